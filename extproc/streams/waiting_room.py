"""Where held requests wait for their turn: whatever may let somebody go, lets the pipeline say who goes."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.pipeline import Pipeline
    from extproc.core.types import Decision, Held, Released
    from extproc.errors import Refusal

# Then others get a turn on the event loop: a thousand releases take 0.1 s.
_MOST_AT_ONCE: Final = 64


class WaitingRoom:
    """Made inside the event loop. ``released``: told of every wait that ends, before who waited."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float], released: Callable[[Released], None]) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._waits: dict[str, asyncio.Future[Decision | Refusal]] = {}
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None

    async def wait(self, held: Held) -> Decision | Refusal:
        """Until it is its turn, or too late. Cancelled if its client leaves; who cancels tells the pipeline."""
        future: asyncio.Future[Decision | Refusal] = self._loop.create_future()
        self._waits[held.ticket] = future
        self.notify()
        try:
            return await future
        finally:
            del self._waits[held.ticket]

    def notify(self) -> None:
        """Something has changed: a request came or ended, an engine has said how it is, the configuration is another."""
        if self._soon is None and self._pipeline.admission.has_waiting:
            self._soon = self._loop.call_soon(self._release)

    def _release(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        released = list(itertools.islice(self._pipeline.release(self._clock()), _MOST_AT_ONCE))
        for one in released:
            self._released(one)
            future = self._waits.get(one.held.ticket)
            if future is None or future.done():
                # its client left in this very moment
                self._pipeline.leave(one.held, self._clock())
            else:
                future.set_result(one.result)
        if len(released) == _MOST_AT_ONCE:
            self.notify()
            return
        now = self._clock()
        again_s = self._pipeline.admission.look_again_s(now)
        if again_s is not None:
            self._later = self._loop.call_later(max(0.0, again_s - now), self._release)
