# SPDX-License-Identifier: Apache-2.0
"""Mean saturation of engines between two thresholds.

Source: the design of llm-d's workload-variant-autoscaler. An engine's saturation is ``max(kv_usage, min(waiting /
max_queue, 1))``; one without data counts as saturated, 1. A mean over ready engines above ``scale_up_threshold``
recommends ``scale_up_increment`` more, one below ``scale_down_threshold`` ``scale_down_increment`` fewer; on a
threshold and between them nothing changes.

Beyond that design: pending replicas count as idle in the mean that scales out. Otherwise each decision until they serve
would add another increment. The mean that scales in is of ready engines alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from controller.api.shared_types import Count, Utilization
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.strategies.engine_loads import (
    capacity_after_scale_in,
    is_load_unknown,
    kv_and_queue,
    pending_units,
    ready_loads,
    unmeasured_recommendation,
)
from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import EngineReport, Situation


class SaturationParameters(Spec, frozen=True):
    """The mean over engines of the larger of KV usage and waiting requests over a full queue. ``max_queue``: requests
    that fill a queue. ``scale_up_threshold``: above it, replicas are added. ``scale_down_threshold``: below it,
    replicas are removed. In between nothing changes. ``scale_up_increment``: replicas added. ``scale_down_increment``:
    replicas removed.
    """

    CEL: ClassVar = (
        CelRule(
            "self.scaleDownThreshold < self.scaleUpThreshold",
            "scaleDownThreshold must be below scaleUpThreshold; what lies between is the zone without changes",
        ),
    )

    max_queue: Count = 5
    scale_up_threshold: Utilization = 0.75
    scale_down_threshold: Utilization = 0.4
    scale_up_increment: Count = 1
    scale_down_increment: Count = 1


class SaturationStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: SaturationParameters = SaturationParameters()
    name: str = "Saturation"

    def recommend(self, situation: Situation, memory: None) -> tuple[Recommendation, None]:  # noqa: ARG002 - it needs none
        """An increment more, a decrement fewer, or the current replicas."""
        loads, current = ready_loads(situation), situation.current_replicas
        if nothing := unmeasured_recommendation(self.name, loads):
            return nothing, None
        units = sum(load.units for load in loads)
        saturated = sum(load.units * engine_saturation(load.report, self.parameters.max_queue) for load in loads)
        mean = saturated / units
        coming = saturated / (units + pending_units(situation))
        inputs = {"mean_saturation": mean, "with_pending": coming, "ready_replicas": units}
        up, down = self.parameters.scale_up_threshold, self.parameters.scale_down_threshold
        unknown = sum(is_load_unknown(load.report) for load in loads)
        message = f"mean saturation is {mean:.2f}" + (f" ({unknown} engines unknown, so full)" if unknown else "")
        if coming > up:
            desired = current + self.parameters.scale_up_increment
            return Recommendation(self.name, desired, f"{message}, above {up:g}", inputs), None
        if mean < down:
            desired = capacity_after_scale_in(situation, self.parameters.scale_down_increment)
            if unknown:
                return Recommendation(
                    self.name, None, f"{message}, below {down:g}, but not all are known", inputs
                ), None
            return Recommendation(self.name, desired, f"{message}, below {down:g}", inputs), None
        if mean > up:
            message = f"{message}, {coming:.2f} with replicas that are starting"
        return Recommendation(self.name, current, f"{message}, not outside {down:g} to {up:g}", inputs), None


def engine_saturation(report: EngineReport | None, max_queue: int) -> float:
    """0: idle, 1: full. What is unknown counts as full."""
    load = kv_and_queue(report)
    return 1.0 if load is None else max(load[0], min(load[1] / max_queue, 1.0))


SATURATION: Final = StrategyType(
    summary="caches and queues by thresholds",
    make=lambda parameters, _: SaturationStrategy(parameters),
    defaults=SaturationParameters(),
)
