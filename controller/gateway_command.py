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
from typing import TYPE_CHECKING, Final

from controller.gateway.compile.gateway_api.settings import ANY, GatewayApiSettings, parse_addresses

if TYPE_CHECKING:
    from controller.cluster.access import Access

DESCRIPTION: Final = (
    "Follow a cluster's ModelServers, ModelRoutes, pods and the rest, and write them as the configuration directory that "
    "extproc reads. It runs beside extproc, with a service account or a kubeconfig."
)
_LEASE: Final = "attache-gateway"

log = logging.getLogger(__name__)


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
        "--gateway",
        metavar="NAMESPACE/NAME",
        help="serve this Gateway alone; default: all of GatewayClasses with controllerName attache.dev/gateway",
    )
    add(
        "--address",
        metavar="IP[,IP...]",
        default=ANY,
        help="where Envoy listens for Gateways, or a range such as 127.0.2.0/24; with several, each Gateway gets one of "
        "its own while there are enough; default: %(default)s",
    )
    add(
        "--advertise",
        metavar="IP|HOSTNAME|service/NAME",
        help="what statuses of Gateways say of their addresses; default: --address, or the pod's own for 0.0.0.0",
    )
    add(
        "--port-offset",
        type=int,
        default=0,
        metavar="N",
        help="Envoy listens on the ports of Gateways plus this; default: %(default)s",
    )
    add(
        "--lease-namespace",
        metavar="NAME",
        help="where the Lease of the replica that writes statuses is; default: ours",
    )
    add("--lease-name", metavar="NAME", default=_LEASE, help="its name; default: %(default)s")
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9004", help="metrics and health; default: %(default)s")
    return made


def main(words: list[str], prog: str = "attache gateway") -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options."""
    made = parser(prog)
    options = made.parse_args(words)
    for name, given in (("--gateway-config", options.gateway_config), ("--gateway", options.gateway)):
        if given is not None and given.count("/") != 1:
            made.error(f"{name}: write NAMESPACE/NAME")
    try:
        parse_addresses(options.address)
    except ValueError as error:
        made.error(f"--address: {error}")
    if not 0 <= options.port_offset < 65535:
        made.error("--port-offset: write a number from 0 to 65534")
    # the client takes a third of a second to import: not for --help
    from controller.cluster.access import find_access  # noqa: PLC0415
    from controller.cluster.errors import AccessInvalid  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        access = find_access()
    except AccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, access))
    except OSError as error:
        print(f"{options.metrics} cannot be listened on: {error}", file=sys.stderr)
        return 2
    return 0


def gateway_api_settings(options: argparse.Namespace, namespace: str, own: str) -> GatewayApiSettings:
    """What the options say of Gateways. ``namespace``: ours. ``own``: the address of this machine, empty if not known."""
    bind = parse_addresses(options.address)
    advertise: str = options.advertise or ""
    kind, _, name = advertise.partition("/")
    if kind == "service" and "/" not in name:
        advertise = f"service/{namespace}/{name}"
    if not advertise and all(ip_address(one).is_unspecified for one in bind):
        advertise = own
    return GatewayApiSettings(gateway=options.gateway, bind=bind, advertise=advertise, port_offset=options.port_offset)


def _own_address() -> str:
    """In a pod, the name of the host is in /etc/hosts with the pod's address."""
    try:
        return os.environ.get("POD_IP") or socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


async def _run(options: argparse.Namespace, access: Access) -> None:
    from controller.cluster.client import connect  # noqa: PLC0415
    from controller.cluster.lease import LeaderElection  # noqa: PLC0415
    from controller.cluster.pages import pages  # noqa: PLC0415
    from controller.roles.gateway import CONTROLLER, GatewayRole, GatewaySettings  # noqa: PLC0415
    from controller.roles.gateway_metrics import GatewayMetrics  # noqa: PLC0415

    metrics = GatewayMetrics()
    settings = GatewaySettings(
        config=options.config,
        namespace=options.namespace,
        gateway_config=options.gateway_config,
        gateway_api=gateway_api_settings(options, access.namespace, _own_address()),
    )
    async with connect(access, manager=CONTROLLER) as client:
        election = LeaderElection(
            client,
            namespace=options.lease_namespace or access.namespace,
            name=options.lease_name,
            identity=f"{os.environ.get('HOSTNAME', 'gateway')}-{secrets.token_hex(4)}",
        )
        role = GatewayRole(client, settings, metrics, election=election)
        running = asyncio.current_task()
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            if running is not None:
                running.cancel()

        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, stop)
        async with pages(options.metrics, metrics.registry, role.ready.is_set):
            try:
                await role.run()
            except asyncio.CancelledError:
                if not stopped:
                    raise
