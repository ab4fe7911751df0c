# SPDX-License-Identifier: Apache-2.0
"""The status of a ModelInfer: conditions without their times, with KServe's reasons, counts and states."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.models.model_infer import names
from controller.models.model_infer.desired_state import round_percent_down
from controller.models.model_infer.pod_state import PodFailure, pod_failure, stuck_reason
from controller.models.model_infer.rollout import BLOCKED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from controller.kube.api_resources import Object
    from controller.models.model_infer.desired_state import DesiredState
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.model_infer_state import ModelInferState
    from controller.models.model_infer.rollout import RolloutProgress

_LONGEST: Final = 2000
_MOST_NAMED: Final = 3
_SUMMARY: Final = 200


class Condition(msgspec.Struct, frozen=True):
    """Without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


class DegradedReason(msgspec.Struct, frozen=True):
    """``reason``: one word. ``message``: for people."""

    reason: str
    message: str


def model_infer_conditions(
    groups: Sequence[Group], target: DesiredState, rollout: RolloutProgress, problems: Sequence[DegradedReason]
) -> list[Condition]:
    """In the order in which people read them."""
    return [
        Condition("Accepted", "True", "Accepted", "it has no mistake"),
        available_condition(groups, target),
        progressing_condition(rollout),
        degraded_condition(problems),
    ]


def refused_condition(mistakes: Sequence[str]) -> Condition:
    """Of an object that cannot be acted on."""
    return Condition("Accepted", "False", "InvalidSpec", "; ".join(mistakes)[:_LONGEST])


def available_condition(groups: Sequence[Group], target: DesiredState) -> Condition:
    """Enough groups serve: as many as the rollout's ``maxUnavailable`` leaves, and one at least."""
    wanted = target.group_count
    ready = len([one for one in groups if one.is_serving])
    needed = max(min(1, wanted), wanted - round_percent_down(target.spec.rollout.max_unavailable, wanted))
    message = f"{ready} of {wanted} groups are ready"
    if ready < needed:
        return Condition("Available", "False", "NotEnoughGroups", message)
    return Condition("Available", "True", "AllGroupsReady" if ready >= wanted else "EnoughGroupsReady", message)


def progressing_condition(rollout: RolloutProgress) -> Condition:
    """True while a change is in progress that may still succeed."""
    status: Literal["True", "False", "Unknown"] = "True" if rollout.phase == "InProgress" else "False"
    return Condition("Progressing", "Unknown" if rollout.phase == "Paused" else status, rollout.phase, rollout.message)


def degraded_condition(problems: Sequence[DegradedReason]) -> Condition:
    """The first problem gives the reason; the message lists the first few."""
    if not problems:
        return Condition("Degraded", "False", "AsExpected", "nothing is wrong")
    named = "; ".join(one.message for one in problems[:_MOST_NAMED])
    more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    return Condition("Degraded", "True", problems[0].reason, named[:_LONGEST] + more)


def degraded_reasons(
    groups: Sequence[Group],
    target: DesiredState,
    observed: ModelInferState,
    rollout: RolloutProgress,
    held: Sequence[DegradedReason],
) -> list[DegradedReason]:
    """The rollout's first, then those of pods, then those of the cluster. ``held``: of what waits to be made."""
    found = [DegradedReason(BLOCKED, rollout.message)] if rollout.phase == BLOCKED else []
    failures = [_as_problem(one, target) for group in groups for one in _failures(group, target, observed)]
    return [*found, *failures, *held]


def failed_groups(groups: Sequence[Group], target: DesiredState, observed: ModelInferState) -> frozenset[int]:
    """Ordinals of groups in which a pod has failed."""
    return frozenset(one.ordinal for one in groups if any(_failures(one, target, observed)))


def _failures(group: Group, target: DesiredState, observed: ModelInferState) -> Iterator[PodFailure]:
    for pod in group.pods:
        found = pod_failure(pod, observed, target.spec.template.unresponsive_timeout) or (
            None if pod.is_ready else stuck_reason(pod, observed)
        )
        if found is not None:
            yield found


