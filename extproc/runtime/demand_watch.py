# SPDX-License-Identifier: Apache-2.0
"""Streams of the page /demand: a line a second, and one at once when engines are missing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.status_page_contents import demand_delta, unfinished_notify_threshold

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from extproc.api.status_page_contents import ProcessDemand, ServerDemand
    from extproc.core.core import Core

# Watchers: the manager, its predecessor that has not hung up, and people.
MOST_WATCHERS: Final = 8
_EVERY_S: Final = 1.0
# Clients can cause alarms at will; a line of many servers takes milliseconds.
_SHORTEST_PAUSE_S: Final = 0.05
# Between two updates of a server without requests in this process: until then, only the age of its engines' reports
# changes.
_QUIET_S: Final = 5.0
# Requests get their turn after so many servers: each takes some 20 µs.
_AT_ONCE: Final = 16
# Watchers get an alarm before further requests are read, within these bounds: turns of the event loop for which
# requests wait, and seconds after which they no longer wait for a watcher that has not taken it.
_TURNS: Final = 8
_URGENT_S: Final = 0.1


class _Follower:
    """A stream of the page. ``news``: its next line is due. ``knows``: unfinished requests in the last line that was
    sent, by ModelServer; 0 where left out.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.knows: dict[str, int] = {}

    def is_news(self, name: str, unfinished: int) -> bool:
        return unfinished >= unfinished_notify_threshold(self.knows.get(name, 0))


class DemandWatchServer:
    """Sends the core's counters to readers of /demand. ``clock``: the core's."""

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._began_at_s = clock()
        self._alarms = 0
        self._followers: set[_Follower] = set()
        # of servers without requests: by name, when they were last updated, a value that changes with their state, and
        # the report
        self._quiet: dict[str, tuple[float, object, ServerDemand]] = {}
        # watchers that have not got the last alarm, and until when requests wait for them
        self._untold: set[_Follower] = set()
        self._urgent_until_s = 0.0
        self._is_closed = False

    @property
    def may_accept_follower(self) -> bool:
        """Whether one more may follow."""
        return len(self._followers) < MOST_WATCHERS and not self._is_closed

    async def current_line(self) -> bytes:
        """The present demand as JSON. Does not affect what streams get, nor when."""
        return _line(await self._page(lambda name: self._made(name, self._clock())))

    async def _page(self, server_of: Callable[[str], ServerDemand | None]) -> ProcessDemand:
        core, now = self._core, self._clock()
        servers: dict[str, ServerDemand] = {}
        for at, name in enumerate(core.meter.server_names(core.pools), start=1):
            server = server_of(name)
            if server is not None:
                servers[name] = server
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return core.meter.process_demand_of(servers, now - self._began_at_s)

    async def _next_of(self, follower: _Follower, *, spares: bool) -> ProcessDemand:
        """``spares``: a server without requests may be as it was seconds ago, and is the same object then."""
        now = self._clock()

        def noted(name: str) -> ServerDemand | None:
            self._note(follower, name)
            return self._spared(name, now) if spares else self._made(name, now)

        page = await self._page(noted)
        for name in self._quiet.keys() - page.servers.keys():
            del self._quiet[name]
        return page

    def _note(self, follower: _Follower, name: str) -> None:
        """Record the server's unfinished requests in a stream's line."""
        unfinished = self._core.meter.unfinished_requests(name)
        if unfinished:
            follower.knows[name] = unfinished
        else:
            follower.knows.pop(name, None)
        self._core.meter.set_notify_threshold(name, unfinished_notify_threshold(unfinished))

    def _spared(self, name: str, now: float) -> ServerDemand | None:
        mark, known = self._core.meter.activity_mark_if_idle(self._core.pools, name), self._quiet.get(name)
        if mark is not None and known is not None and known[1] == mark and now - known[0] < _QUIET_S:
            return known[2]
        made = self._made(name, now)
        if mark is None or made is None:
            self._quiet.pop(name, None)
        else:
            self._quiet[name] = now, mark, made
        return made

    def _made(self, name: str, now: float) -> ServerDemand | None:
        return self._core.meter.server_demand(self._core.pools, name, now)

    def notify_followers(self) -> None:
        """Called after each step of the core: wakes all streams when an engine is missing, and those whose last line
        had far fewer unfinished requests.
        """
        meter = self._core.meter
        if meter.alarms != self._alarms:
            self._alarms = meter.alarms
            self._wake(self._followers)
        if meter.crowded:
            names = tuple(meter.crowded)
            meter.crowded.clear()
            for name in names:
                self._notify_crowded(name)

    def _notify_crowded(self, name: str) -> None:
        """Wake the streams whose last line had far fewer unfinished requests of a server; the others wake when there
        are as many more.
        """
        unfinished = self._core.meter.unfinished_requests(name)
        ignorant = {one for one in self._followers if one.is_news(name, unfinished)}
        self._wake(ignorant)
        for one in self._followers - ignorant:
            self._core.meter.set_notify_threshold(name, unfinished_notify_threshold(one.knows.get(name, 0)))

    def _wake(self, followers: Collection[_Follower]) -> None:
        """Their next line is due, before further requests are read."""
        for one in followers:
            one.news.set()
        self._untold |= set(followers)
        self._urgent_until_s = self._clock() + _URGENT_S

    async def yield_to_followers(self) -> None:
        """Awaited before a request is read, so that a burst is reported at its begin and not after all of it has been
        read.
        """
        turns = 0
        while self._untold and turns < _TURNS and self._clock() < self._urgent_until_s:
            turns += 1
            await asyncio.sleep(0)

    async def stream_lines(self, *, changes: bool = False) -> AsyncGenerator[bytes]:
        """The first one at once. ``changes``: later ones leave out unchanged servers."""
        noted: ProcessDemand | None = None
        follower = _Follower()
        self._followers.add(follower)
        try:
            while not self._is_closed:
                follower.news.clear()
                page = await self._next_of(follower, spares=changes)
                yield _line(demand_delta(page, noted) if changes and noted is not None else page)
                # it is written
                self._untold.discard(follower)
                noted = page
                await asyncio.sleep(_SHORTEST_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S - _SHORTEST_PAUSE_S):
                        await follower.news.wait()
        finally:
            self._followers.discard(follower)
            self._untold.discard(follower)

    def close_streams(self) -> None:
        """End all streams."""
        self._is_closed = True
        for one in self._followers:
            one.news.set()


def _line(page: ProcessDemand) -> bytes:
    return msgspec.json.encode(page) + b"\n"
