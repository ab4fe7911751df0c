# SPDX-License-Identifier: Apache-2.0
"""Targets whose replicas find no node, or do not start, are left out for a while that grows."""

from __future__ import annotations

from controller.api.autoscaling_binding import ScaleTarget
from controller.api.common import ObjectReference
from controller.autoscaler.decision.allocation.allocate import allocate
from controller.autoscaler.decision.allocation.blockage import BackOff, Blockage, update_blockage
from controller.autoscaler.decision.allocation.variants import Rules, Variant, variant_of
from controller.autoscaler.decision.situation import Engine, EngineState, TargetSituation

SPEC = ScaleTarget(name="h100", ref=ObjectReference(kind="ModelInfer", name="llama"), max_replicas=8, min_replicas=0)
RULES = BackOff(patience_s=120, first_s=300, factor=2, longest_s=1000)


def target(*engines: Engine, start_s: float = 60.0) -> TargetSituation:
    return TargetSituation(spec=SPEC, current=len(engines), engines=engines, start_s=start_s)


def stuck(created_at_s: float = 0.0) -> Engine:
    return Engine("stuck", EngineState.UNSCHEDULABLE, created_at_s)


def test_a_replica_may_take_the_usual_time() -> None:
    assert update_blockage(target(stuck()), Blockage(), 120, RULES).at(120) == ""
    found = update_blockage(target(stuck()), Blockage(), 121, RULES)
    assert found.at(121) == "1 replicas find no node, the oldest for 121 s"
    # an engine that takes ten minutes to start gets ten minutes
    assert update_blockage(target(stuck(), start_s=600), Blockage(), 599, RULES).at(599) == ""


def test_it_returns_by_itself_and_the_next_time_is_longer() -> None:
    first = update_blockage(target(stuck()), Blockage(), 200, RULES)
    assert (first.at(499) != "", first.at(500)) == (True, "")
    # what is still there gets the same patience again
    assert update_blockage(target(stuck()), first, 600, RULES).at(600) == ""
    second = update_blockage(target(stuck()), first, 621, RULES)
    assert (second.times, second.until_s) == (2, 621 + 600)
    third = update_blockage(target(stuck()), second, 1400, RULES)
    assert (third.times, third.until_s) == (3, 1400 + 1000)


def test_engines_that_do_not_start_are_the_same() -> None:
    failing = Engine("failing", EngineState.FAILING, 0.0)
    assert "do not start" in update_blockage(target(failing), Blockage(), 200, RULES).at(200)


def test_a_replica_that_became_ready_since_forgives() -> None:
    before = Blockage(times=3, since_s=100, until_s=200, reason="x")
    ready = Engine("ready", EngineState.READY, 150.0, ready_at_s=250.0)
    assert update_blockage(target(ready), before, 300, RULES) == Blockage()
    assert update_blockage(target(ready, stuck(created_at_s=250)), before, 400, RULES).times == 1
    old = Engine("old", EngineState.READY, 0.0, ready_at_s=50.0)
    assert update_blockage(target(old), before, 300, RULES) == before
    assert update_blockage(target(old), before, 1201, RULES) == Blockage()


def test_its_replicas_without_a_node_do_not_count() -> None:
    ready = Engine("ready", EngineState.READY, 0.0, ready_at_s=50.0)
    blocked = TargetSituation(spec=SPEC, current=3, engines=(ready, stuck(), stuck()), blocked="no node")
    assert variant_of(blocked).attainable_replicas == 1
    other = Variant(name="l40s", most=9, cost=9.0)
    assert allocate(3.0, [variant_of(blocked), other], Rules()).replicas == {"h100": 1, "l40s": 2}
