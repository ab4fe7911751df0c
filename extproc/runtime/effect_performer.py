# SPDX-License-Identifier: Apache-2.0
"""Performs the core's effects: answers held streams, queries stores, sends events to peers, schedules ticks."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.limit_refusals import soft_budget_log_message
from extproc.api.config_errors import one_line
from extproc.core.effects import (
    AdapterLoadEnded,
    AskGuard,
    AskLimits,
    AskPromptTokens,
    BreakerChanged,
    Broadcast,
    CacheLookupResult,
    CacheStoreAttempted,
    ChargeSharedStore,
    ClientLeft,
    Decision,
    EngineModelsListed,
    EngineNeeded,
    EngineStarted,
    Fault,
    GuardAnswered,
    HealthChanged,
    OutcomeJoined,
    PrefillEnded,
    RequestHeld,
    RequestRefused,
    RequestSloJudged,
    SettleGrant,
    SloMissPredicted,
    SoftBudgetPassed,
    WakeAt,
)
from extproc.endpoints.health import ADVICE
from extproc.engines.engine_responses import AdapterLoadProblem
from extproc.feeds.guard_client import GuardClient
from extproc.feeds.redis_limits import RedisLimits
from extproc.feeds.tokenizers import Tokenizers
from extproc.refusals import InternalError
from extproc.scheduling.model_check import quoted_names
from extproc.task_supervisor import FailureLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.admission_pipeline import Answer
    from extproc.core.core import Core
    from extproc.core.effects import Effect, Pending, RequestEffect, Work
    from extproc.core.peer_events import EngineReported, EventBatch, PeerEvent
    from extproc.core.request_record import AdapterLoadResult, WorkResult
    from extproc.metrics.request_metrics import Metrics

log = logging.getLogger(__name__)
_PREFILL_ANSWERS: Final = frozenset({"prefilled", "refused"})
# Without a fault of the engine.
_PREFILL_ENDS: Final = frozenset({*_PREFILL_ANSWERS, "left", "not_asked"})
_MOST_FAILING: Final = 1024
_LOAD_ADVICE: Final = {
    AdapterLoadProblem.BUSY: "nothing while it happens now and then; else give the engines more slots, or add engines",
    AdapterLoadProblem.BROKEN: "look at the adapter's source in adapterLoading, its rank and its base model",
    AdapterLoadProblem.UNREACHABLE: (
        "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or write the port of "
        "the runtime agents, if it is not just starting"
    ),
}


class PreDecisionServices(msgspec.Struct, frozen=True):
    """What requests may ask before they are decided. ``limits``: the store of global limits, if there is one."""

    tokenizers: Tokenizers
    guards: GuardClient
    limits: RedisLimits | None = None


class Performer:
    """The shell around the core. Made inside the event loop, which it needs for timers and for streams that wait."""

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        services: PreDecisionServices,
        publish: Callable[[PeerEvent], None],
        begin: Callable[[Work], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """``services``: what requests wait for. ``publish``: takes events for the other processes.
        ``begin``: starts work; ``on_work_result`` gets its result. ``done``: called when all effects of a verb are
        performed.
        """
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._tokenizers, self._guards, self._limits = services.tokenizers, services.guards, services.limits
        self._publish = publish
        self._begin = begin
        self._done = done
        self._failures = FailureLog(log)
        # whose first failure is in the log
        self._failing_prefills: set[tuple[str, str]] = set()
        # by server, address and adapter: weights are tried again and again while clients ask for them
        self._failing_loads: dict[tuple[str, str, str], str] = {}
        self._loop = asyncio.get_running_loop()
        # held requests by ticket
        self._waits: dict[str, asyncio.Future[Decision | RequestRefused]] = {}
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._later_at_s = math.inf

    def perform(self, effects: list[Effect], own: RequestEffect | None = None) -> None:
        """Perform all effects. ``own``: what the request of the calling stream gets or waits for."""
        if own is not None:
            self._perform_own(own)
        for effect in effects:
            if isinstance(effect, Broadcast):
                # most effects are: nobody counts them, and nothing else is tried before
                self._publish(effect.event)
                continue
            self._metrics.count_effect(effect)
            match effect:
                case Decision() | RequestRefused():
                    self._deliver(effect)
                case (OutcomeJoined() | RequestSloJudged() | SloMissPredicted() | ClientLeft()) | (
                    CacheLookupResult()
                    | CacheStoreAttempted()
                    | AskLimits()
                    | AskGuard()
                    | AskPromptTokens()
                    | RequestHeld()
                ):
                    # counted; what a request waits for, its stream asks for
                    pass
                case WakeAt():
                    self._wake_at(effect.at_s)
                case (
                    HealthChanged()
                    | BreakerChanged()
                    | EngineModelsListed()
                    | AdapterLoadEnded()
                    | PrefillEnded()
                    | EngineNeeded()
                    | EngineStarted()
                    | SoftBudgetPassed()
                    | GuardAnswered()
                    | Fault()
                ):
                    self._log(effect)
                case SettleGrant() | ChargeSharedStore():
                    _correct(self._limits, effect)
                case _:
                    # work: mypy finds an effect that nothing performs
                    self._begin(effect)
        self._done()

    async def wait_for_answer(
        self, pending: Pending, tell_gateway: Callable[[], Awaitable[None]] | None = None
    ) -> Answer | Decision | RequestRefused:
        """Wait for what a request waits for. Cancelled if its client disconnects.

        ``tell_gateway``: awaited first if the request is held.
        """
        match pending:
            case AskPromptTokens():
                return await self._tokenizers.tokens_of(pending.arrival)
            case AskGuard():
                return await self._guards.ask_guard(pending)
            case AskLimits():
                return None if self._limits is None else await self._limits.reserve(pending.charges)
            case _:
                try:
                    if tell_gateway is not None:
                        await tell_gateway()
                    return await self._waits[pending.ticket]
                finally:
                    del self._waits[pending.ticket]

    def apply(self, snapshot: Snapshot) -> None:
        """Another configuration; raises ConfigInvalid, with nothing changed."""
        self.perform(self._core.apply(snapshot, self._clock()))
        self._tokenizers.retain_only(self._core.pools)

    def on_engine_report(self, event: EngineReported) -> None:
        """An engine's report has arrived."""
        self.perform(self._core.on_engine_report(event, self._clock()))

    def on_work_result(self, result: WorkResult) -> None:
        """Work for requests that wait has ended, well or not."""
        self.perform(self._core.on_work_result(result, self._clock()))

    def on_peer_batch(self, batch: EventBatch) -> None:
        """A batch of another process's events has arrived."""
        self.perform(self._core.apply_peer_batch(batch, self._clock()))

    def heartbeat(self) -> None:
        """Once a second."""
        self.perform(self._core.heartbeat(self._clock()))
        self._metrics.set_peers(self._core.peer_view.peer_count)

    def _log(
        self,
        effect: HealthChanged
        | BreakerChanged
        | EngineModelsListed
        | AdapterLoadEnded
        | PrefillEnded
        | EngineNeeded
        | EngineStarted
        | SoftBudgetPassed
        | GuardAnswered
        | Fault,
    ) -> None:
        match effect:
            case GuardAnswered():
                self._guards.log_result(effect)
            case SoftBudgetPassed():
                log.warning("%s", one_line(soft_budget_log_message(effect.charge, effect.level)))
            case EngineNeeded():
                log.info("requests wait for an engine of %s, which has none", effect.server)
            case EngineStarted():
                log.info("%s has an engine again, %.3g s after the first request for it", effect.server, effect.after_s)
            case HealthChanged() | BreakerChanged():
                _log_health(effect)
            case EngineModelsListed():
                _log_model(effect)
            case AdapterLoadEnded():
                self._log_load(effect.result)
            case PrefillEnded():
                self._log_prefill(effect)
            case Fault():
                self._failures.record(effect.what, effect.error)

    def _log_prefill(self, ended: PrefillEnded) -> None:
        """The first failure of a prefill engine, and its first answer afterwards."""
        leg, engine = ended.leg, (ended.server, ended.leg.address)
        if leg.outcome in _PREFILL_ANSWERS:
            if engine in self._failing_prefills:
                self._failing_prefills.discard(engine)
                log.info("prefill engine %s of %s answers again", leg.address, ended.server)
            return
        is_new = engine not in self._failing_prefills and len(self._failing_prefills) < _MOST_FAILING
        if leg.outcome not in _PREFILL_ENDS and is_new:
            self._failing_prefills.add(engine)
            log.warning(
                "prefill engine %s of %s: %s after %.3g s, %s; %s. Advice: see that it runs with the ModelServer's "
                "connector, and its log",
                leg.address,
                ended.server,
                leg.outcome,
                leg.took_s,
                one_line(leg.detail) or "no details",
                _then(ended),
            )

    def _log_load(self, result: AdapterLoadResult) -> None:
        """A failure that was the same the last time is not repeated."""
        key = result.server, result.address, result.adapter
        if result.problem is None:
            self._failing_loads.pop(key, None)
        elif self._failing_loads.get(key) == result.message:
            return
        elif key in self._failing_loads or len(self._failing_loads) < _MOST_FAILING:
            self._failing_loads[key] = result.message
        _log_load(result)

    def _deliver(self, end: Decision | RequestRefused) -> None:
        """A request that was held has its answer: to its stream, if that still waits."""
        if isinstance(end, RequestRefused):
            self._note(end)
        future = self._waits.get(end.ticket)
        if future is not None and not future.done():
            future.set_result(end)
        elif isinstance(end, Decision):
            # its client has just disconnected
            self.perform(self._core.on_disconnect(end.ticket, self._clock()))

    def _perform_own(self, own: RequestEffect) -> None:
        self._metrics.count_effect(own)
        if isinstance(own, RequestHeld):
            self._waits[own.ticket] = self._loop.create_future()
        elif isinstance(own, RequestRefused):
            self._note(own)

    def _note(self, refused: RequestRefused) -> None:
        refusal = refused.refusal
        if isinstance(refusal, InternalError):
            self._failures.record("a request could not be decided, and is refused", refusal.__cause__ or refusal)

    def _wake_at(self, at_s: float) -> None:
        delay_s = at_s - self._clock()
        if delay_s <= 0:
            if self._soon is None:
                self._soon = self._loop.call_soon(self._tick)
            return
        if self._later is not None:
            if at_s >= self._later_at_s:
                # a tick returns anew when the next one is due
                return
            self._later.cancel()
        self._later, self._later_at_s = self._loop.call_later(delay_s, self._tick), at_s

    def _tick(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later, self._later_at_s = None, math.inf
        self.perform(self._core.tick(self._clock()))


def _correct(limits: RedisLimits | None, effect: SettleGrant | ChargeSharedStore) -> None:
    """Without a store, nothing was granted there."""
    if limits is None:
        return
    if isinstance(effect, ChargeSharedStore):
        limits.record_overdraft(effect.charge, effect.amount)
    else:
        limits.settle(effect.grant, effect.used)


def _log_health(change: HealthChanged | BreakerChanged) -> None:
    if isinstance(change, BreakerChanged):
        _log_breaker(change)
        return
    if change.failure is None:
        log.info("engine %s of %s answers again: it gets requests as before", change.address, change.server)
        return
    log.warning(
        "engine %s of %s fails more than the others: %s; it is avoided and tried now and then. Advice: %s",
        change.address,
        change.server,
        change.failure.value,
        ADVICE[change.failure],
    )


def _log_breaker(change: BreakerChanged) -> None:
    """The first opening and the end of it; between them, probes fail."""
    whose = f"engine {change.address} of {change.server}" if change.address else f"ModelServer {change.server}"
    if not change.after.trips:
        log.info("the breaker of %s is closed", whose)
    elif not change.before.trips:
        log.warning("the breaker of %s is open", whose)


def _log_model(checked: EngineModelsListed) -> None:
    if not checked.model:
        log.info("the engines of %s list its model", checked.server)
        return
    log.warning(
        "engine %s of %s lists %s and not '%s', the model of its ModelServer: it may answer 404 to every request. "
        "Advice: write one of the engine's names as 'model', or start the engine with --served-model-name %s",
        checked.address,
        checked.server,
        quoted_names(checked.listed),
        checked.model,
        checked.model,
    )


def _log_load(result: AdapterLoadResult) -> None:
    if result.problem is None:
        log.info("engine %s of %s has the adapter %s: %s", result.address, result.server, result.adapter, _took(result))
        return
    log.warning(
        "engine %s of %s has not loaded the adapter %s, %s: %s. Advice: %s",
        result.address,
        result.server,
        result.adapter,
        _took(result),
        result.message,
        _LOAD_ADVICE[result.problem],
    )


def _then(ended: PrefillEnded) -> str:
    if ended.is_beside:
        return "the decode engine is asked to end the request with an error"
    return "decode engines compute the prompts, or fallbacks answer" if ended.goes_on else "requests are answered 503"


def _took(result: AdapterLoadResult) -> str:
    unloaded = f", {', '.join(result.unloaded)} unloaded" if result.unloaded else ""
    return f"{'had it already' if result.was_there else f'after {result.duration_s:.3g} s'}{unloaded}"
