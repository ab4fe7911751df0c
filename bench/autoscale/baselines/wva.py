# SPDX-License-Identifier: Apache-2.0
"""llm-d's Workload Variant Autoscaler, first and second form, faults included.

Source: llm-d-workload-variant-autoscaler, ``internal/saturation/analyzer.go``. Every 30 s one replica more or fewer,
and nothing while anything is in transition. Its number goes through an HPA with AverageValue 1, 10 pods in 150 s; the
window is 0 in its sample and 240 s in its advice for production.

Several kinds of engine are evaluated together. One more is of the cheapest kind that reports, by the cost of a replica;
one fewer is of the most expensive kind that has more than one. So it never takes up a kind that has no replica yet.

Source: llm-d-workload-variant-autoscaler, ``internal/engines/analyzers/saturation_v2/analyzer.go`` and
``internal/engines/pipeline/cost_aware_optimizer.go``. Differences from our strategy ``tokens``: the gateways' queue is
guessed from bytes and means, engines that do not report their cache are left out altogether, waiting requests of
unknown length count nothing. Every 30 s.

Of several kinds of engine, the one with the least cost for its capacity gets all that is missing, up to its upper
bound, as in later releases (the first had no bound). What is spare goes from the kind with the most expensive replicas
first; the last replica of all is one of the cheapest kind. A kind that never had a replica is taken to hold what the
formula derives from the engine's arguments, without a bound by its memory, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from bench.autoscale.baselines.baseline import (
    apply_hpa,
    current_replicas,
    initial_history,
    merge_targets,
    ready_reports,
    split_by_target,
    waiting_per_engine,
)
from controller.api.autoscaling import Behavior, ScalingRule, ScalingRules
from controller.autoscaler.decision.behavior import ScalingHistory
from controller.autoscaler.decision.strategies.engine_loads import kv_cache_usage
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityParameters
from controller.autoscaler.decision.strategies.tokens import TokensParameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscaler.decision.situation import EngineReport, Situation

_WINDOW_S = 300.0
_BYTES_PER_TOKEN = 4
_ROLLING = 10


class SaturationAnalysis(msgspec.Struct, frozen=True):
    """``unsaturated``: engines below both thresholds; the spare room is theirs, in the mean."""

    unsaturated: int
    kv_spare: float
    queue_spare: float
    scale_up: bool
    scale_down_safe: bool


def analyze_saturation(loads: Sequence[tuple[float, float]], given: SpareCapacityParameters) -> SaturationAnalysis:
    """The engines as in the original, each with its cache usage and its queue."""
    if not loads:
        return SaturationAnalysis(0, 0.0, 0.0, scale_up=False, scale_down_safe=False)
    kv_limit, queue_limit = given.kv_cache_threshold, given.queue_length_threshold
    spare = [(kv_limit - kv, queue_limit - queue) for kv, queue in loads if kv < kv_limit and queue < queue_limit]
    count = len(spare)
    kv_spare = sum(kv for kv, _ in spare) / count if count else 0.0
    queue_spare = sum(queue for _, queue in spare) / count if count else 0.0
    safe = False
    if count >= 2:
        factor = count / (count - 1)
        kv_left = kv_limit - (kv_limit - kv_spare) * factor
        queue_left = queue_limit - (queue_limit - queue_spare) * factor
        safe = kv_left >= given.kv_spare_trigger and queue_left >= given.queue_spare_trigger
    short = kv_spare < given.kv_spare_trigger or queue_spare < given.queue_spare_trigger
    return SaturationAnalysis(count, kv_spare, queue_spare, short, safe)


class V1State(msgspec.Struct, frozen=True):
    """``desired``: the last number that was exported."""

    past: ScalingHistory
    desired: int


class WvaV1(msgspec.Struct, frozen=True):
    """``window_s``: stabilisation of the HPA, both ways."""

    parameters: SpareCapacityParameters = SpareCapacityParameters()
    window_s: int = 0
    period_s: float = 30.0

    def desired_replicas(self, situation: Situation, memory: V1State | None) -> tuple[int, V1State | None]:
        """One more, one fewer, or what there is; all through the HPA."""
        before = memory if memory is not None else V1State(initial_history(situation), current_replicas(situation))
        wanted = self._wanted(situation, before.desired)
        desired, past = apply_hpa(wva_hpa_behavior(self.window_s), before.past, wanted, situation)
        return desired, V1State(past, wanted)

    def desired_replicas_by_kind(
        self, situation: Situation, memory: Mapping[str, V1State] | None
    ) -> tuple[Mapping[str, int], Mapping[str, V1State] | None]:
        """One more or one fewer of one kind, each kind through an HPA of its own."""
        each = {one.targets[0].name: one for one in split_by_target(situation)}
        before = {
            name: (memory or {}).get(name) or V1State(initial_history(one), current_replicas(one))
            for name, one in each.items()
        }
        wanted = self._wanted_kinds(situation, {name: one.desired for name, one in before.items()})
        desired, after = {}, {}
        for name, one in each.items():
            desired[name], past = apply_hpa(wva_hpa_behavior(self.window_s), before[name].past, wanted[name], one)
            after[name] = V1State(past, wanted[name])
        return desired, after

    def _wanted_kinds(self, situation: Situation, exported: Mapping[str, int]) -> Mapping[str, int]:
        each = {one.targets[0].name: one for one in split_by_target(situation)}
        current = {name: current_replicas(one) for name, one in each.items()}
        kept = {name: exported[name] or current[name] for name in each}
        if kept != current or any(len(ready_reports(one)) != current[name] for name, one in each.items()):
            return kept
        costs = {name: one.targets[0].spec.cost for name, one in each.items()}
        found = self.analysis(merge_targets(situation))
        if found.scale_up and (reporting := [name for name in each if current[name]]):
            cheapest = min(reporting, key=lambda name: (costs[name], name))
            return {**current, cheapest: current[cheapest] + 1}
        if found.scale_down_safe and (several := [name for name in each if current[name] > 1]):
            dearest = max(several, key=lambda name: (costs[name], name))
            return {**current, dearest: current[dearest] - 1}
        return current

    def _wanted(self, situation: Situation, exported: int) -> int:
        current, reports = current_replicas(situation), ready_reports(situation)
        if exported not in {0, current}:
            return exported
        if len(reports) != current or not reports:
            return current
        found = self.analysis(situation)
        if found.scale_up:
            return current + 1
        return current - 1 if found.scale_down_safe and current > 1 else current

    def analysis(self, situation: Situation) -> SaturationAnalysis:
        """Of the first target's ready engines."""
        held = waiting_per_engine(situation)
        return analyze_saturation([_load(one, held) for one in ready_reports(situation)], self.parameters)


