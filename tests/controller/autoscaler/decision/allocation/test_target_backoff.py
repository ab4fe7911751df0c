# SPDX-License-Identifier: Apache-2.0
"""Targets whose replicas find no node, or do not start, are left out for a while that grows."""

from __future__ import annotations

from controller.api.autoscaling_binding import ScaleTarget
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.allocation.allocate import allocate
from controller.autoscaler.decision.allocation.target_backoff import BackoffSettings, TargetBackoff, update_backoff
from controller.autoscaler.decision.allocation.variants import AllocationRules, Variant, variant_from_target
from controller.autoscaler.decision.situation import Engine, EngineState, TargetSituation

SPEC = ScaleTarget(name="h100", ref=ObjectReference(kind="ModelInfer", name="llama"), max_replicas=8, min_replicas=0)
RULES = BackoffSettings(patience_s=120, first_s=300, factor=2, longest_s=1000)


def target(*engines: Engine, start_s: float = 60.0) -> TargetSituation:
    return TargetSituation(spec=SPEC, current=len(engines), engines=engines, start_s=start_s)


def stuck(created_at_s: float = 0.0) -> Engine:
    return Engine("stuck", EngineState.UNSCHEDULABLE, created_at_s)


def test_a_replica_may_take_the_usual_time() -> None:
    assert update_backoff(target(stuck()), TargetBackoff(), 120, RULES).reason_at(120) == ""
    found = update_backoff(target(stuck()), TargetBackoff(), 121, RULES)
    assert found.reason_at(121) == "1 replicas find no node, the oldest for 121 s"
    # an engine that takes ten minutes to start gets ten minutes
    assert update_backoff(target(stuck(), start_s=600), TargetBackoff(), 599, RULES).reason_at(599) == ""


def test_it_returns_by_itself_and_the_next_time_is_longer() -> None:
    first = update_backoff(target(stuck()), TargetBackoff(), 200, RULES)
    assert (first.reason_at(499) != "", first.reason_at(500)) == (True, "")
    # what is still there gets the same patience again
    assert update_backoff(target(stuck()), first, 600, RULES).reason_at(600) == ""
    second = update_backoff(target(stuck()), first, 621, RULES)
    assert (second.times, second.until_s) == (2, 621 + 600)
    third = update_backoff(target(stuck()), second, 1400, RULES)
    assert (third.times, third.until_s) == (3, 1400 + 1000)


def test_engines_that_do_not_start_are_the_same() -> None:
    failing = Engine("failing", EngineState.FAILING, 0.0)
    assert "do not start" in update_backoff(target(failing), TargetBackoff(), 200, RULES).reason_at(200)


def test_a_replica_that_became_ready_since_forgives() -> None:
    before = TargetBackoff(times=3, since_s=100, until_s=200, reason="x")
    ready = Engine("ready", EngineState.READY, 150.0, ready_at_s=250.0)
    assert update_backoff(target(ready), before, 300, RULES) == TargetBackoff()
    assert update_backoff(target(ready, stuck(created_at_s=250)), before, 400, RULES).times == 1
    old = Engine("old", EngineState.READY, 0.0, ready_at_s=50.0)
    assert update_backoff(target(old), before, 300, RULES) == before
    assert update_backoff(target(old), before, 1201, RULES) == TargetBackoff()


def test_its_replicas_without_a_node_do_not_count() -> None:
    ready = Engine("ready", EngineState.READY, 0.0, ready_at_s=50.0)
    blocked = TargetSituation(spec=SPEC, current=3, engines=(ready, stuck(), stuck()), blocked="no node")
    assert variant_from_target(blocked).attainable_replicas == 1
    other = Variant(name="l40s", most=9, cost=9.0)
    assert allocate(3.0, [variant_from_target(blocked), other], AllocationRules()).replicas == {"h100": 1, "l40s": 2}
