# SPDX-License-Identifier: Apache-2.0
"""``controller bundle``: write a configuration directory as an Envoy bundle, and keep it up to date."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.audit import add_audit_option, file_recorder, open_audit
from extproc.api.addresses import parse_address, parse_endpoint
from extproc.api.config_errors import ConfigInvalid
from extproc.api.dns_resolver import AddressHoldTimes
from extproc.api.quantities import Duration
from extproc.cli.common import print_mistakes, resolved_directory
from extproc.listen_sockets import ListenFailed
from extproc.logs import add_log_options, start_logging
from extproc.sd_notify import READY, notify

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from controller.bundle.acknowledgements import AcknowledgementPoller
    from controller.bundle.sync import BundleSync

DESCRIPTION: Final = (
    "Write a configuration directory as Envoy's configuration: a bootstrap.json to start Envoy with, and the files that"
    " Envoy then watches."
)


# Of engines' names: Envoy has a new address before extproc uses it, and an old one after extproc has left it.
_PATIENCE: Final = AddressHoldTimes(keep_s=30.0, settle_s=0.0)


def parser(prog: str = "controller bundle") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=(
            "Exit status: 0, 1 if Envoy does not take the bundle (with --wait), or 2 for a mistake in the configuration"
            " or the options."
        ),
    )
    add = made.add_argument
    add("--config", type=Path, metavar="DIR", help="the configuration directory")
    add("--out", type=Path, metavar="DIR", help="where the bundle is written")
    add("--path", metavar="DIR", help="where Envoy will find the bundle, if not at --out")
    add("--watch", action="store_true", help="keep running, and write again whenever the configuration changes")
    add(
        "--admin",
        metavar="ADDRESS",
        help=(
            "HOST:PORT of Envoy's admin interface, to see whether it takes the bundle, or 'off' "
            "(default: that of the GatewayConfig)"
        ),
    )
    add("--wait", metavar="DURATION", help="without --watch: wait so long for Envoy to use the bundle")
    add(
        "--metrics",
        default="off",
        metavar="ADDRESS",
        help="with --watch: IP:PORT of /metrics and /readyz, or 'off' (default: %(default)s)",
    )
    add(
        "--drain",
        type=Path,
        metavar="FILE",
        help="with --watch: when FILE appears, drain Envoy, and remove FILE when it has no request",
    )
    add("--golden", action="store_true", help="in a clone: write envoy/bundles from envoy/sources")
    add_audit_option(made)
    add_log_options(made)
    return made


def _polling(
    options: argparse.Namespace, made: argparse.ArgumentParser, path: str
) -> tuple[AcknowledgementPoller | None, float | None, tuple[str, int] | None]:
    """What polls Envoy, for how long to wait for it, and where metrics are served."""
    # Envoy's schema, as below
    from controller.bundle.acknowledgements import AcknowledgementPoller  # noqa: PLC0415
    from controller.bundle.envoy_admin_client import read_envoy_state  # noqa: PLC0415

    try:
        if options.admin not in {None, "off"}:
            parse_endpoint(options.admin)
        metrics = None if options.metrics == "off" else parse_address(options.metrics)
        wait_s = None if options.wait is None else Duration(options.wait)
    except ValueError as error:
        made.error(str(error))
    if options.wait is not None and (options.watch or options.admin == "off"):
        made.error("--wait goes neither with --watch nor with --admin off")
    if metrics is not None and not options.watch:
        made.error("--metrics goes with --watch")
    if options.drain is not None and (not options.watch or options.admin == "off"):
        made.error("--drain goes with --watch, and not with --admin off")
    if options.admin == "off":
        return None, wait_s, metrics
    acknowledgements = AcknowledgementPoller(read_envoy_state, f"{path}/bootstrap.json", address=options.admin)
    return acknowledgements, wait_s, metrics


def _watch(sync: BundleSync, drain: Path | None, metrics: tuple[str, int] | None, registry: CollectorRegistry) -> None:
    """Until SIGTERM or SIGINT. ``drain``: the file that has Envoy drained."""
    from controller.bundle.envoy_drain import drain_on_demand  # noqa: PLC0415
    from controller.bundle.metrics import serve_metrics  # noqa: PLC0415

    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        # no exception: raised inside a library's own code, it may get lost there
        signal.signal(one, lambda *_: stop.set())
    if metrics is not None:
        serve_metrics(sync, metrics, registry)
    if drain is not None and (envoy := sync.acknowledgements) is not None:
        threading.Thread(target=drain_on_demand, args=(drain, lambda: envoy.admin_addresses, stop), daemon=True).start()
    sync.run(stop, lambda: notify(READY, os.environ))


def main(words: list[str], prog: str = "controller bundle") -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    made = parser(prog)
    options = made.parse_args(words)
    # Envoy's schema takes half a second to import: not for --help
    from prometheus_client import CollectorRegistry  # noqa: PLC0415

    from controller.bundle.sync import (  # noqa: PLC0415
        BundleSync,
        release_freed_memory,
        wait_until_acknowledged,
        write_bundle_once,
        write_golden,
    )

    start_logging(options)
    try:
        if options.golden:
            write_golden(Path("envoy"))
            return 0
        if options.config is None or options.out is None:
            made.error("write --config DIR and --out DIR")
        path = options.path or str(options.out.resolve())
        directory = resolved_directory(options.config, _PATIENCE)
        acknowledgements, wait_s, metrics = _polling(options, made, path)
        registry = CollectorRegistry()
        with open_audit(options.audit_log, registry) as audit:
            changed = file_recorder(audit, "attache-bundle")
            if options.watch:
                release_freed_memory()
                _watch(
                    BundleSync(directory, options.out, path, acknowledgements, changed),
                    options.drain,
                    metrics,
                    registry,
                )
                return 0
            snapshot = directory.read()
            write_bundle_once(snapshot, options.out, path, options.config, changed)
        if acknowledgements is not None and wait_s is not None:
            return 0 if wait_until_acknowledged(snapshot, options.out, acknowledgements, wait_s) else 1
    except ConfigInvalid as error:
        return print_mistakes(error)
    except (ListenFailed, OSError) as error:
        print(error if isinstance(error, ListenFailed) else f"cannot write the bundle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0
