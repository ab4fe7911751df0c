# SPDX-License-Identifier: Apache-2.0
"""How many members there should be, and which go: of groups, and of a role in a group.

A member is known by its ordinal, which names its pods. Members that are there keep their ordinals; a new one takes the
lowest that is free. Whoever has to go is chosen by least harm, so ordinals may have gaps. A surplus member, allowed by
``max_surge`` while old ones are left, is a member like any other: as new ones become ready, old ones are replaced in
place while others are to follow, and the last ones just go. So a rollout starts each member once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """``is_ready``: it serves, and nothing of it is draining or going. ``is_outdated``: it is to become another
    revision.
    ``is_draining``: it gets no more requests. ``is_going``: all of its pods are being deleted. ``is_protected``: goes
    last of its like. ``cost``: what the user says of deleting it. ``in_flight`` and ``cached_tokens``: infinite where
    unknown.
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
        """It has been told to go."""
        return self.is_draining or self.is_going


class Size(msgspec.Struct, frozen=True, kw_only=True):
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
    def unavailable(self) -> int:
        """Without any surge, one may be missing: otherwise nothing could ever change."""
        return self.max_unavailable if self.max_unavailable + self.max_surge else 1


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now. ``new`` and ``new_as_old``: ordinals to make, of the new and of the old revision. ``leave``:
    ordinals that go; those of ``replaced`` come again. ``chosen``: ordinals of which one was chosen by its load.
    """

    new: tuple[int, ...] = ()
    new_as_old: tuple[int, ...] = ()
    leave: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    chosen: frozenset[int] = frozenset()


def step(members: Sequence[Member], size: Size) -> Step:
    """Never more members than ``wanted`` and the surge, never fewer ready ones than ``wanted - max_unavailable`` by
    what is done here: members that are not ready go first, and count as unavailable.
    """
    total = size.wanted + _extra(members, size)
    victims = _victims(members, len(members) - total)
    rest = [one for one in members if one.ordinal not in {victim.ordinal for victim in victims}]
    replaced, slots = _replaced(rest, size, total)
    new, old = _made(members, total, slots, size)
    return Step(
        new=new,
        new_as_old=old,
        leave=frozenset(one.ordinal for one in victims) | replaced,
        replaced=replaced,
        chosen=_chosen(members, victims),
    )


def _extra(members: Sequence[Member], size: Size) -> int:
    """Members beyond the wanted. While nothing moves, those that are of the new revision stay beside the old."""
    old = [one for one in members if one.is_outdated and not one.is_leaving]
    if not old:
        return 0
    if size.is_moving:
        return min(size.max_surge, len(old))
    return min(size.max_surge, len([one for one in members if not one.is_outdated and not one.is_leaving]))


def harm(member: Member) -> tuple[object, ...]:
    """Whoever has the least goes first: those that go anyway, those that serve nobody, old ones, and then by what the
    user says, by running requests, and by what the caches hold; at last the highest ordinal.
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


def _victims(members: Sequence[Member], count: int) -> list[Member]:
    return sorted(members, key=harm)[:count] if count > 0 else []


def _chosen(members: Sequence[Member], victims: Sequence[Member]) -> frozenset[int]:
    """The ready ones between which the load decides: empty where all of them go, or none, or others were told
    before.
    """
    fresh = [one for one in victims if one.is_ready]
    equals = [one for one in members if one.is_ready]
    return frozenset(one.ordinal for one in equals) if fresh and len(fresh) < len(equals) else frozenset()


def _replaced(members: Sequence[Member], size: Size, total: int) -> tuple[frozenset[int], int]:
    """The outdated members that are taken down to be made anew in place, and how many more changes may be under way."""
    old = [one for one in members if one.is_outdated]
    fresh = [one for one in members if not one.is_outdated]
    missing = max(0, total - len(members))
    ready = len([one for one in members if one.is_ready])
    under_way = [one for one in fresh if not one.is_ready] + [one for one in old if one.is_leaving]
    slots = size.unavailable + size.max_surge - len(under_way)
    if not size.is_moving:
        return frozenset(), slots
    replaced = [one for one in old if one.is_leaving]
    budget, left = ready - (size.wanted - size.unavailable), slots - missing
    for one in sorted((one for one in old if not one.is_leaving), key=lambda one: (one.is_ready, -one.ordinal)):
        if left <= 0 or (one.is_ready and budget <= 0):
            break
        left, budget = left - 1, budget - one.is_ready
        replaced.append(one)
    return frozenset(one.ordinal for one in replaced), slots


def _made(members: Sequence[Member], total: int, slots: int, size: Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
