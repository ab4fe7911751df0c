# SPDX-License-Identifier: Apache-2.0
"""Who follows the page /demand: a line a second, and one at once when engines are missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.status_pages import changed_since, is_news_at

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from extproc.api.status_pages import Demand, ServerDemand
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
# Who follows is told of an alarm before further requests are read, if that takes no longer: turns of the event loop,
# and seconds after which an alarm that a follower does not take is no concern of requests any more.
_TURNS: Final = 8
_URGENT_S: Final = 0.1


class _Follower:
    """Of the page. ``news``: its next line is due. ``knows``: of how many unfinished requests, by ModelServer; of none
    where that is left out.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.knows: dict[str, int] = {}

    def is_news(self, name: str, unfinished: int) -> bool:
        return unfinished >= is_news_at(self.knows.get(name, 0))


class DemandWatch:
    """Tells what the core has counted. ``clock``: the core's."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._began_at_s = clock()
        self._alarms = 0
        self._followers: set[_Follower] = set()
        # of servers that had nothing to do: by name, when they were looked at, by what that is known, and what was said
        self._quiet: dict[str, tuple[float, object, ServerDemand]] = {}
        # those that have yet to be told of the last alarm, and until when requests let them go first
        self._untold: set[_Follower] = set()
        self._urgent_until_s = 0.0
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether one more may follow."""
        return len(self._followers) < MOST_WATCHERS and not self._is_closed

    async def line(self) -> bytes:
        """All that is known now, as JSON. Changes nothing of what followers are told, nor of when."""
        return _line(await self._page(lambda name: self._made(name, self._clock())))

    async def _page(self, server_of: Callable[[str], ServerDemand | None]) -> Demand:
        core, now = self._core, self._clock()
        servers: dict[str, ServerDemand] = {}
        for at, name in enumerate(core.meter.names(core.pools), start=1):
            server = server_of(name)
            if server is not None:
                servers[name] = server
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return core.meter.page_of(servers, now - self._began_at_s)

    async def _next_of(self, follower: _Follower, *, spares: bool) -> Demand:
        """``spares``: a server that has nothing to do may be as it was seconds ago, and is the same object then."""
        now = self._clock()

        def told(name: str) -> ServerDemand | None:
            self._note(follower, name)
            return self._spared(name, now) if spares else self._made(name, now)

        page = await self._page(told)
        for name in self._quiet.keys() - page.servers.keys():
            del self._quiet[name]
        return page

    def _note(self, follower: _Follower, name: str) -> None:
        """The follower is told of a server now."""
        unfinished = self._core.meter.unfinished(name)
        if unfinished:
            follower.knows[name] = unfinished
        else:
            follower.knows.pop(name, None)
        self._core.meter.tell_at(name, is_news_at(unfinished))

    def _spared(self, name: str, now: float) -> ServerDemand | None:
        mark, known = self._core.meter.quiet_mark(self._core.pools, name), self._quiet.get(name)
        if mark is not None and known is not None and known[1] == mark and now - known[0] < _QUIET_S:
            return known[2]
        made = self._made(name, now)
        if mark is None or made is None:
            self._quiet.pop(name, None)
        else:
            self._quiet[name] = now, mark, made
        return made

    def _made(self, name: str, now: float) -> ServerDemand | None:
        return self._core.meter.server(self._core.pools, name, now)

    def look(self) -> None:
        """Called after everything that the core does: those who follow hear at once of engines that are missed, and of
        far more requests than they know of.
        """
        meter = self._core.meter
        if meter.alarms != self._alarms:
            self._alarms = meter.alarms
            self._wake(self._followers)
        if meter.crowded:
            names = tuple(meter.crowded)
            meter.crowded.clear()
            for name in names:
                self._tell_of(name)

    def _tell_of(self, name: str) -> None:
        """Many requests of a server are unfinished: who knows of far fewer is told; the others when there are as many
        more.
        """
        unfinished = self._core.meter.unfinished(name)
        ignorant = {one for one in self._followers if one.is_news(name, unfinished)}
        self._wake(ignorant)
        for one in self._followers - ignorant:
            self._core.meter.tell_at(name, is_news_at(one.knows.get(name, 0)))

    def _wake(self, followers: Collection[_Follower]) -> None:
        """Their next line is due, before further requests are read."""
        for one in followers:
            one.news.set()
        self._untold |= set(followers)
        self._urgent_until_s = self._clock() + _URGENT_S

    async def let_go_first(self) -> None:
        """Awaited before a request is read: a burst is told of when it begins, not when all of it has been read."""
        turns = 0
        while self._untold and turns < _TURNS and self._clock() < self._urgent_until_s:
            turns += 1
            await asyncio.sleep(0)

    async def lines(self, *, changes: bool = False) -> AsyncGenerator[bytes]:
        """The first one at once. ``changes``: those after it leave out servers of which nothing new is to be told."""
        told: Demand | None = None
        follower = _Follower()
        self._followers.add(follower)
        try:
            while not self._is_closed:
                follower.news.clear()
                page = await self._next_of(follower, spares=changes)
                yield _line(changed_since(page, told) if changes and told is not None else page)
                # it is written
                self._untold.discard(follower)
                told = page
                await asyncio.sleep(_SHORTEST_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S - _SHORTEST_PAUSE_S):
                        await follower.news.wait()
        finally:
            self._followers.discard(follower)
            self._untold.discard(follower)

    def close(self) -> None:
        """Nobody follows from now on."""
        self._is_closed = True
        for one in self._followers:
            one.news.set()


def _line(page: Demand) -> bytes:
    return msgspec.json.encode(page) + b"\n"
