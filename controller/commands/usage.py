# SPDX-License-Identifier: Apache-2.0
"""``attache usage``: keep what requests used, and report it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from controller.bundle.envoy_admin_client import reopen_logs
from controller.usage.ingest import Ingest
from controller.usage.json_lines_store import JsonLinesStore
from controller.usage.log_follower import ExtprocLogReader, LogFollower, LogPosition, LogRotator
from controller.usage.queries import GROUPS, BadQuery, checked_zone, parse_instant, parse_names, parse_query, run_query
from controller.usage.reports import align_columns, as_csv, as_json, as_table
from controller.usage.rollups import DAY_S
from controller.usage.rows import BadLine, parse_usage_line
from controller.usage.server import UsageQueryRunner, UsageReportsApi, ingest_monitoring_pages
from controller.usage.store import SqlStore, StoreError, StoreUnavailable, first_error_line, open_engine
from controller.usage.traffic_drift import CHANGED, SHIFTED, ComparedPeriods, drift_table, find_drift
from extproc.api.addresses import parse_address, parse_endpoint
from extproc.api.quantities import ByteSize, Duration
from extproc.api.usage_log import LEFT_SUFFIX
from extproc.browser_security import add_browser_protection
from extproc.logs import add_log_options, start_logging
from extproc.page_server import PageServer
from extproc.sd_notify import READY, notify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web

    from controller.usage.store import UsageSink

log = logging.getLogger(__name__)
T = TypeVar("T")
_USAGE: Final = 2
_JSON_LINES: Final = "jsonl:"
_DEFAULT_STORE: Final = "usage.db"
_NICENESS: Final = 10
_AUTOGROUP: Final = Path("/proc/self/autogroup")
_CLOCK, _WALL = time.monotonic, time.time  # noqa: TID251 - the clocks of the shell


def parser(prog: str = "attache usage") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Keep what requests used and cost, from the log that Envoy writes, and report it.",
        epilog="Exit status: 0; 1 if a log has bad lines (check), if something has changed (drift) or for a fault of"
        " the process (serve); 2 for a mistake in the options or a store that cannot be used.",
        allow_abbrev=False,
    )
    modes = made.add_subparsers(dest="mode", required=True, metavar="serve|report|drift|check", help="what to do")
    _add_serve(modes)
    _add_report(modes)
    _add_drift(modes)
    check = modes.add_parser("check", help="read a log, and say which of its lines cannot be read", allow_abbrev=False)
    check.add_argument("log", type=Path, metavar="FILE")
    return made


def _add_serve(modes: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = modes.add_parser("serve", help="follow the log, keep rows and sums, serve reports", allow_abbrev=False)
    add = made.add_argument
    add("--log", type=Path, required=True, metavar="FILE", help="spec.usageLog.path of the GatewayConfig")
    add(
        "--store",
        metavar="URL",
        help="sqlite:///FILE, postgresql://USER@HOST/NAME, or jsonl:DIR, which has no reports; $VARIABLES are replaced"
        " (default: usage.db beside the log)",
    )
    add(
        "--source",
        metavar="NAME",
        help="names this log among all of the store, and stays the same (default: this machine's name and the file's)",
    )
    add("--envoy-admin", metavar="ADDRESS", help="HOST:PORT of Envoy's admin interface: the log is rotated by its help")
    add("--rotate-at", default="256Mi", metavar="SIZE", help="of the log, with --envoy-admin (default: %(default)s)")
    add("--keep-requests", default="90d", metavar="DURATION", help="how long rows are kept (default: %(default)s)")
    add("--keep-rollups", default="730d", metavar="DURATION", help="how long sums are kept (default: %(default)s)")
    add(
        "--most-names",
        type=int,
        default=10_000,
        metavar="NUMBER",
        help="tenants that sums of a day keep apart, and keys, users and models of each (default: %(default)s)",
    )
    add(
        "--listen",
        default="off",
        metavar="ADDRESS",
        help="IP:PORT of reports for callers, spec.usageLog.api; only Envoy may reach it, which says who calls"
        " (default: %(default)s)",
    )
    add("--admin-tenants", default="", metavar="NAMES", help="tenants of tokens that see the usage of all (a,b)")
    add("--admin-keys", default="", metavar="NAMES", help="API keys, by name, that see the usage of all (a,b)")
    add(
        "--admin",
        default="127.0.0.1:9008",
        metavar="ADDRESS",
        help="IP:PORT of unauthenticated reports of all callers, or 'off'; bind it to loopback (default: %(default)s)",
    )
    add(
        "--metrics",
        default="127.0.0.1:9007",
        metavar="ADDRESS",
        help="IP:PORT of /metrics and /readyz, or 'off' (default: %(default)s)",
    )
    add_log_options(made)


def _add_report(modes: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = modes.add_parser("report", help="print sums, straight from the store", allow_abbrev=False)
    add = made.add_argument
    add("--store", required=True, metavar="URL", help="as of serve")
    add("--start", default="", metavar="TIME", help="2026-11-23, a time in ISO 8601, or seconds since 1970 (today)")
    add("--end", default="", metavar="TIME", help="before which requests began (now)")
    add("--group-by", default="", metavar="NAMES", help=f"minute, hour or day; {', '.join(GROUPS)}")
    for name in GROUPS:
        add(
            f"--{name.replace('_', '-')}",
            action="append",
            default=[],
            metavar="NAME",
            help="only this one; may be repeated",
        )
    add("--tz", default="UTC", metavar="ZONE", help="of days and of times without one (default: %(default)s)")
    add("--limit", default="1000", metavar="NUMBER", help="of rows (default: %(default)s)")
    add("--page", default="", metavar="NUMBER", help="where the report goes on")
    add("--format", choices=("table", "csv", "json"), default="table", help="(default: %(default)s)")


def _add_drift(modes: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = modes.add_parser(
        "drift", help="compare requests and answers of late with those before, by their rows", allow_abbrev=False
    )
    add = made.add_argument
    add("--store", required=True, metavar="URL", help="as of serve")
    add("--start", default="", metavar="TIME", help="since when it is of late, as of report (a day before the end)")
    add("--end", default="", metavar="TIME", help="before which requests began (now)")
    add("--before", default="7d", metavar="DURATION", help="what it is compared with (default: the %(default)s before)")
    add("--group-by", default="model", metavar="NAMES", help=f"{', '.join(GROUPS)} (default: %(default)s)")
    add(
        "--least",
        type=int,
        default=500,
        metavar="NUMBER",
        help="requests in both periods; smaller groups are left out (default: %(default)s)",
    )
    add("--tz", default="UTC", metavar="ZONE", help="of times without one (default: %(default)s)")


def main(words: list[str], prog: str = "attache usage") -> int:
    """Exit status: 0, 1 for bad lines or a change, or 2 for a mistake in the options or a store that cannot be used."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        match options.mode:
            case "report":
                return _report(options)
            case "drift":
                return _drift(options)
            case "check":
                return _check(options.log)
            case _:
                return _serve(options)
    except (StoreError, StoreUnavailable, BadQuery, ValueError, OSError) as error:
        print(f"{prog} {options.mode}: {error}", file=sys.stderr)
        return _USAGE


