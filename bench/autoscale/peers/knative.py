# SPDX-License-Identifier: Apache-2.0
"""Knative's KPA on requests in flight, with those that its activator would hold. It looks every 2 s."""

from __future__ import annotations

from bench.autoscale.peers.peer import StrategyPeer
from controller.autoscaler.decision.strategies.concurrency import ConcurrencyParameters, ConcurrencyStrategy


def kpa(*, target: float = 100.0, utilization: float = 0.7, period_s: float = 2.0) -> StrategyPeer:
    """``target``: requests in flight that one replica takes; ``utilization``: the share of it that is aimed at."""
    return StrategyPeer(ConcurrencyStrategy(ConcurrencyParameters(target, utilization)), None, period_s)
