# SPDX-License-Identifier: Apache-2.0
"""How many more replicas nodes have accelerators for, by what all pods of the cluster leave of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from controller.api.accelerators import is_of_kind

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


class FreeNode(Protocol):
    """A node that takes pods. ``free``: what the pods of everybody leave, by resource. ``labels``: the node's."""

    @property
    def free(self) -> Mapping[str, float]:
        """Amounts by resource."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """By key."""
        ...


class Place(NamedTuple):
    """Where accelerators are: the index of a node, and one of its resources."""

    node: int
    resource: str


def places_of(nodes: Sequence[FreeNode], kind: str) -> frozenset[Place]:
    """Where accelerators of a kind are, free or not. A kind is the name of a resource, or what a label of the node
    says.

    The latter by ``is_of_kind``: spelling matters little. All accelerators of a node are of the kind of its label.
    """
    return frozenset(
        Place(index, resource)
        for index, node in enumerate(nodes)
        for resource in _resources(node)
        if resource == kind or any(is_of_kind(label, kind) for label in _labels(node))
    )


def free_at(nodes: Sequence[FreeNode], places: Iterable[Place]) -> int:
    """Accelerators that are free there."""
    return sum(max(0, int(nodes[one.node].free[one.resource])) for one in places)


def room_at(nodes: Sequence[FreeNode], places: Collection[Place], accelerators: int, pods: int = 1) -> int:
    """Further replicas that fit there, each of ``pods`` pods with an equal part of its accelerators.

    A pod fits only where one node has all that it asks for: four nodes with two free each have no room for a pod of
    eight.
    """
    share = -(-accelerators // max(1, pods))
    if share == 0:
        raise ValueError("a replica without accelerators is not limited by them")
    by_node: dict[int, int] = {}
    for one in places:
        by_node[one.node] = by_node.get(one.node, 0) + free_at(nodes, (one,))
    return sum(free // share for free in by_node.values()) // max(1, pods)


def kinds_at(nodes: Iterable[FreeNode]) -> list[str]:
    """What nodes with accelerators call them: their labels, or where they have none, their resources."""
    found: set[str] = set()
    for node in nodes:
        resources = list(_resources(node))
        if resources:
            found.update(list(_labels(node)) or resources)
    return sorted(found)


def _resources(node: FreeNode) -> Iterator[str]:
    return (name for name in node.free if _RESOURCES.match(name))


def _labels(node: FreeNode) -> Iterator[str]:
    return (value for label in _KIND_LABELS if (value := node.labels.get(label)))
