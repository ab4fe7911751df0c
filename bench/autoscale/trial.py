# SPDX-License-Identifier: Apache-2.0
"""One trial of the lab: a policy at one setting of its knob on one load with one seed; its measures; all trials."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.load_profiles import DataSplit, find_load_profile, relative_capacities
from bench.autoscale.policies import (
    ScalerSetup,
    policy_named,
    required_engines,
    scaled_objective,
    with_second_variant_policies,
    work_by_second,
)
from bench.autoscale.simulated_fleet import Fleet, FleetCost, fleet_cost
from bench.reporting.request_results import Distribution, distribution
from controller.autoscaler.decision.merged_gateway_reports import SignalAggregator
from controller.autoscaler.decision.replica_performance import estimate_speed
from controller.autoscaler.decision.situation import Engine, EngineState, Situation, TargetSituation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from bench.autoscale.load_profiles import LoadProfile
    from bench.autoscale.policies import Scaler
    from bench.autoscale.simulated_fleet import Replica
    from bench.lab.measures import LatencyObjective
    from bench.reporting.request_results import RequestResult
    from bench.workload.sessions import Workload
    from controller.api import autoscaling
    from controller.autoscaler.decision.gateway_reports import EngineSignal
    from extproc.api.status_page_contents import EngineDemand, ProcessDemand

# In a namespace of its own, with the ModelServer.
_GATEWAY: Final = "default/lab"
WINDOWS: Final = 12
# Interval at which the core's demand is read.
_DEMAND_S: Final = 1.0
# The share of engines' time at which a fleet counts as overloaded.
_FULL: Final = 1.0
# The share of engines' time that the load of the first minute takes of the initial fleet.
_AT_FIRST: Final = 0.8
# Scalers observe the load for so long before their decisions are applied and measured: none begins with empty windows.
WARM_UP_S: Final = 60.0
# The attainment that operators require; of the settings that reach it in tuning, the cheapest is taken.
GOAL: Final = 0.95


class SituationBuilder:
    """One ModelServer with one gateway, and the fleet as it is."""

    def __init__(self, objective: autoscaling.LatencyObjective, *, min_replicas: int) -> None:
        """``min_replicas``: of the first target."""
        self._objective = objective
        self._min_replicas = min_replicas
        self._signals = SignalAggregator()
        self._signals_at_s = 0.0
        self._servers: tuple[str, ...] = ()
        self._engines: Mapping[str, EngineDemand] = {}

    def ingest(self, demand: ProcessDemand, now: float) -> None:
        """A page of the core."""
        if not self._servers:
            self._servers = tuple(demand.servers)
            self._signals.set_subscriptions(self._servers, now)
            self._signals.set_gateways([_GATEWAY], now)
        self._signals.ingest(_GATEWAY, demand, now)
        self._signals.record_traffic_points(now)
        self._signals_at_s = now
        self._engines = demand.servers[self._servers[0]].engines

    def is_starved(self, fleet: Fleet) -> bool:
        """Whether a request waits and no replica is there or ordered."""
        waiting = self._signals.merged_signals(self._servers, self._signals_at_s).waiting
        return waiting.requests > 0 and not any(one.counts_as_ordered for one in fleet.replicas)

    def situation(self, fleet: Fleet, now: float) -> Situation:
        """At an instant after the first page."""
        known = self._signals.merged_signals(self._servers, now)
        targets = []
        for number, variant in enumerate(fleet.variants.values()):
            spec = variant.scale_target(0 if number else self._min_replicas)
            mine = [one for one in fleet.replicas if one.target == variant.name and one.gone_at_s is None]
            said = [self._engines[one.address] for one in mine if one.address in self._engines]
            targets.append(
                TargetSituation(
                    spec=spec,
                    current=fleet.ordered_replicas[variant.name],
                    engines=tuple(_engines(mine, known.engines)),
                    speed=estimate_speed(spec.capacity, said),
                    start_s=variant.start_s,
                )
            )
        return Situation(
            now_s=now,
            targets=tuple(targets),
            traffic=known.traffic,
            waiting=known.waiting,
            freshness=known.freshness,
            objective=self._objective,
        )


def _engines(replicas: Iterable[Replica], said: Mapping[str, EngineSignal]) -> Iterable[Engine]:
    for one in replicas:
        state = EngineState.STARTING if one.is_starting else EngineState.READY
        if one.draining_at_s is not None:
            state = EngineState.DRAINING
        signal = said.get(one.address)
        report = None if signal is None else signal.report
        yield Engine(one.name, state, one.created_at_s, one.ready_at_s, report)


class WindowAttainment(msgspec.Struct, frozen=True, array_like=True):
    """``due``: requests of a part of the run. ``met``: those of them that met both targets."""

    due: int
    met: int


def attainment_by_window(
    due_at_s: Iterable[float],
    results: Iterable[RequestResult],
    objective: LatencyObjective,
    *,
    since_s: float,
    until_s: float,
) -> list[WindowAttainment]:
    """Parts of equal length, so that those of two policies have the same requests. ``due_at_s``: of all requests: one
    that has no result is lost, and missed. Those before ``since_s`` do not count.
    """
    due, met = [0] * WINDOWS, [0] * WINDOWS

    def window(at_s: float) -> int:
        return min(WINDOWS - 1, int(WINDOWS * (at_s - since_s) / (until_s - since_s)))

    for at_s in due_at_s:
        if at_s >= since_s:
            due[window(at_s)] += 1
    for one in results:
        if one.due_at_s < since_s:
            continue
        is_met = not one.error and one.ttft_s <= objective.ttft_s and one.tpot_s <= objective.tpot_s
        met[window(one.due_at_s)] += is_met
    return [WindowAttainment(*both) for both in zip(due, met, strict=True)]


def direction_changes(totals: Sequence[float]) -> int:
    """How often orders changed direction. ``totals``: after each change."""
    directions = [later > before for before, later in itertools.pairwise(totals) if later != before]
    return sum(one != other for one, other in itertools.pairwise(directions))


def overload_to_order_s(need: Sequence[float], orders: Sequence[tuple[float, float]]) -> list[float]:
    """For each time in which more was needed than was ordered: how long until the next larger order.

    ``need``: by second; the first second is not judged. ``orders``: instants and totals, in the same unit, by time. A
    time that ends without an order is left out: the load has gone by itself.
    """
    delays: list[float] = []
    began_at_s: float | None = None
    index, ordered = 0, orders[0][1]
    for second, wanted in enumerate(need):
        while index + 1 < len(orders) and orders[index + 1][0] <= second:
            index += 1
            at_s, total = orders[index]
            if total > ordered and began_at_s is not None:
                delays.append(max(0.0, at_s - began_at_s))
                began_at_s = None
            ordered = total
        if wanted <= ordered:
            began_at_s = None
        elif began_at_s is None:
            began_at_s = float(second)
    return delays


class Trial(msgspec.Struct, frozen=True):
    """``knob``: the value of the policy's knob. ``period_s``: between two decisions; 0: the policy's own. ``start_s``:
    of all replicas; 0: as the load's variants have it. ``duration_s``: of a shorter excerpt; 0: all of the load.
    """

    load: str
    half: DataSplit
    policy: str
    knob: float
    seed: int
    period_s: float = 5.0
    start_s: float = 0.0
    duration_s: float = 0.0

    @property
    def conditions(self) -> Trial:
        """What policies under comparison have in common."""
        return msgspec.structs.replace(self, policy="", knob=0.0)


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """``windows``: of the run, by time. ``refused``: requests that got an error. ``lost``: those without an answer;
    both count as missed. ``to_order_s``: from each overload to the next larger order. ``cpu_s``: what the trial took to
    run. ``code``: the fingerprint of the code that made it; empty if unknown.
    """

    trial: Trial
    requests: int
    refused: int
    lost: int
    windows: list[WindowAttainment]
    ttft_s: Distribution
    tpot_s: Distribution
    bill: FleetCost
    reversals: int
    orders: int
    to_order_s: list[float]
    hours: float
    cpu_s: float
    code: str = ""

    @property
    def attainment(self) -> float:
        """The share of all requests that met both targets."""
        return sum(one.met for one in self.windows) / max(1, self.requests)


def load_of(trial: Trial) -> LoadProfile:
    """The trial's load."""
    load = find_load_profile(trial.load)
    if trial.duration_s:
        load = msgspec.structs.replace(load, duration_s=trial.duration_s)
    if trial.start_s:
        variants = tuple(msgspec.structs.replace(one, start_s=trial.start_s) for one in load.variants)
        load = msgspec.structs.replace(load, variants=variants)
    return load


