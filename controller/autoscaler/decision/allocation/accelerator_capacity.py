# SPDX-License-Identifier: Apache-2.0
"""The further replicas for which nodes have accelerators, and the share of each binding.

Accelerators reserved for another binding do not count: those of its replicas without a node, which nodes still show as
free. For a claim that precedes, by priority and then by age, the replicas that it lacks are reserved as well. Neither
reservation exceeds what fits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from controller.api.shared_types import matches_accelerator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

# Where providers and device plugins write the kind of a node's accelerators.
_KIND_LABELS: Final = (
    "attache.dev/accelerator",
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
# Extended resources that are accelerators. Slices of MIG and the like are named for their size.
_RESOURCES: Final = re.compile(
    r"^(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|gpu\.intel\.com/.+|habana\.ai/gaudi|google\.com/tpu|huawei\.com/Ascend.+)$"
)
Kinds = tuple[str, ...]
Order = tuple[int, str, str]


class SchedulableNode(Protocol):
    """A schedulable node. ``free``: allocatable minus the requests of all pods, by resource. ``labels``: the node's."""

    @property
    def free(self) -> Mapping[str, float]:
        """Amounts by resource."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """By key."""
        ...


class NodeResourceKey(NamedTuple):
    """Where accelerators are: the index of a node, and one of its resources."""

    node: int
    resource: str


def accelerator_resources(nodes: Sequence[SchedulableNode], kind: str) -> frozenset[NodeResourceKey]:
    """Nodes' resources of an accelerator kind, free or not. A kind is the name of a resource or the value of a node's
    label.

    Labels are compared by ``matches_accelerator``, which ignores most of the spelling. All accelerators of a node are
    of its label's kind.
    """
    return frozenset(
        NodeResourceKey(index, resource)
        for index, node in enumerate(nodes)
        for resource in _resources(node)
        if resource == kind or any(matches_accelerator(label, kind) for label in _labels(node))
    )


def free_on_nodes(nodes: Sequence[SchedulableNode], places: Iterable[NodeResourceKey]) -> int:
    """Accelerators that are free there."""
    return sum(max(0, int(nodes[one.node].free[one.resource])) for one in places)


def fitting_replicas(
    nodes: Sequence[SchedulableNode], places: Collection[NodeResourceKey], accelerators: int, pods: int = 1
) -> int:
    """Further replicas that fit there, each of ``pods`` pods with an equal part of its accelerators.

    A pod fits only on one node that has all that it requests: four nodes with two free accelerators each do not fit a
    pod of eight.
    """
    share = -(-accelerators // max(1, pods))
    if share == 0:
        raise ValueError("a replica without accelerators is not limited by them")
    by_node: dict[int, int] = {}
    for one in places:
        by_node[one.node] = by_node.get(one.node, 0) + free_on_nodes(nodes, (one,))
    return sum(free // share for free in by_node.values()) // max(1, pods)


def accelerator_kinds(nodes: Iterable[SchedulableNode]) -> list[str]:
    """What nodes with accelerators call them: their labels, or where they have none, their resources."""
    found: set[str] = set()
    for node in nodes:
        resources = list(_resources(node))
        if resources:
            found.update(list(_labels(node)) or resources)
    return sorted(found)


def _resources(node: SchedulableNode) -> Iterator[str]:
    return (name for name in node.free if _RESOURCES.match(name))


def _labels(node: SchedulableNode) -> Iterator[str]:
    return (value for label in _KIND_LABELS if (value := node.labels.get(label)))


"""Of accelerators, as targets spell them."""
"""Of a binding: the negative of its priority, when it was created, its key. The smallest comes first."""


class TargetAcceleratorClaim(msgspec.Struct, frozen=True, kw_only=True):
    """One target's part of a claim. ``accelerators``: of a replica, of the kind ``kind``, in ``pods`` pods.
    ``promised``: replicas that were ordered and have no node yet. ``lacks``: further ones that it would take if there
    were room.
    """

    kind: str
    accelerators: int
    pods: int = 1
    promised: int = 0
    lacks: int = 0


class BindingAcceleratorClaim(msgspec.Struct, frozen=True):
    """A binding's."""

    order: Order
    shares: tuple[TargetAcceleratorClaim, ...] = ()


