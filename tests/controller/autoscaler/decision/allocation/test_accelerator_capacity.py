# SPDX-License-Identifier: Apache-2.0
"""What nodes have left, by kind of accelerator, and what bindings leave each other of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from controller.autoscaler.decision.allocation.accelerator_capacity import (
    BindingAcceleratorClaim,
    ClusterAccelerators,
    TargetAcceleratorClaim,
    accelerator_kinds,
    accelerator_resources,
    capacity_after_claims,
    fitting_replicas,
    free_on_nodes,
    headroom_in_replicas,
)
from controller.models.model_infer.model_infer_state import NodeCapacity

PRODUCT = "nvidia.com/gpu.product"
NODES = [
    NodeCapacity(name="a", free={"nvidia.com/gpu": 6.0, "cpu": 100.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeCapacity(name="b", free={"nvidia.com/gpu": 2.0}, labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}),
    NodeCapacity(name="c", free={"nvidia.com/gpu": 8.0}, labels={PRODUCT: "NVIDIA-A100-SXM4-80GB"}),
    # somebody asked for more than there is
    NodeCapacity(name="d", free={"nvidia.com/gpu": -1.0}, labels={"attache.dev/accelerator": "h100"}),
]


def free(kind: str, nodes: list[NodeCapacity] = NODES) -> int:
    return free_on_nodes(nodes, accelerator_resources(nodes, kind))


def room(kind: str, accelerators: int, pods: int = 1) -> int:
    return fitting_replicas(NODES, accelerator_resources(NODES, kind), accelerators, pods)


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
    amd = NodeCapacity(name="e", free={"amd.com/gpu": 4.0}, labels={})
    sliced = NodeCapacity(name="f", free={"nvidia.com/gpu": 1.0, "nvidia.com/mig-1g.5gb": 7.0}, labels={})
    nodes = [*NODES, amd, sliced]
    assert free("nvidia.com/gpu", nodes) == 17
    assert free("nvidia.com/mig-1g.5gb", nodes) == 7
    assert free("amd.com/gpu", nodes) == 4
    # no accelerators
    assert free("cpu", nodes) == 0


def test_what_nodes_call_their_accelerators_is_told() -> None:
    nodes = [
        *NODES,
        NodeCapacity(name="e", free={"amd.com/gpu": 4.0}, labels={}),
        NodeCapacity(name="g", free={"cpu": 1.0}),
    ]
    assert accelerator_kinds(nodes) == ["NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "amd.com/gpu", "h100"]


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


NAMES = {"h100": "NVIDIA-H100-80GB-HBM3", "H100": "NVIDIA-H100-80GB-HBM3", "a100": "NVIDIA-A100-SXM4-80GB"}


def node(name: str, gpus: int, product: str = NAMES["h100"]) -> NodeCapacity:
    return NodeCapacity(name=name, free={"nvidia.com/gpu": float(gpus)}, labels={PRODUCT: product})


def share(promised: int = 0, lacks: int = 0, *, accelerators: int = 1, kind: str = "h100") -> TargetAcceleratorClaim:
    return TargetAcceleratorClaim(kind=kind, accelerators=accelerators, promised=promised, lacks=lacks)


def test_two_targets_of_one_binding_and_another_binding_share_what_is_there() -> None:
    nodes = ClusterAccelerators([node("a", 8), node("b", 4)])
    mine = BindingAcceleratorClaim((0, "1", "x"), (share(2), share(1, accelerators=4)))
    other = BindingAcceleratorClaim((0, "2", "y"), (share(3),))
    assert capacity_after_claims(mine, ("h100",), nodes, [mine, other]) == 12 - 2 - 4 - 3


def test_names_of_one_kind_are_one_kind() -> None:
    nodes = ClusterAccelerators([node("a", 8)])
    other = BindingAcceleratorClaim((0, "2", "y"), (share(3, kind="H100"),))
    assert capacity_after_claims(BindingAcceleratorClaim((0, "1", "x")), ("h100",), nodes, [other]) == 5


HBM3 = "NVIDIA-H100-80GB-HBM3"
PCIE = "NVIDIA-H100-PCIe"


def test_kinds_share_what_both_may_have() -> None:
    nodes = ClusterAccelerators([node("a", 8), node("b", 4, PCIE), node("c", 2, NAMES["a100"])])
    # two spellings of one kind are one pool
    assert nodes.pools_of_kinds((HBM3, "nvidia-h100-80gb")) == {(HBM3, "nvidia-h100-80gb")}
    # one kind that is part of another one is limited by itself, and together with it
    assert nodes.pools_of_kinds(("H100", PCIE)) == {("H100", PCIE), (PCIE,)}
    assert (nodes.free_accelerators(("H100", PCIE)), nodes.free_accelerators((PCIE,))) == (12, 4)
    assert nodes.pools_of_kinds(("A100", "B200", "H100")) == {("A100",), ("B200",), ("H100",)}
    # 80GB are on both kinds of nodes, so it has to share with each of them
    wide = ClusterAccelerators([node("a", 8), node("c", 2, "NVIDIA-A100-SXM4-80GB"), node("d", 1, PCIE)])
    assert wide.pools_of_kinds(("80gb", "h100")) == {("80gb",), ("h100",), ("80gb", "h100")}
    assert wide.free_accelerators(("80gb", "h100")) == 11


def test_a_resource_is_a_kind_beside_what_labels_say() -> None:
    nodes = ClusterAccelerators([node("a", 8), node("c", 2, NAMES["a100"])])
    assert nodes.pools_of_kinds(("h100", "nvidia.com/gpu")) == {("h100",), ("h100", "nvidia.com/gpu")}
    assert nodes.free_accelerators(("h100", "nvidia.com/gpu")) == 10


def test_what_an_earlier_one_lacks_is_left_to_it() -> None:
    nodes = ClusterAccelerators([node("a", 8)])
    first, second = (
        BindingAcceleratorClaim((0, "1", "x"), (share(lacks=6),)),
        BindingAcceleratorClaim((0, "2", "y"), (share(lacks=6),)),
    )
    assert capacity_after_claims(first, ("h100",), nodes, [first, second]) == 8
    assert capacity_after_claims(second, ("h100",), nodes, [first, second]) == 2
    urgent = msgspec.structs.replace(second, order=(-1, "2", "y"))
    assert capacity_after_claims(first, ("h100",), nodes, [first, urgent]) == 2


def test_what_fits_nowhere_is_not_kept_from_others() -> None:
    nodes = ClusterAccelerators([node(name, 2) for name in "abcd"])
    large = BindingAcceleratorClaim((-5, "1", "x"), (share(promised=1, lacks=3, accelerators=8),))
    assert capacity_after_claims(BindingAcceleratorClaim((0, "2", "y")), ("h100",), nodes, [large]) == 8


@pytest.mark.parametrize("seed", range(200))
def test_all_together_are_never_allowed_more_than_there_is(seed: int) -> None:
    """Bindings look in any order and take what they may; pods find nodes, or end, whenever they do."""
    rng = random.Random(seed)
    kinds = list(NAMES)
    free = {f"n{i}": (rng.randint(0, 8), NAMES[rng.choice(kinds)]) for i in range(rng.randint(1, 5))}
    claims = [
        BindingAcceleratorClaim(
            (-rng.randint(0, 2), str(rng.randint(0, 3)), f"b{i}"),
            tuple(
                share(kind=rng.choice(kinds), accelerators=rng.choice((1, 1, 2, 4))) for _ in range(rng.randint(1, 3))
            ),
        )
        for i in range(rng.randint(2, 5))
    ]
    for _ in range(60):
        nodes = ClusterAccelerators([node(name, gpus, product) for name, (gpus, product) in free.items()])
        turn = rng.randrange(len(claims))
        mine = claims[turn]
        shares = list(mine.shares)
        for i, one in enumerate(shares):
            mine = BindingAcceleratorClaim(mine.order, tuple(shares))
            allowed = headroom_in_replicas(one, capacity_after_claims(mine, (one.kind,), nodes, claims), nodes)
            wish = rng.randint(0, 6)
            taken = min(wish, allowed)
            shares[i] = msgspec.structs.replace(one, promised=one.promised + taken, lacks=wish - taken)
        claims[turn] = BindingAcceleratorClaim(mine.order, tuple(shares))
        for product in set(NAMES.values()):
            there = sum(gpus for gpus, of in free.values() if of == product)
            promised = sum(
                # what fits nowhere takes nothing
                min(one.promised, nodes.replicas_on_empty_nodes(one)) * one.accelerators
                for each in claims
                for one in each.shares
                if NAMES[one.kind] == product
            )
            assert promised <= there
        _place_some(rng, free, claims)


def _place_some(rng: random.Random, free: dict[str, tuple[int, str]], claims: list[BindingAcceleratorClaim]) -> None:
    """As a scheduler: one replica of each finds a node, if any has room for it."""
    for turn, claim in enumerate(claims):
        shares = list(claim.shares)
        for i, one in enumerate(shares):
            fitting = [
                name
                for name, (gpus, product) in free.items()
                if product == NAMES[one.kind] and gpus >= one.accelerators
            ]
            if one.promised and fitting and rng.random() < 0.4:
                gpus, product = free[fitting[0]]
                free[fitting[0]] = gpus - one.accelerators, product
                shares[i] = msgspec.structs.replace(one, promised=one.promised - 1)
        claims[turn] = BindingAcceleratorClaim(claim.order, tuple(shares))


def test_the_first_in_order_gets_what_becomes_free() -> None:
    first, second = (
        BindingAcceleratorClaim((0, "1", "x"), (share(lacks=2),)),
        BindingAcceleratorClaim((0, "2", "y"), (share(lacks=5),)),
    )
    full = ClusterAccelerators([node("a", 0)])
    assert capacity_after_claims(second, ("h100",), full, [first, second]) == 0
    freed = ClusterAccelerators([node("a", 3)])
    assert (
        headroom_in_replicas(second.shares[0], capacity_after_claims(second, ("h100",), freed, [first, second]), freed)
        == 1
    )
    assert (
        headroom_in_replicas(first.shares[0], capacity_after_claims(first, ("h100",), freed, [first, second]), freed)
        == 3
    )