def wva_hpa_behavior(window_s: int) -> Behavior:
    """The HPA that its documentation puts behind it."""
    rules = ScalingRules(window_s, "Max", (ScalingRule("Pods", 10, 150),))
    return Behavior(rules, rules)


def _load(report: EngineReport | None, held: float) -> tuple[float, float]:
    if report is None:
        return 0.0, 0.0
    return kv_cache_usage(report) or 0.0, (report.waiting or 0.0) + held


class RequestMeans(msgspec.Struct, frozen=True):
    """Tokens of a prompt and of an answer, and the share of prompts that engines had, of five minutes."""

    prompt: float = 0.0
    answer: float = 0.0
    hit_rate: float = 0.0


class V2State(msgspec.Struct, frozen=True):
    """``history``: observed compute bounds by length class. ``capacity``: of a replica, at the engines' last report."""

    past: ScalingHistory
    history: Mapping[str, tuple[float, ...]] = {}
    capacity: int = 0


class VariantCapacity(msgspec.Struct, frozen=True):
    """One kind of engine. ``cost`` and ``capacity`` (tokens): of a replica. ``most``: its upper bound."""

    name: str
    cost: float
    capacity: int
    current: int
    ready: int
    most: int


class WvaV2(msgspec.Struct, frozen=True):
    """``window_s``: stabilisation of the HPA, both ways."""

    parameters: TokensParameters = TokensParameters()
    window_s: int = 0
    period_s: float = 30.0

    def desired_replicas(self, situation: Situation, memory: V2State | None) -> tuple[int, V2State | None]:
        """All that is missing at once, or all that is spare, through the HPA."""
        before = memory if memory is not None else V2State(initial_history(situation))
        means, history = request_means(situation), dict(before.history)
        demand, capacities = self.load_and_capacities(ready_reports(situation), means, history)
        capacity = median(capacities) if capacities else before.capacity
        demand += queued_demand(situation, means)
        wanted = self.optimised_replicas(demand, capacity, current_replicas(situation), len(ready_reports(situation)))
        desired, past = apply_hpa(wva_hpa_behavior(self.window_s), before.past, wanted, situation)
        return desired, V2State(past, history, capacity)

    def desired_replicas_by_kind(
        self, situation: Situation, memory: Mapping[str, V2State] | None
    ) -> tuple[Mapping[str, int], Mapping[str, V2State] | None]:
        """Kinds in the order of cost for capacity, each through an HPA of its own."""
        means = request_means(situation)
        demand, kinds, pasts = queued_demand(situation, means), [], {}
        for view in split_by_target(situation):
            (target,) = view.targets
            before = (memory or {}).get(target.name) or V2State(initial_history(view))
            history = dict(before.history)
            load, capacities = self.load_and_capacities(ready_reports(view), means, history)
            capacity = median(capacities) if capacities else before.capacity or self._derived(means)
            demand += load
            ready = min(len(ready_reports(view)), current_replicas(view))
            kinds.append(
                VariantCapacity(
                    target.name, target.spec.cost, capacity, current_replicas(view), ready, target.spec.max_replicas
                )
            )
            pasts[target.name] = V2State(before.past, history, capacity if capacities else before.capacity)
        wanted = self.optimised_replicas_by_kind(demand, kinds)
        desired, after = {}, {}
        for view in split_by_target(situation):
            name = view.targets[0].name
            desired[name], past = apply_hpa(wva_hpa_behavior(self.window_s), pasts[name].past, wanted[name], view)
            after[name] = msgspec.structs.replace(pasts[name], past=past)
        return desired, after

    def load_and_capacities(
        self, reports: Iterable[EngineReport | None], means: RequestMeans, history: dict[str, tuple[float, ...]]
    ) -> tuple[float, list[int]]:
        """Tokens that engines have and will get from their own queues, and what each of them can hold."""
        demand, capacities = 0.0, []
        for report in reports:
            if report is None or report.kv_capacity_tokens <= 0:
                continue
            used, waiting = int((kv_cache_usage(report) or 0.0) * report.kv_capacity_tokens), int(report.waiting or 0)
            demand += used + waiting * int(means.prompt)
            capacities.append(self.capacity_of(report, used, waiting, means, history))
        return demand, capacities

    def optimised_replicas_by_kind(self, demand: float, kinds: Sequence[VariantCapacity]) -> Mapping[str, int]:
        """The optimiser, for several variants."""
        known = [one for one in kinds if one.capacity > 0]
        required = demand / self.parameters.scale_up_utilization - sum(one.current * one.capacity for one in known)
        wanted = {one.name: one.current for one in kinds}
        if required > 0:
            for one in sorted(known, key=lambda one: one.cost / one.capacity):
                added = max(0, min(math.ceil(required / one.capacity), one.most - one.current))
                wanted[one.name] += added
                required -= added * one.capacity
                if required <= 0:
                    break
            return wanted
        spare = sum(one.ready * one.capacity for one in known) - demand / self.parameters.scale_down_utilization
        cheapest = min(kinds, key=lambda one: one.cost).name
        for one in sorted(known, key=lambda one: -one.cost):
            is_last = one.name == cheapest and not any(count for name, count in wanted.items() if name != cheapest)
            removed = max(0, min(math.floor(spare / one.capacity), one.current - is_last))
            wanted[one.name] -= removed
            spare -= removed * one.capacity
        return wanted

    def optimised_replicas(self, demand: float, capacity: int, current: int, ready: int) -> int:
        """The optimiser, for one variant; the last replica stays."""
        supply, anticipated = min(ready, current) * capacity, current * capacity
        if capacity <= 0:
            return current
        required = demand / self.parameters.scale_up_utilization - anticipated
        if required > 0:
            return current + math.ceil(required / capacity)
        spare = max(supply - demand / self.parameters.scale_down_utilization, 0.0)
        return current - min(math.floor(spare / capacity), max(current - 1, 0))

    def capacity_of(
        self, report: EngineReport, used: int, waiting: int, means: RequestMeans, history: dict[str, tuple[float, ...]]
    ) -> int:
        """The smaller of the memory bound and the compute bound."""
        memory_bound = int(report.kv_capacity_tokens * self.parameters.kv_cache_threshold)
        key = "short" if means.answer < 100 else "medium" if means.answer < 500 else "long"
        if waiting >= int(self.parameters.queue_length_threshold) and used > 0:
            history[key] = (*history.get(key, ()), float(used))[-_ROLLING:]
            return min(memory_bound, used)
        if observed := history.get(key):
            return min(memory_bound, int(sum(observed) / len(observed)))
        return min(memory_bound, self._derived(means) or memory_bound)

    def _derived(self, means: RequestMeans) -> int:
        if means.answer <= 0:
            return 0
        steady = self.parameters.max_batched_tokens * means.answer / (means.prompt + means.answer)
        return int(min(steady, self.parameters.max_sequences) * (means.prompt + means.answer / 2))


def request_means(situation: Situation) -> RequestMeans:
    """Of what was answered."""
    rates = situation.traffic.rates(_WINDOW_S, situation.now_s)
    if rates is None or rates.finished <= 0:
        return RequestMeans()
    hit_rate = rates.cached_tokens / rates.prompt_tokens if rates.prompt_tokens > 0 else 0.0
    return RequestMeans(rates.prompt_tokens / rates.finished, rates.output_tokens / rates.finished, hit_rate)


def queued_demand(situation: Situation, means: RequestMeans) -> float:
    """Tokens that the queue of the gateways will need. Its bytes are those of whole prompts, cached parts included."""
    count, uncached = situation.waiting.requests, situation.waiting.tokens
    whole_bytes = _BYTES_PER_TOKEN * uncached / max(1 - means.hit_rate, 0.01)
    prompts = max(whole_bytes / _BYTES_PER_TOKEN, count * means.prompt) * (1 - means.hit_rate)
    return prompts + count * means.answer


def median(values: list[int]) -> int:
    """In whole tokens."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
