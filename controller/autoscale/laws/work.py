# SPDX-License-Identifier: Apache-2.0
"""Our law, the default: work to come over what an engine may carry, plus what waits, checked by measured latency.

    need = carried(rate in start time) * correction * crowd, and at least what drains the backlog

``rate``: arrivals a second (``load``), continued by their trend over the time that a replica takes to start, if
there is one. ``carried``: replicas for that rate, the largest of four bounds (``queueing``): engines' time for the
objective's TPOT (or ``utilization``), waiting for prefill for its TTFT, tokens in caches, and nine tenths of all time.
The reason names the bound.

Backlog: work that waits at the gateways and in the engines' queues. It is carried forward to the time when a replica
ordered now would be ready. Until then engines that serve, and those that start as they become ready, take work off it,
and arrivals add to it. Only what is left then calls for more replicas, as many as do it within ``drain_budget``, or half of the start time if that is longer. So what
replicas that are starting will mend is not ordered twice.

Correction: the model may be wrong about engines. Measured TPOT says how busy they were: 1 - alpha / TPOT. The factor
moves towards what makes the model say the same, so errors of learned speeds cancel out but for alpha's. Besides, while
latency is above the objective although no more than ``ready`` replicas were called for since a while, it grows. It stays
within its bounds, and without news it falls back to 1 over hours.

Crowd: by Little's law, requests in flight are arrivals a second times how long an answer takes. Where they are more than
the objective allows, engines are slower than the model says or load has risen since it was measured; this shows sooner
than any latency, and asks for up to half as many replicas again.

Scale-in: the answer for n - 1 replicas has to hold with a tenth more load as well, so load at an edge does not make
replicas come and go.

Unknown speeds: the law then asks for ``_IN_FLIGHT`` requests for each replica, and never for fewer than there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscale.latency import (
    ANSWERED_S,
    LEAST_CORRECTION,
    MOST_CORRECTION,
    crowd,
    measured_correction,
    worst_latency,
)
from controller.autoscale.law import Recommendation
from controller.autoscale.load import Load, load_of
from controller.autoscale.queueing import (
    MOST_UTILIZATION,
    RequestWork,
    replicas_for_cache,
    replicas_for_tpot,
    replicas_for_ttft,
)
from controller.autoscale.situation import EngineState, Situation, Speed
from controller.autoscale.speeds import work_of
from controller.resources.scaling_laws import WorkParameters

if TYPE_CHECKING:
    from controller.autoscale.load import PerRequest
    from controller.autoscale.situation import Target
    from controller.resources.autoscaling import LatencyObjective

_UTILIZATION: Final = 0.8
_MOST_LEAD_S: Final = 600.0
_SCALE_IN_ROOM: Final = 1.1
_IN_FLIGHT: Final = 32
# Tokens of answers whose decoding hardly counts.
_SHORT_ANSWER: Final = 4
# Corrections that are worth telling.
_TOLD: Final = 0.005
# In which the correction follows what is measured.
_FOLLOWING_S: Final = 60.0
# Where more replicas than that share have just gone, measured answers say nothing about those that are left.
_AS_MANY: Final = 1.15
# The correction grows by so much of itself in a second for each multiple of the objective. It halves its distance from 1
# in an hour: what the model does not know of an engine stays so, and each trial of less makes replicas come and go.
_GROWTH_PER_S: Final = 1 / 240
_HALVING_S: Final = 3600.0
_SETTLED_S: Final = 180.0


class WorkMemory(msgspec.Struct, frozen=True):
    """``at_s``: of the last answer. ``correction``: see the module. ``enough_since_s``: since when no more replicas
    were called for than were ready; None: they are now. ``ready``: replicas; ``steady_since_s``: since when they are as
    many, nothing waits and none is starting.
    """

    at_s: float
    correction: float = 1.0
    enough_since_s: float | None = None
    ready: float = 0.0
    steady_since_s: float = 0.0
    peak: float = 0.0
    peak_at_s: float = 0.0


class _Need(msgspec.Struct, frozen=True):
    """``replicas``: for the rate. ``bound``: which of the bounds it is."""

    replicas: float
    bound: str


class WorkLaw(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: WorkParameters = WorkParameters()
    name: str = "Work"

    def recommend(self, situation: Situation, memory: WorkMemory | None) -> tuple[Recommendation, WorkMemory | None]:
        """See the module."""
        first = situation.targets[0]
        load = load_of(situation.traffic, window_s=self.parameters.window, now_s=situation.now_s)
        if load is None:
            return Recommendation(self.name, None, "no traffic is known yet"), memory
        if load.arrivals_per_s == 0 and not situation.waiting.requests:
            return Recommendation(self.name, 0.0, "nothing arrives"), _forward(memory, situation.now_s)
        if first.speed is None or load.per_request is None or _is_guess(first, load.per_request):
            return self._by_concurrency(situation), memory
        work = work_of(load.per_request, first.speed, first.spec.stage)
        return self._by_work(situation, memory, load, work, first.speed)

    def _by_work(
        self, situation: Situation, memory: WorkMemory | None, load: Load, work: RequestWork, speed: Speed
    ) -> tuple[Recommendation, WorkMemory | None]:
        lead_s = min(_MOST_LEAD_S, situation.targets[0].start_s)
        rate = load.arrivals_in(lead_s) if self.parameters.trend else load.arrivals_per_s
        now = self._carried(load.arrivals_per_s, work, speed, situation.objective)
        need = self._carried(rate, work, speed, situation.objective) if rate > load.arrivals_per_s else now
        peak = _peak(situation, memory)
        measured = None
        if peak[0] <= _AS_MANY * situation.units(EngineState.READY):
            measured = measured_correction(situation, peak[0], work, speed)
        correction, memory = self._corrected(situation, now, measured, memory, peak=peak)
        left_s = _backlog_left(situation, load.arrivals_per_s * work.total_s, work, speed, lead_s)
        drain_s = max(self.parameters.drain_budget, lead_s / 2)
        for_backlog = rate * work.total_s + left_s / drain_s if left_s > 0 else 0.0
        crowded = crowd(situation, load, work)
        carried = need.replicas * correction * crowded
        wanted = max(carried, for_backlog)
        reason = _reason(need, load, rate, wanted, for_backlog > carried, correction)
        if wanted < situation.current:
            wanted = min(situation.current, wanted * _SCALE_IN_ROOM)
        inputs = {
            "arrivals_per_s": load.arrivals_per_s,
            "arrivals_per_s_ahead": rate,
            "ahead_s": lead_s,
            "rate_window_s": load.seen_s,
            "prefill_s_per_request": work.prefill_s,
            "decode_s_per_request": work.decode_s,
            "replicas_for_rate": need.replicas,
            "replicas_for_backlog": for_backlog,
            "backlog_left_s": left_s,
            "correction": correction,
            "crowd": crowded,
        }
        return Recommendation(self.name, wanted, reason, inputs), memory

    def _carried(self, rate: float, work: RequestWork, speed: Speed, objective: LatencyObjective | None) -> _Need:
        given = self.parameters.utilization
        tpot_s = objective.tpot if objective is not None else None
        needs = []
        if given is None and tpot_s is not None and work.decode_s > 0:
            percent = objective.percentile if objective is not None else 50.0
            by_tpot = replicas_for_tpot(rate, work, step_s=speed.step_s, tpot_s=tpot_s, percent=percent)
            needs.append(_Need(by_tpot, f"TPOT within {tpot_s}"))
            needs.append(_Need(rate * work.total_s / MOST_UTILIZATION, f"engines at most {MOST_UTILIZATION:.0%} busy"))
        else:
            share = given if given is not None else _UTILIZATION
            needs.append(_Need(rate * work.total_s / share, f"engines at most {share:.0%} busy"))
        if objective is not None and objective.ttft is not None and work.prefill_s > 0:
            by_ttft = replicas_for_ttft(
                rate, work, ttft_s=objective.ttft, percent=objective.percentile, replicas=needs[0].replicas
            )
            needs.append(_Need(by_ttft, f"TTFT within {objective.ttft}"))
        if speed.kv_tokens and work.output_tokens > 0:
            step_s = tpot_s if tpot_s is not None else speed.step_s / (1 - _UTILIZATION)
            by_cache = replicas_for_cache(rate, work, kv_tokens=speed.kv_tokens, tpot_s=step_s)
            needs.append(_Need(by_cache, "tokens in flight within the caches"))
        return max(needs, key=lambda one: one.replicas)

    def _corrected(
        self,
        situation: Situation,
        need: _Need,
        measured: float | None,
        memory: WorkMemory | None,
        *,
        peak: tuple[float, float],
    ) -> tuple[float, WorkMemory]:
        """The correction of the model, and what to remember. ``measured``: what it should be by measured TPOT.
        ``peak``: see ``_peak``.
        """
        now_s, ready = situation.now_s, situation.units(EngineState.READY)
        before = memory if memory is not None else WorkMemory(at_s=now_s, ready=ready, steady_since_s=now_s)
        elapsed_s = min(60.0, max(0.0, now_s - before.at_s))
        is_calm = not situation.waiting.requests and not situation.starting
        steady_since_s = before.steady_since_s if is_calm and ready == before.ready else now_s
        # what waits is late for another reason: it came when there were too few
        is_enough = need.replicas * before.correction <= ready and not situation.waiting.requests
        since_s = (before.enough_since_s if before.enough_since_s is not None else now_s) if is_enough else None
        correction = 1 + (before.correction - 1) * 0.5 ** (elapsed_s / _HALVING_S)
        if self.parameters.guard:
            worst = worst_latency(situation) or 0.0
            # what arrived before there were enough is late, and ends late
            is_settled = since_s is not None and now_s - max(since_s, steady_since_s) > _SETTLED_S
            if worst > 1 and is_settled and is_calm:
                correction = before.correction * (1 + min(1.0, worst - 1) * elapsed_s * _GROWTH_PER_S)
            elif measured is not None and worst <= 1 and not situation.waiting.requests:
                correction = before.correction + (measured - before.correction) * min(1.0, elapsed_s / _FOLLOWING_S)
        correction = min(MOST_CORRECTION, max(LEAST_CORRECTION, correction))
        return correction, WorkMemory(
            at_s=now_s,
            correction=correction,
            enough_since_s=since_s,
            ready=ready,
            steady_since_s=steady_since_s,
            peak=peak[0],
            peak_at_s=peak[1],
        )

    def _by_concurrency(self, situation: Situation) -> Recommendation:
        """Without speeds: by requests in flight, and never fewer than now."""
        in_flight = sum(one.report.in_flight for one in situation.engines if one.report is not None)
        requests = in_flight + situation.waiting.requests
        replicas = max(situation.current, requests / _IN_FLIGHT)
        reason = f"speeds are not known yet: {requests} requests, {_IN_FLIGHT} for each replica, never fewer than now"
        return Recommendation(self.name, replicas, reason, {"requests": float(requests)})


def _is_guess(target: Target, mean: PerRequest) -> bool:
    """Whether answers are long and nobody knows yet how long their steps take."""
    speed = target.speed
    is_short = target.spec.stage == "Prefill" or mean.output_tokens <= _SHORT_ANSWER
    return speed is not None and not speed.is_step_known and not is_short


def _forward(memory: WorkMemory | None, now_s: float) -> WorkMemory | None:
    return None if memory is None else msgspec.structs.replace(memory, at_s=now_s, enough_since_s=None)


def _backlog_left(situation: Situation, busy: float, work: RequestWork, speed: Speed, ahead_s: float) -> float:
    """Seconds of one replica's work that will wait in ``ahead_s``, when a replica ordered now is ready.

    ``busy``: replicas that arrivals keep busy. Engines take work off at nearly all of their time.
    """
    waiting = situation.waiting
    # one request in an engine's queue waits for the next step, as it should
    in_engines = sum(
        max(0.0, (engine.report.waiting or 0.0) - 1) for engine in situation.ready if engine.report is not None
    )
    backlog = waiting.requests * work.decode_s
    if work.prefill_s > 0:
        backlog += waiting.tokens / speed.prefill_tokens_per_s
    backlog += in_engines * work.total_s
    capacity, at_s = situation.units(EngineState.READY) * MOST_UTILIZATION, 0.0
    arriving = sorted(
        (max(0.0, target.start_s - (situation.now_s - engine.created_at_s)), target.capacity)
        for target in situation.targets
        for engine in target.having(EngineState.STARTING)
    )
    for ready_s, units in (*arriving, (ahead_s, 0.0)):
        until_s = min(ready_s, ahead_s)
        backlog = max(0.0, backlog + (busy - capacity) * (until_s - at_s))
        capacity, at_s = capacity + units * MOST_UTILIZATION, until_s
    return backlog


def _peak(situation: Situation, memory: WorkMemory | None) -> tuple[float, float]:
    """The most replicas that were ready in the time of the measured answers, and when."""
    ready, now_s = situation.units(EngineState.READY), situation.now_s
    if memory is None or ready >= memory.peak or now_s - memory.peak_at_s > ANSWERED_S:
        return ready, now_s
    return memory.peak, memory.peak_at_s


def _reason(need: _Need, load: Load, rate: float, wanted: float, is_backlog: bool, correction: float) -> str:
    ahead = f", {rate:.3g} by their trend when a replica would be ready" if rate > load.arrivals_per_s * 1.001 else ""
    text = f"{load.arrivals_per_s:.3g} requests/s{ahead}; {need.replicas:.2f} replicas for {need.bound}"
    if abs(correction - 1) > _TOLD:
        text += (
            f", times {correction:.2f} as latencies were {'higher' if correction > 1 else 'lower'} than that explains"
        )
    if is_backlog:
        text += f"; {wanted:.2f} to work off what waits"
    return text