def _as_problem(failure: PodFailure, target: DesiredState) -> DegradedReason:
    """An engine of a revision that never was ready anywhere has not loaded its model."""
    update = target.history.update
    is_new = failure.pod.revision == update.hash != target.current.hash and not update.reached
    reason = "ModelLoadFailed" if failure.reason == "RuntimeUnhealthy" and is_new else failure.reason
    return DegradedReason(reason, f"pod {failure.pod.key.partition('/')[2]}: {failure.message}")


def model_infer_status(
    groups: Sequence[Group],
    target: DesiredState,
    rollout: RolloutProgress,
    *,
    conditions: Sequence[Condition],
    failed: Collection[int],
    recoveries: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """The whole status. ``failed``: ordinals of groups with a failed pod."""
    update = target.history.update
    staying = [one for one in groups if not one.is_being_deleted]
    updated = [one for one in staying if one.is_whole_revision and one.revision.hash == update.hash]
    states = Counter(_state(one, failed) for one in groups)
    missing = target.group_count - len(groups)
    return {
        "observedGeneration": target.owner["metadata"].get("generation", 0),
        "replicas": len(staying),
        "readyReplicas": len([one for one in groups if one.is_serving]),
        "updatedReplicas": len(updated),
        "currentRevision": _current_after(target, rollout),
        "updateRevision": update.hash,
        "labelSelector": names.label_selector(target.name, SCALE_UNIT="true"),
        "summary": _summary(conditions),
        "groups": dict(sorted((states + Counter({"Missing": max(0, missing)})).items())),
        "roles": [_role(one.name, groups, target) for one in target.spec.template.roles],
        "recoveries": list(recoveries),
        "conditions": [msgspec.to_builtins(one) for one in conditions],
    }


def refused_status(thing: Object, mistakes: Sequence[str]) -> Mapping[str, Any]:
    """Of an object that cannot be acted on; what runs, runs on."""
    condition = refused_condition(mistakes)
    return {
        "observedGeneration": thing["metadata"].get("generation", 0),
        "summary": _summary([condition]),
        "conditions": [msgspec.to_builtins(condition)],
    }


def _current_after(target: DesiredState, rollout: RolloutProgress) -> str:
    """The new revision is the current one as soon as all groups serve with it, none kept back."""
    is_done = rollout.phase == "UpToDate" and target.first_updated_ordinal == 0
    return target.goal.hash if is_done else target.current.hash


def _state(group: Group, failed: Collection[int]) -> str:
    if group.is_being_deleted:
        return "Terminating"
    if group.is_draining:
        return "Draining"
    if group.is_serving:
        return "Ready"
    return "Failed" if group.ordinal in failed else "Starting"


def _role(name: str, groups: Sequence[Group], target: DesiredState) -> Mapping[str, Any]:
    found = [one for group in groups for one in group.replicas_of_role(name) if not one.is_being_deleted]
    role = target.history.update.role(name)
    return {
        "name": name,
        "replicas": len(found),
        "ready": len([one for one in found if one.is_ready]),
        "updated": len([one for one in found if role is not None and one.role_revision == role.hash]),
    }


def add_summary(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """A status whose conditions have changed, with their summary."""
    conditions = msgspec.convert(status["conditions"], list[Condition])
    return {**status, "summary": _summary(conditions)}


def _summary(conditions: Sequence[Condition]) -> str:
    """The first condition that is not as it should be, in a few words."""
    by_type = {one.type: one for one in conditions}
    accepted, degraded = by_type.get("Accepted"), by_type.get("Degraded")
    if accepted is not None and accepted.status == "False":
        message = f"{accepted.reason}: {accepted.message}"
    elif degraded is not None and degraded.status == "True":
        message = f"{degraded.reason}: {degraded.message}"
    elif by_type["Progressing"].status != "False":
        message = f"{by_type['Progressing'].reason}: {by_type['Available'].message}"
    else:
        message = "Ready"
    line = message.partition("\n")[0]
    return line if len(line) <= _SUMMARY else line[: _SUMMARY - 1] + "…"
