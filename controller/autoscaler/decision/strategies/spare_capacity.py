# SPDX-License-Identifier: Apache-2.0
"""Room in caches and queues: one more when it runs short, one fewer when the rest keeps enough.

Source: llm-d's workload-variant-autoscaler, ``internal/saturation/analyzer.go`` (first form). Over N ready engines,
with the cache usage ``kv`` and the queue ``q`` of each::

    scale out if  kv_cache_threshold - mean(kv) < kv_spare_trigger
                  or queue_length_threshold - mean(q) < queue_spare_trigger
    scale in if   N >= 2, and with mean(kv) * N/(N-1) and mean(q) * N/(N-1) both differences reach their triggers

What is different from the original, each for a fault that its users met:

- Saturated engines are in the means. The original leaves them out, and takes an engine away beside one that is full.
- An engine without data counts as saturated. The original reads missing values as 0.
- Replicas that do not serve yet count as empty for scaling out, instead of forbidding every change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.shared_types import Positive, Utilization
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.strategies.engine_loads import (
    WeightedEngineLoad,
    capacity_after_scale_in,
    is_load_unknown,
    kv_and_queue,
    pending_units,
    ready_loads,
    unmeasured_recommendation,
)
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation


class SpareCapacityParameters(Spec, frozen=True):
    """llm-d's workload-variant-autoscaler, first form. ``kv_cache_threshold`` and ``queue_length_threshold``: an engine
    at one of them is saturated. ``kv_spare_trigger`` and ``queue_spare_trigger``: with less spare capacity than this on
    average, one replica is added; one is removed if the others keep as much.
    """

    kv_cache_threshold: Utilization = 0.8
    queue_length_threshold: Positive = 5.0
    kv_spare_trigger: Utilization = 0.1
    queue_spare_trigger: Positive = 3.0


class SpareCapacityStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: SpareCapacityParameters = SpareCapacityParameters()
    name: str = "SpareCapacity"

    def recommend(self, situation: Situation, memory: None) -> tuple[Recommendation, None]:  # noqa: ARG002 - it needs none
        """One more, one fewer, or the current replicas."""
        loads, current = ready_loads(situation), situation.current_replicas
        if nothing := unmeasured_recommendation(self.name, loads):
            return nothing, None
        units = sum(load.units for load in loads)
        kv, queue = self._sums(loads)
        with_pending = units + pending_units(situation)
        kv_spare, queue_spare = self._spare(kv / with_pending, queue / with_pending)
        inputs = {"kv_spare": kv_spare, "queue_spare": queue_spare, "ready_replicas": units}
        message = f"{kv_spare:.2f} of a cache and {queue_spare:.1f} places in queue are free in the mean"
        if self._is_short(kv_spare, queue_spare):
            return Recommendation(self.name, current + 1, f"{message}, too little", inputs), None
        if units < 2:
            return Recommendation(self.name, current, f"{message}, enough; the last engine stays", inputs), None
        kv_left, queue_left = self._spare(kv / (units - 1), queue / (units - 1))
        left = f"{kv_left:.2f} and {queue_left:.1f} without one engine"
        inputs |= {"kv_spare_after": kv_left, "queue_spare_after": queue_left}
        if self._is_short(kv_left, queue_left):
            return Recommendation(self.name, current, f"{message}, enough; {left} would be too little", inputs), None
        if unknown := [load.name for load in loads if is_load_unknown(load.report)]:
            return Recommendation(self.name, None, f"{message}, but {unknown[0]} is unknown", inputs), None
        return Recommendation(self.name, capacity_after_scale_in(situation), f"{message}; still {left}", inputs), None

    def _sums(self, loads: tuple[WeightedEngineLoad, ...]) -> tuple[float, float]:
        full = self.parameters.kv_cache_threshold, self.parameters.queue_length_threshold
        known = [(load.units, kv_and_queue(load.report) or full) for load in loads]
        return sum(units * one[0] for units, one in known), sum(units * one[1] for units, one in known)

    def _spare(self, kv: float, queue: float) -> tuple[float, float]:
        return self.parameters.kv_cache_threshold - kv, self.parameters.queue_length_threshold - queue

    def _is_short(self, kv_spare: float, queue_spare: float) -> bool:
        return kv_spare < self.parameters.kv_spare_trigger or queue_spare < self.parameters.queue_spare_trigger


SPARE_CAPACITY: Final = StrategyType(
    summary="room in caches and queues",
    make=lambda parameters, _: SpareCapacityStrategy(parameters),
    defaults=SpareCapacityParameters(),
)