def with_first_variant(load: LoadProfile, kind: int) -> LoadProfile:
    """The load with another variant as the first: the one that the fleet begins with. Its requests stay."""
    if not kind:
        return load
    first, others = load.variants[kind], load.variants[:kind] + load.variants[kind + 1 :]
    return msgspec.structs.replace(load, variants=(first, *others))


def run_trial(trial: Trial, traces: Path) -> TrialResult:
    """Raises TraceInvalid or PolicyUnknown. ``traces``: the directory with trace files."""
    return run_trial_with_load(trial, load_of(trial), traces)


def run_trial_with_load(trial: Trial, load: LoadProfile, traces: Path) -> TrialResult:
    """The same with a load that need not be among those with names. Raises TraceInvalid or PolicyUnknown."""
    began = time.process_time()
    policy = policy_named(trial.policy)
    workload = load.workload(trial.half, trial.seed, traces)
    load = with_first_variant(load, policy.kind)
    period_s = trial.period_s or policy.native_period_s
    work = work_by_second(load, workload)
    need = [float(one) for one in required_engines(work, _FULL)]
    least, initial = load.min_replicas if policy.has_zero else 1, initial_replicas(work)
    setup = ScalerSetup(load, workload, trial.knob, period_s, least, initial)
    fleet = Fleet(load.variants, {load.variants[0].name: initial}, seed=trial.seed)
    _drive(fleet, policy.make(setup), setup)
    results = fleet.simulation.run(workload)
    return _result(trial, load, workload, results, fleet, need, time.process_time() - began)


