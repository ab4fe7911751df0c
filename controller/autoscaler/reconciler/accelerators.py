# SPDX-License-Identifier: Apache-2.0
"""The accelerator capacity of nodes that each binding may use; nodes are watched only while a binding needs it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from controller.autoscaler.decision.allocation.accelerator_capacity import (
    BindingAcceleratorClaim,
    ClusterAccelerators,
    Kinds,
    TargetAcceleratorClaim,
    capacity_after_claims,
    headroom_in_replicas,
)
from controller.kube.api_resources import NODES, PODS
from controller.kube.pod_views import POD_VIEW
from controller.models.node_capacity import node_capacities, trimmed_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.result import TargetAction
    from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
    from controller.kube.informer import Informer
    from controller.kube.pod_views import PodView
    from controller.kube.shared_informers import SharedInformers

# Interval at which all pods of a cluster are summed at most.
_EACH_S: Final = 2.0
# How long replicas without pods reserve accelerators after they were ordered: a quota may refuse their pods, and an
# exported decision may never create any. After that, other bindings get these accelerators.
_PROMISED_S: Final = 60.0
# Kinds of accelerators in a message.
_MOST_KINDS: Final = 8


class AcceleratorHeadroom(msgspec.Struct, frozen=True):
    """``replicas``: further replicas that fit, by target. ``free``: accelerators for them, by pool. A target or pool
    that is missing is unlimited. ``pools``: those from which each target takes its accelerators. ``without_nodes``: why
    no node counts for a limited target.
    """

    replicas: Mapping[str, int] = {}
    free: Mapping[str, int] = {}
    pools: Mapping[str, tuple[str, ...]] = {}
    without_nodes: Mapping[str, str] = {}


class AcceleratorReservation(NamedTuple):
    """The last decision of a binding, whose accelerators are reserved for it. ``replicas`` and ``lacks``: by target.
    ``grown_at_s``: when it last requested more.
    """

    view: BindingView
    resolved: Sequence[ResolvedTarget]
    replicas: Mapping[str, int]
    lacks: Mapping[str, int]
    grown_at_s: float


class AcceleratorTracker:
    """``run`` follows nodes and all pods while a binding needs their capacity. ``ordered``: of all bindings."""

    def __init__(self, shared: SharedInformers, ordered: Callable[[], Iterable[AcceleratorReservation]]) -> None:
        self._shared = shared
        self._ordered = ordered
        self._users: set[str] = set()
        self._wake = asyncio.Event()
        self._informers: tuple[Informer, Informer] | None = None
        self._is_old = True
        self._read_at_s = float("-inf")
        self._nodes = ClusterAccelerators()
        self._placed: frozenset[str] = frozenset()

    def compute_headroom(
        self, view: BindingView, resolved: Sequence[ResolvedTarget], before: AcceleratorReservation | None
    ) -> AcceleratorHeadroom:
        """Empty where that is unknown, and where no target of a stage fits on any node: then replicas are unlimited, as
        a cluster autoscaler may add nodes for pending pods. ``before``: what the binding ordered last.
        """
        limited = [one for one in resolved if is_limited(one, resolved, view)]
        if not limited:
            self.release(view.key)
            return AcceleratorHeadroom()
        if view.key not in self._users:
            self._users.add(view.key)
            self._wake.set()
        if not self._is_known():
            return AcceleratorHeadroom()
        # its decision begins with the replicas in the spec, whatever it decided before
        mine = self._claim(
            AcceleratorReservation(view, resolved, {}, {}, -math.inf if before is None else before.grown_at_s)
        )
        others = [self._claim(one) for one in self._ordered() if one.view.key != view.key]
        shares = {one.spec.name: share for one in resolved if (share := self._share(one)) is not None}
        names = [
            one.spec.name
            for one in limited
            if one.spec.name in shares and _is_possible(one, resolved, shares, self._nodes)
        ]
        return _capacity(
            names, shares, self._nodes, lambda kinds: capacity_after_claims(mine, kinds, self._nodes, others)
        )

    def reserve(
        self,
        view: BindingView,
        resolved: Sequence[ResolvedTarget],
        steps: Sequence[TargetAction],
        lacks: Mapping[str, int],
        before: AcceleratorReservation | None,
    ) -> AcceleratorReservation | None:
        """What a decision takes; None: nothing that others would have to leave. ``lacks``: how many more replicas the
        binding would take, by target.
        """
        owned = [one for one in resolved if one.may_write and self._share(one) is not None]
        if not owned:
            return None
        replicas = {
            one.target.spec.name: one.replicas for one in steps if one.will_be_applied and one.replicas is not None
        }
        known = {} if before is None else before.replicas
        is_more = any(count > known.get(name, 0) for name, count in replicas.items())
        grown_at_s = _now_s() if before is None or is_more else before.grown_at_s
        return AcceleratorReservation(view, owned, replicas, lacks, grown_at_s)

    def release(self, key: str) -> None:
        """The binding is gone, or needs no capacity."""
        if key in self._users:
            self._users.discard(key)
            self._wake.set()

    async def run(self) -> None:
        """Watch nodes and pods while any binding needs to know their capacity, until cancelled."""
        while True:
            self._wake.clear()
            if self._users:
                await self._follow()
            else:
                await self._wake.wait()

    async def _follow(self) -> None:
        nodes = self._shared.acquire(NODES, transform=trimmed_node)
        pods = self._shared.acquire(PODS, transform=POD_VIEW)
        for one in (nodes, pods):
            one.subscribe(self._changed)
        self._informers, self._is_old = (nodes, pods), True
        try:
            while self._users:
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._informers = None
            for one in (nodes, pods):
                one.unsubscribe(self._changed)
                self._shared.release(one)

    def _changed(self, _: str) -> None:
        self._is_old = True

    def _is_known(self) -> bool:
        """Whether the free accelerators of nodes, and the pods that use the others, are known."""
        if self._informers is None:
            return False
        nodes, pods = self._informers
        if not (nodes.synced.is_set() and pods.synced.is_set()):
            return False
        now_s = _now_s()
        if self._is_old and now_s >= self._read_at_s + _EACH_S:
            self._read_at_s, self._is_old = now_s, False
            views: list[PodView] = [one["view"] for one in pods.objects.values()]
            self._nodes = ClusterAccelerators(node_capacities(nodes.objects.values(), views))
            self._placed = frozenset(one.key for one in views if one.node and not one.is_ended)
        return True

    def _claim(self, ordered: AcceleratorReservation) -> BindingAcceleratorClaim:
        view = ordered.view
        priority = 0 if view.binding is None else view.binding.spec.priority
        is_new = _now_s() - ordered.grown_at_s < _PROMISED_S
        shares = (
            self._share(one, ordered.replicas.get(one.spec.name, 0), ordered.lacks.get(one.spec.name, 0), is_new=is_new)
            for one in ordered.resolved
        )
        return BindingAcceleratorClaim(
            (-priority, view.claim.created, view.key), tuple(one for one in shares if one is not None)
        )

    def _share(
        self, target: ResolvedTarget, replicas: int = 0, lacks: int = 0, *, is_new: bool = True
    ) -> TargetAcceleratorClaim | None:
        """None if it uses no known accelerators. ``is_new``: replicas without pods may soon have them."""
        spec, found = target.spec, target.found
        if spec.accelerator is None or spec.accelerators < 1 or found is None or target.kind is None:
            return None
        units: dict[str, list[bool]] = {}
        for pod in target.pods:
            if not pod.is_ended:
                units.setdefault(target.kind.unit_of(pod), []).append(pod.key in self._placed)
        placed = sum(all(one) for one in units.values())
        without_pods = max(0, max(found.replicas, replicas) - len(units))
        return TargetAcceleratorClaim(
            kind=spec.accelerator,
            accelerators=spec.accelerators,
            pods=max((len(one) for one in units.values()), default=1),
            promised=len(units) - placed + (without_pods if is_new else 0),
            lacks=lacks,
        )


def _capacity(
    names: Sequence[str],
    shares: Mapping[str, TargetAcceleratorClaim],
    nodes: ClusterAccelerators,
    left: Callable[[Kinds], int],
) -> AcceleratorHeadroom:
    """``names``: of the targets that are limited. ``shares``: of all, by target. ``left``: of some kinds together."""
    open_ = {share.kind for name, share in shares.items() if name not in names}
    counts: dict[str, int] = {}
    of_kind: dict[str, set[str]] = {}
    for kinds in nodes.pools_of_kinds(tuple(sorted({share.kind for share in shares.values()}))):
        limited = [one for one in kinds if one not in open_]
        if limited:
            pool, count = " or ".join(limited), left(kinds)
            counts[pool] = min(count, counts.get(pool, count))
            for one in limited:
                of_kind.setdefault(one, set()).add(pool)
    return AcceleratorHeadroom(
        {name: headroom_in_replicas(shares[name], left((shares[name].kind,)), nodes) for name in names},
        counts,
        {name: tuple(sorted(of_kind.get(share.kind, ()))) for name, share in shares.items()},
        {name: _homeless(shares[name].kind, nodes) for name in names if not nodes.has_kind(shares[name].kind)},
    )


def _homeless(kind: str, nodes: ClusterAccelerators) -> str:
    return f"no node has accelerators of the kind {kind}; nodes have {', '.join(nodes.kinds()[:_MOST_KINDS])}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def is_limited(target: ResolvedTarget, resolved: Sequence[ResolvedTarget], view: BindingView) -> bool:
    """Whether nodes' accelerators limit it: it is one of several of its stage, or shares a budget."""
    spec = target.spec
    several = sum(one.spec.stage == spec.stage for one in resolved) > 1
    has_budget = view.binding is not None and view.binding.spec.budget is not None
    return (several or has_budget) and spec.accelerator is not None and spec.accelerators > 0


def _is_possible(
    one: ResolvedTarget,
    resolved: Sequence[ResolvedTarget],
    shares: Mapping[str, TargetAcceleratorClaim],
    nodes: ClusterAccelerators,
) -> bool:
    """Whether some target of the stage would find a node, or may."""
    same = [each.spec.name for each in resolved if each.spec.stage == one.spec.stage]
    return any(name not in shares or nodes.replicas_on_empty_nodes(shares[name]) > 0 for name in same)
