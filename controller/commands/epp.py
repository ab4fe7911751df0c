# SPDX-License-Identifier: Apache-2.0
"""``attache epp``: the picker role and extproc in one container, with llm-d's flags."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.commands.epp_flags import FLAGS, FlagInvalid, read_flags
from controller.commands.epp_plan import for_conformance, plan

if TYPE_CHECKING:
    from controller.commands.epp_plan import Plan
    from controller.kube.access import Access
    from extproc.api.picker_config import PickerCheck

DESCRIPTION: Final = (
    "Serve one InferencePool as an endpoint picker of the Gateway API Inference Extension. The flags are those of"
    " llm-d's endpoint picker, so that its image can be replaced by this one."
)
_ROLE_RETRY_S: Final = 1.0
_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - a pod's ports are for others

log = logging.getLogger(__name__)


def parser(prog: str = "attache epp") -> argparse.ArgumentParser:
    """The options, for --help and completion; ``read_flags`` reads them."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=(
            "Exit status: 0 after SIGTERM or SIGINT, 1 if extproc ended by itself, 2 for a mistake in the flags or no "
            "cluster. docs/reference/llm-d-flags.md lists flags that have no effect."
        ),
        allow_abbrev=False,
    )
    _add_own(made)
    for flag in FLAGS:
        shown = flag.note + (f" (default: {flag.default})" if flag.default else "")
        nargs = "?" if flag.sort == "truth" else None
        made.add_argument(
            f"--{flag.name}",
            metavar=flag.sort.upper(),
            nargs=nargs,
            help=shown if flag.fate == "obeyed" else argparse.SUPPRESS,
        )
    return made


def _add_own(made: argparse.ArgumentParser) -> None:
    """Options that llm-d does not have."""
    made.add_argument(
        "--bind-address", metavar="IP", default=_EVERYWHERE, help="where ports are opened (default: %(default)s)"
    )
    made.add_argument(
        "--trust-headers",
        choices=("true", "false"),
        default="true",
        help=(
            "believe headers that say who asks, as llm-d does; the gateway must then write them (default: %(default)s)"
        ),
    )
    made.add_argument(
        "--conformance",
        action="store_true",
        help="for the conformance suite alone: obey the header test-epp-endpoint-selection, and read no plugins",
    )


def main(words: list[str], prog: str, check_picker: PickerCheck) -> int:
    """Exit status: 0 after a signal, 1 if extproc ended by itself, 2 for a mistake in the flags.

    ``check_picker``: that of extproc.
    """
    if {"--help", "-h"} & set(words):
        parser(prog).parse_args(["--help"])
    ours = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    _add_own(ours)
    options, theirs = ours.parse_known_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        given = read_flags(theirs)
        namespace, trusts = os.environ.get("NAMESPACE", ""), options.trust_headers == "true"
        planned = plan(given, namespace=namespace, address=options.bind_address, trusts_headers=trusts)
        if options.conformance:
            planned = for_conformance(planned)
    except FlagInvalid as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    for note in given.notes:
        log.info("%s", note)
    # the client takes a third of a second to import: not for --help
    from controller.kube.access import find_access, from_kubeconfig  # noqa: PLC0415
    from controller.kube.errors import AccessInvalid  # noqa: PLC0415

    try:
        access = from_kubeconfig(Path(planned.kubeconfig)) if planned.kubeconfig else find_access()
    except AccessInvalid as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="attache-epp-") as folder:
        return asyncio.run(_run(planned, access, Path(folder), check_picker))


async def _run(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> int:
    """extproc as a process of its own, so that following the cluster costs requests nothing; and the role, here."""
    config = folder / "config"
    config.mkdir()
    words = [sys.executable, "-m", "attache", "extproc", "--config", str(config), *planned.extproc]
    extproc = await asyncio.create_subprocess_exec(*words)
    is_stopping = False

    def stop() -> None:
        """A first signal begins the drain of extproc, a second ends it. Pods are followed meanwhile."""
        nonlocal is_stopping
        is_stopping = True
        with contextlib.suppress(ProcessLookupError):
            extproc.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    role = asyncio.create_task(_follow(planned, access, folder, check_picker))
    status = await extproc.wait()
    role.cancel()
    await asyncio.gather(role, return_exceptions=True)
    if not is_stopping:
        log.error("extproc has ended with status %d", status)
    return 0 if is_stopping else 1


async def _follow(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> None:
    """The role, until cancelled. Requests go on without it, so a failure of it is logged, and it begins again."""
    while True:
        try:
            await _run_role(planned, access, folder, check_picker)
        except OSError as error:
            log.error("the picker role cannot listen or write, tried again in %g s: %s", _ROLE_RETRY_S, error)
        except Exception:
            log.exception("the picker role failed, and begins again in %g s; please report this", _ROLE_RETRY_S)
        await asyncio.sleep(_ROLE_RETRY_S)


async def _run_role(planned: Plan, access: Access, folder: Path, check_picker: PickerCheck) -> None:
    from controller.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from controller.gateway.picker_role import CONTROLLER, PickerRole, PickerSettings  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415 - not for --help
    from controller.kube.pages import pages  # noqa: PLC0415

    file = planned.picker_file
    if planned.picker_text:
        file = folder / "picker.yaml"
        await asyncio.to_thread(file.write_text, planned.picker_text)
    settings = PickerSettings(
        config=folder / "config",
        pool=planned.pool,
        group=planned.group,
        picker_file=file,
        # llm-d's service account may read none
        reads_config_maps=False,
        fixed_pool=planned.fixed_pool,
        server_fields=planned.server_fields,
    )
    metrics = GatewayMetrics()
    async with connect(access, manager=CONTROLLER) as client:
        role = PickerRole(client, settings, metrics, check_picker=check_picker)
        async with pages(planned.metrics, metrics.registry, role.ready.is_set):
            await role.run()
