# SPDX-License-Identifier: Apache-2.0
"""The console over HTTP: one page without parts from elsewhere, and what it shows as JSON. Nothing can be changed here.

The page may run its own script and connect to this port, and nothing else (its Content-Security-Policy has the hashes).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from extproc.api.status_page_contents import CONSOLE_PATH
from extproc.console.api_keys import keys_answer
from extproc.console.console_state import ConsoleInputs, ConsoleQuery, ProcessView, console_state
from extproc.console.slo import objectives_answer
from extproc.http_body import read_at_most
from extproc.metrics.recent_requests import OPEN_S, RecentRequest
from extproc.wire_names import USAGE_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from extproc.api.authentication import ApiKey
    from extproc.api.status_page_contents import ConfigReport
    from extproc.core.core import Core
    from extproc.metrics.request_metrics import Metrics

_Result = TypeVar("_Result")
_Query = TypeVar("_Query")

_FILE: Final = Path(__file__).with_name("console.html")
_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_STYLE: Final = re.compile(rb"<style>(.*?)</style>", re.DOTALL)
_SAFE: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Steps of a state between two turns of other work: a ModelServer takes some 50 µs.
_STEPS_AT_ONCE: Final = 4
_WORKER: Final = "worker"
_SIBLING_S: Final = 5.0
_USAGE_S: Final = 10.0
_MANAGER_S: Final = 5.0
_MOST_REPLICAS: Final = 8
_MOST_BYTES: Final = 1 << 20
# Requests to another process at a time, for all who look at the console.
_AT_ONCE: Final = 4
# Of the manager: the last decision about each binding, and the statuses of Models and ModelInfers.
_DECISIONS_PATH: Final = "/decisions"
_ROLLOUTS_PATH: Final = "/rollouts"
_USAGE_PARAMETERS: Final = frozenset(
    {"start", "end", "tz", "group_by", "tenant", "key", "user", "model", "server", "route", "limit", "page"}
)
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - another worker listens there, too


class ConsoleWorkerInfo(msgspec.Struct, frozen=True):
    """``address``: where this worker's pages are; ``worker`` of ``workers``: its number, from 0; the ports of all are
    consecutive. ``has_explain``: /debug/explain is there. ``usage_api``: URL of ``attache usage serve``,
    ``manager``: of the manager's pages.
    """

    address: tuple[str, int] | Path
    worker: int = 0
    workers: int = 1
    has_explain: bool = False
    usage_api: str | None = None
    manager: str | None = None

    def url_of_worker(self, worker: int) -> str | None:
        """Of another worker's pages; None: there is no such worker."""
        if not isinstance(self.address, tuple) or not 0 <= worker < self.workers:
            return None
        host, port = self.address
        host = _ANY_ADDRESS.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port - self.worker + worker}"


class RequestsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``find``: a part of a tenant, user, key, model, engine or request id. ``server``: a ModelServer."""

    find: Annotated[str, msgspec.Meta(max_length=200)] = ""
    server: Annotated[str, msgspec.Meta(max_length=600)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class NamesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``find``: a part of a name."""

    find: Annotated[str, msgspec.Meta(max_length=200)] = ""


class RequestsAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """``requests``: the newest first. ``kept``: how many there are. They are kept from the first time that somebody
    asks until nobody has asked for ``kept_for_s``.
    """

    instance: str
    worker: int
    workers: int
    kept: int
    kept_for_s: float
    requests: list[RecentRequest]


