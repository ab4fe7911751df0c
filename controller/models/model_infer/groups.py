# SPDX-License-Identifier: Apache-2.0
"""Existing groups, and the one rule for the desired number of members: groups, and replicas of a role.

A member is identified by its ordinal, which names its pods. Existing members keep their ordinals; a new one takes the
lowest free one. The member to remove is chosen by least harm, so ordinals may have gaps. A surplus member, allowed by
``max_surge`` while old ones are left, is a member like any other: as new ones become ready, old ones are replaced in
place while others are to follow, and the last ones just go. So a rollout starts each member once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.desired_state import Revision
from controller.models.model_infer.names import PodPosition
from controller.models.model_infer.pod_state import Pod

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.models.model_infer.desired_state import DesiredState
    from controller.models.model_infer.model_infer_state import PodLoad


class RemovalCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """``is_ready``: it serves, and no part of it drains or is being deleted. ``is_outdated``: it is to become another
    revision. ``is_draining``: it gets no more requests. ``is_going``: all of its pods are being deleted.
    ``is_protected``: removed last among equals. ``cost``: the user's deletion cost. ``in_flight`` and
    ``cached_tokens``: infinite where unknown.
    """

    ordinal: int
    is_ready: bool
    is_outdated: bool = False
    is_draining: bool = False
    is_going: bool = False
    is_protected: bool = False
    cost: int = 0
    in_flight: float = math.inf
    cached_tokens: float = math.inf

    @property
    def is_leaving(self) -> bool:
        """It drains or is being deleted."""
        return self.is_draining or self.is_going


class RolloutBounds(msgspec.Struct, frozen=True, kw_only=True):
    """``wanted``: members. ``max_unavailable`` and ``max_surge``: as numbers. ``is_moving``: outdated members become
    new.
    ``keeps_old_below``: new members with a lower ordinal are of the old revision.
    """

    wanted: int
    max_unavailable: int = 1
    max_surge: int = 0
    is_moving: bool = True
    keeps_old_below: int = 0

    @property
    def effective_max_unavailable(self) -> int:
        """Without any surge, one may be missing: otherwise nothing could ever change."""
        return self.max_unavailable if self.max_unavailable + self.max_surge else 1


class GroupChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one reconcile. ``new`` and ``new_as_old``: ordinals to create, of the new and of the old revision.
    ``leave``: ordinals to remove; those of ``replaced`` are recreated. ``chosen``: candidates among which the load
    decided.
    """

    new: tuple[int, ...] = ()
    new_as_old: tuple[int, ...] = ()
    leave: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    chosen: frozenset[int] = frozenset()


def group_changes(members: Sequence[RemovalCandidate], size: RolloutBounds) -> GroupChanges:
    """These changes never exceed ``wanted`` plus the surge, and never leave fewer ready members than ``wanted -
    max_unavailable``: members that are not ready are removed first, and count as unavailable.
    """
    total = size.wanted + _extra(members, size)
    victims = _victims(members, len(members) - total)
    rest = [one for one in members if one.ordinal not in {victim.ordinal for victim in victims}]
    replaced, slots = _replaced(rest, size, total)
    new, old = _made(members, total, slots, size)
    return GroupChanges(
        new=new,
        new_as_old=old,
        leave=frozenset(one.ordinal for one in victims) | replaced,
        replaced=replaced,
        chosen=_chosen(members, victims),
    )


def _extra(members: Sequence[RemovalCandidate], size: RolloutBounds) -> int:
    """Members in excess. While the rollout pauses, those of the new revision stay in addition to the old."""
    old = [one for one in members if one.is_outdated and not one.is_leaving]
    if not old:
        return 0
    if size.is_moving:
        return min(size.max_surge, len(old))
    return min(size.max_surge, len([one for one in members if not one.is_outdated and not one.is_leaving]))


def removal_order(member: RemovalCandidate) -> tuple[object, ...]:
    """Sort key of removal, least harm first: being deleted already, serving nothing, outdated, then the user's deletion
    cost, running requests, cached tokens; at last the highest ordinal.
    """
    return (
        not member.is_going,
        not member.is_draining,
        member.is_ready,
        member.is_protected,
        not member.is_outdated,
        member.cost,
        member.in_flight,
        member.cached_tokens,
        -member.ordinal,
    )


def _victims(members: Sequence[RemovalCandidate], count: int) -> list[RemovalCandidate]:
    return sorted(members, key=removal_order)[:count] if count > 0 else []


