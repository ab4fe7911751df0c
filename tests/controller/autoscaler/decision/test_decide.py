# SPDX-License-Identifier: Apache-2.0
"""Decisions over hours of load: how steady they are, how fast, and what never happens."""

from __future__ import annotations

import pytest

from controller.api.autoscaling import LatencyObjective
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.fluid import Fluid

OBJECTIVE = LatencyObjective(ttft=Duration("2s"), tpot=Duration("40ms"))
POLICY = AutoscalingPolicySpec(objective=OBJECTIVE)


@pytest.mark.parametrize("rate", [5.0, 24.0, 100.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_constant_noisy_load_turns_round_at_most_twice_in_an_hour(rate: float, seed: int) -> None:
    deployment = Fluid(POLICY, lambda _: rate, replicas=2, seed=seed)
    deployment.run(3600)
    assert deployment.reversals() <= 2, deployment.history


def test_a_step_is_followed_in_one_order_within_a_quarter_of_a_minute() -> None:
    deployment = Fluid(POLICY, lambda at_s: 4.0 if at_s < 600 else 24.0, replicas=1)
    deployment.run(595)
    before = deployment.replicas
    deployment.run(20)
    # 24 requests a second are 2.0 engines' work; with 0.8 of their time for it, and room for noise, 3; what waits until
    # they are ready may ask for more
    assert before == 1
    assert deployment.replicas in {3, 4, 5}