def _report(options: argparse.Namespace) -> int:
    parameters = {
        "start": [options.start],
        "end": [options.end],
        "group_by": [options.group_by],
        "tz": [options.tz],
        "limit": [options.limit],
        "page": [options.page],
        **{name: getattr(options, name) for name in GROUPS},
    }
    query = parse_query(parameters, _WALL())
    report = _read(options.store, lambda connection: run_query(connection, query))
    match options.format:
        case "csv":
            print(as_csv(report), end="")
        case "json":
            print(as_json(report).decode())
        case _:
            print(as_table(report))
    if report.next_offset is not None:
        print(f"there are more: --page {report.next_offset}", file=sys.stderr)
    return 0


def _drift(options: argparse.Namespace) -> int:
    """1 if something has changed."""
    groups = parse_names("--group-by", [options.group_by], GROUPS)
    zone = checked_zone(options.tz)
    end = parse_instant("--end", options.end, zone, default=_WALL())
    start = parse_instant("--start", options.start, zone, default=end - DAY_S)
    periods = ComparedPeriods(int(start - Duration(options.before)), start, end)
    if not periods.before < start < end:
        raise BadQuery("--start", "is not before --end, or --before is no time")
    found, small = _read(options.store, lambda one: find_drift(one, periods, groups, least=max(1, options.least)))
    print(
        align_columns(
            list(drift_table(found, groups)), [*(True for _ in groups), True, *(False for _ in range(5)), True]
        )
    )
    if small:
        print(f"groups with fewer than {options.least} requests in a period, left out: {small}", file=sys.stderr)
    changed = sum(one.psi >= CHANGED for one in found)
    print(f"{changed} of {len(found)} have changed (psi of {CHANGED} or more; {SHIFTED}: shifted)", file=sys.stderr)
    return 1 if changed else 0


def _read(store: str, read: Callable[[sa.Connection], T]) -> T:
    """What ``read`` finds in the store, which is there. Raises StoreError, StoreAway."""
    engine = open_engine(os.path.expandvars(_no_lines(store)))
    file = engine.url.database
    if engine.dialect.name == "sqlite" and file and not Path(file).exists():
        # SQLite would make one
        raise StoreError(f"there is no file {file}; name the store that `attache usage serve` writes")
    try:
        with engine.connect() as connection:
            return read(connection)
    except SQLAlchemyError as error:
        raise StoreUnavailable(f"the store cannot be read: {first_error_line(error)}") from error
    finally:
        engine.dispose()


def _no_lines(store: str) -> str:
    if store.startswith(_JSON_LINES):
        raise StoreError("reports need a database: JSON lines have no sums")
    return store


