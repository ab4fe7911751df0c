# SPDX-License-Identifier: Apache-2.0
"""Which pods go and which are missing, between groups and inside a group; which of the missing must wait."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.desired_state import Revision, RoleRevision, round_percent_down, round_percent_up
from controller.models.model_infer.groups import (
    GroupChanges,
    Replica,
    RolloutBounds,
    entry_pods,
    group_changes,
    group_removal_candidate,
    replica_removal_candidate,
)
from controller.models.model_infer.names import PodPosition
from controller.models.model_infer.pod_state import Pod

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.api.model_infer import Role
    from controller.api.shared_types import IntOrPercent
    from controller.models.model_infer.desired_state import DesiredState, RevisionHistory
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.model_infer_state import ModelInferState, PodLoad
    from controller.models.model_infer.recovery import RecoveryResult


class MissingPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to make. ``revision`` and ``role``: of what."""

    place: PodPosition
    revision: Revision
    role: RoleRevision


class PodChanges(msgspec.Struct, frozen=True, kw_only=True):
    """``leaving``: drained, then deleted. ``unwanted``: places of those, and of what is going already. ``missing``: in
    the order in which they are made. ``renamed``: pods that are of a new revision as they are, because their role has
    not changed. ``asks_loads_of``: pods between which the load decides, before anything was chosen.
    """

    leaving: tuple[Replica, ...] = ()
    unwanted: frozenset[PodPosition] = frozenset()
    missing: tuple[MissingPod, ...] = ()
    renamed: tuple[tuple[Pod, str], ...] = ()
    asks_loads_of: frozenset[str] = frozenset()


def merge_changes(found: Iterable[PodChanges]) -> PodChanges:
    """All of them in one."""
    every = list(found)
    return PodChanges(
        leaving=tuple(one for each in every for one in each.leaving),
        unwanted=frozenset().union(*(each.unwanted for each in every)),
        missing=tuple(one for each in every for one in each.missing),
        renamed=tuple(one for each in every for one in each.renamed),
        asks_loads_of=frozenset().union(*(each.asks_loads_of for each in every)),
    )


def remove_replicas(replicas: Sequence[Replica]) -> PodChanges:
    """All of these go."""
    return PodChanges(
        leaving=tuple(one for one in replicas if not one.is_being_deleted),
        unwanted=frozenset(one.place for one in replicas),
    )


def missing_replica_pods(group: int, revision: Revision, role: RoleRevision, replica: int) -> tuple[MissingPod, ...]:
    """A whole replica, entry pod first."""
    return tuple(
        MissingPod(place=PodPosition(group, role.name, replica, index), revision=revision, role=role)
        for index in range(role.size)
    )


def create_group(ordinal: int, revision: Revision, target: DesiredState) -> PodChanges:
    """A group of which nothing is there."""
    return PodChanges(
        missing=tuple(
            one
            for role in revision.roles
            for replica in range(target.replicas_of(revision, role.name))
            for one in missing_replica_pods(ordinal, revision, role, replica)
        )
    )


def keep_group_revision(group: Group, target: DesiredState, observed: ModelInferState) -> PodChanges:
    """A group that keeps its revision: only the number of replicas changes, and missing pods are recreated."""
    if group.is_being_deleted:
        return PodChanges()
    sizes = {
        one.name: RolloutBounds(wanted=target.replicas_of(group.revision, one.name)) for one in group.revision.roles
    }
    return _changed(group, group.revision, sizes, target, observed)


