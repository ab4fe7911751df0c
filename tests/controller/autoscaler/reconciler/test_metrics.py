# SPDX-License-Identifier: Apache-2.0
"""What the series of a binding are made from is kept until the next look; its traffic is not."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from controller.autoscaler.decision.decision import Decision, StageDecision
from controller.autoscaler.decision.situation import Situation
from controller.autoscaler.decision.traffic import History, Sums, Traffic
from controller.autoscaler.reconciler.metrics import ScalingMetrics, Series
from controller.autoscaler.reconciler.status import Looked


def test_the_points_of_a_look_are_not_kept() -> None:
    series = Series(ScalingMetrics(CollectorRegistry()), lambda _: "m")
    view: Any = SimpleNamespace(key="default/b", namespace="default")
    points = History().points(1.0, Sums())
    held = weakref.ref(points)
    series.put(view, Looked(now_s=1.0, situations=(Situation(now_s=1.0, targets=(), traffic=Traffic(points)),)))
    del points
    gc.collect()
    assert held() is None
    assert [one.at_s for one in series.made()] == [1.0]


def test_a_stage_whose_targets_are_not_proven_the_cheapest_is_told() -> None:
    registry = CollectorRegistry()
    series = Series(ScalingMetrics(registry), lambda _: "m")
    view: Any = SimpleNamespace(key="default/b", namespace="default")
    stages = (StageDecision("Prefill", (), 1.0, is_proven=False), StageDecision("Decode", (), 1.0))
    decision = Decision(binding=view.key, at_s=1.0, mode="Auto", targets=(), stages=stages)
    series.put(view, Looked(now_s=1.0, decision=decision))
    labels = {"namespace": "default", "binding": "b"}
    found = [
        registry.get_sample_value("attache_scaling_unproven", {**labels, "stage": stage})
        for stage in ("Prefill", "Decode")
    ]
    assert found == [1.0, 0.0]
