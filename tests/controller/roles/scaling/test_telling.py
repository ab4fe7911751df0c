# SPDX-License-Identifier: Apache-2.0
"""What a binding says after a look: news, and nothing that changes with every look."""

from __future__ import annotations

from typing import Any

import msgspec

from controller.autoscale.decision import Decision, StageDecision, Step, TargetDecision
from controller.autoscale.law import Recommendation
from controller.autoscale.situation import Engine, EngineState, Freshness, Situation, Target
from controller.resources.autoscaling import AutoscalingPolicySpec
from controller.resources.autoscaling_binding import ScaleTarget
from controller.roles.scaling import deciding
from controller.roles.scaling.owning import Hold
from controller.roles.scaling.resolving import Problem, Resolved
from controller.roles.scaling.scalables import KINDS, Scalable
from controller.roles.scaling.telling import Looked, Scaled, digest_of, events_of, status_of

SPEC = msgspec.convert({"name": "main", "ref": {"kind": "ModelInfer", "name": "llama"}, "maxReplicas": 9}, ScaleTarget)
PLACE = ("default", "attache.dev", "ModelInfer", "llama")


def looked(
    reason: str = "a reason",
    *,
    current: int = 2,
    desired: int | None = 3,
    mode: Any = "Auto",  # noqa: ANN401 - a literal
    steps: tuple[Step, ...] = (),
    hold: Hold | None = None,
    problem: Problem | None = None,
) -> Looked:
    found = Scalable(
        resource=KINDS[0].resource,
        key="default/llama",
        uid="1",
        version="1",
        replicas=current,
        selector={},
        template={},
    )
    resolved = Resolved(spec=SPEC, place=PLACE, kind=KINDS[0], found=found, problem=problem)
    stage = StageDecision(
        "Both", (Recommendation("Work", desired, reason),), None if desired is None else float(desired), steps
    )
    decided = TargetDecision("main", current, desired, reason=reason)
    decision = Decision(binding="default/one", at_s=0.0, mode=mode, targets=(decided,), stages=(stage,))
    engines = tuple(Engine(str(number), EngineState.READY, 0.0) for number in range(current))
    holds = {} if hold is None else {"main": hold}
    return Looked(
        now_s=1_800_000_000.0,
        policy=AutoscalingPolicySpec(mode=mode),
        resolved=(resolved,),
        situations=(Situation(now_s=0.0, targets=(Target(SPEC, current, engines),), freshness=Freshness()),),
        decision=decision,
        steps=tuple(deciding.steps_of(decision, (resolved,), holds)),
        holds=holds,
    )


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_a_status_says_what_is_there_and_what_should_be() -> None:
    status = status_of(looked(), {})
    assert status["targets"] == [{"name": "main", "current": 2, "ready": 2, "desired": 3, "reason": "a reason"}]
    assert conditions(status) == {
        "TargetsResolved": ("True", "Resolved"),
        "MetricsAvailable": ("True", "DataFound"),
        "ScalingActive": ("True", "Scaling"),
        "ScalingLimited": ("False", "NotLimited"),
        "CapacityBlocked": ("False", "NotBlocked"),
    }


def test_reasons_that_change_all_the_time_stay_while_the_numbers_do() -> None:
    first = looked("4.1 requests a second", steps=(Step("Limited", 4.1, 3.0, "4.1 is too fast"),))
    second = looked("4.2 requests a second", steps=(Step("Limited", 4.2, 3.0, "4.2 is too fast"),))
    before = status_of(first, {})
    assert status_of(second, before) == before
    assert digest_of(first) == digest_of(second)
    more = looked("5.2 requests a second", desired=4)
    assert digest_of(more) != digest_of(first)
    assert status_of(more, before)["targets"][0]["reason"] == "5.2 requests a second"


def test_a_write_is_told_once_and_remembered() -> None:
    done = msgspec.structs.replace(looked(), scaled=(Scaled("main", "ModelInfer llama", 2, 3, "more work"),))
    status = status_of(done, {})
    assert (status["targets"][0]["current"], status["lastDecision"]) == (3, "main from 2 to 3: more work")
    assert [one.reason for one in events_of(done, status, {})] == ["Scaled"]
    later = looked(current=3)
    after = status_of(later, status)
    assert after["lastDecision"] == status["lastDecision"]
    assert list(events_of(later, after, status)) == []


def test_what_is_not_known_is_told_once() -> None:
    unknown = looked("nobody reports", desired=None)
    status = status_of(unknown, {})
    assert conditions(status)["MetricsAvailable"] == ("False", "DataMissing")
    assert "desired" not in status["targets"][0]
    assert [one.reason for one in events_of(unknown, status, {})] == ["FailedGetMetrics"]
    assert list(events_of(unknown, status, status)) == []


def test_a_change_by_hand_is_told_with_its_end() -> None:
    held = looked(hold=Hold("kubectl", 2, 1_800_000_600.0))
    status = status_of(held, {})
    assert conditions(status)["ScalingActive"] == ("False", "ManualHold")
    message = next(one["message"] for one in status["conditions"] if one["type"] == "ScalingActive")
    assert message == "main: kubectl has set 2 replicas, which stay until 2027-01-15T08:10:00Z"
    assert [one.reason for one in events_of(held, status, {})] == ["ManualChangeHonoured"]
    assert not held.steps[0].writes


def test_a_target_whose_accelerator_no_node_has_is_told() -> None:
    homeless = msgspec.structs.replace(looked(), homeless={"main": "no node has accelerators of the kind H1000"})
    status = status_of(homeless, {})
    assert conditions(status)["CapacityBlocked"] == ("True", "NoSuchAccelerator")
    assert [one.reason for one in events_of(homeless, status, {})] == ["CapacityBlocked"]
    assert digest_of(homeless) != digest_of(looked())


def test_modes_and_problems_keep_from_writing() -> None:
    assert looked().steps[0].writes
    for mode in ("Recommend", "Export", "Paused"):
        assert not looked(mode=mode).steps[0].writes
    assert looked(mode="ScaleUpOnly", desired=1).steps[0].replicas == 2
    conflict = looked(problem=Problem("Conflict", "llama is scaled by another"))
    assert not conflict.steps[0].writes
    assert conditions(status_of(conflict, {}))["TargetsResolved"] == ("False", "Conflict")
    assert looked(problem=Problem("ServerNotFound", "none", forbids=False)).steps[0].writes
