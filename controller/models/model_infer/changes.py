# SPDX-License-Identifier: Apache-2.0
"""What is to become of groups, before anybody asked how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.models.model_infer.groups import Replica
from controller.models.model_infer.names import Place
from controller.models.model_infer.pod_state import Pod
from controller.models.model_infer.revisions import Revision, RoleRevision

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to make. ``revision`` and ``role``: of what."""

    place: Place
    revision: Revision
    role: RoleRevision


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """``leaving``: drained, then deleted. ``unwanted``: places of those, and of what is going already. ``missing``: in
    the order in which they are made. ``renamed``: pods that are of a new revision as they are, because their role has
    not changed. ``asks_loads_of``: pods between which the load decides, before anything was chosen.
    """

    leaving: tuple[Replica, ...] = ()
    unwanted: frozenset[Place] = frozenset()
    missing: tuple[Missing, ...] = ()
    renamed: tuple[tuple[Pod, str], ...] = ()
    asks_loads_of: frozenset[str] = frozenset()


def together(found: Iterable[Changes]) -> Changes:
    """All of them in one."""
    every = list(found)
    return Changes(
        leaving=tuple(one for each in every for one in each.leaving),
        unwanted=frozenset().union(*(each.unwanted for each in every)),
        missing=tuple(one for each in every for one in each.missing),
        renamed=tuple(one for each in every for one in each.renamed),
        asks_loads_of=frozenset().union(*(each.asks_loads_of for each in every)),
    )


def going(replicas: Sequence[Replica]) -> Changes:
    """All of these go."""
    return Changes(
        leaving=tuple(one for one in replicas if not one.is_going),
        unwanted=frozenset(one.place for one in replicas),
    )


def missing_pods(group: int, revision: Revision, role: RoleRevision, replica: int) -> tuple[Missing, ...]:
    """A whole replica, entry pod first."""
    return tuple(
        Missing(place=Place(group, role.name, replica, index), revision=revision, role=role)
        for index in range(role.size)
    )
