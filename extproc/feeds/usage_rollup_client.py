# SPDX-License-Identifier: Apache-2.0
"""What callers have used of their budgets, from the usage process: levels are rebuilt from its rows.

A process that starts asks before it serves, for a bounded time, and goes on asking until the rows are whole: the usage
process may be away, or behind the log by hours. Each answer counts, as levels are only ever lowered. It asks again when
Redis had to begin with buckets that it did not know: it may have lost them. And it asks once a minute, for what a
process that died had not told anybody, and at once for a budget that a reload has added.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import msgspec

from extproc.admission.budget_recovery import UsageRollupRow
from extproc.http_body import read_at_most
from extproc.wire_names import USAGE_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import ClientSession

    from extproc.admission.budget_recovery import RemainingBudgets, UsageQuery
    from extproc.core.core import Core
    from extproc.core.effects import Effect
    from extproc.feeds.redis_limits import RedisLimits

log = logging.getLogger(__name__)
_NOT_IMPLEMENTED: Final = 501
# Rows this much older than their answer are whole: Envoy, the reader and the database take a second or two.
_USUAL_LAG_S: Final = 10.0
# Of a page, as many as the usage process gives; and of all pages: ten million callers.
_ROWS: Final = 10_000
_MOST_PAGES: Final = 1_000
_MOST_BYTES: Final = 16 << 20
# Rows between two turns of other work.
_ROWS_AT_ONCE: Final = 500


class _RollupsPage(msgspec.Struct, frozen=True):
    """``until_s``: all requests that ended before it are in the rows; None if nobody knows. Fields of the page that are
    not named here are ignored.
    """

    data: tuple[UsageRollupRow, ...]
    next_page: str | None = None
    until_s: float | None = None


class _NoReports(Exception):
    """The usage process keeps rows that it cannot add up."""


class RollupTiming(msgspec.Struct, frozen=True):
    """In seconds. ``start_s``: the longest that a start waits; ``retry_s``: its pauses. ``page_s``: the longest that
    a page may take. ``pause_s``: between two questions afterwards. ``lost_s``: after the store had to begin with
    buckets that it did not know, which it has to at the start of each window, too. ``again_s``: without any reason.
    """

    start_s: float = 5.0
    retry_s: float = 0.2
    page_s: float = 60.0
    pause_s: float = 5.0
    lost_s: float = 30.0
    again_s: float = 60.0


_TIMES: Final = RollupTiming()


class UsageRollupClient:
    """Asks ``url`` what was used in the windows that are open."""

    def __init__(
        self,
        url: str,
        core: Core,
        limits: RedisLimits | None,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        perform: Callable[[list[Effect]], object],
        times: RollupTiming = _TIMES,
    ) -> None:
        """``url``: of the usage process, such as http://127.0.0.1:9010. ``limits``: the store of global budgets."""
        self._perform = perform
        self._url = url.rstrip("/")
        self._core = core
        self._limits = limits
        self._clock = clock
        self._wall_clock = wall_clock
        self._times = times
        self._began_s = wall_clock()
        self._wanted = asyncio.Event()
        self._wanted.set()
        # a budget was added
        self._added = asyncio.Event()
        self._asked = core.admission.budget_account_settings()
        self._is_over = False
        self._reason = ""
        # whether the log says that levels are those of the rows
        self._is_known = False
        if limits is not None:
            limits.on_new_bucket = self._wanted.set

    async def load(self) -> None:
        """Lower the levels of budgets to what the rows leave of them. A failure is logged; ``run`` tries again."""
        try:
            async with asyncio.timeout(self._times.start_s):
                while await self._try() and self._wanted.is_set():  # noqa: ASYNC110 - it happens in another process
                    await asyncio.sleep(self._times.retry_s)
        except TimeoutError:
            self._wanted.set()
            self._note(f"it takes longer than {self._times.start_s:g} s")

    def on_config(self) -> None:
        """Another configuration is in use: ask at once for budgets that it has added, which would begin full."""
        known = self._core.admission.budget_account_settings()
        if not known <= self._asked:
            self._added.set()
            self._wanted.set()
        self._asked = known

    async def run(self) -> None:
        """Ask as often as needed."""
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.again_s):
                    await self._wanted.wait()
            await self._pause(self._times.pause_s)
            self._added.clear()
            await self._try()
            if not self._wanted.is_set():
                # so that a store that begins with many buckets is no load
                await self._pause(self._times.lost_s)

    async def _pause(self, seconds: float) -> None:
        """Until a budget is added, at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._added.wait()

    async def _try(self) -> bool:
        """Ask once. Returns whether a start asks again at once: nothing listens yet, of processes that start together,
        or rows are behind.
        """
        self._wanted.clear()
        asked_s = self._wall_clock()
        try:
            until_s = await self._ask()
        except _NoReports:
            self._is_over = True
            log.warning("budgets are not rebuilt: %s has no sums (see --store of attache usage serve)", self._url)
            return False
        except Exception as error:  # noqa: BLE001 - the client library raises all sorts, and a start must not fail
            self._wanted.set()
            self._note(str(error) or type(error).__name__)
            return isinstance(error, OSError)
        if until_s < asked_s - _USUAL_LAG_S:
            self._wanted.set()
            self._note("its rows are behind the usage log")
            return True
        if until_s < self._began_s:
            # the last seconds before the start come later
            self._wanted.set()
            return False
        if not self._is_known:
            log.info("the levels of budgets are those of the usage rows of %s", self._url)
        self._reason, self._is_known = "", True
        return False

    def _note(self, reason: str) -> None:
        """Once for each cause in succession."""
        if reason != self._reason:
            self._is_known = False
            log.warning("budgets have the levels that are known here, until %s answers in full: %s", self._url, reason)
        self._reason = reason

    async def _ask(self) -> float:
        """Returns until when the rows are whole."""
        # the HTTP library takes long to load, and is not needed without this option
        from aiohttp import ClientSession  # noqa: PLC0415

        until_s = math.inf
        found: list[RemainingBudgets] = []
        async with ClientSession() as session:
            for query in self._core.admission.usage_queries(self._wall_clock()):
                spent = self._core.admission.make_remaining_budgets(query, self._wall_clock())
                for number, (dimensions, tenants) in enumerate(query.dimensions_and_tenants()):
                    url = self._url_of(query, sorted(dimensions), tenants)
                    add = partial(spent.add_row, is_by_key=number > 0)
                    until_s = min(until_s, await self._read_pages(session, url, add))
                found.append(spent)
        for spent in found:
            shared = self._core.cap_budgets(spent, self._clock())
            if self._limits is not None:
                self._limits.cap_budgets(shared)
        self._perform(self._core.on_usage_rows_read(self._wall_clock()))
        return until_s

    async def _read_pages(self, session: ClientSession, url: str, add: Callable[[UsageRollupRow], None]) -> float:
        """Add the rows of all pages. They are sorted by caller, and callers are added meanwhile: then the last rows of
        a page are the first ones of the next, too, and count once.
        """
        known, number, until_s = frozenset[tuple[str, ...]](), "", math.inf
        for _ in range(_MOST_PAGES):
            async with asyncio.timeout(self._times.page_s):
                page = await _read(session, f"{url}&{urlencode({'page': number})}" if number else url)
            until_s = min(until_s, 0.0 if page.until_s is None else page.until_s)
            rows = {(row.tenant, row.user, row.key, row.route): row for row in page.data}
            for index, (key, row) in enumerate(rows.items(), 1):
                if key not in known:
                    add(row)
                if not index % _ROWS_AT_ONCE:
                    await asyncio.sleep(0)
            if not (number := page.next_page or ""):
                return until_s
            known = frozenset(rows)
        raise ValueError(f"there are more than {_MOST_PAGES} pages")

    def _url_of(self, query: UsageQuery, dimensions: Sequence[str], tenants: Sequence[str]) -> str:
        parameters: list[tuple[str, object]] = [
            ("start", query.window.start_s),
            ("end", int(self._wall_clock()) + 1),
            ("group_by", ",".join(dimensions)),
            ("limit", _ROWS),
            *(("tenant", tenant) for tenant in tenants),
        ]
        return f"{self._url}{USAGE_PATH}?{urlencode(parameters)}"


async def _read(session: ClientSession, url: str) -> _RollupsPage:
    """Raises _NoReports, and whatever the client library does."""
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status == _NOT_IMPLEMENTED:
            raise _NoReports
        answer.raise_for_status()
        content = await read_at_most(answer.content, _MOST_BYTES)
    if content is None:
        raise ValueError(f"the page has more than {_MOST_BYTES} bytes")
    return msgspec.json.decode(content, type=_RollupsPage, strict=False)
