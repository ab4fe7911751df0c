# SPDX-License-Identifier: Apache-2.0
"""What nodes have left, by kind of accelerator."""

from __future__ import annotations

import pytest

from controller.autoscaler.decision.allocation.inventory import free_at, kinds_at, places_of, room_at
from controller.models.model_infer.observed import NodeRoom

PRODUCT = "nvidia.com/gpu.product"
NODES = [
    NodeRoom(name="a", free={"nvidia.com/gpu": 6.0, "cpu": 100.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeRoom(name="b", free={"nvidia.com/gpu": 2.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeRoom(name="c", free={"nvidia.com/gpu": 8.0}, labels={PRODUCT: "NVIDIA-A100-SXM4-80GB"}),
    # somebody asked for more than there is
    NodeRoom(name="d", free={"nvidia.com/gpu": -1.0}, labels={"attache.dev/accelerator": "h100"}),
]


def free(kind: str, nodes: list[NodeRoom] = NODES) -> int:
    return free_at(nodes, places_of(nodes, kind))


def room(kind: str, accelerators: int, pods: int = 1) -> int:
    return room_at(NODES, places_of(NODES, kind), accelerators, pods)


def test_kinds_are_found_by_words_of_labels() -> None:
    kinds = ("H100", "nvidia-h100", "NVIDIA-A100-SXM4-80GB", "h1", "L40S")
    assert {kind: free(kind) for kind in kinds} == {
        "H100": 8,
        "nvidia-h100": 8,
        "NVIDIA-A100-SXM4-80GB": 8,
        "h1": 0,
        "L40S": 0,
    }


def test_a_kind_may_be_a_resource() -> None:
    amd = NodeRoom(name="e", free={"amd.com/gpu": 4.0}, labels={})
    sliced = NodeRoom(name="f", free={"nvidia.com/gpu": 1.0, "nvidia.com/mig-1g.5gb": 7.0}, labels={})
    nodes = [*NODES, amd, sliced]
    assert free("nvidia.com/gpu", nodes) == 17
    assert free("nvidia.com/mig-1g.5gb", nodes) == 7
    assert free("amd.com/gpu", nodes) == 4
    # no accelerators
    assert free("cpu", nodes) == 0


def test_what_nodes_call_their_accelerators_is_told() -> None:
    nodes = [*NODES, NodeRoom(name="e", free={"amd.com/gpu": 4.0}, labels={}), NodeRoom(name="g", free={"cpu": 1.0})]
    assert kinds_at(nodes) == ["NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "amd.com/gpu", "h100"]


def test_a_replica_fits_only_where_one_node_has_it_all() -> None:
    assert room("H100", 1) == 8
    assert room("H100", 4) == 1
    assert room("H100", 8) == 0
    # two pods of four each: one place alone
    assert room("H100", 8, pods=2) == 0
    assert room("A100", 8, pods=2) == 1


def test_what_needs_no_accelerators_is_not_limited_by_them() -> None:
    with pytest.raises(ValueError, match="without accelerators"):
        room("H100", 0)