def _chosen(members: Sequence[RemovalCandidate], victims: Sequence[RemovalCandidate]) -> frozenset[int]:
    """The ready ones among which the load decides: empty where all or none are removed, or others were chosen."""
    fresh = [one for one in victims if one.is_ready]
    equals = [one for one in members if one.is_ready]
    return frozenset(one.ordinal for one in equals) if fresh and len(fresh) < len(equals) else frozenset()


def _replaced(members: Sequence[RemovalCandidate], size: RolloutBounds, total: int) -> tuple[frozenset[int], int]:
    """The outdated members that are removed and recreated in place, and how many more changes may be in progress."""
    old = [one for one in members if one.is_outdated]
    fresh = [one for one in members if not one.is_outdated]
    missing = max(0, total - len(members))
    ready = len([one for one in members if one.is_ready])
    under_way = [one for one in fresh if not one.is_ready] + [one for one in old if one.is_leaving]
    slots = size.effective_max_unavailable + size.max_surge - len(under_way)
    if not size.is_moving:
        return frozenset(), slots
    replaced = [one for one in old if one.is_leaving]
    budget, left = ready - (size.wanted - size.effective_max_unavailable), slots - missing
    for one in sorted((one for one in old if not one.is_leaving), key=lambda one: (one.is_ready, -one.ordinal)):
        if left <= 0 or (one.is_ready and budget <= 0):
            break
        left, budget = left - 1, budget - one.is_ready
        replaced.append(one)
    return frozenset(one.ordinal for one in replaced), slots


