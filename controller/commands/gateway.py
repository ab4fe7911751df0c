# SPDX-License-Identifier: Apache-2.0
"""``attache gateway``: what a cluster's objects say, as the configuration of extproc and Envoy beside it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from controller.gateway.compile.gateway_api.gateways import ANY, GatewayApiSettings, parse_addresses
from extproc.api.addresses import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.access import Access
    from controller.kube.client import Client
    from extproc.api.picker_config import PickerCheck

DESCRIPTION: Final = (
    "Follow a cluster's ModelServers, ModelRoutes, pods and the rest, and write them as the configuration directory"
    " that extproc reads. It runs beside extproc, with a service account or a kubeconfig."
)
_LEASE: Final = "attache-gateway"
_HIGHEST_PORT: Final = 65535
POOL_GROUPS: Final = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")

log = logging.getLogger(__name__)


class Role(Protocol):
    """What runs; ``ready`` is set once the directory has been written."""

    ready: asyncio.Event

    async def run(self) -> None:
        """Until cancelled."""
        ...


def parser(prog: str = "attache gateway") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, epilog="Exit status: 0, or 2 for a mistake in the options or no cluster."
    )
    add = made.add_argument
    add("--config", type=Path, metavar="DIR", required=True, help="the configuration directory to write")
    add("--namespace", metavar="NAME", help="serve the objects of this namespace alone; default: of all namespaces")
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
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9004", help="metrics and health; default: %(default)s")
    _add_gateways(made)
    _add_picker_mode(made)
    return made


def _add_gateways(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group(
        "Gateways", "Of the Gateway API, whose GatewayClass has the controllerName attache.dev/gateway."
    ).add_argument
    add("--gateway", metavar="NAMESPACE/NAME", help="serve this Gateway alone; default: all of these classes")
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
        help="what Gateways say of their addresses; default: --address, or the pod's own where that is 0.0.0.0",
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
    add("--picker-config", metavar="NAME", help="a ConfigMap beside the pool whose only key is an EndpointPickerConfig")
    add("--picker-config-file", type=Path, metavar="FILE", help="an EndpointPickerConfig; changes are followed")


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extproc beside
    it.
    """
    made = parser(prog)
    options = made.parse_args(words)
    mistake = _mistake(options)
    if mistake:
        made.error(mistake)
    # the client takes a third of a second to import: not for --help
    from controller.kube.access import find_access  # noqa: PLC0415
    from controller.kube.errors import AccessInvalid  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        access = find_access()
    except AccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, access, check_picker))
    except OSError as error:
        print(f"{options.metrics} cannot be listened on: {error}", file=sys.stderr)
        return 2
    return 0


def _consumers(options: argparse.Namespace) -> dict[str, str]:
    """Who uses the directory, by name, and where each says what it uses."""
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
        *("gateway", "address", "advertise", "port_offset"),
    )
    misplaced = of_gateways if options.pool is not None else of_pools
    for field in misplaced:
        if getattr(options, field):
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
    """What the options say of Gateways. ``namespace``: ours. ``own``: the address of this machine, empty if not
    known.
    """
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


def _own_address() -> str:
    """In a pod, the name of the host is in /etc/hosts with the pod's address."""
    try:
        return os.environ.get("POD_IP") or socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


async def _run(options: argparse.Namespace, access: Access, check_picker: PickerCheck) -> None:
    from controller.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.pages import pages  # noqa: PLC0415

    metrics = GatewayMetrics()
    async with connect(access, manager=_LEASE if options.pool is None else "attache-picker") as client:
        make = _gateway_role if options.pool is None else _picker_role
        role = make(options, client, metrics, check_picker)
        async with pages(options.metrics, metrics.registry, role.ready.is_set, extprocs=options.extproc):
            await until_signalled(role.run())


def _gateway_role(
    options: argparse.Namespace, client: Client, metrics: GatewayMetrics, check_picker: PickerCheck
) -> Role:
    from controller.gateway.role import GatewayRole, GatewaySettings  # noqa: PLC0415
    from controller.kube.lease import LeaderElection  # noqa: PLC0415

    settings = GatewaySettings(
        config=options.config,
        namespace=options.namespace,
        gateway_config=options.gateway_config,
        gateway_api=gateway_api_settings(options, client.access.namespace, _own_address()),
        consumers=_consumers(options),
    )
    election = LeaderElection(
        client,
        namespace=options.lease_namespace or client.access.namespace,
        name=options.lease_name or _LEASE,
        identity=f"{os.environ.get('HOSTNAME', 'gateway')}-{secrets.token_hex(4)}",
    )
    return GatewayRole(client, settings, metrics, election=election, check_picker=check_picker)


def _picker_role(
    options: argparse.Namespace, client: Client, metrics: GatewayMetrics, check_picker: PickerCheck
) -> Role:
    from controller.gateway.picker_role import PickerRole, PickerSettings  # noqa: PLC0415

    settings = PickerSettings(
        config=options.config,
        pool=options.pool,
        group=options.pool_group or POOL_GROUPS[0],
        picker_config=options.picker_config,
        picker_file=options.picker_config_file,
    )
    return PickerRole(client, settings, metrics, check_picker=check_picker)


async def until_signalled(running: Coroutine[None, None, None]) -> None:
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
