# SPDX-License-Identifier: Apache-2.0
"""How long a signal may take to come, from the first look at a binding."""

from __future__ import annotations

from controller.autoscaler.decision.decision import Decision, StageDecision
from controller.autoscaler.reconciler.status import Awaiting, patience_s


def decision(*combined: float | None) -> Decision:
    stages = tuple(StageDecision("Both", (), one, ()) for one in combined)
    return Decision(binding="default/one", at_s=0.0, mode="Auto", targets=(), stages=stages)


def test_it_is_early_for_six_periods_and_three_seconds_at_least() -> None:
    assert (patience_s(5.0), patience_s(0.1)) == (30.0, 3.0)
    awaiting = Awaiting()

    def is_early(now_s: float, *combined: float | None, uid: str = "1") -> bool:
        return awaiting.is_early("default/one", uid, decision(*combined), period_s=5.0, now_s=now_s)

    assert is_early(100.0, None)
    assert is_early(129.0, 3.0, None)
    assert not is_early(129.0, 3.0)
    assert not is_early(130.0, None)
    # what is lost later is missing at once; a binding that was made anew begins anew
    assert not is_early(500.0, None)
    assert is_early(501.0, None, uid="2")
    awaiting.forget("default/one")
    assert is_early(900.0, None, uid="2")


def test_a_decision_without_stages_knows_nothing() -> None:
    assert Awaiting().is_early("default/one", "1", decision(), period_s=5.0, now_s=7.0)
