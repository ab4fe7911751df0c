# SPDX-License-Identifier: Apache-2.0
"""How many more replicas nodes have accelerators for, by what all pods of the cluster leave of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


def free_accelerators(nodes: Iterable[FreeNode], kinds: Iterable[str]) -> dict[str, int]:
    """Of each kind, over all nodes."""
    nodes = list(nodes)
    return {kind: sum(_free(one) for one in nodes if has_kind(one, kind)) for kind in kinds}


def room_for(nodes: Iterable[FreeNode], kind: str, accelerators: int, pods: int = 1) -> int:
    """Further replicas that fit, each of ``pods`` pods with an equal part of its accelerators.

    A pod fits only where one node has all that it asks for: four nodes with two free each have no room for a pod of
    eight.
    """
    share = -(-accelerators // max(1, pods))
    if share == 0:
        raise ValueError("a replica without accelerators is not limited by them")
    places = sum(_free(one) // share for one in nodes if has_kind(one, kind))
    return places // max(1, pods)


def _free(node: FreeNode) -> int:
    return sum(max(0, int(amount)) for name, amount in node.free.items() if _RESOURCES.match(name))


def has_kind(node: FreeNode, kind: str) -> bool:
    """Whether a node has accelerators of a kind: the whole value of a label, or one of its words.

    H100 is NVIDIA-H100-80GB-HBM3, too.
    """
    wanted = kind.lower()
    for label in _KIND_LABELS:
        value = node.labels.get(label, "").lower()
        if value and (value == wanted or wanted in re.split(r"[-_ ]", value)):
            return True
    return False