def update_group_revision(
    group: Group,
    target: DesiredState,
    observed: ModelInferState,
    *,
    may_drop: bool,
    least_surge: int = 0,
    is_moving: bool = True,
) -> PodChanges:
    """A group whose roles change to those of the goal, one replica after the other, each role within its own bounds.

    ``may_drop``: the group may serve with less meanwhile; otherwise a role first gets its surplus replicas, at least
    ``least_surge``.
    """
    goal = target.goal
    outdated = frozenset(
        one.place
        for one in group.replicas
        if (role := goal.role(one.place.role)) is not None and one.role_revision != role.hash
    )
    roles = {one.name: one for one in target.spec.template.roles}
    ahead = _ahead(group, goal, target, outdated)
    sizes: dict[str, RolloutBounds] = {}
    for one in goal.roles:
        wanted = target.replicas_of(goal, one.name)
        unavailable, surge = rollout_bounds(roles.get(one.name), wanted)
        if not may_drop:
            unavailable, surge = 0, max(surge, least_surge)
        moves = is_moving and one.name not in ahead and unavailable + surge > 0
        sizes[one.name] = RolloutBounds(wanted=wanted, max_unavailable=unavailable, max_surge=surge, is_moving=moves)
    found = _changed(group, goal, sizes, target, observed, outdated)
    unchanged = [pod for one in group.replicas if one.place not in outdated for pod in one.live_pods]
    renamed = tuple((one, goal.hash) for one in unchanged if one.revision != goal.hash and goal.role(one.place.role))
    return msgspec.structs.replace(found, renamed=renamed)


def rollout_bounds(role: Role | None, wanted: int) -> tuple[int, int]:
    """How many replicas of a role may be missing, and how many too many. One may be missing if nothing is written, or
    if shares leave nothing to move with; none if only a surplus is.
    """
    surge = round_percent_up(role.max_surge, wanted) if role is not None and role.max_surge is not None else 0
    unavailable = (
        round_percent_down(role.max_unavailable, wanted) if role is not None and role.max_unavailable is not None else 0
    )
    return (unavailable, surge) if unavailable + surge else (1, 0)


def _ahead(group: Group, goal: Revision, target: DesiredState, outdated: frozenset[object]) -> frozenset[str]:
    """Roles that would be further than ``maxSkew`` ahead of the slowest one after one more replica. The slowest one may
    always go on.
    """
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for role in goal.roles:
        found = group.replicas_of_role(role.name)
        if any(one.place in outdated for one in found):
            wanted[role.name] = max(1, target.replicas_of(goal, role.name))
            done[role.name] = len([one for one in found if one.place not in outdated])
    skew = target.spec.rollout.max_skew
    return frozenset(name for name in done if _is_ahead(name, done, wanted, skew))


def _is_ahead(name: str, done: Mapping[str, int], wanted: Mapping[str, int], skew: IntOrPercent) -> bool:
    if isinstance(skew, int):
        slowest = min(done.values())
        return done[name] > slowest and done[name] + 1 - slowest > skew
    share = {one: done[one] / wanted[one] for one in done}
    slowest_share = min(share.values())
    return share[name] > slowest_share and (done[name] + 1) / wanted[name] - slowest_share > int(skew[:-1]) / 100


def _changed(
    group: Group,
    revision: Revision,
    sizes: Mapping[str, RolloutBounds],
    target: DesiredState,
    observed: ModelInferState,
    outdated: frozenset[object] = frozenset(),
) -> PodChanges:
    gone = [one for one in group.replicas if revision.role(one.place.role) is None]
    found = [remove_replicas(gone)]
    for role in revision.roles:
        replicas = group.replicas_of_role(role.name)
        members = [
            replica_removal_candidate(one, observed.loads, is_outdated=one.place in outdated) for one in replicas
        ]
        found.append(
            _of_role(
                group.ordinal,
                revision,
                role,
                replicas,
                group_changes(members, sizes[role.name]),
                observed,
                target.history,
            )
        )
    return merge_changes(found)


def _of_role(
    ordinal: int,
    revision: Revision,
    role: RoleRevision,
    replicas: Sequence[Replica],
    made: GroupChanges,
    observed: ModelInferState,
    history: RevisionHistory,
) -> PodChanges:
    asked = _unasked([one for one in replicas if one.place.replica in made.chosen], observed)
    leaving = [] if asked else [one for one in replicas if one.place.replica in made.leave]
    staying = [one for one in replicas if one.place.replica not in made.leave]
    return msgspec.structs.replace(
        remove_replicas(leaving),
        missing=(
            *(pod for one in staying for pod in _missing_of(one, revision, history)),
            *(
                pod
                for one in (*made.new, *made.new_as_old)
                for pod in missing_replica_pods(ordinal, revision, role, one)
            ),
        ),
        asks_loads_of=asked,
    )


