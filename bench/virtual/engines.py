# SPDX-License-Identifier: Apache-2.0
"""Engines in virtual time: step by step, or in leaps while nothing can change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from bench.engine.kv_cache import CacheJournal
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import RooflineStepTime, StepTimeModel
from extproc.core.peer_events import EngineReported
from extproc.engines.metrics import CacheConfig, EngineReport, LoraState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.engine.hardware import Hardware
    from bench.engine.kv_cache import CacheChange
    from bench.engine.request import EngineStep, Request, Token
    from bench.virtual.event_queue import EventQueue


class EngineProfile(msgspec.Struct, frozen=True):
    """An engine's speed and limits. ``kv_bytes``: of a token's keys and values, in bytes."""

    speed: StepTimeModel
    limits: EngineLimits
    kv_bytes: float = 131_072.0


def roofline_engine(hardware: Hardware, limits: EngineLimits | None = None, *, block_size: int = 16) -> EngineProfile:
    """Step times by the roofline. Without ``limits``: vLLM's defaults, and as many blocks as the GPUs' memory holds.

    ``block_size``: tokens of a KV block, where ``limits`` has none.
    """
    if limits is None:
        limits = EngineLimits(block_size=block_size, num_gpu_blocks=hardware.kv_tokens() // block_size)
    return EngineProfile(RooflineStepTime(hardware), limits, float(hardware.model.kv_bytes_per_token))


def addresses(count: int) -> list[str]:
    """Addresses for ``count`` virtual engines."""
    return [f"10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(count)]


class StepObserver(Protocol):
    """Sees what a scheduler has exported, computed and reserved blocks for."""

    def on_step(self, engine: VirtualEngine, now: float) -> None:
        """A step has begun or ended."""
        ...


class VirtualEngine:
    """One engine, driven by an event queue.

    ``served``: requests that have ended. ``busy_s``: time spent computing. ``adapters``: loaded at run time.
    """

    def __init__(
        self,
        kind: EngineProfile,
        events: EventQueue,
        on_tokens: Callable[[Iterable[Token], float], None],
        *,
        leaps: bool,
        on_blocks: Callable[[list[CacheChange], float], None] | None = None,
        transfers: StepObserver | None = None,
    ) -> None:
        """``on_tokens``: called with the tokens of a step and the instant. ``leaps``: several steps may end as one.

        ``on_blocks``: called with what enters and leaves the cache; requests must then keep their text. ``transfers``:
        to and from other engines.
        """
        self.kind = kind
        self._journal = CacheJournal() if on_blocks is not None else None
        self._on_blocks = on_blocks
        self._transfers = transfers
        self.scheduler = Scheduler(kind.speed, kind.limits, self._journal)
        self.served = 0
        self.busy_s = 0.0
        self.adapters: set[str] = set()
        self._events = events
        self._on_tokens = on_tokens
        self._leaps = leaps
        self._step: EngineStep | None = None
        self._began_at_s = 0.0
        self._plan = 0
        self._reported_first_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """A request arrives. It is in the next step; a leap ends with the step that runs."""
        self.scheduler.add(request)
        self.wake(now)

    def wake(self, now: float) -> None:
        """There may be more to compute, or more room."""
        if self._step is None:
            self._begin(now)
        elif self._step.count > 1:
            self._step.cut_short(now - self._began_at_s)
            self._plan_end()

    def _begin(self, now: float) -> None:
        self._step = self.scheduler.begin_step(leaps=self._leaps)
        if self._transfers is not None:
            self._transfers.on_step(self, now)
        if self._step is not None:
            self._began_at_s = now
            self._plan_end()

    def _plan_end(self) -> None:
        """Plan the end of the step, in place of an earlier plan."""
        assert self._step is not None
        self._plan += 1
        plan = self._plan
        self._events.schedule_at(self._began_at_s + self._step.duration_s, lambda now: self._end(plan, now))

    def _end(self, plan: int, now: float) -> None:
        if plan != self._plan or self._step is None:
            return
        step, self._step = self._step, None
        self.busy_s += step.duration_s
        tokens = self.scheduler.end_step(step)
        if self._transfers is not None:
            self._transfers.on_step(self, now)
        if self._journal is not None and self._on_blocks is not None:
            changes = self._journal.pop_changes()
            if changes:
                self._on_blocks(changes, now)
        self.served += sum(1 for token in tokens if token.is_last)
        self._on_tokens(tokens, now)
        if self._step is None:  # on_tokens may have brought the next request, and with it begun a step
            self._begin(now)

    def engine_report(self, server: str, address: str) -> EngineReported:
        """Its current metrics, as extproc reads them."""
        scheduler, limits = self.scheduler, self.kind.limits
        pool = scheduler.pool
        before, self._reported_first_tokens = self._reported_first_tokens, scheduler.counters.first_tokens
        loras = None
        if limits.max_loras:
            active, waiting = _adapters_of(scheduler.running), _adapters_of(scheduler.waiting)
            loras = LoraState(active, waiting, limits.max_loras)
        state = EngineReport(
            len(scheduler.waiting),
            len(scheduler.running),
            1 - pool.free_blocks / pool.total,
            first_tokens=self._reported_first_tokens - before,
            loras=loras,
        )
        cache = CacheConfig(limits.block_size, limits.num_gpu_blocks * limits.block_size)
        return EngineReported(server, address, state, cache)


def _adapters_of(requests: Iterable[Request]) -> frozenset[str]:
    return frozenset(one.adapter for one in requests if one.adapter)
