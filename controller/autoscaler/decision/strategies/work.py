# SPDX-License-Identifier: Apache-2.0
"""The default strategy: expected work over an engine's capacity, plus the backlog, corrected by measured latency.

    need = correction * max(carried(rate in start time), carried(rate) * crowd), and at least what drains the backlog

``rate``: arrivals a second (``load``), continued by their trend over the time that a replica takes to start, if there
is one; of what is beyond all load of the last hour, half. ``carried``: replicas for that rate with room for more
(headroom), the largest of four bounds (``speeds``): engines' time for the objective's TPOT (or ``utilization``),
waiting for prefill for its TTFT, tokens in caches, and nine tenths of all time. The reason names the bound.

Correction: the model may be wrong about engines, so a factor is adjusted until it matches the measurements.

Crowd: by Little's law, requests in flight are arrivals a second times how long an answer takes. Where they are more
than the objective allows although there have been enough replicas for a minute, engines are slower than the model
assumes or load has risen since it was measured. This shows sooner than any latency, and adds up to half as many
replicas again.

Backlog: work that waits at the gateways and in the engines' queues. It is carried forward to the time when a replica
ordered now would be ready. Until then engines that serve, and those that start as they become ready, take work off it,
and arrivals add to it. Only what is left then calls for more replicas, as many as do it within ``drain_budget``, or
half of the start time if that is longer. So replicas that are starting are not ordered twice.

Scale-in: the answer for n - 1 replicas has to hold with 15% more load as well, so load at a threshold does not add and
remove replicas alternately.

Unknown speeds: the strategy then recommends a replica for each ``_IN_FLIGHT`` requests, and never fewer than now.

Headroom: replicas take a minute and more to start, and until then the existing ones serve an unforeseen rise. Headroom
for a multiple of load pays where load rises again soon, and is wasted at a peak, where it costs most. Past load is the
best estimate of how far load may rise. So there is headroom for ``headroom`` times the current load, but not for more
than the largest load of the last hour. While the history covers only minutes, all of it is kept.

The factor: learned speeds have errors, and the model leaves things out. Measured TPOT gives the utilisation of engines:
1 - alpha / TPOT. The factor moves towards the value at which the model gives the same, so errors of learned speeds
cancel out but for alpha's.

- Latency within the objective: it moves both ways. Answers of the last minute were served by the replicas of that time,
  so their maximum counts; after many were removed, the factor does not move.
- Latency above the objective: it only grows. The fewest replicas of that time count. Besides, where no more are
  recommended than are ready for a while, it grows slowly at any TPOT: TTFT may be late.

It stays within its bounds, and without measurements it returns to 1 over hours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from controller.api.shared_types import Utilization
from controller.api.strategies import LearnedState, StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.offered_load import OfferedLoad, estimate_offered_load
from controller.autoscaler.decision.replica_performance import (
    MOST_UTILIZATION,
    RequestWork,
    replicas_for_cache,
    replicas_for_tpot,
    replicas_for_ttft,
    request_work,
    utilization_for_tpot,
)
from controller.autoscaler.decision.situation import EngineState, ReplicaSpeed, Situation
from extproc.api.quantities import Duration
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from controller.api.autoscaling import LatencyObjective
    from controller.autoscaler.decision.offered_load import MeanRequestWork
    from controller.autoscaler.decision.situation import TargetSituation

_REMEMBERED_S: Final = 3600.0
_PLACE_S: Final = 300.0
# Of an hour, and the one that is leaving it.
MOST_PLACES: Final = 13
# Less is no hint at what load may rise to.
_KNOWN_S: Final = 300.0
# In which the factor follows what is measured.
_FOLLOWING_S: Final = 60.0
# Where more replicas than that share were just removed, measured latencies do not describe the remaining ones.
_AS_MANY: Final = 1.15
# It grows by so much of itself in a second for each multiple of the objective. It halves its distance from 1 in an
# hour: errors of the model for an engine are lasting, and each trial of fewer replicas removes some and adds them
# again.
_GROWTH_PER_S: Final = 1 / 240
_HALVING_S: Final = 3600.0
_SETTLED_S: Final = 180.0
_MOST_ELAPSED_S: Final = 60.0
LEAST_CORRECTION: Final = 0.5
MOST_CORRECTION: Final = 2.0
# Measured steps that are hardly slower than idle ones are a poor measure of utilisation.
_LEAST_BUSY: Final = 0.1
# Only from this share of the objective on can measured TPOT call for more than the model does.
_NEAR_OBJECTIVE: Final = 0.62
_MOST_CROWD: Final = 1.5
_LATENCY_WINDOW_S: Final = 60.0
# Answers that end in the window began before it.
ANSWERED_S: Final = 90.0
_FEWEST_ANSWERS: Final = 20
# Digits kept of a load, finer than its accuracy; times are whole seconds.
_DIGITS: Final = 3
_MOST_PER_S: Final = 1e12
_UTILIZATION: Final = 0.8
_MOST_LEAD_S: Final = 600.0
_SCALE_IN_ROOM: Final = 1.15
_IN_FLIGHT: Final = 32
# Tokens of answers whose decoding hardly counts.
_SHORT_ANSWER: Final = 4
# Corrections that the reason mentions.
_TOLD: Final = 0.005
# Of the part of a trend's forecast that is beyond all load of the last hour.
_BEYOND: Final = 0.5
# Requests in flight are those of a shortage for so long after it.
_WORKED_OFF_S: Final = 60.0


class WorkParameters(Spec, frozen=True):
    """Expected work, in engine seconds. ``utilization``: the share of its time that an engine may be busy; left out, it
    follows from the objective's TPOT, and is 0.8 without one. ``window``: over which rates are measured. ``headroom``:
    the multiple of the current load for which there is capacity, up to the peak of the last hour. ``drain_budget``:
    time in which waiting requests should be served. ``trend``: whether the rates are continued over the time that an
    engine takes to start. ``guard``: whether measured latencies above the objective add replicas.
    """

    utilization: Utilization | None = None
    window: Duration = Duration("30s")
    headroom: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.5
    drain_budget: Duration = Duration("15s")
    trend: bool = True
    guard: bool = True


class LoadPeak(msgspec.Struct, frozen=True):
    """The highest load of a span of five minutes, in requests a second. ``at_s``: when it began."""

    at_s: float
    per_s: float


class LoadPeaks(msgspec.Struct, frozen=True):
    """The load of the last hour. ``since_s``: since when it has been measured without a gap of an hour. ``places``: by
    time.
    """

    since_s: float
    places: tuple[LoadPeak, ...] = ()

    def with_load(self, per_s: float, now_s: float) -> LoadPeaks:
        """With the load of now."""
        places = [one for one in self.places if now_s - _REMEMBERED_S < one.at_s <= now_s]
        since_s = self.since_s if places else now_s
        if places and now_s - places[-1].at_s < _PLACE_S:
            places[-1] = LoadPeak(places[-1].at_s, max(places[-1].per_s, per_s))
        else:
            places.append(LoadPeak(now_s, per_s))
        return LoadPeaks(since_s, tuple(places))

    def highest_load(self, now_s: float) -> float:
        """The highest load; infinite while the history is too short."""
        if now_s - self.since_s <= _KNOWN_S:
            return math.inf
        return max((one.per_s for one in self.places), default=math.inf)


def with_headroom(per_s: float, headroom: float, most: float) -> float:
    """The load that replicas should be able to carry. ``most``: see ``LoadPeaks``."""
    return max(per_s, min(per_s * headroom, most))


class ReplicaCountSample(msgspec.Struct, frozen=True):
    """A number of replicas, and when there were as many."""

    replicas: float
    at_s: float


class LatencyCorrection(msgspec.Struct, frozen=True, kw_only=True):
    """``factor``: see the module. ``at_s``: time of its last update. ``enough_since_s``: since when no more replicas
    were called for than were ready; None: more are called for. ``ready``: replicas; ``steady_since_s``: since when
    their number is constant, nothing waits and none starts. ``most`` and ``fewest``: replicas ready in the time of
    measured answers.
    """

    at_s: float
    factor: float = 1.0
    enough_since_s: float | None = None
    ready: float = 0.0
    steady_since_s: float = 0.0
    most: ReplicaCountSample | None = None
    fewest: ReplicaCountSample | None = None


def correct_for_latency(
    situation: Situation,
    before: LatencyCorrection | None,
    *,
    needed: float,
    work: RequestWork,
    speed: ReplicaSpeed,
    guard: bool,
) -> LatencyCorrection:
    """``needed``: replicas for load as it is, by the model. ``guard``: whether measured latencies count at all."""
    now_s, ready = situation.now_s, situation.engine_units(EngineState.READY)
    before = before or LatencyCorrection(at_s=now_s, ready=ready, steady_since_s=now_s)
    elapsed_s = min(_MOST_ELAPSED_S, max(0.0, now_s - before.at_s))
    is_calm = not situation.waiting.requests and not situation.starting_engines
    steady_since_s = before.steady_since_s if is_calm and ready == before.ready else now_s
    # waiting requests are late for another reason: they arrived when there were too few replicas
    is_enough = needed * before.factor <= ready and not situation.waiting.requests
    since_s = (before.enough_since_s if before.enough_since_s is not None else now_s) if is_enough else None
    most, fewest = _extreme(before.most, ready, now_s, sign=1), _extreme(before.fewest, ready, now_s, sign=-1)
    factor = 1 + (before.factor - 1) * 0.5 ** (elapsed_s / _HALVING_S)
    if guard:
        worst = worst_latency_ratio(situation) or 0.0
        # what arrived before there were enough is late, and ends late
        is_settled = since_s is not None and now_s - max(since_s, steady_since_s) > _SETTLED_S
        if worst > 1:
            if is_settled and is_calm:
                factor = before.factor * (1 + min(1.0, worst - 1) * elapsed_s * _GROWTH_PER_S)
            if not situation.waiting.requests:
                shown = measured_correction(situation, fewest.replicas, work, speed) or 0.0
                factor = max(factor, _towards(before.factor, shown, elapsed_s))
        elif not situation.waiting.requests and most.replicas <= _AS_MANY * ready:
            measured = measured_correction(situation, most.replicas, work, speed)
            factor = factor if measured is None else _towards(before.factor, measured, elapsed_s)
    return LatencyCorrection(
        at_s=now_s,
        factor=min(MOST_CORRECTION, max(LEAST_CORRECTION, factor)),
        enough_since_s=since_s,
        ready=ready,
        steady_since_s=steady_since_s,
        most=most,
        fewest=fewest,
    )


def _towards(before: float, measured: float, elapsed_s: float) -> float:
    return before + (measured - before) * min(1.0, elapsed_s / _FOLLOWING_S)


def _extreme(before: ReplicaCountSample | None, ready: float, now_s: float, *, sign: int) -> ReplicaCountSample:
    """The most (``sign`` 1) or fewest (-1) replicas that were ready in the time of the measured answers."""
    if before is None or (ready - before.replicas) * sign >= 0 or now_s - before.at_s > ANSWERED_S:
        return ReplicaCountSample(ready, now_s)
    return before


def concurrency_ratio(situation: Situation, load: OfferedLoad, work: RequestWork) -> float:
    """In flight over what would be at the objective, by Little's law, within bounds: engines that are slower than
    expected, or load that has risen since it was measured, show here first.
    """
    objective = situation.objective
    if objective is None or objective.tpot is None or load.arrivals_per_s <= 0 or work.output_tokens <= 0:
        return 1.0
    in_flight = sum(one.report.in_flight for one in situation.engines if one.report is not None)
    allowed = load.arrivals_per_s * work.output_tokens * objective.tpot
    spare = 2 * math.sqrt(max(1.0, allowed))
    return min(_MOST_CROWD, max(1.0, (in_flight + situation.waiting.requests - spare) / allowed))


def measured_correction(situation: Situation, ready: float, work: RequestWork, speed: ReplicaSpeed) -> float | None:
    """How much more work measured TPOT shows than the model expects; None if it shows nothing. ``ready``: replicas of
    the time in which the requests were answered that are measured.
    """
    objective = situation.objective
    rates = situation.traffic.rates(ANSWERED_S, situation.now_s)
    if objective is None or objective.tpot is None or work.output_tokens <= 0 or rates is None or rates.arrivals <= 0:
        return None
    _, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, situation.now_s)
    if tpot_s is None:
        return None
    limits = {"step_s": speed.step_s, "tpot_s": float(objective.tpot)}
    expected = replicas_for_tpot(rates.arrivals, work, percent=objective.percentile, **limits) * utilization_for_tpot(
        **limits
    )
    busy = ready * max(_LEAST_BUSY, 1 - speed.step_s / tpot_s)
    # far below the objective the idle step's error would count more than what is measured
    most = MOST_CORRECTION if tpot_s > _NEAR_OBJECTIVE * objective.tpot else 1.0
    return min(most, max(LEAST_CORRECTION, busy / expected))


def worst_latency_ratio(situation: Situation) -> float | None:
    """The larger of TTFT and TPOT, each over its objective; None with few answers, or without an objective."""
    objective = situation.objective
    rates = situation.traffic.rates(_LATENCY_WINDOW_S, situation.now_s)
    if objective is None or rates is None or rates.finished * rates.window_s < _FEWEST_ANSWERS:
        return None
    ttft_s, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, situation.now_s)
    pairs = ((ttft_s, objective.ttft), (tpot_s, objective.tpot))
    shares = [value / limit for value, limit in pairs if value is not None and limit]
    return max(shares) if shares else None


class WorkMemory(msgspec.Struct, frozen=True):
    """``at_s``: of the last answer. ``correction``: None before the first one. ``peaks``: None as well."""

    at_s: float
    correction: LatencyCorrection | None = None
    peaks: LoadPeaks | None = None

    def without_load(self, now_s: float) -> WorkMemory:
        """After a reconcile without arrivals: nothing is measured then."""
        correction = self.correction
        if correction is not None:
            correction = msgspec.structs.replace(correction, at_s=now_s, enough_since_s=None)
        return WorkMemory(now_s, correction, self.peaks)


def peaks_to_save(memory: object) -> LoadPeaks | None:
    """The slow-to-learn part of the strategy's memory; None if there is none. Without it, a restart has no history of
    the load, and so adds all headroom at once.
    """
    if not isinstance(memory, WorkMemory) or memory.peaks is None:
        return None
    places = tuple(LoadPeak(round(one.at_s), float(f"{one.per_s:.{_DIGITS}g}")) for one in memory.peaks.places)
    return LoadPeaks(round(memory.peaks.since_s), places)


def restore_peaks(kept: LoadPeaks, now_s: float) -> WorkMemory | None:
    """As after a restart; None for what cannot have been seen."""
    times = [kept.since_s, *(one.at_s for one in kept.places)]
    is_seen = times == sorted(times) and times[0] >= 0 and times[-1] <= now_s + 1
    if not is_seen or len(kept.places) > MOST_PLACES or not all(0 <= one.per_s <= _MOST_PER_S for one in kept.places):
        return None
    return WorkMemory(now_s, peaks=kept)


class _Need(msgspec.Struct, frozen=True):
    """``replicas``: for the rate. ``bound``: which of the bounds it is."""

    replicas: float
    bound: str


class WorkStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: WorkParameters = WorkParameters()
    name: str = "Work"

    def recommend(self, situation: Situation, memory: WorkMemory | None) -> tuple[Recommendation, WorkMemory | None]:
        """By the work that arrives, what waits, and what may come while replicas start."""
        first = situation.targets[0]
        load = estimate_offered_load(situation.traffic, window_s=self.parameters.window, now_s=situation.now_s)
        if load is None:
            return Recommendation(self.name, None, "no traffic is known yet"), memory
        if load.arrivals_per_s == 0 and not situation.waiting.requests:
            still = None if memory is None else memory.without_load(situation.now_s)
            return Recommendation(self.name, 0.0, "nothing arrives"), still
        if first.speed is None or load.per_request is None or _is_guess(first, load.per_request):
            return self._by_concurrency(situation), memory
        work = request_work(load.per_request, first.speed, first.spec.stage)
        return self._by_work(situation, memory, load, work, first.speed)

    def _by_work(
        self,
        situation: Situation,
        memory: WorkMemory | None,
        load: OfferedLoad,
        work: RequestWork,
        speed: ReplicaSpeed,
    ) -> tuple[Recommendation, WorkMemory | None]:
        now_s, guard = situation.now_s, self.parameters.guard
        lead_s = min(_MOST_LEAD_S, situation.targets[0].start_s)
        before = memory or WorkMemory(now_s)
        peaks = (before.peaks or LoadPeaks(now_s)).with_load(load.mean_per_s, now_s)
        rate = self._ahead(load, lead_s, peaks.highest_load(now_s))
        roomy_now, roomy_ahead = (
            with_headroom(each, self.parameters.headroom, peaks.highest_load(now_s))
            for each in (load.arrivals_per_s, rate)
        )
        needs = {
            each: self._carried(each, work, speed, situation.objective)
            for each in {load.arrivals_per_s, roomy_now, roomy_ahead}
        }
        bare, now, need = needs[load.arrivals_per_s], needs[roomy_now], needs[roomy_ahead]
        correction = correct_for_latency(
            situation, before.correction, needed=bare.replicas, work=work, speed=speed, guard=guard
        )
        left_s = _backlog_left(situation, load.arrivals_per_s * work.total_s, work, speed, lead_s)
        drain_s = max(self.parameters.drain_budget, lead_s / 2)
        for_backlog = rate * work.total_s + left_s / drain_s if left_s > 0 else 0.0
        # too few replicas are crowded, and more are called for anyway
        enough_s = 0.0 if correction.enough_since_s is None else now_s - correction.enough_since_s
        crowded = concurrency_ratio(situation, load, work) if enough_s >= _WORKED_OFF_S else 1.0
        carried = correction.factor * max(need.replicas, now.replicas * crowded)
        wanted = max(carried, for_backlog)
        reason = _reason(need, load, rate, wanted, for_backlog > carried, correction.factor)
        if wanted < situation.current_replicas:
            wanted = min(situation.current_replicas, wanted * _SCALE_IN_ROOM)
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

    def _ahead(self, load: OfferedLoad, lead_s: float, most: float) -> float:
        """Arrivals a second when a replica that is ordered now is ready. Trends end, and rather where nothing was
        before.
        """
        rate = load.predicted_arrivals_per_s(lead_s) if self.parameters.trend else load.arrivals_per_s
        seen = max(most, load.arrivals_per_s)
        return rate if rate <= seen else seen + _BEYOND * (rate - seen)

    def _carried(
        self, rate: float, work: RequestWork, speed: ReplicaSpeed, objective: LatencyObjective | None
    ) -> _Need:
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
        replicas = max(situation.current_replicas, requests / _IN_FLIGHT)
        reason = f"speeds are not known yet: {requests} requests, {_IN_FLIGHT} for each replica, never fewer than now"
        return Recommendation(self.name, replicas, reason, {"requests": float(requests)})


def _is_guess(target: TargetSituation, mean: MeanRequestWork) -> bool:
    """Whether answers are long and the time of their steps has not been measured yet."""
    speed = target.speed
    is_short = target.spec.stage == "Prefill" or mean.output_tokens <= _SHORT_ANSWER
    return speed is not None and not speed.is_step_known and not is_short


def _backlog_left(situation: Situation, busy: float, work: RequestWork, speed: ReplicaSpeed, ahead_s: float) -> float:
    """Seconds of one replica's work that will wait in ``ahead_s``, when a replica ordered now is ready.

    ``busy``: replicas that arrivals keep busy. Engines take work off at nearly all of their time.
    """
    waiting = situation.waiting
    # one request in an engine's queue waits for the next step, as it should
    in_engines = sum(
        max(0.0, (engine.report.waiting or 0.0) - 1) for engine in situation.ready_engines if engine.report is not None
    )
    backlog = waiting.requests * work.decode_s
    if work.prefill_s > 0:
        backlog += waiting.tokens / speed.prefill_tokens_per_s
    backlog += in_engines * work.total_s
    capacity, at_s = situation.engine_units(EngineState.READY) * MOST_UTILIZATION, 0.0
    arriving = sorted(
        (max(0.0, target.start_s - (situation.now_s - engine.created_at_s)), target.capacity)
        for target in situation.targets
        for engine in target.engines_in_state(EngineState.STARTING)
    )
    for ready_s, units in (*arriving, (ahead_s, 0.0)):
        until_s = min(ready_s, ahead_s)
        backlog = max(0.0, backlog + (busy - capacity) * (until_s - at_s))
        capacity, at_s = capacity + units * MOST_UTILIZATION, until_s
    return backlog


def _reason(need: _Need, load: OfferedLoad, rate: float, wanted: float, is_backlog: bool, correction: float) -> str:
    ahead = f", {rate:.3g} by their trend when a replica would be ready" if rate > load.arrivals_per_s * 1.001 else ""
    text = f"{load.arrivals_per_s:.3g} requests/s{ahead}; {need.replicas:.2f} replicas for {need.bound}"
    if abs(correction - 1) > _TOLD:
        text += (
            f", times {correction:.2f} as latencies were {'higher' if correction > 1 else 'lower'} than that explains"
        )
    if is_backlog:
        text += f"; {wanted:.2f} to work off what waits"
    return text


WORK: Final = StrategyType(
    summary="work to come, by learned speeds",
    make=lambda parameters, _: WorkStrategy(parameters),
    defaults=WorkParameters(),
    kept=LearnedState(LoadPeaks, peaks_to_save, restore_peaks),
)
