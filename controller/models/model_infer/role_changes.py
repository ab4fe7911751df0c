# SPDX-License-Identifier: Apache-2.0
"""Inside a group: replicas of roles that are missing, too many, or outdated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.changes import Changes, Missing, going, missing_pods, together
from controller.models.model_infer.groups import entries, replica_as_member
from controller.models.model_infer.sizing import Size, Step, step
from controller.models.model_infer.target import down, up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.common import IntOrPercent
    from controller.api.model_infer import Role
    from controller.models.model_infer.groups import Group, Replica
    from controller.models.model_infer.observed import Load, Observed
    from controller.models.model_infer.revisions import History, Revision, RoleRevision
    from controller.models.model_infer.target import Target


def whole_group(ordinal: int, revision: Revision, target: Target) -> Changes:
    """A group of which nothing is there."""
    return Changes(
        missing=tuple(
            one
            for role in revision.roles
            for replica in range(target.replicas_of(revision, role.name))
            for one in missing_pods(ordinal, revision, role, replica)
        )
    )


def kept_group(group: Group, target: Target, observed: Observed) -> Changes:
    """A group that keeps its revision: only the number of replicas changes, and pods that are missing come again."""
    if group.is_going:
        return Changes()
    sizes = {one.name: Size(wanted=target.replicas_of(group.revision, one.name)) for one in group.revision.roles}
    return _changed(group, group.revision, sizes, target, observed)


def turning_group(
    group: Group, target: Target, observed: Observed, *, may_drop: bool, least_surge: int = 0, is_moving: bool = True
) -> Changes:
    """A group whose roles become those of the goal, one replica after the other, each role within its own bounds.

    ``may_drop``: the group may serve with less meanwhile; otherwise roles change only by what they may have too many,
    which is ``least_surge`` at least.
    """
    goal = target.goal
    outdated = frozenset(
        one.place
        for one in group.replicas
        if (role := goal.role(one.place.role)) is not None and one.role_revision != role.hash
    )
    roles = {one.name: one for one in target.spec.template.roles}
    ahead = _ahead(group, goal, target, outdated)
    sizes: dict[str, Size] = {}
    for one in goal.roles:
        wanted = target.replicas_of(goal, one.name)
        unavailable, surge = bounds(roles.get(one.name), wanted)
        if not may_drop:
            unavailable, surge = 0, max(surge, least_surge)
        moves = is_moving and one.name not in ahead and unavailable + surge > 0
        sizes[one.name] = Size(wanted=wanted, max_unavailable=unavailable, max_surge=surge, is_moving=moves)
    found = _changed(group, goal, sizes, target, observed, outdated)
    unchanged = [pod for one in group.replicas if one.place not in outdated for pod in one.live]
    renamed = tuple((one, goal.hash) for one in unchanged if one.revision != goal.hash and goal.role(one.place.role))
    return msgspec.structs.replace(found, renamed=renamed)


def bounds(role: Role | None, wanted: int) -> tuple[int, int]:
    """How many replicas of a role may be missing, and how many too many. One may be missing if nothing is written, or
    if shares leave nothing to move with; none if only a surplus is.
    """
    surge = up(role.max_surge, wanted) if role is not None and role.max_surge is not None else 0
    unavailable = down(role.max_unavailable, wanted) if role is not None and role.max_unavailable is not None else 0
    return (unavailable, surge) if unavailable + surge else (1, 0)


def _ahead(group: Group, goal: Revision, target: Target, outdated: frozenset[object]) -> frozenset[str]:
    """Roles that would be further than ``maxSkew`` ahead of the slowest one after one more replica. The slowest one may
    always go on.
    """
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for role in goal.roles:
        found = group.of_role(role.name)
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
    sizes: Mapping[str, Size],
    target: Target,
    observed: Observed,
    outdated: frozenset[object] = frozenset(),
) -> Changes:
    gone = [one for one in group.replicas if revision.role(one.place.role) is None]
    found = [going(gone)]
    for role in revision.roles:
        replicas = group.of_role(role.name)
        members = [replica_as_member(one, observed.loads, is_outdated=one.place in outdated) for one in replicas]
        found.append(
            _of_role(group.ordinal, revision, role, replicas, step(members, sizes[role.name]), observed, target.history)
        )
    return together(found)


def _of_role(
    ordinal: int,
    revision: Revision,
    role: RoleRevision,
    replicas: Sequence[Replica],
    made: Step,
    observed: Observed,
    history: History,
) -> Changes:
    asked = _unasked([one for one in replicas if one.place.replica in made.chosen], observed)
    leaving = [] if asked else [one for one in replicas if one.place.replica in made.leave]
    staying = [one for one in replicas if one.place.replica not in made.leave]
    return msgspec.structs.replace(
        going(leaving),
        missing=(
            *(pod for one in staying for pod in _missing_of(one, revision, history)),
            *(pod for one in (*made.new, *made.new_as_old) for pod in missing_pods(ordinal, revision, role, one)),
        ),
        asks_loads_of=asked,
    )


def _missing_of(replica: Replica, revision: Revision, history: History) -> list[Missing]:
    """Pods of a replica that is there in part, of the revision of those that are. Nothing while one is going: names are
    in use, and workers of a replica that is made anew must not meet its old entry pod.
    """
    found = history.with_role(replica.role_revision, revision)
    if found is None or len(replica.live) != len(replica.pods):
        return []
    there = {one.place.index for one in replica.pods}
    whole = missing_pods(replica.place.group, *found, replica.place.replica)
    return [one for one in whole if one.place.index not in there]


def _unasked(replicas: Sequence[Replica], observed: Observed) -> frozenset[str]:
    return unasked([one.key for one in entries(replicas)], observed.loads, observed.loads_asked_of)


def unasked(keys: Sequence[str], loads: Mapping[str, Load], asked: frozenset[str]) -> frozenset[str]:
    """All of ``keys`` as long as gateways have not been asked about one of them."""
    return frozenset(keys) if any(one not in loads and one not in asked for one in keys) else frozenset()
