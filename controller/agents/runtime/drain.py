# SPDX-License-Identifier: Apache-2.0
"""A drain: it ends when no request runs or waits in the engine, or when the grace period is over.

``DrainState`` decides; ``Drainer`` carries it out. The drain continues if its caller disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

# Pages in a row that must show nothing: a request between two queues is on none of them.
_IN_A_ROW: Final = 2
Outcome = Literal["", "idle", "gone", "timeout"]
_PAUSE_S: Final = 0.5


class DrainSettings(msgspec.Struct, frozen=True):
    """``settle_s``: in which gateways notice that this engine takes no more. ``timeout_s``: the grace, from the
    begin.
    """

    settle_s: float = 5.0
    timeout_s: float = 600.0


class EngineLoad(msgspec.Struct, frozen=True):
    """The load on a metrics page. None: not reported. ``is_gone``: the engine's port refuses connections."""

    running: float | None = None
    waiting: float | None = None
    is_gone: bool = False


class DrainState(msgspec.Struct, frozen=True):
    """A drain that has begun.

    ``load``: the last one read. ``quiet``: consecutive pages without requests. ``outcome``: empty while it lasts.
    """

    began_at_s: float
    load: EngineLoad = EngineLoad()
    quiet: int = 0
    outcome: Outcome = ""
    ended_at_s: float = 0.0


def next_drain_state(
    drain: DrainState, load: EngineLoad, settings: DrainSettings, *, finishes_requests: bool, now_s: float
) -> DrainState:
    """The drain after a read of the engine's page. ``finishes_requests``: see Dialect.

    Without metrics the grace period decides.
    """
    if drain.outcome:
        return drain
    is_quiet = _is_quiet(load, finishes_requests=finishes_requests)
    latest = drain.load if load == EngineLoad() else load
    drain = replace(drain, load=latest, quiet=drain.quiet + 1 if is_quiet else 0)
    outcome: Outcome = ""
    elapsed_s = now_s - drain.began_at_s
    if drain.quiet >= _IN_A_ROW and load.is_gone:
        outcome = "gone"
    elif drain.quiet >= _IN_A_ROW and elapsed_s >= settings.settle_s:
        outcome = "idle"
    elif elapsed_s >= settings.timeout_s:
        outcome = "timeout"
    return replace(drain, outcome=outcome, ended_at_s=now_s) if outcome else drain


def _is_quiet(load: EngineLoad, *, finishes_requests: bool) -> bool:
    if load.is_gone:
        return True
    if load.running is None and not finishes_requests:
        return False
    if load.running is None and load.waiting is None:
        return False
    return not load.running and not load.waiting


class Drainer:
    """``drain``: None until one begins."""

    def __init__(
        self,
        settings: DrainSettings,
        load: Callable[[], Awaitable[EngineLoad]],
        *,
        finishes_requests: bool,
        clock: Callable[[], float],
    ) -> None:
        self.drain: DrainState | None = None
        self._settings = settings
        self._load = load
        self._finishes_requests = finishes_requests
        self._clock = clock
        self._changed = asyncio.Condition()

    async def start_drain(self) -> None:
        """From now on the engine is not ready. Once more changes nothing."""
        async with self._changed:
            if self.drain is None:
                log.info("draining begins")
                self.drain = DrainState(self._clock())
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

    async def wait_until_drained(self) -> DrainState | None:
        """The drain when it is over; None when it was taken back."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.drain is None or bool(self.drain.outcome))
            return self.drain

    async def run(self) -> None:
        """Run drains until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.drain is not None and not self.drain.outcome)
            await self._poll()
            await asyncio.sleep(min(_PAUSE_S, self._left_s()))

    async def _poll(self) -> None:
        load = await self._bounded_load()
        async with self._changed:
            if self.drain is None:
                return
            self.drain = next_drain_state(
                self.drain, load, self._settings, finishes_requests=self._finishes_requests, now_s=self._clock()
            )
            if self.drain.outcome:
                elapsed_s = self.drain.ended_at_s - self.drain.began_at_s
                log.info("drained in %.1f s: %s", elapsed_s, self.drain.outcome)
                self._changed.notify_all()

    async def _bounded_load(self) -> EngineLoad:
        """Not longer than the grace lasts, also if the engine's metrics hang."""
        try:
            async with asyncio.timeout(self._left_s()):
                return await self._load()
        except TimeoutError:
            return EngineLoad()

    def _left_s(self) -> float:
        """Of the grace."""
        if self.drain is None:
            return 0.0
        return max(self.drain.began_at_s + self._settings.timeout_s - self._clock(), 0.0)
