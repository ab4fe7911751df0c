# SPDX-License-Identifier: Apache-2.0
"""What a ModelInfer's status says: counts, revisions, and conditions without their times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from controller.reconcile.model_infer import names
from controller.reconcile.model_infer.group_changes import is_outdated
from controller.reconcile.model_infer.target import down

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.cluster.resources import Object
    from controller.reconcile.model_infer.groups import Group
    from controller.reconcile.model_infer.target import Target


class Condition(msgspec.Struct, frozen=True):
    """Without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def status_of(groups: Sequence[Group], target: Target, conditions: Sequence[Condition]) -> Mapping[str, Any]:
    """All of it."""
    updated = [one for one in groups if one.is_whole_revision and one.revision.hash == target.history.update.hash]
    return {
        "observedGeneration": target.owner["metadata"].get("generation", 0),
        "replicas": len([one for one in groups if not one.is_going]),
        "readyReplicas": len([one for one in groups if one.is_ready]),
        "updatedReplicas": len([one for one in updated if not one.is_going]),
        "currentRevision": current_after(groups, target),
        "updateRevision": target.history.update.hash,
        "labelSelector": names.selector(target.name, SCALE_UNIT="true"),
        "roles": [_role(one.name, groups, target) for one in target.spec.template.roles],
        "conditions": [msgspec.to_builtins(one) for one in conditions],
    }


def current_after(groups: Sequence[Group], target: Target) -> str:
    """The goal once all groups have it."""
    is_done = all(not is_outdated(one, target) for one in groups) and target.first_moving == 0
    return target.goal.hash if is_done else target.current.hash


def _role(name: str, groups: Sequence[Group], target: Target) -> Mapping[str, Any]:
    found = [one for group in groups for one in group.of_role(name) if not one.is_going]
    role = target.history.update.role(name)
    return {
        "name": name,
        "replicas": len(found),
        "ready": len([one for one in found if one.is_ready]),
        "updated": len([one for one in found if role is not None and one.role_revision == role.hash]),
    }


def available(groups: Sequence[Group], target: Target) -> Condition:
    """Enough groups serve: as many as the rollout's ``maxUnavailable`` leaves, and one at least."""
    wanted = target.spec.replicas
    ready = len([one for one in groups if one.is_ready])
    needed = max(min(1, wanted), wanted - down(target.spec.rollout.max_unavailable, wanted))
    said = f"{ready} of {wanted} groups are ready"
    if ready < needed:
        return Condition("Available", "False", "NotEnoughGroups", said)
    return Condition("Available", "True", "AllGroupsReady" if ready >= wanted else "EnoughGroupsReady", said)


def refused(thing: Object, mistakes: Sequence[str]) -> Mapping[str, Any]:
    """Of an object that cannot be acted on; what runs, runs on."""
    said = "; ".join(mistakes)
    return {
        "observedGeneration": thing["metadata"].get("generation", 0),
        "conditions": [msgspec.to_builtins(Condition("Accepted", "False", "InvalidSpec", said))],
    }
