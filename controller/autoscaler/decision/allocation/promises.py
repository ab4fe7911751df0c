# SPDX-License-Identifier: Apache-2.0
"""What bindings leave each other of nodes' accelerators: none counts what another one was promised already.

Replicas without a node are promised room that nodes still show as free. A claim that comes before another one, by
priority and then by age, is also left what it lacks. Neither counts for more than what would fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.allocation.inventory import free_at, kinds_at, places_of, room_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscaler.decision.allocation.inventory import FreeNode, Place

Kinds = tuple[str, ...]
"""Of accelerators, as targets spell them."""

Order = tuple[int, str, str]
"""Of a binding: the negative of its priority, when it was created, its key. The smallest comes first."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One target's part of a claim. ``accelerators``: of a replica, of the kind ``kind``, in ``pods`` pods.
    ``promised``: replicas that were ordered and have no node yet. ``lacks``: further ones that it would take if there
    were room.
    """

    kind: str
    accelerators: int
    pods: int = 1
    promised: int = 0
    lacks: int = 0


class Claim(msgspec.Struct, frozen=True):
    """A binding's."""

    order: Order
    shares: tuple[Share, ...] = ()


class Nodes:
    """What nodes have left at one instant. Kinds are asked about again and again, so what was found is kept."""

    def __init__(self, nodes: Iterable[FreeNode] = ()) -> None:
        self._nodes = list(nodes)
        self._free: dict[Kinds, int] = {}
        self._fits: dict[tuple[str, int, int], int] = {}
        self._of_kind: dict[str, frozenset[Place]] = {}

    def free(self, kinds: Kinds) -> int:
        """Accelerators of these kinds; those that are of several of them count once."""
        if kinds not in self._free:
            self._free[kinds] = free_at(self._nodes, self._of_any(kinds))
        return self._free[kinds]

    def fits(self, share: Share) -> int:
        """Replicas that would find nodes, were there nobody else."""
        asked = share.kind, share.accelerators, share.pods
        if asked not in self._fits:
            self._fits[asked] = room_at(self._nodes, self._places(share.kind), share.accelerators, share.pods)
        return self._fits[asked]

    def has(self, kind: str) -> bool:
        """Whether a node has accelerators of a kind, free or not."""
        return bool(self._places(kind))

    def kinds(self) -> list[str]:
        """What nodes call their accelerators."""
        return kinds_at(self._nodes)

    def overlap(self, kinds: Kinds, other: str) -> bool:
        """Whether some accelerators count as ``other``, too: ``H100`` and ``h100``, or ``NVIDIA-H100-80GB-HBM3``."""
        return other in kinds or not self._of_any(kinds).isdisjoint(self._places(other))

    def pools(self, kinds: Kinds) -> set[Kinds]:
        """Which of these kinds have to share: each one with those that mean no others than it, as ``H100`` with
        ``h100`` and ``NVIDIA-H100-PCIe``; and all that overlap, directly or by way of others.
        """
        found = {tuple(one for one in kinds if one == kind or self._is_within(one, kind)) for kind in kinds}
        rest = list(kinds)
        while rest:
            together: Kinds = (rest.pop(0),)
            while near := tuple(one for one in rest if self.overlap(together, one)):
                together += near
                rest = [one for one in rest if one not in near]
            found.add(tuple(one for one in kinds if one in together))
        return found

    def _is_within(self, kind: str, other: str) -> bool:
        return self.has(kind) and self._places(kind) <= self._places(other)

    def _of_any(self, kinds: Kinds) -> frozenset[Place]:
        return self._places(kinds[0]) if len(kinds) == 1 else frozenset().union(*map(self._places, kinds))

    def _places(self, kind: str) -> frozenset[Place]:
        if kind not in self._of_kind:
            self._of_kind[kind] = places_of(self._nodes, kind)
        return self._of_kind[kind]


def left_for(mine: Claim, kinds: Kinds, nodes: Nodes, others: Iterable[Claim]) -> int:
    """Accelerators of these kinds together that ``mine`` may still ask for. ``others``: all claims, with or without
    ``mine``.
    """
    left = nodes.free(kinds) - sum(_promised(one, nodes) for one in _of(mine, kinds, nodes))
    rest = [one for one in others if one.order != mine.order]
    left -= sum(_promised(share, nodes) for one in rest for share in _of(one, kinds, nodes))
    for one in sorted((each for each in rest if each.order < mine.order), key=lambda each: each.order):
        for share in _of(one, kinds, nodes):
            fits = min(nodes.fits(share) - min(share.promised, nodes.fits(share)), max(0, left) // share.accelerators)
            left -= min(share.lacks, fits) * share.accelerators
    return max(0, left)


def room_of(share: Share, left: int, nodes: Nodes) -> int:
    """Replicas of a target that it may have beyond what it was promised. ``left``: by ``left_for``."""
    return min(left // share.accelerators, max(0, nodes.fits(share) - share.promised))


def _of(claim: Claim, kinds: Kinds, nodes: Nodes) -> Sequence[Share]:
    return [one for one in claim.shares if nodes.overlap(kinds, one.kind)]


def _promised(share: Share, nodes: Nodes) -> int:
    return min(share.promised, nodes.fits(share)) * share.accelerators
