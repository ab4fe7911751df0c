# SPDX-License-Identifier: Apache-2.0
"""Reports over HTTP: of callers, whom Envoy names in headers, and of administrators; and the page of metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from controller.usage.ingest_metrics import UsageIngestMetrics
from controller.usage.queries import BadQuery, parse_query, run_query, stored_until_by_source
from controller.usage.reports import as_csv, as_json, completions_page, costs_page, restrict_to_owner
from controller.usage.rows import bounded_caller_name
from extproc.wire_names import (
    ANONYMOUS,
    CALLER_CLIENT,
    CALLER_REPORTS,
    CALLER_TENANT,
    CALLER_USER,
    ORGANIZATION_PATH,
    USAGE_PATH,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import sqlalchemy as sa

    from controller.usage.ingest import IngestCounters
    from controller.usage.queries import Query, UsageReport

COMPLETIONS_PATH: Final = f"{ORGANIZATION_PATH}usage/completions"
COSTS_PATH: Final = f"{ORGANIZATION_PATH}costs"
# Reports share the machine with Envoy, and the database with the writer. The admin listener has slots of its own.
_AT_ONCE: Final = 2
# Reports that run or wait for others to end: of all callers, of a tenant's, and of one.
_MOST_WAITING: Final = 16
_MOST_OF_A_TENANT: Final = 4
_MOST_OF_A_CALLER: Final = 2
_DEADLINE_S: Final = 30.0
# SQLite asks so often, in steps of its machine, whether to stop.
_STEPS: Final = 100_000
_CALLER: Final = {"tenant": CALLER_TENANT, "key": CALLER_CLIENT, "user": CALLER_USER, "reports": CALLER_REPORTS}
_PRIVATE: Final = {"cache-control": "private, no-store"}


class Caller(NamedTuple):
    """As Envoy names it; what it does not know is empty. ``reports``: the tenant all of whose usage its key may read,
    percent-encoded.
    """

    tenant: str
    key: str
    user: str
    reports: str

    @property
    def owner(self) -> tuple[str, str]:
        """Its tenant, or else its key, or else its user, behind the name of the field."""
        if self.reports:
            return "tenant", unquote(self.reports)
        return next(((name, value) for name, value in self._asdict().items() if value), ("", ""))


class UsageQueryRunner:
    """Runs queries, each with a time limit. ``engine``: None where there are no sums."""

    def __init__(self, engine: sa.Engine | None, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        """``clock``: seconds, as ``time.monotonic``. ``wall``: seconds since 1970."""
        self._engine = engine
        self._clock = clock
        self.wall = wall

    @property
    def is_open(self) -> bool:
        """Whether there is something to ask."""
        return self._engine is not None

    def run(self, query: Query) -> UsageReport:
        """Blocks; raises BadQuery, SQLAlchemyError."""
        with self._connected() as connection:
            return run_query(connection, query)

    def stored_until_by_source(self) -> dict[str, float]:
        """Until when the rows of each log are stored. Blocks; raises SQLAlchemyError."""
        with self._connected() as connection:
            return stored_until_by_source(connection)

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        """With the time limit."""
        assert self._engine is not None  # noqa: S101 - is_there
        with self._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            if connection.dialect.name == "sqlite":
                ends_at_s = self._clock() + _DEADLINE_S
                driver.set_progress_handler(lambda: self._clock() > ends_at_s, _STEPS)
            else:
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(_DEADLINE_S * 1_000)}")
            try:
                yield connection
            finally:
                if connection.dialect.name == "sqlite":
                    driver.set_progress_handler(None, 0)


class UsageReportsApi:
    """The routes of reports. ``is_admin_port``: whoever connects sees everything."""

    def __init__(
        self,
        database: UsageQueryRunner,
        *,
        counts: IngestCounters,
        is_admin_port: bool = False,
        admin_tenants: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
    ) -> None:
        self._database = database
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._counts = counts
        # reports that run or wait for a slot, by caller
        self._waiting = Counter[Caller]()
        self._is_admin_port = is_admin_port
        self._admins = {"tenant": frozenset(admin_tenants), "key": frozenset(admin_keys)}

    def app(self) -> web.Application:
        """The server's application."""
        made = web.Application()
        made.router.add_get(USAGE_PATH, self._usage)
        made.router.add_get(COMPLETIONS_PATH, self._completions)
        made.router.add_get(COSTS_PATH, self._costs)
        return made

    async def _usage(self, request: web.Request) -> web.Response:
        def make(parameters: Mapping[str, Sequence[str]], owned: Mapping[str, str]) -> web.Response:
            query = parse_query(parameters, self._database.wall())
            query = msgspec.structs.replace(query, filters=restrict_to_owner(query.filters, owned))
            form = (parameters.get("format") or ["json"])[-1]
            if form not in {"json", "csv"}:
                raise BadQuery("format", "write json or csv")
            # first: what is stored after this is in the report or is not, and nothing is claimed of it
            until_s, of_all = (
                self._counts.stored_until_s,
                self._database.stored_until_by_source() if self._is_admin_port else {},
            )
            report = self._database.run(query)
            if form == "json":
                return _json(as_json(report, until_s, of_all))
            headers = {} if report.next_offset is None else {"x-next-page": str(report.next_offset)}
            return web.Response(text=as_csv(report), content_type="text/csv", headers={**_PRIVATE, **headers})

        return await self._answer(request, make)

    async def _completions(self, request: web.Request) -> web.Response:
        def make(parameters: Mapping[str, Sequence[str]], owned: Mapping[str, str]) -> web.Response:
            page = completions_page(parameters, owned, self._database.wall(), self._database.run)
            return _json(msgspec.json.encode(page))

        return await self._answer(request, make)

    async def _costs(self, request: web.Request) -> web.Response:
        def make(parameters: Mapping[str, Sequence[str]], owned: Mapping[str, str]) -> web.Response:
            page = costs_page(parameters, owned, self._database.wall(), self._database.run)
            return _json(msgspec.json.encode(page))

        return await self._answer(request, make)

    async def _answer(
        self, request: web.Request, make: Callable[[Mapping[str, Sequence[str]], Mapping[str, str]], web.Response]
    ) -> web.Response:
        caller = Caller(**{name: _verified(request, header) for name, header in _CALLER.items()})
        owned = self._owned(caller._asdict())
        if owned is None:
            text = "The gateway does not know who is calling: configure authentication."
            return _error(403, text, "unknown_caller")
        if not self._database.is_open:
            text = "Reports need a database; this gateway keeps JSON lines (see --store)."
            return _error(501, text, "no_reports")
        if not self._has_place(caller):
            busy = _error(429, "Too many reports are asked for at once; try again in a second.", "busy")
            busy.headers["retry-after"] = "1"
            return busy
        self._waiting[caller] += 1
        try:
            async with self._slots:
                parameters = {name: request.query.getall(name) for name in request.query}
                return await asyncio.to_thread(make, parameters, owned)
        except BadQuery as error:
            return _error(400, str(error), "invalid_parameter", error.parameter)
        except SQLAlchemyError:
            text = "The report took too long, or the database is away; ask for a shorter range, or try again."
            return _error(503, text, "unavailable")
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    def _has_place(self, caller: Caller) -> bool:
        """Whether one more report of the caller may wait."""
        if self._waiting.total() >= _MOST_WAITING:
            return False
        of_tenant = sum(count for other, count in self._waiting.items() if other.owner == caller.owner)
        return self._is_admin_port or (of_tenant < _MOST_OF_A_TENANT and self._waiting[caller] < _MOST_OF_A_CALLER)

    def _owned(self, caller: Mapping[str, str]) -> Mapping[str, str] | None:
        """Filters that the caller cannot leave: none for administrators. None: nobody knows who it is.

        A token's rows are those of its tenant and its user, and of no user if it names none. Of an API key Envoy knows
        the name alone, and no tenant, unless the key may read all of the tenant's usage.
        """
        if self._is_admin_port or any(caller[name] in admins for name, admins in self._admins.items()):
            return {}
        if not any(caller.values()):
            return None
        if caller["reports"]:
            owned = {"tenant": unquote(caller["reports"])}
        elif caller["key"]:
            owned = {name: caller[name] for name in ("key", "tenant") if caller[name]}
        else:
            owned = {"tenant": caller["tenant"] or ANONYMOUS, "user": caller["user"]}
        return {name: bounded_caller_name(value) for name, value in owned.items()}


def _verified(request: web.Request, header: str) -> str:
    """A name that Envoy has written, as extproc reads it: what is no UTF-8 is Latin-1."""
    value = request.headers.get(header, "").encode(errors="surrogateescape")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=_PRIVATE)


def _error(status: int, message: str, code: str, parameter: str | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": parameter, "code": code}
    return web.Response(
        status=status, body=msgspec.json.encode({"error": error}), content_type="application/json", headers=_PRIVATE
    )


def ingest_monitoring_pages(counts: IngestCounters, wall: Callable[[], float]) -> web.Application:
    """/metrics and /readyz."""
    registry = CollectorRegistry()
    registry.register(UsageIngestMetrics(counts, wall))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=503 if counts.error else 200, text=counts.error or "rows are kept")

    made = web.Application()
    made.router.add_get("/metrics", metrics)
    made.router.add_get("/readyz", ready)
    return made