def _made(
    members: Sequence[RemovalCandidate], total: int, slots: int, size: RolloutBounds
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lowest free ordinals. Beside old members, no more new ones than may be under way: a revision that never
    becomes ready must not take the place of all that fails meanwhile.
    """
    taken = {one.ordinal for one in members}
    is_mixed = any(one.is_outdated for one in members)
    new: list[int] = []
    old: list[int] = []
    ordinal = 0
    count = total - len(members)
    surplus = total - max(size.wanted, len(members))
    while len(new) + len(old) < count:
        keeps = ordinal < size.keeps_old_below
        # a surplus member that is made as an old one would change nothing
        if ordinal not in taken and not (keeps and len(new) + len(old) >= count - surplus):
            is_new = not keeps and (not is_mixed or (size.is_moving and len(new) < slots))
            (new if is_new else old).append(ordinal)
        ordinal += 1
    return tuple(new), tuple(old)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a role: an entry pod and its workers. ``place``: of the entry pod. ``pods``: those that are there.
    ``size``: pods that it should have, by the revision of those that are.
    """

    place: PodPosition
    pods: tuple[Pod, ...]
    size: int

    @property
    def live_pods(self) -> list[Pod]:
        """Pods that are not being deleted."""
        return [one for one in self.pods if not one.is_going]

    @property
    def is_being_deleted(self) -> bool:
        """All of it is being deleted."""
        return not self.live_pods

    @property
    def role_revision(self) -> str:
        """Empty where its pods are not of one."""
        found = {one.role_revision for one in self.live_pods or self.pods}
        return found.pop() if len(found) == 1 else ""

    @property
    def is_draining(self) -> bool:
        """Its entry pod gets no new requests."""
        return any(one.draining_at_s is not None for one in self.live_pods if one.place.index == 0)

    @property
    def is_ready(self) -> bool:
        """It serves: whole, of one revision, ready in all pods, and not about to go."""
        return (
            bool(self.role_revision)
            and len(self.live_pods) == len(self.pods) == self.size
            and all(one.is_ready for one in self.pods)
            and not self.is_draining
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """``revision``: of its pods, also of missing ones to create. ``is_whole_revision``: all of its pods are of it.
    ``is_ready``: all of its roles serve with their desired replicas. ``is_serving``: with as many as it takes to serve:
    of a scalable role the template's replicas, however many more an autoscaler asks for.
    """

    ordinal: int
    replicas: tuple[Replica, ...]
    revision: Revision
    is_whole_revision: bool
    is_ready: bool
    is_serving: bool

    @property
    def pods(self) -> list[Pod]:
        """All that are there."""
        return [pod for one in self.replicas for pod in one.pods]

    @property
    def is_being_deleted(self) -> bool:
        """All of it is being deleted."""
        return all(one.is_being_deleted for one in self.replicas)

    @property
    def is_draining(self) -> bool:
        """No part of it gets new requests."""
        live = [one for one in self.replicas if not one.is_being_deleted]
        return bool(live) and all(one.is_draining for one in live)

    def replicas_of_role(self, role: str) -> list[Replica]:
        """Replicas of one role, by number."""
        return [one for one in self.replicas if one.place.role == role]


def groups_from_pods(pods: Sequence[Pod], target: DesiredState) -> tuple[Group, ...]:
    """By ordinal."""
    by_group: dict[int, list[Pod]] = defaultdict(list)
    for one in pods:
        by_group[one.place.group].append(one)
    return tuple(_group(ordinal, found, target) for ordinal, found in sorted(by_group.items()))


def _group(ordinal: int, pods: Sequence[Pod], target: DesiredState) -> Group:
    live = [one for one in pods if not one.is_going] or pods
    hashes = {one.revision for one in live}
    revision = _revision(hashes, target)
    sizes = _sizes(target)
    by_replica: dict[tuple[str, int], list[Pod]] = defaultdict(list)
    for one in pods:
        by_replica[one.place.role, one.place.replica].append(one)
    replicas = tuple(
        Replica(place=PodPosition(ordinal, role, number), pods=tuple(found), size=_size_of(found, sizes))
        for (role, number), found in sorted(by_replica.items())
    )
    wanted = {one.name: target.replicas_of(revision, one.name) for one in revision.roles}
    enough = {one.name: one.replicas for one in target.spec.template.roles if one.scalable}
    return Group(
        ordinal=ordinal,
        replicas=replicas,
        revision=revision,
        is_whole_revision=hashes == {revision.hash},
        is_ready=_serves(replicas, wanted),
        is_serving=_serves(replicas, {name: min(count, enough.get(name, count)) for name, count in wanted.items()}),
    )


def _revision(hashes: Iterable[str], target: DesiredState) -> Revision:
    """The goal if any pod is of it: the rest is to become so. A member of unknown revision becomes the goal."""
    known = [found for one in sorted(hashes) if (found := target.history.get(one)) is not None]
    goals = [one for one in known if one.hash == target.goal.hash]
    return next(iter(goals or known), target.goal)


def _sizes(target: DesiredState) -> Mapping[str, int]:
    """Pods of a replica, by the role's revision."""
    known = [target.history.update, *target.history.kept.values()]
    return {role.hash: role.size for one in known for role in one.roles}


def _size_of(pods: Sequence[Pod], sizes: Mapping[str, int]) -> int:
    """Without a known revision, the existing pods are the full size."""
    return max((sizes.get(one.role_revision, len(pods)) for one in pods), default=0)


def _serves(replicas: Sequence[Replica], wanted: Mapping[str, int]) -> bool:
    """``wanted``: replicas by role. A role may have more than it should while it changes, and those count."""
    ready = [one.place.role for one in replicas if one.is_ready]
    return any(wanted.values()) and all(ready.count(role) >= count for role, count in wanted.items())


def group_removal_candidate(
    group: Group, loads: Mapping[str, PodLoad], *, is_outdated: bool, is_protected: bool
) -> RemovalCandidate:
    """A group as input for the choice of members to remove."""
    return RemovalCandidate(
        ordinal=group.ordinal,
        is_ready=group.is_ready and not group.is_draining,
        is_outdated=is_outdated,
        is_draining=group.is_draining,
        is_going=group.is_being_deleted,
        is_protected=is_protected,
        cost=sum(one.deletion_cost for one in group.pods),
        in_flight=_sum([loads.get(one.key) for one in entry_pods(group.replicas)], "in_flight"),
        cached_tokens=_sum([loads.get(one.key) for one in entry_pods(group.replicas)], "cached_tokens"),
    )


def replica_removal_candidate(replica: Replica, loads: Mapping[str, PodLoad], *, is_outdated: bool) -> RemovalCandidate:
    """The same of one replica of a role."""
    found = [loads.get(one.key) for one in entry_pods([replica])]
    return RemovalCandidate(
        ordinal=replica.place.replica,
        is_ready=replica.is_ready,
        is_outdated=is_outdated,
        is_draining=replica.is_draining,
        is_going=replica.is_being_deleted,
        cost=sum(one.deletion_cost for one in replica.pods),
        in_flight=_sum(found, "in_flight"),
        cached_tokens=_sum(found, "cached_tokens"),
    )


def entry_pods(replicas: Iterable[Replica]) -> list[Pod]:
    """The pods that requests are sent to."""
    return [pod for one in replicas for pod in one.pods if pod.place.index == 0]


def _sum(loads: Sequence[PodLoad | None], field: str) -> float:
    """Infinite as soon as one is unknown: it may be the busiest."""
    return math.inf if None in loads or not loads else sum(getattr(one, field) for one in loads)
