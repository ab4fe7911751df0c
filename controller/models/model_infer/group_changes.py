# SPDX-License-Identifier: Apache-2.0
"""Between groups: which are made, which go, and which become the new revision now."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.changes import Changes, going, together
from controller.models.model_infer.groups import as_member, entries
from controller.models.model_infer.role_changes import bounds, kept_group, turning_group, unasked, whole_group
from controller.models.model_infer.sizing import Size, Step, step
from controller.models.model_infer.target import down, up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.target import Target


def is_outdated(group: Group, target: Target) -> bool:
    """Whether a group is to become the goal. Groups below the partition keep what they have."""
    if group.ordinal < target.first_moving:
        return False
    return not group.is_whole_revision or group.revision.hash != target.goal.hash


def changes(groups: Sequence[Group], target: Target, observed: Observed, *, is_moving: bool) -> Changes:
    """``is_moving``: the rollout is neither paused nor has it failed."""
    by_role = target.spec.rollout.unit == "Role"
    size = _size(groups, target, is_moving=is_moving, by_role=by_role)
    members = [
        as_member(
            one,
            observed.loads,
            is_outdated=is_outdated(one, target) and not by_role,
            is_protected=one.ordinal < target.first_moving,
        )
        for one in groups
    ]
    made = step(members, size)
    staying = [one for one in groups if one.ordinal not in made.leave]
    if by_role:
        inside = _turns(staying, target, observed, is_moving=is_moving)
    else:
        inside = [kept_group(one, target, observed) for one in staying]
    return together([_leaving(groups, made, observed), *inside, *_new(made, target)])


def _size(groups: Sequence[Group], target: Target, *, is_moving: bool, by_role: bool) -> Size:
    """By role no group counts as outdated, so it is told here that beside old ones, while nothing moves, new ones are
    of the old revision.
    """
    rollout, wanted = target.spec.rollout, target.spec.replicas
    stands_still = by_role and not is_moving and any(is_outdated(one, target) for one in groups)
    first_new = sys.maxsize if stands_still else target.first_moving
    return Size(
        wanted=wanted,
        max_unavailable=down(rollout.max_unavailable, wanted),
        max_surge=0 if by_role else up(rollout.max_surge, wanted),
        is_moving=is_moving,
        keeps_old_below=first_new if target.current.hash != target.goal.hash else 0,
    )


def _leaving(groups: Sequence[Group], made: Step, observed: Observed) -> Changes:
    """Nobody leaves before the gateways were asked who does least harm, where that decides."""
    candidates = [one for one in groups if one.ordinal in made.chosen]
    keys = [pod.key for one in candidates for pod in entries(one.replicas)]
    asked = unasked(keys, observed.loads, observed.loads_asked_of)
    leaving = [one for one in groups if one.ordinal in made.leave and (not asked or one.ordinal in made.replaced)]
    found = going([replica for one in leaving for replica in one.replicas])
    return msgspec.structs.replace(found, asks_loads_of=asked)


def _new(made: Step, target: Target) -> list[Changes]:
    new = [whole_group(one, target.goal, target) for one in made.new]
    return [*new, *(whole_group(one, target.current, target) for one in made.new_as_old)]


def _turns(groups: Sequence[Group], target: Target, observed: Observed, *, is_moving: bool) -> list[Changes]:
    """With ``unit: Role``: groups that have begun go on, others begin as far as groups may be unavailable. Where none
    may be, one after the other changes, each role by a surplus replica.
    """
    rollout, wanted = target.spec.rollout, target.spec.replicas
    unavailable = down(rollout.max_unavailable, wanted) or (0 if up(rollout.max_surge, wanted) else 1)
    least_surge = 0 if unavailable else 1
    budget = len([one for one in groups if one.is_ready]) - (wanted - unavailable)
    old = [one for one in groups if is_outdated(one, target)]
    fresh = [one for one in groups if not is_outdated(one, target)]
    begun = {one.ordinal for one in old if _has_begun(one, target)}
    slots = max(1, unavailable) - len(begun) - len([one for one in fresh if not one.is_ready])
    found = [kept_group(one, target, observed) for one in fresh]
    for one in sorted(old, key=lambda one: (one.ordinal not in begun, one.is_ready, -one.ordinal)):
        if one.ordinal not in begun:
            if slots <= 0 or not is_moving:
                found.append(kept_group(one, target, observed))
                continue
            slots -= 1
        may_drop = not one.is_ready or budget > 0
        budget -= one.is_ready and _drops(target)
        found.append(
            turning_group(one, target, observed, may_drop=may_drop, least_surge=least_surge, is_moving=is_moving)
        )
    return found


def _has_begun(group: Group, target: Target) -> bool:
    return any(one.revision == target.goal.hash for one in group.pods)


def _drops(target: Target) -> bool:
    """Whether a group serves with less while its roles change."""
    return any(bounds(one, target.counts[one.name])[0] > 0 for one in target.spec.template.roles)
