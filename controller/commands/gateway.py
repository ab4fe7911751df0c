# SPDX-License-Identifier: Apache-2.0
"""``attache gateway``: writes a cluster's objects as the configuration of extproc and Envoy beside it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from controller.audit import add_audit_option, open_audit
from controller.gateway.compile.gateway_api.gateways import ANY, GatewayApiSettings, parse_addresses
from extproc.api.addresses import Network, parse_endpoint, parse_networks
from extproc.api.quantities import Duration
from extproc.logs import add_log_options, start_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from extproc.api.picker_config import PickerConfigChecker

DESCRIPTION: Final = (
    "Follow a cluster's ModelServers, ModelRoutes, pods and the rest, and write them as the configuration directory"
    " that extproc reads. Run it together with extproc, with a service account or a kubeconfig."
)
_LEASE: Final = "attache-gateway"
_HIGHEST_PORT: Final = 65535
_GRACE: Final = "10s"
POOL_GROUPS: Final = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")

T = TypeVar("T")
log = logging.getLogger(__name__)


class GatewayRunnable(Protocol):
    """What runs; ``ready`` is set once the directory has been written."""

    ready: asyncio.Event

    async def run(self) -> None:
        """Run the role until cancelled."""
        ...


def parser(prog: str = "attache gateway") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, epilog="Exit status: 0, or 2 for a mistake in the options or no cluster."
    )
    add = made.add_argument
    add("--config", type=Path, metavar="DIR", required=True, help="the configuration directory to write")
    add("--namespace", metavar="NAME", help="serve only objects of this namespace; default: of all namespaces")
    add(
        "--gateway-config",
        metavar="NAMESPACE/NAME",
        help="the GatewayConfig to serve; default: the one that Gateways refer to, or one without settings",
    )
    add(
        "--lease-namespace",
        metavar="NAME",
        help="where the Lease of the replica that writes statuses is; default: ours",
    )
    add(
        "--extproc",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="HOST:PORT of extproc's --metrics, to see whether it uses what is written; once for each of its processes",
    )
    add("--bundle", metavar="ADDRESS", help="HOST:PORT of the --metrics of 'attache bundle', to see whether Envoy does")
    add("--lease-name", metavar="NAME", help=f"its name; default: {_LEASE}")
    add(
        "--grace",
        metavar="DURATION",
        type=_argument(Duration),
        help=(
            "how long deleted ModelRoutes and ModelServers are still served, and the former pods of a changed "
            f"selector that selects no ready one; 0s: not at all; default: {_GRACE}"
        ),
    )
    add_endpoint_networks_option(made)
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9004", help="metrics and health; default: %(default)s")
    _add_gateways(made)
    _add_picker_mode(made)
    add_audit_option(made)
    add_log_options(made)
    return made


def add_endpoint_networks_option(made: argparse.ArgumentParser) -> None:
    """The option, for ``endpoint_networks``."""
    made.add_argument(
        "--endpoint-networks",
        metavar="CIDR[,CIDR...]",
        type=_argument(parse_networks),
        help=(
            "networks in which ModelServers may list endpoints, such as 10.20.0.0/16; default: all with --namespace, "
            "else none; this machine and metadata services are never accepted"
        ),
    )


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """With the reason in argparse's message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _add_gateways(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group(
        "Gateways", "Of the Gateway API, whose GatewayClass has the controllerName attache.dev/gateway."
    ).add_argument
    add("--gateway", metavar="NAMESPACE/NAME", help="serve only this Gateway; default: all of these classes")
    add(
        "--address",
        metavar="IP[,IP...]",
        help=(
            "where Envoy listens, or a range such as 127.0.2.0/24; with several, each Gateway gets one of its own"
            f" while there are enough; default: {ANY}"
        ),
    )
    add(
        "--advertise",
        metavar="IP|HOSTNAME|service/NAME",
        help="the addresses in the status of Gateways; default: --address, or the pod's own where that is 0.0.0.0",
    )
    add("--port-offset", type=int, metavar="N", help="Envoy listens on the ports of Gateways plus this; default: 0")


