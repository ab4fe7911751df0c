# SPDX-License-Identifier: Apache-2.0
"""``python -m extproc --config DIR``: serve until a signal, in one process or in several."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_address
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_snapshot import Snapshot
from extproc.api.dns_resolver import AddressHoldTimes
from extproc.api.gateway_config import GatewayConfigSpec
from extproc.api.quantities import Duration
from extproc.api.spec import qualified_key
from extproc.api.tracing import parse_otlp
from extproc.api.untrusted_files import read_token
from extproc.cli.common import parse_metrics_address, print_mistakes, resolved_directory, set_process_name
from extproc.cli.workers import AWAITED, supervise
from extproc.logs import add_log_options, start_logging
from extproc.runtime.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# Of engines' names: Envoy has a new address before extproc uses it, and an old one after extproc has left it.
_PATIENCE: Final = AddressHoldTimes(keep_s=10.0, settle_s=4.0)
# Where a password may stand: command lines are for all to read.
REDIS_VARIABLE: Final = "ATTACHE_REDIS"
# Of a directory that is not there yet.
_NOTHING: Final = Snapshot(version="", routes=(), servers=(), gateway=GatewayConfigSpec())


def main(words: list[str], prog: str = "extproc") -> int:
    """Exit status: 0 after a signal, 2 for a mistake in configuration or arguments."""
    made = parser(prog)
    options = made.parse_args(words)
    if options.worker == AWAITED:
        options.worker = _await_worker()
        if not options.worker:
            return 0
    from extproc.llmd.picker_builder import picker_notes  # noqa: PLC0415 - loads numpy: not for --help

    directory = resolved_directory(options.config, _PATIENCE)
    try:
        # reported once, not by every worker
        snapshot = directory.read()
        notes = picker_notes(snapshot)
    except ConfigInvalid as error:
        if not options.wait_for_pool:
            return print_mistakes(error)
        snapshot, notes = _NOTHING, []
    if not options.wait_for_pool and options.pool is not None and not _has_pool(snapshot, options.pool):
        made.error(f"--pool: no ModelServer in {options.config} is called '{options.pool}'")
    try:
        _check(options)
    except ValueError as error:
        made.error(str(error))
    if options.worker is None:
        start_logging(options)
        for note in notes:
            log.info("%s", note)
    else:
        start_logging(options, worker=msgspec.json.decode(options.worker, type=WorkerSettings).number)

    if options.workers is not None and options.worker is None:
        return supervise(options, words)
    from extproc.cli import launch  # noqa: PLC0415 - loads gRPC: not before all options are known to be right

    return launch.run_process_until_signal(options, directory, snapshot)


def _await_worker() -> str:
    """Load all that serves, then wait for the supervisor to tell who this process is; empty if it has ended."""
    import extproc.cli.launch  # noqa: PLC0415
    import extproc.console.pages  # noqa: PLC0415
    import extproc.feeds.adapter_loader  # noqa: PLC0415
    import extproc.runtime.admin_pages  # noqa: F401, PLC0415

    # what is loaded stays: the collector need not look through it when the process begins to serve
    gc.collect()
    gc.freeze()
    set_process_name("spare")
    return sys.stdin.readline().strip()


def _has_pool(snapshot: Snapshot, pool: str) -> bool:
    return qualified_key(pool) in {server.metadata.key for server in snapshot.servers}


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for an option that does not parse or does not fit the others."""
    if not options.listen.startswith("unix:"):
        parse_address(options.listen)
    metrics = parse_metrics_address(options.metrics)
    workers = 1 if options.workers is None else options.workers
    if isinstance(metrics, Path) and workers > 1:
        raise ValueError("--metrics unix:PATH goes with one process; with --workers write IP:PORT")
    if min(options.duplex_choices, options.buffered_choices, workers) < 1:
        raise ValueError("--workers, --duplex-choices and --buffered-choices take 1 or more")
    if not 0 <= options.decision_sample <= 1:
        raise ValueError("--decision-sample is a share from 0 to 1")
    if options.decision_log is not None and not options.decision_log.parent.is_dir():
        raise ValueError(f"--decision-log: there is no folder {options.decision_log.parent}")
    for option, is_given in (("--wait-for-pool", options.wait_for_pool), ("--shadow", options.shadow)):
        if is_given and options.pool is None:
            raise ValueError(f"{option} needs --pool")
    _check_tls(options)
    _check_others(options)
    for duration in (options.grace, options.drain, options.settle):
        if duration is not None:
            Duration(duration)
    _check_ports(options.listen, metrics, workers)


