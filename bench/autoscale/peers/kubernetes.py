# SPDX-License-Identifier: Apache-2.0
"""HorizontalPodAutoscaler v2 on running and waiting requests, as the guides of vLLM and others set it up.

Two metrics of all pods together with ``AverageValue`` targets; the larger answer counts. Default behaviour: out by
100 % or 4 pods in 15 s, in after 300 s. It looks every 15 s.
"""

from __future__ import annotations

from bench.autoscale.peers.peer import StrategyPeer
from controller.api.autoscaling import Behavior, MetricTarget
from controller.autoscaler.decision.strategies.target import TargetStrategy


def hpa(
    *, running: float, waiting: float | None = None, behavior: Behavior | None = None, period_s: float = 15.0
) -> StrategyPeer:
    """``running`` and ``waiting``: requests that one replica should have; without ``waiting`` all count as one."""
    if waiting is None:
        metrics: tuple[MetricTarget, ...] = (MetricTarget("requests_in_flight", running),)
    else:
        metrics = (MetricTarget("requests_running", running), MetricTarget("requests_queued", waiting))
    return StrategyPeer(TargetStrategy(metrics, careful=False), behavior or Behavior(), period_s)
