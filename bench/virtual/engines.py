"""Engines in virtual time: each takes one step after the other, or many at once while nothing comes that could change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.engine.journal import Journal
from bench.engine.scheduler import Limits, Scheduler
from bench.engine.step_time import Roofline, StepTime
from extproc.endpoints.engine_reports import CacheConfig, EngineReport
from extproc.replication.messages import EngineSaid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.engine.hardware import Hardware
    from bench.engine.journal import Removed, Stored
    from bench.engine.request import Request, Step, Token
    from bench.virtual.events import Events


class Kind(msgspec.Struct, frozen=True):
    """What an engine is: its speed and its limits."""

    speed: StepTime
    limits: Limits


def kind_of(hardware: Hardware, limits: Limits | None = None, *, block_size: int = 16) -> Kind:
    """By the roofline; without limits, vLLM's defaults and as many blocks as the GPUs have room for."""
    if limits is None:
        limits = Limits(block_size=block_size, num_gpu_blocks=hardware.kv_tokens() // block_size)
    return Kind(Roofline(hardware), limits)


class Machine:
    """One engine. ``on_tokens`` is told of every token, or of several at once with ``leaps``."""

    def __init__(
        self,
        kind: Kind,
        events: Events,
        on_tokens: Callable[[Iterable[Token], float], None],
        *,
        leaps: bool,
        on_blocks: Callable[[list[Stored | Removed], float], None] | None = None,
    ) -> None:
        """``on_blocks`` is told what enters and leaves the cache; requests must then keep their text."""
        self.kind = kind
        self._journal = Journal() if on_blocks is not None else None
        self._on_blocks = on_blocks
        self.scheduler = Scheduler(kind.speed, kind.limits, self._journal)
        self.served = 0
        self.busy_s = 0.0
        self._events = events
        self._on_tokens = on_tokens
        self._leaps = leaps
        self._step: Step | None = None
        self._began = 0.0
        self._plans = 0
        self._told = 0

    def add(self, request: Request, now: float) -> None:
        """A request arrives: it is in the next step, and many steps at once end with the one that runs."""
        self.scheduler.add(request)
        if self._step is None:
            self._begin(now)
        elif self._step.count > 1:
            self._step.cut(now - self._began)
            self._plan()

    def _begin(self, now: float) -> None:
        self._step = self.scheduler.begin_step(leaps=self._leaps)
        if self._step is not None:
            self._began = now
            self._plan()

    def _plan(self) -> None:
        """The end of the step; an earlier plan for it counts no more."""
        assert self._step is not None
        self._plans += 1
        plan = self._plans
        self._events.at(self._began + self._step.seconds, lambda now: self._end(plan, now))

    def _end(self, plan: int, now: float) -> None:
        if plan != self._plans or self._step is None:
            return
        step, self._step = self._step, None
        self.busy_s += step.seconds
        tokens = self.scheduler.end_step(step)
        if self._journal is not None and self._on_blocks is not None:
            changes = self._journal.take()
            if changes:
                self._on_blocks(changes, now)
        self.served += sum(1 for token in tokens if token.is_last)
        self._on_tokens(tokens, now)
        if self._step is None:  # somebody who was told may have sent the next request already
            self._begin(now)

    def said(self, server: str, address: str) -> EngineSaid:
        """What it would say of itself if asked now."""
        scheduler, limits = self.scheduler, self.kind.limits
        pool = scheduler.pool
        before, self._told = self._told, scheduler.counters.first_tokens
        state = EngineReport(
            len(scheduler.waiting),
            len(scheduler.running),
            1 - pool.free / pool.total,
            first_tokens=self._told - before,
        )
        cache = CacheConfig(limits.block_size, limits.num_gpu_blocks * limits.block_size)
        return EngineSaid(server, address, state, cache)
