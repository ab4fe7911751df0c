# SPDX-License-Identifier: Apache-2.0
"""llm-d's workload-variant-autoscaler, first form, as it was: saturated engines out of the means, missing values 0.

Source: llm-d-workload-variant-autoscaler, ``internal/saturation/analyzer.go``. Every 30 s one replica more or fewer,
and nothing while anything is in transition. Its number goes through an HPA with AverageValue 1, 10 pods in 150 s; the
window is 0 in its sample and 240 s in its advice for production.

Several kinds of engine are judged together. One more is of the cheapest kind that reports, by the cost of a replica;
one fewer is of the most expensive kind that has more than one. So it never takes up a kind that has no replica yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.autoscale.peers.peer import began, current_of, merged, ready_reports, through_hpa, views, waiting_each
from controller.api.autoscaling import Behavior, ScalingRule, ScalingRules
from controller.autoscaler.decision.behavior import Past
from controller.autoscaler.decision.strategies.reading import kv_usage_of
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityParameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.autoscaler.decision.situation import EngineReport, Situation


class Analysis(msgspec.Struct, frozen=True):
    """``unsaturated``: engines below both thresholds; the spare room is theirs, in the mean."""

    unsaturated: int
    kv_spare: float
    queue_spare: float
    scale_up: bool
    scale_down_safe: bool


def as_wva_v1(loads: Sequence[tuple[float, float]], given: SpareCapacityParameters) -> Analysis:
    """What the original says of engines, each with its cache usage and its queue."""
    if not loads:
        return Analysis(0, 0.0, 0.0, scale_up=False, scale_down_safe=False)
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
    return Analysis(count, kv_spare, queue_spare, short, safe)


class V1Memory(msgspec.Struct, frozen=True):
    """``desired``: the last number that was exported."""

    past: Past
    desired: int


class WvaV1(msgspec.Struct, frozen=True):
    """``window_s``: stabilisation of the HPA, both ways."""

    parameters: SpareCapacityParameters = SpareCapacityParameters()
    window_s: int = 0
    period_s: float = 30.0

    def desired(self, situation: Situation, memory: V1Memory | None) -> tuple[int, V1Memory | None]:
        """One more, one fewer, or what there is; all through the HPA."""
        before = memory if memory is not None else V1Memory(began(situation), current_of(situation))
        wanted = self._wanted(situation, before.desired)
        desired, past = through_hpa(hpa_of(self.window_s), before.past, wanted, situation)
        return desired, V1Memory(past, wanted)

    def desired_kinds(
        self, situation: Situation, memory: Mapping[str, V1Memory] | None
    ) -> tuple[Mapping[str, int], Mapping[str, V1Memory] | None]:
        """One more or one fewer of one kind, each kind through an HPA of its own."""
        each = {one.targets[0].name: one for one in views(situation)}
        before = {name: (memory or {}).get(name) or V1Memory(began(one), current_of(one)) for name, one in each.items()}
        wanted = self._wanted_kinds(situation, {name: one.desired for name, one in before.items()})
        desired, after = {}, {}
        for name, one in each.items():
            desired[name], past = through_hpa(hpa_of(self.window_s), before[name].past, wanted[name], one)
            after[name] = V1Memory(past, wanted[name])
        return desired, after

    def _wanted_kinds(self, situation: Situation, exported: Mapping[str, int]) -> Mapping[str, int]:
        each = {one.targets[0].name: one for one in views(situation)}
        current = {name: current_of(one) for name, one in each.items()}
        kept = {name: exported[name] or current[name] for name in each}
        if kept != current or any(len(ready_reports(one)) != current[name] for name, one in each.items()):
            return kept
        costs = {name: one.targets[0].spec.cost for name, one in each.items()}
        found = self.analysis(merged(situation))
        if found.scale_up and (reporting := [name for name in each if current[name]]):
            cheapest = min(reporting, key=lambda name: (costs[name], name))
            return {**current, cheapest: current[cheapest] + 1}
        if found.scale_down_safe and (several := [name for name in each if current[name] > 1]):
            dearest = max(several, key=lambda name: (costs[name], name))
            return {**current, dearest: current[dearest] - 1}
        return current

    def _wanted(self, situation: Situation, exported: int) -> int:
        current, reports = current_of(situation), ready_reports(situation)
        if exported not in {0, current}:
            return exported
        if len(reports) != current or not reports:
            return current
        found = self.analysis(situation)
        if found.scale_up:
            return current + 1
        return current - 1 if found.scale_down_safe and current > 1 else current

    def analysis(self, situation: Situation) -> Analysis:
        """Of the first target's ready engines."""
        held = waiting_each(situation)
        return as_wva_v1([_load(one, held) for one in ready_reports(situation)], self.parameters)


def hpa_of(window_s: int) -> Behavior:
    """The HPA that its documentation puts behind it."""
    rules = ScalingRules(window_s, "Max", (ScalingRule("Pods", 10, 150),))
    return Behavior(rules, rules)


def _load(report: EngineReport | None, held: float) -> tuple[float, float]:
    if report is None:
        return 0.0, 0.0
    return kv_usage_of(report) or 0.0, (report.waiting or 0.0) + held