def initial_replicas(work: Sequence[float]) -> int:
    """The initial fleet. ``work``: engines' worth by second."""
    return max(1, math.ceil(sum(work[: int(WARM_UP_S)]) / WARM_UP_S / _AT_FIRST))


def _drive(fleet: Fleet, scaler: Scaler, setup: ScalerSetup) -> None:
    """Plan the ticks: pages each second, decisions each period, until the load ends. What still waits then is served by
    the fleet as it is.
    """
    pictures = SituationBuilder(scaled_objective(setup), min_replicas=setup.min_replicas)
    load = setup.load
    next_at_s = 0.0

    def tick(now: float) -> None:
        nonlocal next_at_s
        fleet.remove_drained(now)
        pictures.ingest(fleet.simulation.core.demand(now), now)
        if now >= next_at_s or (not setup.min_replicas and pictures.is_starved(fleet)):
            next_at_s = max(next_at_s, now + setup.period_s)
            desired = scaler.decide(pictures.situation(fleet, now))
            if now >= WARM_UP_S:
                fleet.scale_to(desired, now)
        if now + _DEMAND_S < load.duration_s:
            fleet.simulation.schedule_at(now + _DEMAND_S, tick)

    fleet.simulation.schedule_at(0.0, tick)


def _result(
    trial: Trial,
    load: LoadProfile,
    workload: Workload,
    results: Sequence[RequestResult],
    fleet: Fleet,
    need: list[float],
    cpu_s: float,
) -> TrialResult:
    counted = [one for one in results if one.due_at_s >= WARM_UP_S]
    good = [one for one in counted if not one.error]
    due_at_s = [at_s for session in workload.sessions if (at_s := session.begins_at_s) >= WARM_UP_S]
    worth = relative_capacities(load)
    totals = [(one.at_s, sum(worth[name] * count for name, count in one.desired.items())) for one in fleet.orders]
    return TrialResult(
        trial=trial,
        requests=len(due_at_s),
        refused=len(counted) - len(good),
        lost=len(due_at_s) - len(counted),
        windows=attainment_by_window(due_at_s, counted, load.objective, since_s=WARM_UP_S, until_s=load.duration_s),
        ttft_s=distribution(one.ttft_s for one in good),
        tpot_s=distribution(one.tpot_s for one in good if one.output_tokens > 1),
        bill=fleet_cost(fleet.replicas, WARM_UP_S, load.duration_s),
        reversals=direction_changes([total for _, total in totals]),
        orders=len(totals) - 1,
        to_order_s=overload_to_order_s([0.0] * int(WARM_UP_S) + need[int(WARM_UP_S) :], totals),
        hours=(load.duration_s - WARM_UP_S) / 3600,
        cpu_s=round(cpu_s, 2),
    )