class ClusterAccelerators:
    """Free accelerators of nodes at one instant. Results are cached by kind, as kinds are queried repeatedly."""

    def __init__(self, nodes: Iterable[SchedulableNode] = ()) -> None:
        self._nodes = list(nodes)
        self._free: dict[Kinds, int] = {}
        self._fits: dict[tuple[str, int, int], int] = {}
        self._of_kind: dict[str, frozenset[NodeResourceKey]] = {}

    def free_accelerators(self, kinds: Kinds) -> int:
        """Accelerators of these kinds; those that are of several of them count once."""
        if kinds not in self._free:
            self._free[kinds] = free_on_nodes(self._nodes, self._of_any(kinds))
        return self._free[kinds]

    def replicas_on_empty_nodes(self, share: TargetAcceleratorClaim) -> int:
        """Replicas that fit on the nodes while no other pod runs there."""
        shape = share.kind, share.accelerators, share.pods
        if shape not in self._fits:
            self._fits[shape] = fitting_replicas(self._nodes, self._places(share.kind), share.accelerators, share.pods)
        return self._fits[shape]

    def has_kind(self, kind: str) -> bool:
        """Whether a node has accelerators of a kind, free or not."""
        return bool(self._places(kind))

    def kinds(self) -> list[str]:
        """What nodes call their accelerators."""
        return accelerator_kinds(self._nodes)

    def kinds_overlap(self, kinds: Kinds, other: str) -> bool:
        """Whether some accelerators count as ``other``, too: ``H100`` and ``h100``, or ``NVIDIA-H100-80GB-HBM3``."""
        return other in kinds or not self._of_any(kinds).isdisjoint(self._places(other))

    def pools_of_kinds(self, kinds: Kinds) -> set[Kinds]:
        """Which of these kinds have to share: each one with those that mean no others than it, as ``H100`` with
        ``h100`` and ``NVIDIA-H100-PCIe``; and all that overlap, directly or by way of others.
        """
        found = {tuple(one for one in kinds if one == kind or self._is_within(one, kind)) for kind in kinds}
        rest = list(kinds)
        while rest:
            together: Kinds = (rest.pop(0),)
            while near := tuple(one for one in rest if self.kinds_overlap(together, one)):
                together += near
                rest = [one for one in rest if one not in near]
            found.add(tuple(one for one in kinds if one in together))
        return found

    def _is_within(self, kind: str, other: str) -> bool:
        return self.has_kind(kind) and self._places(kind) <= self._places(other)

    def _of_any(self, kinds: Kinds) -> frozenset[NodeResourceKey]:
        return self._places(kinds[0]) if len(kinds) == 1 else frozenset().union(*map(self._places, kinds))

    def _places(self, kind: str) -> frozenset[NodeResourceKey]:
        if kind not in self._of_kind:
            self._of_kind[kind] = accelerator_resources(self._nodes, kind)
        return self._of_kind[kind]


def capacity_after_claims(
    mine: BindingAcceleratorClaim, kinds: Kinds, nodes: ClusterAccelerators, others: Iterable[BindingAcceleratorClaim]
) -> int:
    """Accelerators of these kinds together that ``mine`` may still request. ``others``: all claims, with or without
    ``mine``.
    """
    left = nodes.free_accelerators(kinds) - sum(_promised(one, nodes) for one in _of(mine, kinds, nodes))
    rest = [one for one in others if one.order != mine.order]
    left -= sum(_promised(share, nodes) for one in rest for share in _of(one, kinds, nodes))
    for one in sorted((each for each in rest if each.order < mine.order), key=lambda each: each.order):
        for share in _of(one, kinds, nodes):
            fits = min(
                nodes.replicas_on_empty_nodes(share) - min(share.promised, nodes.replicas_on_empty_nodes(share)),
                max(0, left) // share.accelerators,
            )
            left -= min(share.lacks, fits) * share.accelerators
    return max(0, left)


def headroom_in_replicas(share: TargetAcceleratorClaim, left: int, nodes: ClusterAccelerators) -> int:
    """Replicas of a target that it may have beyond what it was promised. ``left``: by ``capacity_after_claims``."""
    return min(left // share.accelerators, max(0, nodes.replicas_on_empty_nodes(share) - share.promised))


def _of(claim: BindingAcceleratorClaim, kinds: Kinds, nodes: ClusterAccelerators) -> Sequence[TargetAcceleratorClaim]:
    return [one for one in claim.shares if nodes.kinds_overlap(kinds, one.kind)]


def _promised(share: TargetAcceleratorClaim, nodes: ClusterAccelerators) -> int:
    return min(share.promised, nodes.replicas_on_empty_nodes(share)) * share.accelerators