class ConsolePages:
    """The routes of the console."""

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        is_ready: Callable[[], bool],
        report: Callable[[], ConfigReport],
        place: ConsoleWorkerInfo,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._is_ready = is_ready
        self._report = report
        self._place = place
        self._began_at_s = clock()
        self._version = _version()
        self._page, policy = page_and_csp(_FILE.read_bytes())
        self._page_headers = {**_SAFE, "Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
        self._usage_gate, self._manager_gate = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> list[web.RouteDef]:
        """For the application of the pages."""
        return [
            web.get(CONSOLE_PATH, self._show_page),
            web.get(f"{CONSOLE_PATH}/state", self._show_state),
            web.get(f"{CONSOLE_PATH}/requests", self._show_requests),
            web.get(f"{CONSOLE_PATH}/usage", self._show_usage),
            web.get(f"{CONSOLE_PATH}/objectives", self._show_objectives),
            web.get(f"{CONSOLE_PATH}/keys", self._show_keys),
            web.get(f"{CONSOLE_PATH}/decisions", self._show_decisions),
            web.get(f"{CONSOLE_PATH}/rollouts", self._show_rollouts),
        ]

    async def _show_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, headers=self._page_headers, content_type="text/html", charset="utf-8")

    async def _show_state(self, http: web.Request) -> web.Response:
        if (other := await self._of_other_worker(http)) is not None:
            return other
        query = _read(http, ConsoleQuery)
        facts = ConsoleInputs(
            self._process(),
            self._report(),
            self._metrics.outcomes(),
            self._metrics.admission.tenant_counts(),
            self._metrics.caches.lookups(),
        )
        return _json(await _in_turns(console_state(self._core, facts, query, self._clock())))

    async def _show_requests(self, http: web.Request) -> web.Response:
        if (other := await self._of_other_worker(http)) is not None:
            return other
        query, now, process = _read(http, RequestsQuery), self._clock(), self._process()
        self._metrics.recent.on_viewed(now)
        found = self._metrics.recent.newest(now, most=query.limit, find=query.find, server=query.server)
        return _json(
            RequestsAnswer(process.instance, process.worker, process.workers, len(self._metrics.recent), OPEN_S, found)
        )

    async def _show_usage(self, http: web.Request) -> web.Response:
        if self._place.usage_api is None:
            return _error(404, "There is no usage here; start extproc with --usage-api URL.")
        wanted = [(name, value) for name, value in http.query.items() if name in _USAGE_PARAMETERS]
        async with self._usage_gate:
            return await _fetched(self._place.usage_api.rstrip("/") + USAGE_PATH, wanted, _USAGE_S, "the usage API")

    async def _show_decisions(self, _: web.Request) -> web.Response:
        return await self._of_manager(_DECISIONS_PATH, [])

    async def _show_rollouts(self, http: web.Request) -> web.Response:
        return await self._of_manager(_ROLLOUTS_PATH, [("find", _read(http, NamesQuery).find)])

    async def _of_manager(self, path: str, query: list[tuple[str, str]]) -> web.Response:
        if self._place.manager is None:
            return _error(404, "There is no manager here; start extproc with --manager URL.")
        if self._manager_gate.locked():
            # it hangs, and who waited for it would hold a connection of ours
            return _error(503, "The manager has not answered earlier requests yet.")
        async with self._manager_gate:
            return await _of_leader(URL(self._place.manager.rstrip("/") + path), query)

    async def _show_objectives(self, http: web.Request) -> web.Response:
        if (other := await self._of_other_worker(http)) is not None:
            return other
        query, place = _read(http, NamesQuery), self._place
        steps = objectives_answer(
            self._metrics.objectives.report(),
            find=query.find,
            now_s=self._wall_clock(),
            worker=place.worker,
            workers=place.workers,
        )
        return _json(await _in_turns(steps, 1))

    async def _show_keys(self, http: web.Request) -> web.Response:
        query = _read(http, NamesQuery)
        return _json(await _in_turns(keys_answer(self._keys(), find=query.find, now_s=self._wall_clock()), 1))

    def _keys(self) -> Sequence[ApiKey]:
        authentication = self._core.snapshot.gateway.authentication
        return () if authentication is None else authentication.api_keys

    async def _of_other_worker(self, http: web.Request) -> web.Response | None:
        """The answer of another worker, if one is asked for; None: this one is to answer."""
        wanted = http.query.get(_WORKER, "")
        if not wanted or wanted == str(self._place.worker):
            return None
        url = (
            self._place.url_of_worker(int(wanted))
            if wanted.isascii() and wanted.isdigit() and len(wanted) < 6
            else None
        )
        if url is None:
            return _error(404, f"There is no such worker; their numbers are 0 to {self._place.workers - 1}.")
        others = [(name, value) for name, value in http.query.items() if name != _WORKER]
        access = http.headers.get("Authorization")
        headers = {} if access is None else {"Authorization": access}
        return await _fetched(url + http.path, others, _SIBLING_S, f"worker {wanted}", headers)

    def _process(self) -> ProcessView:
        place = self._place
        return ProcessView(
            instance=self._core.process_name,
            version=self._version,
            worker=place.worker,
            workers=place.workers,
            at=self._wall_clock(),
            uptime_s=self._clock() - self._began_at_s,
            is_ready=self._is_ready(),
            has_explain=place.has_explain,
            has_usage=place.usage_api is not None,
            has_objectives=any(route.spec.slo for route in self._core.snapshot.routes),
            has_keys=bool(self._keys()),
            has_manager=place.manager is not None,
        )


def page_and_csp(page: bytes) -> tuple[bytes, str]:
    """The page, and the policy under which a browser runs it: its own script and style by their hashes."""
    scripts, styles = (" ".join(map(_hash, found.findall(page))) for found in (_SCRIPT, _STYLE))
    parts = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def _version() -> str:
    try:
        return version("attache")
    except PackageNotFoundError:
        return ""


def _read(http: web.Request, kind: type[_Query]) -> _Query:
    """The query as this struct; raises the answer to one that is not."""
    given = {name: value for name, value in http.query.items() if name != _WORKER}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise web.HTTPBadRequest(text=f"{error}\n") from error


async def _in_turns(steps: Generator[None, None, _Result], at_once: int = _STEPS_AT_ONCE) -> _Result:
    """The result, after other work has had its turn now and then."""
    number = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
        number += 1
        if number % at_once == 0:
            await asyncio.sleep(0)


async def _of_leader(url: URL, query: list[tuple[str, str]]) -> web.Response:
    """The manager's answer. All replicas that the name has are asked, as those that do not lead answer 503."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return _error(502, f"No answer of the manager: {url.host}: {error.strerror}")
    addresses = sorted({str(address[0]) for *_, address in found})[:_MOST_REPLICAS]
    asked = (
        _fetched(str(url.with_host(one)), query, _MANAGER_S, "the manager", {"Host": url.authority}, url.host)
        for one in addresses
    )
    return min(await asyncio.gather(*asked), key=attrgetter("status"))


async def _fetched(
    url: str,
    query: list[tuple[str, str]],
    most_s: float,
    whose: str,
    headers: Mapping[str, str] | None = None,
    tls_name: str | None = None,
) -> web.Response:
    """A page of another process, as JSON; 502 if it has none within its bounds of time and size."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=most_s)) as client,
            client.get(url, params=query, headers=headers, server_hostname=tls_name, allow_redirects=False) as answer,
        ):
            body = await read_at_most(answer.content, _MOST_BYTES)
            if body is None:
                return _error(502, f"The answer of {whose} is larger than 1 MiB; ask for less.")
            if answer.content_type != "application/json":
                return _error(502, f"{whose} answered {answer.status} and no JSON.")
            return web.Response(status=answer.status, body=body, content_type="application/json", headers=_SAFE)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        return _error(502, f"No answer of {whose}: {str(error) or type(error).__name__}")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=_SAFE)


def _error(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message}})
    return web.Response(status=status, body=body, content_type="application/json", headers=_SAFE)
