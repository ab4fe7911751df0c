# SPDX-License-Identifier: Apache-2.0
"""A binding's status: news, and nothing that changes with every reconciliation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.api.autoscaling_binding import ScaleTarget
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decision import AppliedRule, Decision, Recommendation, StageDecision, TargetDecision
from controller.autoscaler.decision.situation import Engine, EngineState, Freshness, Situation, TargetSituation
from controller.autoscaler.reconciler.bindings import ManualOverride, trimmed_policy
from controller.autoscaler.reconciler.controller import policy_status
from controller.autoscaler.reconciler.result import ReconciliationResult, ReplicaUpdate, target_actions
from controller.autoscaler.reconciler.scalables import KINDS, Scalable
from controller.autoscaler.reconciler.status import binding_events, binding_status
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget, TargetProblem
from extproc.api.spec import API_VERSION

SPEC = msgspec.convert({"name": "main", "ref": {"kind": "ModelInfer", "name": "llama"}, "maxReplicas": 9}, ScaleTarget)
PLACE = ("default", "attache.dev", "ModelInfer", "llama")


def result(
    reason: str = "a reason",
    *,
    current: int = 2,
    desired: int | None = 3,
    mode: Any = "Auto",  # noqa: ANN401 - a literal
    steps: tuple[AppliedRule, ...] = (),
    hold: ManualOverride | None = None,
    problem: TargetProblem | None = None,
) -> ReconciliationResult:
    found = Scalable(
        resource=KINDS[0].resource,
        key="default/llama",
        uid="1",
        version="1",
        replicas=current,
        selector={},
        template={},
    )
    resolved = ResolvedTarget(spec=SPEC, place=PLACE, kind=KINDS[0], found=found, problem=problem)
    stage = StageDecision(
        "Both", (Recommendation("Work", desired, reason),), None if desired is None else float(desired), steps
    )
    decided = TargetDecision("main", current, desired, reason=reason)
    decision = Decision(binding="default/one", at_s=0.0, mode=mode, targets=(decided,), stages=(stage,))
    engines = tuple(Engine(str(number), EngineState.READY, 0.0) for number in range(current))
    holds = {} if hold is None else {"main": hold}
    return ReconciliationResult(
        now_s=1_800_000_000.0,
        policy=AutoscalingPolicySpec(mode=mode),
        resolved=(resolved,),
        situations=(Situation(now_s=0.0, targets=(TargetSituation(SPEC, current, engines),), freshness=Freshness()),),
        decision=decision,
        steps=tuple(target_actions(decision, (resolved,), holds)),
        holds=holds,
    )


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_a_status_says_what_is_there_and_what_should_be() -> None:
    status = binding_status(result(), {})
    assert status["targets"] == [{"name": "main", "current": 2, "ready": 2, "desired": 3, "reason": "a reason"}]
    assert conditions(status) == {
        "TargetsResolved": ("True", "Resolved"),
        "MetricsAvailable": ("True", "DataFound"),
        "ScalingActive": ("True", "Scaling"),
        "ScalingLimited": ("False", "NotLimited"),
        "CapacityBlocked": ("False", "NotBlocked"),
    }


def test_reasons_that_change_all_the_time_stay_while_the_numbers_do() -> None:
    first = result("4.1 requests a second", steps=(AppliedRule("Limited", 4.1, 3.0, "4.1 is too fast"),))
    second = result("4.2 requests a second", steps=(AppliedRule("Limited", 4.2, 3.0, "4.2 is too fast"),))
    before = binding_status(first, {})
    assert binding_status(second, before) == before
    more = result("5.2 requests a second", desired=4)
    assert binding_status(more, before)["targets"][0]["reason"] == "5.2 requests a second"


def test_another_cause_is_the_reason_at_once_though_the_numbers_of_replicas_stay() -> None:
    before = binding_status(result("no traffic is known yet"), {})
    after = binding_status(result("speeds are not known yet: 4 requests, 32 for each replica"), before)
    assert after["targets"][0]["reason"] == "speeds are not known yet: 4 requests, 32 for each replica"


def test_a_write_is_told_once_and_remembered() -> None:
    done = msgspec.structs.replace(result(), scaled=(ReplicaUpdate("main", "ModelInfer llama", 2, 3, "more work"),))
    status = binding_status(done, {})
    assert (status["targets"][0]["current"], status["lastDecision"]) == (3, "main from 2 to 3: more work")
    assert [one.reason for one in binding_events(done, status, {})] == ["Scaled"]
    later = result(current=3)
    after = binding_status(later, status)
    assert after["lastDecision"] == status["lastDecision"]
    assert list(binding_events(later, after, status)) == []


def test_what_is_not_known_is_told_once() -> None:
    unknown = result("nobody reports", desired=None)
    status = binding_status(unknown, {})
    assert conditions(status)["MetricsAvailable"] == ("False", "DataMissing")
    assert "desired" not in status["targets"][0]
    assert [one.reason for one in binding_events(unknown, status, {})] == ["FailedGetMetrics"]
    assert list(binding_events(unknown, status, status)) == []


def test_what_may_still_come_is_no_warning_until_it_is_late() -> None:
    awaited = msgspec.structs.replace(result("nobody reports", desired=None), awaits_data=True)
    first = binding_status(awaited, {})
    assert conditions(first)["MetricsAvailable"] == ("False", "DataAwaited")
    assert list(binding_events(awaited, first, {})) == []
    late = msgspec.structs.replace(awaited, awaits_data=False)
    second = binding_status(late, first)
    assert conditions(second)["MetricsAvailable"] == ("False", "DataMissing")
    assert [one.reason for one in binding_events(late, second, first)] == ["FailedGetMetrics"]
    # another manager looks for the first time
    third = binding_status(awaited, second)
    assert conditions(third)["MetricsAvailable"] == ("False", "DataMissing")
    assert list(binding_events(awaited, third, second)) == []


def test_what_comes_soon_was_never_missing() -> None:
    awaited = msgspec.structs.replace(result("nobody reports", desired=None), awaits_data=True)
    first = binding_status(awaited, {})
    second = binding_status(result(), first)
    assert conditions(second)["MetricsAvailable"] == ("True", "DataFound")
    assert list(binding_events(result(), second, first)) == []


def test_a_change_by_hand_is_told_with_its_end() -> None:
    held = result(hold=ManualOverride("kubectl", 2, 1_800_000_600.0))
    status = binding_status(held, {})
    assert conditions(status)["ScalingActive"] == ("False", "ManualHold")
    message = next(one["message"] for one in status["conditions"] if one["type"] == "ScalingActive")
    assert message == "main: kubectl has set 2 replicas, which stay until 2027-01-15T08:10:00Z"
    assert [one.reason for one in binding_events(held, status, {})] == ["ManualChangeHonoured"]
    assert not held.steps[0].is_written_by_us


def test_a_target_whose_accelerator_no_node_has_is_told() -> None:
    without_nodes = msgspec.structs.replace(
        result(), without_nodes={"main": "no node has accelerators of the kind H1000"}
    )
    status = binding_status(without_nodes, {})
    assert conditions(status)["CapacityBlocked"] == ("True", "NoSuchAccelerator")
    assert [one.reason for one in binding_events(without_nodes, status, {})] == ["CapacityBlocked"]


def test_modes_and_problems_keep_from_writing() -> None:
    assert result().steps[0].is_written_by_us
    for mode in ("Recommend", "Export", "Paused"):
        assert not result(mode=mode).steps[0].is_written_by_us
    assert result(mode="ScaleUpOnly", desired=1).steps[0].replicas == 2
    conflict = result(problem=TargetProblem("Conflict", "llama is scaled by another"))
    assert not conflict.steps[0].is_written_by_us
    assert conditions(binding_status(conflict, {}))["TargetsResolved"] == ("False", "Conflict")
    assert result(problem=TargetProblem("ServerNotFound", "none", forbids=False)).steps[0].is_written_by_us


def messages(status: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["message"] for one in status["conditions"]}


def test_another_cause_of_missing_data_is_news_and_another_number_is_not() -> None:
    denied = result("queue: may not read the Secret, 3 times", desired=None)
    again = result("queue: may not read the Secret, 4 times", desired=None)
    wrong = result("queue: the certificate is not trusted", desired=None)
    before = binding_status(denied, {})
    assert binding_status(again, before) == before
    assert messages(binding_status(wrong, before))["MetricsAvailable"] == "queue: the certificate is not trusted"


def test_scaling_is_not_active_while_no_target_may_be_written() -> None:
    conflict = result(problem=TargetProblem("Conflict", "llama is scaled by another"))
    status = binding_status(conflict, {})
    assert conditions(status)["ScalingActive"] == ("False", "Conflict")
    assert [one.reason for one in binding_events(conflict, status, {})] == ["Conflict"]
    unknown = result(problem=TargetProblem("ServerNotFound", "none", forbids=False))
    assert conditions(binding_status(unknown, {}))["ScalingActive"] == ("True", "Scaling")


def test_a_recommendation_says_why() -> None:
    for mode in ("Recommend", "Export"):
        assert binding_status(result("3 are needed", mode=mode), {})["targets"][0]["reason"] == "3 are needed"


def test_a_schedule_that_cannot_be_read_is_told() -> None:
    window = {"start": "0 8 * * 1-5", "duration": "10h", "timeZone": "Europe/Berln", "minReplicas": 2}
    unknown = "'Europe/Berln' is no time zone that this machine knows; write a name such as Europe/Berlin, or UTC"
    said = f"schedule '0 8 * * 1-5' in Europe/Berln: {unknown}"
    thing = {"apiVersion": API_VERSION, "metadata": {"name": "p"}, "spec": {"schedules": [window]}}
    view = trimmed_policy(thing)["view"]
    bad = msgspec.structs.replace(result(), policy=view.policy.spec, bad_schedules=view.bad_schedules)
    assert messages(binding_status(bad, {}))["ScalingActive"] == f"the mode of the policy is Auto; {said}"
    (accepted,) = policy_status(view, 1)["conditions"]
    assert (accepted["status"], accepted["reason"]) == ("False", "ScheduleInvalid")
    assert accepted["message"] == f"{said}; all else of the policy holds"


@pytest.mark.parametrize("mode", ["Auto", "ScaleUpOnly", "Recommend", "Export"])
def test_no_mode_is_active_while_no_target_is_there(mode: str) -> None:
    lost = TargetProblem("TargetNotFound", "there is no ModelInfer llama")
    missing = ResolvedTarget(spec=SPEC, place=PLACE, problem=lost)
    found = msgspec.structs.replace(result(mode=mode), resolved=(missing,))
    assert conditions(binding_status(found, {}))["ScalingActive"] == ("False", "TargetNotFound")


def test_bounds_of_a_target_that_is_not_there_limit_nothing() -> None:
    bounded = result(steps=(AppliedRule("ScalingLimited", 0.0, 1.0, "minReplicas want 1"),))
    assert conditions(binding_status(bounded, {}))["ScalingLimited"] == ("True", "ScalingLimited")
    missing = ResolvedTarget(
        spec=SPEC, place=PLACE, problem=TargetProblem("TargetNotFound", "there is no ModelInfer llama")
    )
    nothing = msgspec.structs.replace(bounded, resolved=(missing,))
    assert conditions(binding_status(nothing, {}))["ScalingLimited"] == ("False", "NotLimited")
