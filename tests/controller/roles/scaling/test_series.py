# SPDX-License-Identifier: Apache-2.0
"""What the series of a binding are made from is kept until the next look; its traffic is not."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from controller.autoscale.history import History, Sums
from controller.autoscale.situation import Situation
from controller.autoscale.traffic import Traffic
from controller.roles.scaling.metrics import ScalingMetrics
from controller.roles.scaling.series import Series
from controller.roles.scaling.telling import Looked


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
