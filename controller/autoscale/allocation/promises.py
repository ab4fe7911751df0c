# SPDX-License-Identifier: Apache-2.0
"""What bindings leave each other of nodes' accelerators: none counts what another one was promised already.

Replicas without a node are promised room that nodes still show as free. A claim that comes before another one, by
priority and then by age, is also left what it lacks. Neither counts for more than what would fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.autoscale.allocation.inventory import free_accelerators, has_kind, room_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscale.allocation.inventory import FreeNode

Order = tuple[int, str, str]
"""Of a binding: the negative of its priority, when it was created, its key. The smallest comes first."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One target's part of a claim. ``accelerators``: of a replica, of the kind ``kind``, in ``pods`` pods. ``promised``:
    replicas that were ordered and have no node yet. ``lacks``: further ones that it would take if there were room.
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
        self._free: dict[str, int] = {}
        self._fits: dict[tuple[str, int, int], int] = {}
        self._of_kind: dict[str, frozenset[int]] = {}

    def free(self, kind: str) -> int:
        """Accelerators of a kind."""
        if kind not in self._free:
            self._free[kind] = free_accelerators(self._nodes, (kind,))[kind]
        return self._free[kind]

    def fits(self, share: Share) -> int:
        """Replicas that would find nodes, were there nobody else."""
        asked = share.kind, share.accelerators, share.pods
        if asked not in self._fits:
            self._fits[asked] = room_for(self._nodes, share.kind, share.accelerators, share.pods)
        return self._fits[asked]

    def overlap(self, one: str, other: str) -> bool:
        """Whether a node may count as both kinds: ``H100`` and ``h100``, or ``NVIDIA-H100-80GB-HBM3``."""
        return one == other or not self._places(one).isdisjoint(self._places(other))

    def _places(self, kind: str) -> frozenset[int]:
        if kind not in self._of_kind:
            self._of_kind[kind] = frozenset(i for i, node in enumerate(self._nodes) if has_kind(node, kind))
        return self._of_kind[kind]


def left_for(mine: Claim, kind: str, nodes: Nodes, others: Iterable[Claim]) -> int:
    """Accelerators of a kind that ``mine`` may still ask for. ``others``: all claims, with or without ``mine``."""
    left = nodes.free(kind) - sum(_promised(one, nodes) for one in _of(mine, kind, nodes))
    rest = [one for one in others if one.order != mine.order]
    left -= sum(_promised(share, nodes) for one in rest for share in _of(one, kind, nodes))
    for one in sorted((each for each in rest if each.order < mine.order), key=lambda each: each.order):
        for share in _of(one, kind, nodes):
            fits = min(nodes.fits(share) - min(share.promised, nodes.fits(share)), max(0, left) // share.accelerators)
            left -= min(share.lacks, fits) * share.accelerators
    return max(0, left)


def room_of(share: Share, left: int, nodes: Nodes) -> int:
    """Replicas of a target that it may have beyond what it was promised. ``left``: by ``left_for``."""
    return min(left // share.accelerators, max(0, nodes.fits(share) - share.promised))


def _of(claim: Claim, kind: str, nodes: Nodes) -> Sequence[Share]:
    return [one for one in claim.shares if nodes.overlap(one.kind, kind)]


def _promised(share: Share, nodes: Nodes) -> int:
    return min(share.promised, nodes.fits(share)) * share.accelerators