def _check_others(options: argparse.Namespace) -> None:
    """Addresses of what is beside the port of the streams."""
    if options.health is not None:
        parse_address(options.health)
    if options.otlp is not None:
        parse_otlp(options.otlp)
    # a worker that begins later must serve even if the file is gone: then nobody sees the console
    if options.console_token is not None and options.worker is None:
        try:
            read_token(options.console_token)
        except OSError as error:
            raise ValueError(f"--console-token {error.filename}: {error.strerror}") from None
    url = options.usage_api
    if url is not None and not re.fullmatch(r"https?://[^/?#\s]+/?", url):
        raise ValueError(f"--usage-api {url}: write http://HOST:PORT, where attache usage serve listens")
    url = options.manager
    if url is not None and not re.fullmatch(r"https?://[^/?#\s]+/?", url):
        raise ValueError(f"--manager {url}: write http://HOST:PORT of the metrics of attache manager")


def _check_tls(options: argparse.Namespace) -> None:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("--tls-cert and --tls-key: write both")
    if options.tls_self_signed and options.tls_cert is not None:
        raise ValueError("--tls-self-signed does not go with --tls-cert")
    if (options.tls_self_signed or options.tls_cert) and find_spec("cryptography") is None:
        raise ValueError("TLS needs the Python package 'cryptography'; run: pip install 'attache[tls]'")
    if options.tls_ciphers:
        from extproc.streams.tls import TlsRequirements  # noqa: PLC0415 - only where it is asked for

        TlsRequirements(options.tls_min_version, options.tls_ciphers).context()


def _check_ports(listen: str, metrics: tuple[str, int] | Path | None, workers: int) -> None:
    """Workers take consecutive ports: those of gRPC and those of metrics must not overlap."""
    if workers == 1 or not isinstance(metrics, tuple) or listen.startswith("unix:"):
        return
    first = parse_address(listen)[1]
    if abs(first - metrics[1]) < workers:
        ports = f"{first} to {first + workers - 1}"
        raise ValueError(
            f"{workers} workers listen on ports {ports}; write --metrics {metrics[0]}:{first + 100}, or 'off'"
        )


def parser(prog: str = "extproc") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Serve Envoy's ext_proc protocol: choose an engine for every request that Envoy asks about.",
        epilog="Exit status: 0 after SIGTERM or SIGINT, 2 for a mistake in the configuration or the options.",
    )
    add = made.add_argument
    add("--config", type=Path, required=True, metavar="DIR", help="the configuration directory; changes are followed")
    add("--listen", default="127.0.0.1:9002", metavar="ADDRESS", help="IP:PORT or unix:PATH (default: %(default)s)")
    add(
        "--metrics",
        default="127.0.0.1:9003",
        metavar="ADDRESS",
        help="IP:PORT or unix:PATH of /metrics and /readyz, or 'off' (default: %(default)s)",
    )
    add(
        "--files",
        type=Path,
        metavar="DIR",
        help="the directory to which file names in the configuration are relative (default: the directory of --config)",
    )
    add(
        "--llm-d-metrics",
        action="store_true",
        help="show metrics under the names of llm-d's endpoint picker, too (llm_d_epp_request_running and others)",
    )
    add(
        "--grace",
        metavar="DURATION",
        help=(
            "after SIGTERM, how long new requests are still taken while health checks report NOT_SERVING, so that"
            " gateways notice first (default: 3s with --workers or --pool, else 0s)"
        ),
    )
    add(
        "--drain",
        default="5m",
        metavar="DURATION",
        help="after that, how long running requests may take to end (default: %(default)s)",
    )
    add(
        "--settle",
        default="3s",
        metavar="DURATION",
        help=(
            "how long a new ModelServer waits before it is used, so that Envoy knows it by then (default: %(default)s)"
        ),
    )
    add(
        "--state",
        type=Path,
        metavar="DIR",
        help="directory for the levels of Local limits, so that they survive a restart; created if it is missing",
    )
    add(
        "--usage-api",
        metavar="URL",
        help="http://HOST:PORT of attache usage serve: at the start, budgets are rebuilt from its rows",
    )
    add(
        "--manager",
        metavar="URL",
        help="http://HOST:PORT of the metrics of attache manager: the console shows its scaling decisions and rollouts",
    )
    add(
        "--console-token",
        type=Path,
        metavar="FILE",
        help=(
            "the console and /debug/explain need the token in this file, as the password in a browser or as"
            " authorization: Bearer TOKEN"
        ),
    )
    add(
        "--otlp",
        metavar="URL",
        help=(
            "send spans of sampled requests to the OpenTelemetry collector at http://HOST:PORT or grpc://HOST:PORT,"
            " with TLS https:// or grpcs:// (default: as the GatewayConfig's 'tracing' says); $OTEL_SERVICE_NAME,"
            " $OTEL_RESOURCE_ATTRIBUTES and $OTEL_EXPORTER_OTLP_CERTIFICATE are used"
        ),
    )
    _add_processes(made)
    _add_gateways(made)
    add_log_options(made)
    add = made.add_argument_group("debugging").add_argument
    add("--decision-log", type=Path, metavar="FILE", help="append a sample of decisions and outcomes as JSON lines")
    add(
        "--decision-sample",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of requests that are logged there, from 0 to 1 (default: %(default)s)",
    )
    add(
        "--debug",
        action="store_true",
        help="serve /debug/explain on the port of the metrics; only for trusted networks",
    )
    return made


