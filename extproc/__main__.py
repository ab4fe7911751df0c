"""The command line: ``python -m extproc --config DIR`` serves, ``python -m extproc check DIR`` says what is wrong with DIR."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from extproc import explain_command
from extproc.config.load import load_directory
from extproc.config.mistakes import ConfigInvalid
from extproc.config.rules import parse_address
from extproc.config.units import parse_duration_s
from extproc.scheduling.pickers import picker_notes


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["check"]:
            return _check(words[1:])
        return explain_command.run(words[1:]) if words[:1] == ["explain"] else _serve(words)
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
        epilog="`extproc check DIR` says every mistake in a configuration directory; `extproc explain` why a request goes "
        "where it goes.",
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
    other = parser.add_argument_group("gateways that are configured elsewhere (endpoint picker protocol)")
    other.add_argument("--pool", metavar="NAME", help="the ModelServer for all requests that no ModelRoute knows")
    other.add_argument(
        "--duplex-choices",
        type=int,
        default=1,
        metavar="N",
        help="addresses in an answer where bodies come in pieces; more than 1 only if the gateway goes down a list (default: 1)",
    )
    other.add_argument(
        "--buffered-choices",
        type=int,
        default=4,
        metavar="N",
        help="the same where bodies come whole, as from our bundle (default: 4)",
    )
    other.add_argument("--mode-override", action="store_true", help="the gateway allows it: spare answers the way here")
    other.add_argument("--conformance", action="store_true", help="obey the header test-epp-endpoint-selection")
    seeing = parser.add_argument_group("seeing what is decided")
    seeing.add_argument("--decision-log", type=Path, metavar="FILE", help="append a sample of decisions as JSON lines")
    seeing.add_argument("--decision-sample", type=float, default=0.01, metavar="SHARE", help="default: 0.01")
    seeing.add_argument(
        "--debug", action="store_true", help="serve /debug/explain beside the metrics: for trusted networks only"
    )
    options = parser.parse_args(words)
    if not 0 <= options.decision_sample <= 1:
        parser.error("--decision-sample is a share from 0 to 1")
    if min(options.duplex_choices, options.buffered_choices) < 1:
        parser.error("--duplex-choices and --buffered-choices take 1 or more")
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
    from extproc.streams.exchange import GatewayOptions  # noqa: PLC0415
    from extproc.streams.server import ListenFailed  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    snapshot = load_directory(options.config)
    if options.pool is not None and options.pool not in {server.metadata.name for server in snapshot.servers}:
        parser.error(f"--pool: no ModelServer in {options.config} is called '{options.pool}'")
    gateway = GatewayOptions(
        buffered_choices=options.buffered_choices,
        duplex_choices=options.duplex_choices,
        pool=options.pool,
        overrides_mode=options.mode_override,
        conformance=options.conformance,
    )
    settings = Settings(
        config=options.config,
        listen=options.listen,
        metrics=metrics,
        drain_s=drain_s,
        settle_s=settle_s,
        gateway=gateway,
        decision_log=options.decision_log,
        decision_share=options.decision_sample,
        shows_reasons=options.debug,
    )
    try:
        uvloop.run(serve(settings, snapshot))
    except (ListenFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
