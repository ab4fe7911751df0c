"""The command line: ``python -m extproc --config DIR`` serves, ``python -m extproc check DIR`` says what is wrong with DIR."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from extproc.config.load import load_directory
from extproc.config.mistakes import ConfigInvalid
from extproc.config.rules import parse_address
from extproc.config.units import parse_duration_s
from extproc.scheduling.pickers import picker_notes


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _check(words[1:]) if words[:1] == ["check"] else _serve(words)
    except ConfigInvalid as error:
        print(error, file=sys.stderr)
        print(f"{len(error.mistakes)} to mend", file=sys.stderr)
        return 2


def _check(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="extproc check", description="Say every mistake in a configuration directory."
    )
    parser.add_argument("directory", type=Path)
    snapshot = load_directory(parser.parse_args(words).directory)
    for note in picker_notes(snapshot):
        print(f"note: {note}")
    print(f"good: {len(snapshot.routes)} routes, {len(snapshot.servers)} servers")
    return 0


def _serve(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="extproc",
        description="Pick the engine for every request that Envoy asks about.",
        epilog="`extproc check DIR` says every mistake in a configuration directory.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="DIR", help="YAML of ModelRoutes and ModelServers"
    )
    parser.add_argument("--listen", default="127.0.0.1:9002", help="IP:PORT or unix:PATH (default: %(default)s)")
    parser.add_argument("--metrics", default="127.0.0.1:9003", help="IP:PORT of /metrics and /readyz, or 'off'")
    parser.add_argument("--drain", default="5m", help="how long running streams may take after SIGTERM (default: 5m)")
    parser.add_argument(
        "--settle",
        default="1500ms",
        help="how long a new ModelServer waits for Envoy to know it as well (default: %(default)s)",
    )
    options = parser.parse_args(words)
    try:
        if not options.listen.startswith("unix:"):
            parse_address(options.listen)
        metrics = None if options.metrics == "off" else parse_address(options.metrics)
        drain_s = parse_duration_s(options.drain)
        settle_s = parse_duration_s(options.settle)
    except ValueError as error:
        parser.error(str(error))

    # `check` answers without loading gRPC and Envoy's schema
    from extproc.app import Settings, serve  # noqa: PLC0415
    from extproc.streams.server import ListenFailed  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    snapshot = load_directory(options.config)
    try:
        uvloop.run(serve(Settings(options.config, options.listen, metrics, drain_s, settle_s), snapshot))
    except (ListenFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
