# SPDX-License-Identifier: Apache-2.0
"""Carries a drain out: looks at the engine until it is over. Who asked for it may leave meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.agents.runtime.drain import Drain, Load, observed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.agents.runtime.drain import DrainSettings

_PAUSE_S: Final = 0.5

log = logging.getLogger(__name__)


class Drainer:
    """``drain``: None until one begins."""

    def __init__(
        self,
        settings: DrainSettings,
        load: Callable[[], Awaitable[Load]],
        *,
        finishes_requests: bool,
        clock: Callable[[], float],
    ) -> None:
        self.drain: Drain | None = None
        self._settings = settings
        self._load = load
        self._finishes_requests = finishes_requests
        self._clock = clock
        self._changed = asyncio.Condition()

    async def begin(self) -> None:
        """From now on the engine is not ready. Once more changes nothing."""
        async with self._changed:
            if self.drain is None:
                log.info("draining begins")
                self.drain = Drain(self._clock())
                self._changed.notify_all()

    async def cancel(self) -> bool:
        """Serve again; whether there was a drain."""
        async with self._changed:
            if self.drain is None:
                return False
            log.info("draining is taken back")
            self.drain = None
            self._changed.notify_all()
            return True

    async def ended(self) -> Drain | None:
        """The drain when it is over; None when it was taken back."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.drain is None or bool(self.drain.outcome))
            return self.drain

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.drain is not None and not self.drain.outcome)
            await self._look()
            await asyncio.sleep(min(_PAUSE_S, self._left_s()))

    async def _look(self) -> None:
        load = await self._bounded_load()
        async with self._changed:
            if self.drain is None:
                return
            self.drain = observed(
                self.drain, load, self._settings, finishes_requests=self._finishes_requests, now_s=self._clock()
            )
            if self.drain.outcome:
                elapsed_s = self.drain.ended_at_s - self.drain.began_at_s
                log.info("drained in %.1f s: %s", elapsed_s, self.drain.outcome)
                self._changed.notify_all()

    async def _bounded_load(self) -> Load:
        """Not longer than the grace lasts, also if the engine's metrics hang."""
        try:
            async with asyncio.timeout(self._left_s()):
                return await self._load()
        except TimeoutError:
            return Load()

    def _left_s(self) -> float:
        """Of the grace."""
        if self.drain is None:
            return 0.0
        return max(self.drain.began_at_s + self._settings.timeout_s - self._clock(), 0.0)
