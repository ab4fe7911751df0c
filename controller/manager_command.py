# SPDX-License-Identifier: Apache-2.0
"""``attache manager``: the cluster's side that serves no requests; so far, the admission webhooks."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Final

from extproc.config.validation import parse_address

if TYPE_CHECKING:
    from controller.cluster.access import Access
    from extproc.config.picker_config import PickerCheck

_SERVICE: Final = "attache-manager"


def parser(prog: str = "attache manager") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Serve the admission webhooks of our kinds: mistakes that a schema cannot find are refused by the API "
        "server, and references to objects that are not there are warned of. It makes and renews its certificates.",
        epilog="Exit status: 0, or 2 for a mistake in the options or no cluster.",
    )
    add = made.add_argument
    add("--listen", metavar="ADDRESS", default="0.0.0.0:9443", help="of the webhooks; default: %(default)s")
    add(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="by which API servers call this server, for its certificate; several times for several; "
        f"default: {_SERVICE}.NAMESPACE.svc",
    )
    add("--namespace", metavar="NAME", help="of the Secret with the certificates; default: ours")
    add(
        "--secret",
        metavar="NAME",
        default="attache-webhook-certificates",
        help="the Secret with the certificates, which must be there; default: %(default)s",
    )
    add(
        "--webhook-configuration",
        metavar="NAME",
        default="attache",
        help="the ValidatingWebhookConfiguration that gets the authorities of the certificates; default: %(default)s",
    )
    add("--metrics", metavar="ADDRESS", default="127.0.0.1:9006", help="metrics and health; default: %(default)s")
    return made


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the options. ``check_picker``: that of the extprocs."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        for address in (options.listen, options.metrics):
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
    failure: BaseException | None = None
    try:
        asyncio.run(_run(options, access, check_picker))
    except* OSError as group:
        failure = group
    if failure is None:
        return 0
    print(f"{options.listen} or {options.metrics} cannot be listened on: {failure}", file=sys.stderr)
    return 2


async def _run(options: argparse.Namespace, access: Access, check_picker: PickerCheck) -> None:
    from controller.cluster.client import connect  # noqa: PLC0415
    from controller.cluster.pages import pages  # noqa: PLC0415
    from controller.gateway_command import until_signalled  # noqa: PLC0415
    from controller.roles.manager import CONTROLLER, ManagerMetrics, ManagerRole, ManagerSettings  # noqa: PLC0415
    from controller.webhooks.rotation import RotationSettings  # noqa: PLC0415

    namespace = options.namespace or access.namespace
    rotation = RotationSettings(
        namespace=namespace,
        secret=options.secret,
        configuration=options.webhook_configuration,
        names=tuple(options.host) or (f"{_SERVICE}.{namespace}.svc",),
    )
    metrics = ManagerMetrics()
    async with connect(access, manager=CONTROLLER) as client:
        settings = ManagerSettings(listen=options.listen, rotation=rotation)
        role = ManagerRole(client, settings, metrics, check_picker=check_picker)
        async with pages(options.metrics, metrics.registry, role.ready.is_set):
            await until_signalled(role.run())