class ComparisonPlan(msgspec.Struct, frozen=True):
    """What to compare. ``period_s``: between two decisions, of every policy; 0: each has its own. ``seeds``: of the
    held halves; tuning takes half as many, rounded up. ``start_s`` and ``duration_s``: as in Trial.
    """

    loads: Sequence[str]
    policies: Sequence[str]
    seeds: int = 2
    period_s: float = 5.0
    start_s: float = 0.0
    duration_s: float = 0.0

    def trials(self, half: DataSplit) -> list[Trial]:
        """Every policy at every setting on every load."""
        seeds = self.seeds if half is DataSplit.HELD else -(-self.seeds // 2)
        return [
            Trial(load, half, policy, knob, seed, self.period_s, self.start_s, self.duration_s)
            for seed in range(seeds)
            for load in self.loads
            for policy in with_second_variant_policies(self.policies, len(find_load_profile(load).variants))
            for knob in policy_named(policy).grid
        ]


class TunedPolicy(msgspec.Struct, frozen=True):
    """What tuning has found for a policy: ``knob``, of ``tried`` settings. ``attainment`` and ``cost``: its means over
    the tuning halves of all loads; the cost is of an hour.
    """

    policy: str
    knob: float
    attainment: float
    cost: float
    tried: int


def tune_policies(results: Iterable[TrialResult], goal: float = GOAL) -> dict[str, TunedPolicy]:
    """For each policy the cheapest setting that attains the goal in the mean of the loads; if none does, the one that
    attains most. Settings that were run on fewer loads or seeds than others of the policy are left out.
    """
    by_setting: Mapping[str, dict[float, list[TrialResult]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        by_setting[one.trial.policy][one.trial.knob].append(one)
    found = {}
    for policy, settings in by_setting.items():
        most = max(len(each) for each in settings.values())
        whole = {knob: each for knob, each in settings.items() if len(each) == most}
        means = [_mean(policy, knob, each, len(whole)) for knob, each in whole.items()]
        good = [one for one in means if one.attainment >= goal]
        found[policy] = (
            min(good, key=lambda one: one.cost) if good else max(means, key=lambda one: (one.attainment, -one.cost))
        )
    return found


def _mean(policy: str, knob: float, results: Sequence[TrialResult], tried: int) -> TunedPolicy:
    count = len(results)
    attainment = sum(one.attainment for one in results) / count
    return TunedPolicy(policy, knob, attainment, sum(one.bill.cost / one.hours for one in results) / count, tried)
