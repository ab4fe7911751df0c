# SPDX-License-Identifier: Apache-2.0
"""What nodes have left, by kind of accelerator."""

from __future__ import annotations

import pytest

from controller.autoscale.allocation.inventory import free_accelerators, room_for
from controller.reconcile.model_infer.observed import NodeRoom

PRODUCT = "nvidia.com/gpu.product"
NODES = [
    NodeRoom(name="a", free={"nvidia.com/gpu": 6.0, "cpu": 100.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeRoom(name="b", free={"nvidia.com/gpu": 2.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeRoom(name="c", free={"nvidia.com/gpu": 8.0}, labels={PRODUCT: "NVIDIA-A100-SXM4-80GB"}),
    # somebody asked for more than there is
    NodeRoom(name="d", free={"nvidia.com/gpu": -1.0}, labels={"attache.dev/accelerator": "h100"}),
]


def test_kinds_are_found_by_words_of_labels() -> None:
    kinds = ("H100", "NVIDIA-A100-SXM4-80GB", "h1", "L40S")
    assert free_accelerators(NODES, kinds) == {"H100": 8, "NVIDIA-A100-SXM4-80GB": 8, "h1": 0, "L40S": 0}


def test_a_replica_fits_only_where_one_node_has_it_all() -> None:
    assert room_for(NODES, "H100", 1) == 8
    assert room_for(NODES, "H100", 4) == 1
    assert room_for(NODES, "H100", 8) == 0
    # two pods of four each: one place alone
    assert room_for(NODES, "H100", 8, pods=2) == 0
    assert room_for(NODES, "A100", 8, pods=2) == 1


def test_what_needs_no_accelerators_is_not_limited_by_them() -> None:
    with pytest.raises(ValueError, match="without accelerators"):
        room_for(NODES, "H100", 0)
