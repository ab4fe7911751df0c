# SPDX-License-Identifier: Apache-2.0
"""Two kinds of GPU at two prices in virtual time: what tiers save, and what they keep."""

from __future__ import annotations

import pytest

from bench.lab.gpu_tiers import POLICIES, afternoon_workload, run_policy


@pytest.mark.slow
def test_tiers_keep_objectives_at_less_than_the_dear_price() -> None:
    workload = afternoon_workload(phase_s=30.0)
    results = {name: run_policy(policy, workload) for name, policy in POLICIES.items()}
    dear, cheap, halves, tiers = results.values()
    # the load is such that neither alone is right
    assert dear.attainment[""] > 0.95
    assert cheap.attainment[""] < 0.5
    assert halves.attainment[""] < 0.8
    assert tiers.attainment[""] > 0.93
    assert tiers.cost_micros < 0.85 * dear.cost_micros
    # only the dear tier writes tokens as fast as premium chats want them; a batch never pays for it
    assert tiers.attainment["premium"] > 0.95
    assert tiers.attainment["batch"] == 1.0
    assert 0.25 < tiers.cheap < 0.9
