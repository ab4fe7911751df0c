# SPDX-License-Identifier: Apache-2.0
"""Who follows the page /demand: a line a second, and one at once when engines are missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.config.demand import changed_since

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from extproc.config.demand import Demand, ServerDemand
    from extproc.core.core import Core

# Who follows: the manager, the one before it that has not hung up, and people.
MOST_WATCHERS: Final = 8
_EVERY_S: Final = 1.0
# Clients can make requests wait and leave as often as they like; a line of many servers takes milliseconds.
_SHORTEST_PAUSE_S: Final = 0.05
# A server at which this process has nothing to do is looked at so often: until then, all that changes is the age of
# what its engines reported.
_QUIET_S: Final = 5.0
# Requests get their turn after so many servers: each takes some 20 µs.
_AT_ONCE: Final = 16
# Who follows is told of an alarm before further requests are read, if that takes no longer: turns of the event loop, and
# seconds after which an alarm that a follower does not take is no concern of requests any more.
_TURNS: Final = 8
_URGENT_S: Final = 0.1


class DemandWatch:
    """Tells what the core has counted. ``clock``: the core's."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._began_at_s = clock()
        self._alarms = 0
        self._watchers: set[asyncio.Event] = set()
        # of servers that had nothing to do: by name, when they were looked at, by what that is known, and what was said
        self._quiet: dict[str, tuple[float, object, ServerDemand]] = {}
        # those that have yet to be told of the last alarm, and until when requests let them go first
        self._untold: set[asyncio.Event] = set()
        self._urgent_until_s = 0.0
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether one more may follow."""
        return len(self._watchers) < MOST_WATCHERS and not self._is_closed

    async def line(self) -> bytes:
        """All that is known now, as JSON."""
        return _line(await self._page(spares=False))

    async def _page(self, *, spares: bool) -> Demand:
        """``spares``: a server that has nothing to do may be as it was seconds ago, and is the same object then."""
        core, now = self._core, self._clock()
        servers: dict[str, ServerDemand] = {}
        names = core.meter.names(core.pools)
        for at, name in enumerate(names, start=1):
            server = self._server(name, now, spares=spares)
            if server is not None:
                servers[name] = server
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
        for name in self._quiet.keys() - servers.keys():
            del self._quiet[name]
        return core.meter.page_of(servers, now - self._began_at_s)

    def _server(self, name: str, now: float, *, spares: bool) -> ServerDemand | None:
        pools, meter = self._core.pools, self._core.meter
        mark, known = meter.quiet_mark(pools, name), self._quiet.get(name)
        if spares and mark is not None and known is not None and known[1] == mark and now - known[0] < _QUIET_S:
            return known[2]
        made = meter.server(pools, name, now)
        if mark is None or made is None:
            self._quiet.pop(name, None)
        else:
            self._quiet[name] = now, mark, made
        return made

    def look(self) -> None:
        """Called after everything that the core does: those who follow hear at once of engines that are missed, and of far
        more requests than they know of.
        """
        if self._core.meter.alarms != self._alarms:
            self._alarms = self._core.meter.alarms
            self._untold |= self._watchers
            self._urgent_until_s = self._clock() + _URGENT_S
            self._wake()

    async def let_go_first(self) -> None:
        """Awaited before a request is read: a burst is told of when it begins, not when all of it has been read."""
        turns = 0
        while self._untold and turns < _TURNS and self._clock() < self._urgent_until_s:
            turns += 1
            await asyncio.sleep(0)

    async def lines(self, *, changes: bool = False) -> AsyncGenerator[bytes]:
        """The first one at once. ``changes``: those after it leave out servers of which nothing new is to be told."""
        told: Demand | None = None
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while not self._is_closed:
                news.clear()
                page = await self._page(spares=changes)
                yield _line(changed_since(page, told) if changes and told is not None else page)
                # it is written
                self._untold.discard(news)
                told = page
                await asyncio.sleep(_SHORTEST_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S - _SHORTEST_PAUSE_S):
                        await news.wait()
        finally:
            self._watchers.discard(news)
            self._untold.discard(news)

    def close(self) -> None:
        """Nobody follows from now on."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        for news in self._watchers:
            news.set()


def _line(page: Demand) -> bytes:
    return msgspec.json.encode(page) + b"\n"
