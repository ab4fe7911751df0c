# SPDX-License-Identifier: Apache-2.0
"""The groups that are there: their replicas, whether they serve, and their revision."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.names import Place
from controller.models.model_infer.pod_state import Pod
from controller.models.model_infer.revisions import Revision
from controller.models.model_infer.sizing import Member

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from controller.models.model_infer.observed import Load
    from controller.models.model_infer.target import Target


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a role: an entry pod and its workers. ``place``: of the entry pod. ``pods``: those that are there.
    ``size``: pods that it should have, by the revision of those that are.
    """

    place: Place
    pods: tuple[Pod, ...]
    size: int

    @property
    def live(self) -> list[Pod]:
        """Pods that are not being deleted."""
        return [one for one in self.pods if not one.is_going]

    @property
    def is_going(self) -> bool:
        """All of it is being deleted."""
        return not self.live

    @property
    def role_revision(self) -> str:
        """Empty where its pods are not of one."""
        found = {one.role_revision for one in self.live or self.pods}
        return found.pop() if len(found) == 1 else ""

    @property
    def is_draining(self) -> bool:
        """Its entry pod gets no new requests."""
        return any(one.draining_at_s is not None for one in self.live if one.place.index == 0)

    @property
    def is_ready(self) -> bool:
        """It serves: whole, of one revision, ready in all pods, and not about to go."""
        return (
            bool(self.role_revision)
            and len(self.live) == len(self.pods) == self.size
            and all(one.is_ready for one in self.pods)
            and not self.is_draining
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """``revision``: what it is made of, and what of it is missing is made of. ``is_whole_revision``: all of its pods
    are of it. ``is_ready``: all of its roles serve with as many replicas as they should have.
    """

    ordinal: int
    replicas: tuple[Replica, ...]
    revision: Revision
    is_whole_revision: bool
    is_ready: bool

    @property
    def pods(self) -> list[Pod]:
        """All that are there."""
        return [pod for one in self.replicas for pod in one.pods]

    @property
    def is_going(self) -> bool:
        """All of it is being deleted."""
        return all(one.is_going for one in self.replicas)

    @property
    def is_draining(self) -> bool:
        """No part of it gets new requests."""
        live = [one for one in self.replicas if not one.is_going]
        return bool(live) and all(one.is_draining for one in live)

    def of_role(self, role: str) -> list[Replica]:
        """Replicas of one role, by number."""
        return [one for one in self.replicas if one.place.role == role]


def groups_of(pods: Sequence[Pod], target: Target) -> tuple[Group, ...]:
    """By ordinal."""
    by_group: dict[int, list[Pod]] = defaultdict(list)
    for one in pods:
        by_group[one.place.group].append(one)
    return tuple(_group(ordinal, found, target) for ordinal, found in sorted(by_group.items()))


def _group(ordinal: int, pods: Sequence[Pod], target: Target) -> Group:
    live = [one for one in pods if not one.is_going] or pods
    hashes = {one.revision for one in live}
    revision = _revision(hashes, target)
    sizes = _sizes(target)
    by_replica: dict[tuple[str, int], list[Pod]] = defaultdict(list)
    for one in pods:
        by_replica[one.place.role, one.place.replica].append(one)
    replicas = tuple(
        Replica(place=Place(ordinal, role, number), pods=tuple(found), size=_size_of(found, sizes))
        for (role, number), found in sorted(by_replica.items())
    )
    return Group(
        ordinal=ordinal,
        replicas=replicas,
        revision=revision,
        is_whole_revision=hashes == {revision.hash},
        is_ready=_serves(replicas, revision, target),
    )


def _revision(hashes: Iterable[str], target: Target) -> Revision:
    """The goal where any pod is of it: then the rest is to become so. What nothing is known of becomes the goal."""
    known = [found for one in sorted(hashes) if (found := target.history.get(one)) is not None]
    goals = [one for one in known if one.hash == target.goal.hash]
    return next(iter(goals or known), target.goal)


def _sizes(target: Target) -> Mapping[str, int]:
    """Pods of a replica, by the role's revision."""
    known = [target.history.update, *target.history.kept.values()]
    return {role.hash: role.size for one in known for role in one.roles}


def _size_of(pods: Sequence[Pod], sizes: Mapping[str, int]) -> int:
    """Without a revision that tells, what is there is taken for whole."""
    return max((sizes.get(one.role_revision, len(pods)) for one in pods), default=0)


def _serves(replicas: Sequence[Replica], revision: Revision, target: Target) -> bool:
    """A role may have more replicas than it should while it changes, and those count."""
    ready = [one.place.role for one in replicas if one.is_ready]
    wanted = {one.name: target.replicas_of(revision, one.name) for one in revision.roles}
    return any(wanted.values()) and all(ready.count(role) >= count for role, count in wanted.items())


def as_member(group: Group, loads: Mapping[str, Load], *, is_outdated: bool, is_protected: bool) -> Member:
    """For the choice of what goes."""
    return Member(
        ordinal=group.ordinal,
        is_ready=group.is_ready and not group.is_draining,
        is_outdated=is_outdated,
        is_draining=group.is_draining,
        is_going=group.is_going,
        is_protected=is_protected,
        cost=sum(one.deletion_cost for one in group.pods),
        in_flight=_sum([loads.get(one.key) for one in entries(group.replicas)], "in_flight"),
        cached_tokens=_sum([loads.get(one.key) for one in entries(group.replicas)], "cached_tokens"),
    )


def replica_as_member(replica: Replica, loads: Mapping[str, Load], *, is_outdated: bool) -> Member:
    """The same of one replica of a role."""
    found = [loads.get(one.key) for one in entries([replica])]
    return Member(
        ordinal=replica.place.replica,
        is_ready=replica.is_ready,
        is_outdated=is_outdated,
        is_draining=replica.is_draining,
        is_going=replica.is_going,
        cost=sum(one.deletion_cost for one in replica.pods),
        in_flight=_sum(found, "in_flight"),
        cached_tokens=_sum(found, "cached_tokens"),
    )


def entries(replicas: Iterable[Replica]) -> list[Pod]:
    """The pods that requests are sent to."""
    return [pod for one in replicas for pod in one.pods if pod.place.index == 0]


def _sum(loads: Sequence[Load | None], field: str) -> float:
    """Infinite as soon as one is unknown: it may be the busiest."""
    return math.inf if None in loads or not loads else sum(getattr(one, field) for one in loads)
