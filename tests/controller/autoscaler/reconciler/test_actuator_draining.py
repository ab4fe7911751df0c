# SPDX-License-Identifier: Apache-2.0
"""Whom a scale-in takes, and when: marked first, and not before they have nothing left."""

from __future__ import annotations

from controller.api.drain_mark import DELETION_COST, DRAINING, HEARD_S
from controller.autoscaler.decision.situation import EngineReport
from controller.autoscaler.reconciler.actuator import choose_pods_to_remove, drain_mark_removals, drain_pods
from controller.kube.pod_views import PodView

NOW_S = 1_800_000_000.0


def pod(name: str, *, ready: bool = True, since_s: float | None = None, created_at_s: float = 0.0) -> PodView:
    return PodView(
        key=f"default/{name}",
        name=name,
        uid=name,
        labels={},
        ip=name,
        created_at_s=created_at_s,
        draining_at_s=since_s,
        deletion_cost=None if since_s is None else "-1000000",
        is_ready=ready,
    )


def busy(**in_flight: int) -> dict[str, EngineReport]:
    return {name: EngineReport(at_s=NOW_S, in_flight=count) for name, count in in_flight.items()}


def test_the_least_busy_go_and_what_does_not_serve_before_them() -> None:
    pods = [pod("a"), pod("b"), pod("c", ready=False), pod("d")]
    found = choose_pods_to_remove(pods, 2, busy(a=3, b=1, d=2), is_ordered=False)
    assert [one.name for one in found] == ["c", "b"]


def test_an_engine_of_which_nobody_knows_goes_last() -> None:
    assert [one.name for one in choose_pods_to_remove([pod("a"), pod("b")], 1, busy(b=9), is_ordered=False)] == ["b"]


def test_a_stateful_set_loses_the_highest_ordinals() -> None:
    pods = [pod(f"x-{number}") for number in (0, 2, 10, 9)]
    assert [one.name for one in choose_pods_to_remove(pods, 2, {}, is_ordered=True)] == ["x-10", "x-9"]


def test_who_goes_is_marked_first_and_sorted_to_the_front() -> None:
    plan = drain_pods([pod("a"), pod("b")], 1, busy(a=3, b=0), is_ordered=False, now_s=NOW_S, drain_s=60.0)
    assert [(one.key, sorted(one.annotations)) for one in plan.marks] == [
        ("default/b", sorted([DRAINING, DELETION_COST]))
    ]
    assert (plan.may_go, plan.requeue_at_s) == (False, NOW_S + HEARD_S)


def test_who_is_idle_goes_once_the_mark_was_heard() -> None:
    def plan(since_s: float, in_flight: int) -> bool:
        pods = [pod("a"), pod("b", since_s=NOW_S - since_s)]
        return drain_pods(pods, 1, busy(a=3, b=in_flight), is_ordered=False, now_s=NOW_S, drain_s=60.0).may_go

    assert not plan(HEARD_S - 1, 0)
    assert plan(HEARD_S + 1, 0)
    assert not plan(HEARD_S + 1, 1)
    assert plan(61.0, 1)


def test_an_engine_that_nobody_reports_is_waited_for() -> None:
    pods = [pod("a"), pod("b", since_s=NOW_S - 30)]
    plan = drain_pods(pods, 1, busy(a=3), is_ordered=False, now_s=NOW_S, drain_s=60.0)
    assert (plan.may_go, plan.waits_for) == (False, ("b",))


def test_a_report_of_before_the_mark_says_nothing() -> None:
    pods = [pod("a"), pod("b", since_s=NOW_S - 30)]
    old = {"b": EngineReport(at_s=NOW_S - 29)}
    assert not drain_pods(pods, 1, old, is_ordered=False, now_s=NOW_S, drain_s=60.0).may_go


def test_marks_are_taken_off_who_stays() -> None:
    pods = [pod("a"), pod("b", since_s=NOW_S - 30)]
    assert [(one.key, one.annotations) for one in drain_mark_removals(pods)] == [
        ("default/b", {DRAINING: None, DELETION_COST: None})
    ]
    plan = drain_pods(pods, 1, busy(a=0, b=5), is_ordered=True, now_s=NOW_S, drain_s=60.0)
    assert plan.marks == ()
    ordered = [pod("x-0", since_s=NOW_S - 30), pod("x-1")]
    plan = drain_pods(ordered, 1, {}, is_ordered=True, now_s=NOW_S, drain_s=60.0)
    assert [one.key for one in plan.marks] == ["default/x-0", "default/x-1"]


def test_nothing_is_waited_for_where_the_policy_says_so() -> None:
    plan = drain_pods([pod("a"), pod("b")], 1, busy(a=1, b=2), is_ordered=False, now_s=NOW_S, drain_s=0.0)
    assert plan.may_go
    assert [(one.key, one.annotations) for one in plan.marks] == [("default/a", {DELETION_COST: "-1000000"})]
