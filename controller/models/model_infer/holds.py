# SPDX-License-Identifier: Apache-2.0
"""Missing pods that must wait: for pods that are going, or for roles that start first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.models.model_infer.changes import Changes, Missing
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.recovery import Recovered
    from controller.models.model_infer.target import Target


def may_be_made(wanted: Changes, groups: Sequence[Group], recovered: Recovered, target: Target) -> list[Missing]:
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


def _restarting(wanted: Changes, groups: Sequence[Group], recovered: Recovered, target: Target) -> frozenset[int]:
    """Groups that are made anew whole: nothing of them is made before all of the old one is gone."""
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


def _waits(missing: Missing, group: Group | None, after: Mapping[str, Sequence[str]], target: Target) -> bool:
    """A role waits until those that it starts after are ready. Once it has begun, it need not any more."""
    first = [one for one in after.get(missing.place.role, ()) if missing.revision.role(one) is not None]
    wanted = {one: target.replicas_of(missing.revision, one) for one in first}
    if group is None:
        return any(wanted.values())
    if any(one.live for one in group.of_role(missing.place.role)):
        return False
    return any(len([one for one in group.of_role(role) if one.is_ready]) < count for role, count in wanted.items())
