# SPDX-License-Identifier: Apache-2.0
"""What a ModelInfer's status says: counts, states, and what is wrong at a glance."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.models.model_infer import conditions, names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from controller.kube.resources import Object
    from controller.models.model_infer.conditions import Condition
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.rollout import Rollout
    from controller.models.model_infer.target import Target

_SUMMARY: Final = 200


def status_of(
    groups: Sequence[Group],
    target: Target,
    rollout: Rollout,
    *,
    told: Sequence[Condition],
    failed: Collection[int],
    recoveries: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """All of it. ``told``: conditions. ``failed``: ordinals of groups with a failed pod."""
    update = target.history.update
    staying = [one for one in groups if not one.is_going]
    updated = [one for one in staying if one.is_whole_revision and one.revision.hash == update.hash]
    states = Counter(_state(one, failed) for one in groups)
    missing = target.spec.replicas - len(groups)
    return {
        "observedGeneration": target.owner["metadata"].get("generation", 0),
        "replicas": len(staying),
        "readyReplicas": len([one for one in groups if one.is_ready]),
        "updatedReplicas": len(updated),
        "currentRevision": _current_after(target, rollout),
        "updateRevision": update.hash,
        "labelSelector": names.selector(target.name, SCALE_UNIT="true"),
        "summary": _summary(told),
        "groups": dict(sorted((states + Counter({"Missing": max(0, missing)})).items())),
        "roles": [_role(one.name, groups, target) for one in target.spec.template.roles],
        "recoveries": list(recoveries),
        "conditions": [msgspec.to_builtins(one) for one in told],
    }


def refused(thing: Object, mistakes: Sequence[str]) -> Mapping[str, Any]:
    """Of an object that cannot be acted on; what runs, runs on."""
    told = conditions.refused(mistakes)
    return {
        "observedGeneration": thing["metadata"].get("generation", 0),
        "summary": _summary([told]),
        "conditions": [msgspec.to_builtins(told)],
    }


def _current_after(target: Target, rollout: Rollout) -> str:
    """The new revision is the current one as soon as all groups serve with it, none kept back."""
    is_done = rollout.phase == "UpToDate" and target.first_moving == 0
    return target.goal.hash if is_done else target.current.hash


def _state(group: Group, failed: Collection[int]) -> str:
    if group.is_going:
        return "Terminating"
    if group.is_draining:
        return "Draining"
    if group.is_ready:
        return "Ready"
    return "Failed" if group.ordinal in failed else "Starting"


def _role(name: str, groups: Sequence[Group], target: Target) -> Mapping[str, Any]:
    found = [one for group in groups for one in group.of_role(name) if not one.is_going]
    role = target.history.update.role(name)
    return {
        "name": name,
        "replicas": len(found),
        "ready": len([one for one in found if one.is_ready]),
        "updated": len([one for one in found if role is not None and one.role_revision == role.hash]),
    }


def _summary(told: Sequence[Condition]) -> str:
    """The first condition that is not as it should be, in a few words."""
    by_type = {one.type: one for one in told}
    accepted, degraded = by_type["Accepted"], by_type.get("Degraded")
    if accepted.status == "False":
        said = f"{accepted.reason}: {accepted.message}"
    elif degraded is not None and degraded.status == "True":
        said = f"{degraded.reason}: {degraded.message}"
    elif by_type["Progressing"].status != "False":
        said = f"{by_type['Progressing'].reason}: {by_type['Available'].message}"
    else:
        said = "Ready"
    line = said.partition("\n")[0]
    return line if len(line) <= _SUMMARY else line[: _SUMMARY - 1] + "…"
