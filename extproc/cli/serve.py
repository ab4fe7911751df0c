"""``python -m extproc --config DIR``: the words of the command line to settings, and one process or several."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from extproc.config.directory import ConfigDirectory
from extproc.config.quantities import Duration
from extproc.config.spec import full_key
from extproc.config.validation import parse_address, worker_addresses
from extproc.runtime.workers import supervise
from extproc.scheduling.pickers import picker_notes

if TYPE_CHECKING:
    from extproc.config.types import Snapshot
    from extproc.runtime.app import Settings

log = logging.getLogger(__name__)


def run(words: list[str]) -> int:
    """Serve until a signal; raises ConfigInvalid."""
    parser = _parser()
    options = parser.parse_args(words)
    # its mistakes once, not from every worker
    directory = ConfigDirectory(options.config)
    snapshot = directory.read()
    notes = picker_notes(snapshot)
    if options.pool is not None and full_key(options.pool) not in {server.metadata.key for server in snapshot.servers}:
        parser.error(f"--pool: no ModelServer in {options.config} is called '{options.pool}'")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.worker is None:
        for note in notes:
            log.info("%s", note)
        if options.redis is None:
            for warning in limits_without_redis(snapshot):
                log.warning("%s", warning)
    try:
        settings = _settings(options, directory)
    except ValueError as error:
        parser.error(str(error))
    if options.workers > 1 and options.worker is None:
        return asyncio.run(supervise(words, options.workers))

    # gRPC and Envoy's schema take a second to load: not before all words are known to be right
    from extproc.replication.redis_bus import RedisMissing  # noqa: PLC0415
    from extproc.runtime.app import serve  # noqa: PLC0415
    from extproc.streams.server import ListenFailed  # noqa: PLC0415

    try:
        uvloop.run(serve(settings, snapshot))
    except (ListenFailed, RedisMissing, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def limits_without_redis(snapshot: Snapshot) -> list[str]:
    """What Global limits come to where there is no Redis to ask."""
    return [
        f"ModelRoute {route.metadata.key}: rateLimits[{index}] is Global, and there is no --redis: "
        + ("all its requests get 503" if limit.without_redis == "Refuse" else "every machine grants it by itself")
        for route in snapshot.routes
        for index, limit in enumerate(route.spec.rate_limits)
        if limit.scope == "Global"
    ]


def _settings(options: argparse.Namespace, config: ConfigDirectory) -> Settings:
    """Raises ValueError."""
    from extproc.runtime.app import Settings, Worker  # noqa: PLC0415 - slow to load, see above
    from extproc.streams.context import GatewayOptions  # noqa: PLC0415

    if not options.listen.startswith("unix:"):
        parse_address(options.listen)
    metrics = None if options.metrics == "off" else parse_address(options.metrics)
    if min(options.duplex_choices, options.buffered_choices, options.workers) < 1:
        raise ValueError("--workers, --duplex-choices and --buffered-choices take 1 or more")
    if not 0 <= options.decision_sample <= 1:
        raise ValueError("--decision-sample is a share from 0 to 1")
    _check_rows(options.listen, metrics, options.workers)
    worker, listen, decisions = None, options.listen, options.decision_log
    if options.worker is not None:
        place, _, sockets = options.worker.partition(":")
        number, workers = map(int, place.split("/"))
        worker = Worker(number, workers, Path(sockets))
        listen = worker_addresses(listen, workers)[number]
        metrics = None if metrics is None else (metrics[0], metrics[1] + number)
        decisions = None if decisions is None else decisions.with_name(f"{decisions.name}.{number}")
    return Settings(
        config=config,
        listen=listen,
        metrics=metrics,
        drain_s=Duration(options.drain),
        settle_s=Duration(options.settle),
        gateway=GatewayOptions(
            buffered_choices=options.buffered_choices,
            duplex_choices=options.duplex_choices,
            pool=None if options.pool is None else full_key(options.pool),
            overrides_mode=options.mode_override,
            conformance=options.conformance,
            trusts_headers=options.trust_headers,
        ),
        decision_log=decisions,
        decision_share=options.decision_sample,
        shows_reasons=options.debug,
        worker=worker,
        redis=options.redis,
        redis_channel=options.redis_channel,
    )


def _check_rows(listen: str, metrics: tuple[str, int] | None, workers: int) -> None:
    """Workers take consecutive ports: those of gRPC and those of metrics must not meet."""
    if workers == 1 or metrics is None or listen.startswith("unix:"):
        return
    first = parse_address(listen)[1]
    if abs(first - metrics[1]) < workers:
        ports = f"{first} to {first + workers - 1}"
        raise ValueError(
            f"{workers} workers listen on ports {ports}; write --metrics {metrics[0]}:{first + 100}, or 'off'"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="extproc",
        description="Pick the engine for every request that Envoy asks about.",
        epilog="`extproc check DIR` says every mistake in a configuration directory; `extproc explain` why a request goes "
        "where it goes.",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="DIR", help="YAML and JSON files of ModelRoutes and ModelServers")
    add("--listen", default="127.0.0.1:9002", help="IP:PORT or unix:PATH (default: %(default)s)")
    add("--metrics", default="127.0.0.1:9003", help="IP:PORT of /metrics and /readyz, or 'off'")
    add("--drain", default="5m", help="how long running streams may take after SIGTERM (default: 5m)")
    add(
        "--settle",
        default="3s",
        help="how long a new ModelServer waits for Envoy to know it as well (default: %(default)s)",
    )
    _add_several(parser)
    _add_gateways(parser)
    add = parser.add_argument_group("seeing what is decided").add_argument
    add("--decision-log", type=Path, metavar="FILE", help="append a sample of decisions as JSON lines")
    add("--decision-sample", type=float, default=0.01, metavar="SHARE", help="default: 0.01")
    add("--debug", action="store_true", help="serve /debug/explain beside the metrics: for trusted networks only")
    return parser


def _add_several(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("more than one process").add_argument
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes, on consecutive ports from --listen and --metrics on (or unix:PATH.0, ...); default: 1",
    )
    add("--worker", help=argparse.SUPPRESS)  # by which a worker knows itself
    add("--redis", metavar="URL", help="share with extproc on other machines: redis://host:port")
    add("--redis-channel", default="attache", metavar="NAME", help="default: attache")


def _add_gateways(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("gateways that are configured elsewhere (endpoint picker protocol)").add_argument
    add(
        "--pool",
        metavar="[NAMESPACE/]NAME",
        help="the ModelServer for all requests whose model no ModelRoute serves (namespace: default)",
    )
    add(
        "--duplex-choices",
        type=int,
        default=1,
        metavar="N",
        help="addresses in an answer where bodies come in pieces; more only if the gateway goes down a list (default: 1)",
    )
    add(
        "--buffered-choices",
        type=int,
        default=4,
        metavar="N",
        help="the same where bodies come whole, as from our bundle (default: 4)",
    )
    add("--mode-override", action="store_true", help="the gateway allows it: spare answers the way here")
    add(
        "--trust-headers",
        action="store_true",
        help="the gateway writes x-attache-tenant, x-llm-d-inference-objective and the like itself, and removes its clients'",
    )
    add("--conformance", action="store_true", help="obey the header test-epp-endpoint-selection")
