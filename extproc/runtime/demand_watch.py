# SPDX-License-Identifier: Apache-2.0
"""Who follows the page /demand: a line a second, and one at once when engines are missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from extproc.config.demand import ServerDemand
    from extproc.core.core import Core

# Who follows: the manager, the one before it that has not hung up, and people.
MOST_WATCHERS: Final = 8
_EVERY_S: Final = 1.0
# Clients can make requests wait and leave as often as they like; a line of many servers takes milliseconds.
_SHORTEST_PAUSE_S: Final = 0.05
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
        core, now = self._core, self._clock()
        servers: dict[str, ServerDemand] = {}
        for name, server in core.meter.servers(core.pools, now):
            servers[name] = server
            if len(servers) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return msgspec.json.encode(core.meter.page_of(servers, now - self._began_at_s)) + b"\n"

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

    async def lines(self) -> AsyncGenerator[bytes]:
        """The first one at once."""
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while not self._is_closed:
                news.clear()
                yield await self.line()
                # it is written
                self._untold.discard(news)
                await asyncio.sleep(_SHORTEST_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _EVERY_S - _SHORTEST_PAUSE_S)
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