def _check(path: Path) -> int:
    bad = rows = 0
    now_s = _WALL()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                parse_usage_line(line, now_s)
                rows += 1
            except BadLine as error:
                bad += 1
                print(f"{path}:{number}: {error}")
    print(f"{rows} lines can be read, {bad} cannot")
    return 1 if bad else 0


def _serve(options: argparse.Namespace) -> int:
    start_logging(options)
    _yield_processors()
    listens = {
        name: None if getattr(options, name) == "off" else parse_address(getattr(options, name))
        for name in ("listen", "admin", "metrics")
    }
    keep_requests_s, keep_rollups_s = Duration(options.keep_requests), Duration(options.keep_rollups)
    rotate_at = ByteSize(options.rotate_at)
    if options.envoy_admin is not None:
        parse_endpoint(options.envoy_admin)
    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    open_sink, engine = _store_of(options)
    rotation = None
    if options.envoy_admin is not None:
        rotation = LogRotator(options.log, int(rotate_at), partial(reopen_logs, options.envoy_admin))
    ingest = Ingest(
        LogFollower(options.log, LogPosition(), _CLOCK),
        open_sink,
        wall=_WALL,
        keep_requests_s=keep_requests_s,
        keep_rollups_s=keep_rollups_s,
        left=ExtprocLogReader(Path(f"{options.log}{LEFT_SUFFIX}"), _CLOCK),
        rotation=rotation,
    )
    database = UsageQueryRunner(engine, _CLOCK, _WALL)
    callers = UsageReportsApi(
        database,
        counts=ingest.counts,
        admin_tenants=_names(options.admin_tenants),
        admin_keys=_names(options.admin_keys),
    )
    apps = {
        "listen": callers.app(),
        "admin": UsageReportsApi(database, counts=ingest.counts, is_admin_port=True).app(),
        "metrics": ingest_monitoring_pages(ingest.counts, _WALL),
    }
    for name, address in listens.items():
        if address is not None:
            add_browser_protection(apps[name], address[0], is_behind_envoy=name == "listen")
    log.info("follows %s into %s", options.log, _shown(options.store))
    with _running(ingest, stop) as failed:
        asyncio.run(_serve_until(stop, [(one, apps[name]) for name, one in listens.items() if one is not None]))
    return 1 if failed else 0


def _yield_processors() -> None:
    """Requests come first on a machine that is busy: rows may be late, and Envoy's log keeps them meanwhile."""
    os.nice(_NICENESS)
    # where sessions share processors, niceness counts within a session alone; systems without that have no such file
    with suppress(OSError):
        _AUTOGROUP.write_text(str(_NICENESS))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@contextmanager
def _running(ingest: Ingest, stop: threading.Event) -> Iterator[list[Exception]]:
    """Ingest in a thread, until ``stop``; gives what ended it before that. Raises StoreError."""
    failed: list[Exception] = []

    def ingest_all() -> None:
        try:
            ingest.run(stop)
        except StoreError as error:
            failed.append(error)
        except Exception as error:
            log.exception("rows are not kept any more")
            failed.append(error)
        finally:
            ingest.close()
            stop.set()

    writer = threading.Thread(target=ingest_all, name="ingest")
    writer.start()
    try:
        yield failed
    finally:
        stop.set()
        writer.join()
    if failed and isinstance(failed[0], StoreError):
        raise failed[0]


async def _serve_until(stop: threading.Event, apps: list[tuple[tuple[str, int], web.Application]]) -> None:
    runners = [await _listen(address, app) for address, app in apps]
    notify(READY, os.environ)
    await asyncio.to_thread(stop.wait)
    for runner in runners:
        await runner.cleanup()


def _store_of(options: argparse.Namespace) -> tuple[Callable[[], UsageSink], sa.Engine | None]:
    """What opens the store, and what reports ask, if there is something to ask. Raises StoreError."""
    if options.store is None:
        # not by a URL, in which characters of a path have a meaning
        engine = open_engine(sa.URL.create("sqlite", database=str(options.log.absolute().with_name(_DEFAULT_STORE))))
    else:
        url = os.path.expandvars(options.store)
        if url.startswith(_JSON_LINES):
            return partial(JsonLinesStore, Path(url.removeprefix(_JSON_LINES))), None
        engine = open_engine(url)
    source = options.source or f"{socket.gethostname()}:{options.log.absolute()}"
    store = SqlStore(engine, source, most_names=options.most_names)

    def prepared() -> UsageSink:
        store.prepare()
        return store

    return prepared, engine


def _shown(store: str | None) -> str:
    """Without a password."""
    if store is None:
        return _DEFAULT_STORE
    scheme, _, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if "@" in rest else store


async def _listen(address: tuple[str, int], app: web.Application) -> web.AppRunner:
    runner = PageServer(app, end_s=2.0)
    await runner.setup()
    await runner.listen(address)
    return runner