def _missing_of(replica: Replica, revision: Revision, history: RevisionHistory) -> list[MissingPod]:
    """Missing pods of an incomplete replica, of the revision of the existing ones. None while a pod terminates: its
    name is in use, and new workers must not connect to the old entry pod.
    """
    found = history.with_role(replica.role_revision, revision)
    if found is None or len(replica.live_pods) != len(replica.pods):
        return []
    there = {one.place.index for one in replica.pods}
    whole = missing_replica_pods(replica.place.group, *found, replica.place.replica)
    return [one for one in whole if one.place.index not in there]


def _unasked(replicas: Sequence[Replica], observed: ModelInferState) -> frozenset[str]:
    return keys_to_query_load([one.key for one in entry_pods(replicas)], observed.loads, observed.loads_asked_of)


def keys_to_query_load(keys: Sequence[str], loads: Mapping[str, PodLoad], asked: frozenset[str]) -> frozenset[str]:
    """All of ``keys`` if any has no load and was not requested from gateways; else none."""
    return frozenset(keys) if any(one not in loads and one not in asked for one in keys) else frozenset()


def is_outdated(group: Group, target: DesiredState) -> bool:
    """Whether a group must change to the goal revision. Groups below the partition keep theirs."""
    if group.ordinal < target.first_updated_ordinal:
        return False
    return not group.is_whole_revision or group.revision.hash != target.goal.hash


def pod_changes(
    groups: Sequence[Group], target: DesiredState, observed: ModelInferState, *, is_moving: bool
) -> PodChanges:
    """``is_moving``: the rollout is neither paused nor has it failed."""
    by_role = target.spec.rollout.unit == "Role"
    size = _size(groups, target, is_moving=is_moving, by_role=by_role)
    members = [
        group_removal_candidate(
            one,
            observed.loads,
            is_outdated=is_outdated(one, target) and not by_role,
            is_protected=one.ordinal < target.first_updated_ordinal,
        )
        for one in groups
    ]
    made = group_changes(members, size)
    staying = [one for one in groups if one.ordinal not in made.leave]
    if by_role:
        inside = _turns(staying, target, observed, is_moving=is_moving)
    else:
        inside = [keep_group_revision(one, target, observed) for one in staying]
    return merge_changes([_leaving(groups, made, observed), *inside, *_new(made, target)])


def _size(groups: Sequence[Group], target: DesiredState, *, is_moving: bool, by_role: bool) -> RolloutBounds:
    """By role no group counts as outdated. So while nothing moves, this sets the old revision for new groups beside old
    ones.
    """
    rollout, wanted = target.spec.rollout, target.spec.replicas
    stands_still = by_role and not is_moving and any(is_outdated(one, target) for one in groups)
    first_new = sys.maxsize if stands_still else target.first_updated_ordinal
    return RolloutBounds(
        wanted=wanted,
        max_unavailable=round_percent_down(rollout.max_unavailable, wanted),
        max_surge=0 if by_role else round_percent_up(rollout.max_surge, wanted),
        is_moving=is_moving,
        keeps_old_below=first_new if target.current.hash != target.goal.hash else 0,
    )


def _leaving(groups: Sequence[Group], made: GroupChanges, observed: ModelInferState) -> PodChanges:
    """Where loads decide, no group is removed before the loads were requested from gateways."""
    candidates = [one for one in groups if one.ordinal in made.chosen]
    keys = [pod.key for one in candidates for pod in entry_pods(one.replicas)]
    asked = keys_to_query_load(keys, observed.loads, observed.loads_asked_of)
    leaving = [one for one in groups if one.ordinal in made.leave and (not asked or one.ordinal in made.replaced)]
    found = remove_replicas([replica for one in leaving for replica in one.replicas])
    return msgspec.structs.replace(found, asks_loads_of=asked)


