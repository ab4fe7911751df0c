# SPDX-License-Identifier: Apache-2.0
"""llm-d's workload-variant-autoscaler, second form, as it was, in whole tokens, with its HPA.

Source: llm-d-workload-variant-autoscaler, ``internal/engines/analyzers/saturation_v2/analyzer.go`` and
``internal/engines/pipeline/cost_aware_optimizer.go``. What differs from our strategy ``tokens``: the gateways' queue
is guessed from bytes and means, engines that do not tell their cache are left out altogether, waiting requests without
a known length count nothing. Every 30 s.

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

from bench.autoscale.peers.peer import began, current_of, ready_reports, through_hpa, views
from bench.autoscale.peers.wva_v1 import hpa_of
from controller.autoscaler.decision.behavior import Past
from controller.autoscaler.decision.strategies.reading import kv_usage_of
from controller.autoscaler.decision.strategies.tokens import TokensParameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscaler.decision.situation import EngineReport, Situation

_WINDOW_S = 300.0
_BYTES_PER_TOKEN = 4
_ROLLING = 10


class Means(msgspec.Struct, frozen=True):
    """Tokens of a prompt and of an answer, and the share of prompts that engines had, of five minutes."""

    prompt: float = 0.0
    answer: float = 0.0
    hit_rate: float = 0.0


class V2Memory(msgspec.Struct, frozen=True):
    """``history``: observed compute bounds by length class. ``capacity``: of a replica, when engines last told."""

    past: Past
    history: Mapping[str, tuple[float, ...]] = {}
    capacity: int = 0


class Kind(msgspec.Struct, frozen=True):
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

    def desired(self, situation: Situation, memory: V2Memory | None) -> tuple[int, V2Memory | None]:
        """All that is missing at once, or all that is spare, through the HPA."""
        before = memory if memory is not None else V2Memory(began(situation))
        means, history = means_of(situation), dict(before.history)
        demand, capacities = self.told(ready_reports(situation), means, history)
        capacity = median(capacities) if capacities else before.capacity
        demand += queued_demand(situation, means)
        wanted = self.wanted(demand, capacity, current_of(situation), len(ready_reports(situation)))
        desired, past = through_hpa(hpa_of(self.window_s), before.past, wanted, situation)
        return desired, V2Memory(past, history, capacity)

    def desired_kinds(
        self, situation: Situation, memory: Mapping[str, V2Memory] | None
    ) -> tuple[Mapping[str, int], Mapping[str, V2Memory] | None]:
        """Kinds in the order of cost for capacity, each through an HPA of its own."""
        means = means_of(situation)
        demand, kinds, pasts = queued_demand(situation, means), [], {}
        for view in views(situation):
            (target,) = view.targets
            before = (memory or {}).get(target.name) or V2Memory(began(view))
            history = dict(before.history)
            load, capacities = self.told(ready_reports(view), means, history)
            capacity = median(capacities) if capacities else before.capacity or self._derived(means)
            demand += load
            ready = min(len(ready_reports(view)), current_of(view))
            kinds.append(
                Kind(target.name, target.spec.cost, capacity, current_of(view), ready, target.spec.max_replicas)
            )
            pasts[target.name] = V2Memory(before.past, history, capacity if capacities else before.capacity)
        wanted = self.wanted_kinds(demand, kinds)
        desired, after = {}, {}
        for view in views(situation):
            name = view.targets[0].name
            desired[name], past = through_hpa(hpa_of(self.window_s), pasts[name].past, wanted[name], view)
            after[name] = msgspec.structs.replace(pasts[name], past=past)
        return desired, after

    def told(
        self, reports: Iterable[EngineReport | None], means: Means, history: dict[str, tuple[float, ...]]
    ) -> tuple[float, list[int]]:
        """Tokens that engines have and will get from their own queues, and what each of them can hold."""
        demand, capacities = 0.0, []
        for report in reports:
            if report is None or report.kv_capacity_tokens <= 0:
                continue
            used, waiting = int((kv_usage_of(report) or 0.0) * report.kv_capacity_tokens), int(report.waiting or 0)
            demand += used + waiting * int(means.prompt)
            capacities.append(self.capacity_of(report, used, waiting, means, history))
        return demand, capacities

    def wanted_kinds(self, demand: float, kinds: Sequence[Kind]) -> Mapping[str, int]:
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

    def wanted(self, demand: float, capacity: int, current: int, ready: int) -> int:
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
        self, report: EngineReport, used: int, waiting: int, means: Means, history: dict[str, tuple[float, ...]]
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

    def _derived(self, means: Means) -> int:
        if means.answer <= 0:
            return 0
        steady = self.parameters.max_batched_tokens * means.answer / (means.prompt + means.answer)
        return int(min(steady, self.parameters.max_sequences) * (means.prompt + means.answer / 2))


def means_of(situation: Situation) -> Means:
    """Of what was answered."""
    rates = situation.traffic.rates(_WINDOW_S, situation.now_s)
    if rates is None or rates.finished <= 0:
        return Means()
    hit_rate = rates.cached_tokens / rates.prompt_tokens if rates.prompt_tokens > 0 else 0.0
    return Means(rates.prompt_tokens / rates.finished, rates.output_tokens / rates.finished, hit_rate)


def queued_demand(situation: Situation, means: Means) -> float:
    """Tokens that the queue of the gateways will need. Its bytes are those of whole prompts, cached parts included."""
    count, uncached = situation.waiting.requests, situation.waiting.tokens
    whole_bytes = _BYTES_PER_TOKEN * uncached / max(1 - means.hit_rate, 0.01)
    prompts = max(whole_bytes / _BYTES_PER_TOKEN, count * means.prompt) * (1 - means.hit_rate)
    return prompts + count * means.answer


def median(values: list[int]) -> int:
    """In whole tokens."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
