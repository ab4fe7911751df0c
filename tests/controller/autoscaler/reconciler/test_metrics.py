# SPDX-License-Identifier: Apache-2.0
"""What the series of a binding are made from is kept until the next look; its traffic is not."""

from __future__ import annotations

import gc
import weakref
from random import Random
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from controller.autoscaler.decision.decision import Decision, StageDecision
from controller.autoscaler.decision.situation import Situation
from controller.autoscaler.decision.traffic import Traffic, TrafficCounters, TrafficHistory
from controller.autoscaler.reconciler.binding_state import BindingState, new_binding_state
from controller.autoscaler.reconciler.metrics import ScalingMetrics, binding_series
from controller.autoscaler.reconciler.result import ReconciliationResult


def state_after(result: ReconciliationResult) -> BindingState:
    view: Any = SimpleNamespace(key="default/b", namespace="default")
    state = new_binding_state("1", Random(1), conflict_s=(0.2, 5.0))
    state.store_result(view, result)
    return state


def test_the_points_of_a_reconciliation_are_not_kept() -> None:
    points = TrafficHistory().points(1.0, TrafficCounters())
    held = weakref.ref(points)
    state = state_after(
        ReconciliationResult(now_s=1.0, situations=(Situation(now_s=1.0, targets=(), traffic=Traffic(points)),))
    )
    del points
    gc.collect()
    assert held() is None
    found = binding_series(state, lambda _: "m")
    assert found is not None
    assert found.at_s == 1.0


def test_a_stage_whose_targets_are_not_proven_the_cheapest_is_told() -> None:
    registry = CollectorRegistry()
    stages = (StageDecision("Prefill", (), 1.0, is_proven=False), StageDecision("Decode", (), 1.0))
    decision = Decision(binding="default/b", at_s=1.0, mode="Auto", targets=(), stages=stages)
    state = state_after(ReconciliationResult(now_s=1.0, decision=decision))
    ScalingMetrics(registry).set_series_source(
        lambda: [one for one in (binding_series(state, lambda _: "m"),) if one is not None]
    )
    labels = {"namespace": "default", "binding": "b"}
    found = [
        registry.get_sample_value("attache_scaling_unproven", {**labels, "stage": stage})
        for stage in ("Prefill", "Decode")
    ]
    assert found == [1.0, 0.0]