def _add_processes(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("several processes").add_argument
    add(
        "--workers",
        type=int,
        metavar="N",
        help=(
            "number of processes; they take consecutive ports, starting at those of --listen and --metrics "
            "(or unix:PATH.0, unix:PATH.1, ...). A spare process takes the place of one that ends or hangs, also of "
            "a single one (default: one process alone)"
        ),
    )
    add("--worker", help=argparse.SUPPRESS)  # what the supervisor tells a worker
    add(
        "--redis",
        metavar="URL",
        default=os.environ.get(REDIS_VARIABLE) or None,
        help=f"share state with extproc on other machines through redis://HOST:PORT (default: ${REDIS_VARIABLE})",
    )
    add("--redis-channel", default="attache", metavar="NAME", help="of the processes that share (default: %(default)s)")


def _add_tls(add: Callable[..., argparse.Action]) -> None:
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="serve gRPC with TLS and this certificate, PEM; files that change are used for new connections",
    )
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    add(
        "--tls-self-signed",
        action="store_true",
        help="serve gRPC with TLS and a certificate of our own; gateways must not check it",
    )
    add(
        "--tls-min-version",
        choices=("1.2", "1.3"),
        default="1.2",
        help="the oldest version of TLS that is accepted (default: %(default)s)",
    )
    add(
        "--tls-ciphers",
        default="",
        metavar="SUITES",
        help="the accepted suites of TLS 1.2, by OpenSSL's names with colons between them (default: OpenSSL's choice)",
    )


def _add_gateways(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group(
        "gateways that Attaché does not configure", "They use the endpoint picker protocol of the Gateway API."
    ).add_argument
    add("--pool", metavar="NAME", help="the ModelServer for requests that match no ModelRoute")
    add(
        "--wait-for-pool",
        action="store_true",
        help=(
            "start although the directory does not have that ModelServer yet, or cannot be read; not ready until it"
            " has it"
        ),
    )
    _add_tls(add)
    add(
        "--health",
        metavar="ADDRESS",
        help="IP:PORT where gRPC's health service listens, too, without TLS; for probes of a kubelet",
    )
    add(
        "--duplex-choices",
        type=int,
        default=1,
        metavar="N",
        help=(
            "how many endpoints an answer lists when the gateway streams bodies; more than 1 only if the gateway "
            "tries them in order (default: %(default)s)"
        ),
    )
    add(
        "--buffered-choices",
        type=int,
        default=4,
        metavar="N",
        help="the same when the gateway sends whole bodies, as Attaché's own bundle does (default: %(default)s)",
    )
    add(
        "--whole-bodies",
        action="store_true",
        help=(
            "with --pool, read messages that do not say how bodies come (protocol_config) as whole bodies (BUFFERED); "
            "without this flag, as pieces (FULL_DUPLEX_STREAMED)"
        ),
    )
    add(
        "--trust-headers",
        action="store_true",
        help=(
            "trust x-attache-tenant, x-llm-d-inference-objective and similar headers; the gateway must remove them "
            "from its clients' requests and write them itself"
        ),
    )
    add(
        "--endpoint-scores",
        action="store_true",
        help="with --pool, write the scores of all endpoints into the answer's metadata, as llm-d's picker can",
    )
    add(
        "--shadow",
        action="store_true",
        help=(
            "compare the picks of another endpoint picker with ours: the gateway sends copies"
            " (observability_mode), and metrics and the log have the share of agreement"
        ),
    )
    add("--conformance", action="store_true", help="obey the header test-epp-endpoint-selection; never in production")