def _new(made: GroupChanges, target: DesiredState) -> list[PodChanges]:
    new = [create_group(one, target.goal, target) for one in made.new]
    return [*new, *(create_group(one, target.current, target) for one in made.new_as_old)]


def _turns(
    groups: Sequence[Group], target: DesiredState, observed: ModelInferState, *, is_moving: bool
) -> list[PodChanges]:
    """With ``unit: Role``: groups that have begun go on, others begin as far as groups may be unavailable. Where none
    may be, one after the other changes, each role by a surplus replica.
    """
    rollout, wanted = target.spec.rollout, target.spec.replicas
    unavailable = round_percent_down(rollout.max_unavailable, wanted) or (
        0 if round_percent_up(rollout.max_surge, wanted) else 1
    )
    least_surge = 0 if unavailable else 1
    budget = len([one for one in groups if one.is_ready]) - (wanted - unavailable)
    old = [one for one in groups if is_outdated(one, target)]
    fresh = [one for one in groups if not is_outdated(one, target)]
    begun = {one.ordinal for one in old if _has_begun(one, target)}
    slots = max(1, unavailable) - len(begun) - len([one for one in fresh if not one.is_ready])
    found = [keep_group_revision(one, target, observed) for one in fresh]
    for one in sorted(old, key=lambda one: (one.ordinal not in begun, one.is_ready, -one.ordinal)):
        if one.ordinal not in begun:
            if slots <= 0 or not is_moving:
                found.append(keep_group_revision(one, target, observed))
                continue
            slots -= 1
        may_drop = not one.is_ready or budget > 0
        budget -= one.is_ready and _drops(target)
        found.append(
            update_group_revision(
                one, target, observed, may_drop=may_drop, least_surge=least_surge, is_moving=is_moving
            )
        )
    return found


def _has_begun(group: Group, target: DesiredState) -> bool:
    return any(one.revision == target.goal.hash for one in group.pods)


def _drops(target: DesiredState) -> bool:
    """Whether a group serves with less while its roles change."""
    return any(rollout_bounds(one, target.counts[one.name])[0] > 0 for one in target.spec.template.roles)


def pods_to_create(
    wanted: PodChanges, groups: Sequence[Group], recovered: RecoveryResult, target: DesiredState
) -> list[MissingPod]:
    """Of the missing pods, those that nothing keeps from being made now."""
    by_ordinal = {one.ordinal: one for one in groups}
    restarting = _restarting(wanted, groups, recovered, target)
    after = {one.name: one.starts_after for one in target.spec.template.roles}
    return [
        one
        for one in wanted.missing
        if one.place.group not in restarting
        and msgspec.structs.replace(one.place, index=0) not in recovered.places
        and not _waits(one, by_ordinal.get(one.place.group), after, target)
    ]


def _restarting(
    wanted: PodChanges, groups: Sequence[Group], recovered: RecoveryResult, target: DesiredState
) -> frozenset[int]:
    """Groups that are recreated whole: no pod of them is created before all old ones are gone."""
    if target.spec.recovery != "Group":
        return frozenset()
    going = [
        pod.place.group
        for group in groups
        for one in group.replicas
        if one.place not in wanted.unwanted
        for pod in one.pods
        if pod.is_going
    ]
    return frozenset(going) | {one.group for one in recovered.places}


def _waits(missing: MissingPod, group: Group | None, after: Mapping[str, Sequence[str]], target: DesiredState) -> bool:
    """A role waits until those that it starts after are ready. Once it has begun, it need not any more."""
    first = [one for one in after.get(missing.place.role, ()) if missing.revision.role(one) is not None]
    wanted = {one: target.replicas_of(missing.revision, one) for one in first}
    if group is None:
        return any(wanted.values())
    if any(one.live_pods for one in group.replicas_of_role(missing.place.role)):
        return False
    return any(
        len([one for one in group.replicas_of_role(role) if one.is_ready]) < count for role, count in wanted.items()
    )
