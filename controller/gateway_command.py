# SPDX-License-Identifier: Apache-2.0
"""``attache gateway``: what a cluster's objects say, as the configuration of extproc and Envoy beside it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.config.validation import parse_address

if TYPE_CHECKING:
    from controller.cluster.access import Access
    from extproc.config.picker_config import PickerCheck

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
    add("--gateway-config", metavar="NAMESPACE/NAME", help="the GatewayConfig to serve; default: one without settings")
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
        help="IP:PORT of extproc's --metrics, to see whether it uses what is written; once for each of its processes",
    )
    add("--bundle", metavar="ADDRESS", help="IP:PORT of the --metrics of 'attache bundle', to see whether Envoy does")
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9004", help="metrics and health; default: %(default)s")
    return made


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extproc beside it."""
    made = parser(prog)
    options = made.parse_args(words)
    if options.gateway_config is not None and options.gateway_config.count("/") != 1:
        made.error("--gateway-config: write NAMESPACE/NAME")
    try:
        for address in _followers(options).values():
            parse_address(address)
    except ValueError as error:
        made.error(str(error))
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
        asyncio.run(_run(options, access, check_picker))
    except OSError as error:
        print(f"{options.metrics} cannot be listened on: {error}", file=sys.stderr)
        return 2
    return 0


def _followers(options: argparse.Namespace) -> dict[str, str]:
    """Who uses the directory, by name, and where each says what it uses."""
    several = len(options.extproc) > 1
    found = {f"extproc at {one}" if several else "extproc": one for one in options.extproc}
    return found if options.bundle is None else {**found, "Envoy": options.bundle}


async def _run(options: argparse.Namespace, access: Access, check_picker: PickerCheck) -> None:
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
        followers=_followers(options),
    )
    async with connect(access, manager=CONTROLLER) as client:
        election = LeaderElection(
            client,
            namespace=options.lease_namespace or access.namespace,
            name=_LEASE,
            identity=f"{os.environ.get('HOSTNAME', 'gateway')}-{secrets.token_hex(4)}",
        )
        role = GatewayRole(client, settings, metrics, election=election, check_picker=check_picker)
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