def _add_picker_mode(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group(
        "picker mode",
        "For an extproc behind a gateway of somebody else, which has the same --pool: one InferencePool is served, and "
        "neither ModelServers nor ModelRoutes.",
    ).add_argument
    add("--pool", metavar="NAMESPACE/NAME", help="the InferencePool")
    add("--pool-group", metavar="GROUP", help="its API group; default: inference.networking.k8s.io")
    add(
        "--picker-config",
        metavar="NAME",
        help="a ConfigMap in the pool's namespace; its only key is an EndpointPickerConfig",
    )
    add("--picker-config-file", type=Path, metavar="FILE", help="an EndpointPickerConfig; changes are followed")


def main(words: list[str], prog: str, check_picker: PickerConfigChecker) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extproc beside
    it.
    """
    made = parser(prog)
    options = made.parse_args(words)
    mistake = _mistake(options)
    if mistake:
        made.error(mistake)
    # the client takes a third of a second to import: not for --help
    from controller.kube.cluster_access import find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid  # noqa: PLC0415

    start_logging(options)
    try:
        access = find_access()
    except ClusterAccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, access, check_picker))
    except OSError as error:
        print(f"{options.metrics} cannot be listened on: {error}", file=sys.stderr)
        return 2
    return 0


def _consumers(options: argparse.Namespace) -> dict[str, str]:
    """The consumers of the directory, by name, with the address where each reports the files in use."""
    several = len(options.extproc) > 1
    found = {f"extproc at {one}" if several else "extproc": one for one in options.extproc}
    return found if options.bundle is None else {**found, "Envoy": options.bundle}


def _mistake(options: argparse.Namespace) -> str:
    """What is wrong with the options; empty if nothing is."""
    named = ("gateway_config", "gateway", "pool")
    for name, value in ((f"--{one.replace('_', '-')}", getattr(options, one)) for one in named):
        if value is not None and (value.count("/") != 1 or not all(value.split("/"))):
            return f"{name}: write NAMESPACE/NAME"
    of_pools = ("pool_group", "picker_config", "picker_config_file")
    of_gateways = (
        *("namespace", "gateway_config", "lease_namespace", "lease_name", "extproc", "bundle"),
        *("gateway", "address", "advertise", "port_offset", "grace", "endpoint_networks"),
    )
    misplaced = of_gateways if options.pool is not None else of_pools
    for field in misplaced:
        if getattr(options, field) not in (None, []):
            where = "does not go with --pool" if options.pool is not None else "needs --pool"
            return f"--{field.replace('_', '-')} {where}"
    if options.picker_config is not None and options.picker_config_file is not None:
        return "--picker-config and --picker-config-file: write one of them"
    if options.pool_group not in {None, *POOL_GROUPS}:
        return f"--pool-group: write {' or '.join(POOL_GROUPS)}"
    try:
        parse_addresses(options.address or ANY)
        if not 0 <= (options.port_offset or 0) < _HIGHEST_PORT:
            raise ValueError(f"--port-offset: write a number from 0 to {_HIGHEST_PORT - 1}")
        for address in _consumers(options).values():
            parse_endpoint(address)
    except ValueError as error:
        return str(error)
    return ""


def gateway_api_settings(options: argparse.Namespace, namespace: str, own: str) -> GatewayApiSettings:
    """The options for Gateways. ``namespace``: ours. ``own``: the address of this machine, empty if unknown."""
    bind = parse_addresses(options.address or ANY)
    advertise: str = options.advertise or ""
    kind, _, name = advertise.partition("/")
    if kind == "service" and "/" not in name:
        advertise = f"service/{namespace}/{name}"
    if not advertise and all(ip_address(one).is_unspecified for one in bind):
        advertise = own
    return GatewayApiSettings(
        gateway=options.gateway, bind=bind, advertise=advertise, port_offset=options.port_offset or 0
    )


def endpoint_networks(given: tuple[Network, ...] | None, namespace: str | None) -> tuple[Network, ...] | None:
    """Those that may be listed; None: all. Who may write objects of one namespace of many is not trusted to name what
    the gateway's own place in the network reaches: pods and Services of other namespaces, and machines beside them.
    """
    return () if given is None and namespace is None else given


def _own_address() -> str:
    """In a pod, the name of the host is in /etc/hosts with the pod's address."""
    try:
        return os.environ.get("POD_IP") or socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


async def _run(options: argparse.Namespace, access: ClusterAccess, check_picker: PickerConfigChecker) -> None:
    from controller.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.manager_metrics import observe_api_calls  # noqa: PLC0415
    from controller.kube.metrics_and_health import serve_pages  # noqa: PLC0415

    metrics = GatewayMetrics()
    manager = _LEASE if options.pool is None else "attache-picker"
    async with contextlib.AsyncExitStack() as opened:
        audit = opened.enter_context(open_audit(options.audit_log, metrics.registry))
        observed = observe_api_calls(metrics.registry)
        client = await opened.enter_async_context(connect(access, manager=manager, audit=audit, observed=observed))
        make = _gateway_role if options.pool is None else _picker_role
        role = make(options, client, metrics, check_picker)
        async with serve_pages(options.metrics, metrics.registry, role.ready.is_set, extprocs=options.extproc):
            await run_until_signalled(role.run())


def _gateway_role(
    options: argparse.Namespace, client: Client, metrics: GatewayMetrics, check_picker: PickerConfigChecker
) -> GatewayRunnable:
    from controller.gateway.runner import GatewayRunner, GatewaySettings  # noqa: PLC0415
    from controller.kube.leader_election import LeaderElection  # noqa: PLC0415

    settings = GatewaySettings(
        config=options.config,
        namespace=options.namespace,
        gateway_config=options.gateway_config,
        gateway_api=gateway_api_settings(options, client.access.namespace, _own_address()),
        consumers=_consumers(options),
        networks=endpoint_networks(options.endpoint_networks, options.namespace),
        grace_s=Duration(_GRACE) if options.grace is None else options.grace,
    )
    election = LeaderElection(
        client,
        namespace=options.lease_namespace or client.access.namespace,
        name=options.lease_name or _LEASE,
        identity=f"{os.environ.get('HOSTNAME', 'gateway')}-{secrets.token_hex(4)}",
    )
    return GatewayRunner(client, settings, metrics, election=election, check_picker=check_picker)


def _picker_role(
    options: argparse.Namespace, client: Client, metrics: GatewayMetrics, check_picker: PickerConfigChecker
) -> GatewayRunnable:
    from controller.gateway.inference_pool_reconciler import InferencePoolRunner, InferencePoolSettings  # noqa: PLC0415

    settings = InferencePoolSettings(
        config=options.config,
        pool=options.pool,
        group=options.pool_group or POOL_GROUPS[0],
        picker_config=options.picker_config,
        picker_file=options.picker_config_file,
    )
    return InferencePoolRunner(client, settings, metrics, check_picker=check_picker)


async def run_until_signalled(running: Coroutine[None, None, None]) -> None:
    """Await ``running``, and cancel it at SIGTERM or SIGINT."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        if task is not None:
            task.cancel()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
