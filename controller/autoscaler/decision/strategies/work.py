# SPDX-License-Identifier: Apache-2.0
"""Our law, the default: work to come over what an engine may carry, plus what waits, checked by measured latency.

    need = correction * max(carried(rate in start time), carried(rate) * crowd), and at least what drains the backlog

``rate``: arrivals a second (``load``), continued by their trend over the time that a replica takes to start, if there
is one; of what is beyond all load of the last hour, half. ``carried``: replicas for that rate with room for more
(``room``), the largest of four bounds (``queueing``): engines' time for the objective's TPOT (or ``utilization``),
waiting for prefill for its TTFT, tokens in caches, and nine tenths of all time. The reason names the bound.

Correction: the model may be wrong about engines, see ``correction``.

Crowd: by Little's law, requests in flight are arrivals a second times how long an answer takes. Where they are more
than the objective allows although there have been enough replicas for a minute, engines are slower than the model says
or load has risen since it was measured. This shows sooner than any latency, and asks for up to half as many again.

Backlog: work that waits at the gateways and in the engines' queues. It is carried forward to the time when a replica
ordered now would be ready. Until then engines that serve, and those that start as they become ready, take work off it,
and arrivals add to it. Only what is left then calls for more replicas, as many as do it within ``drain_budget``, or
half of the start time if that is longer. So what replicas that are starting will mend is not ordered twice.

Scale-in: the answer for n - 1 replicas has to hold with 15% more load as well, so load at an edge does not make
replicas come and go.

Unknown speeds: the law then asks for ``_IN_FLIGHT`` requests for each replica, and never for fewer than there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.scaling_laws import WorkParameters
from controller.autoscaler.decision.correction import corrected
from controller.autoscaler.decision.latency import crowd
from controller.autoscaler.decision.law import Recommendation
from controller.autoscaler.decision.load import Load, load_of
from controller.autoscaler.decision.queueing import (
    MOST_UTILIZATION,
    RequestWork,
    replicas_for_cache,
    replicas_for_tpot,
    replicas_for_ttft,
)
from controller.autoscaler.decision.room import Peaks, with_room
from controller.autoscaler.decision.situation import EngineState, Situation, Speed
from controller.autoscaler.decision.speeds import work_of
from controller.autoscaler.decision.work_memory import WorkMemory

if TYPE_CHECKING:
    from controller.api.autoscaling import LatencyObjective
    from controller.autoscaler.decision.load import PerRequest
    from controller.autoscaler.decision.situation import Target

_UTILIZATION: Final = 0.8
_MOST_LEAD_S: Final = 600.0
_SCALE_IN_ROOM: Final = 1.15
_IN_FLIGHT: Final = 32
# Tokens of answers whose decoding hardly counts.
_SHORT_ANSWER: Final = 4
# Corrections that are worth telling.
_TOLD: Final = 0.005
# Of the part of a trend's forecast that is beyond all load of the last hour.
_BEYOND: Final = 0.5
# Requests in flight are those of a shortage for so long after it.
_WORKED_OFF_S: Final = 60.0


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
            still = None if memory is None else memory.without_load(situation.now_s)
            return Recommendation(self.name, 0.0, "nothing arrives"), still
        if first.speed is None or load.per_request is None or _is_guess(first, load.per_request):
            return self._by_concurrency(situation), memory
        work = work_of(load.per_request, first.speed, first.spec.stage)
        return self._by_work(situation, memory, load, work, first.speed)

    def _by_work(
        self, situation: Situation, memory: WorkMemory | None, load: Load, work: RequestWork, speed: Speed
    ) -> tuple[Recommendation, WorkMemory | None]:
        now_s, guard = situation.now_s, self.parameters.guard
        lead_s = min(_MOST_LEAD_S, situation.targets[0].start_s)
        before = memory or WorkMemory(now_s)
        peaks = (before.peaks or Peaks(now_s)).seen(load.mean_per_s, now_s)
        rate = self._ahead(load, lead_s, peaks.most(now_s))
        roomy_now, roomy_ahead = (
            with_room(each, self.parameters.headroom, peaks.most(now_s)) for each in (load.arrivals_per_s, rate)
        )
        needs = {
            each: self._carried(each, work, speed, situation.objective)
            for each in {load.arrivals_per_s, roomy_now, roomy_ahead}
        }
        bare, now, need = needs[load.arrivals_per_s], needs[roomy_now], needs[roomy_ahead]
        correction = corrected(situation, before.correction, needed=bare.replicas, work=work, speed=speed, guard=guard)
        left_s = _backlog_left(situation, load.arrivals_per_s * work.total_s, work, speed, lead_s)
        drain_s = max(self.parameters.drain_budget, lead_s / 2)
        for_backlog = rate * work.total_s + left_s / drain_s if left_s > 0 else 0.0
        # too few replicas are crowded, and more are called for anyway
        enough_s = 0.0 if correction.enough_since_s is None else now_s - correction.enough_since_s
        crowded = crowd(situation, load, work) if enough_s >= _WORKED_OFF_S else 1.0
        carried = correction.factor * max(need.replicas, now.replicas * crowded)
        wanted = max(carried, for_backlog)
        reason = _reason(need, load, rate, wanted, for_backlog > carried, correction.factor)
        if wanted < situation.current:
            wanted = min(situation.current, wanted * _SCALE_IN_ROOM)
        inputs = {
            "arrivals_per_s": load.arrivals_per_s,
            "arrivals_per_s_ahead": rate,
            "ahead_s": lead_s,
            "arrivals_per_s_with_room": roomy_ahead,
            "rate_window_s": load.seen_s,
            "prefill_s_per_request": work.prefill_s,
            "decode_s_per_request": work.decode_s,
            "replicas_for_rate": need.replicas,
            "replicas_for_backlog": for_backlog,
            "backlog_left_s": left_s,
            "correction": correction.factor,
            "crowd": crowded,
        }
        return Recommendation(self.name, wanted, reason, inputs), WorkMemory(now_s, correction, peaks)

    def _ahead(self, load: Load, lead_s: float, most: float) -> float:
        """Arrivals a second when a replica that is ordered now is ready. Trends end, and rather where nothing was
        before.
        """
        rate = load.arrivals_in(lead_s) if self.parameters.trend else load.arrivals_per_s
        seen = max(most, load.arrivals_per_s)
        return rate if rate <= seen else seen + _BEYOND * (rate - seen)

    def _carried(self, rate: float, work: RequestWork, speed: Speed, objective: LatencyObjective | None) -> _Need:
        given = self.parameters.utilization
        tpot_s = objective.tpot if objective is not None else None
        needs = []
        if given is None and tpot_s is not None and work.output_tokens > 0:
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
