# SPDX-License-Identifier: Apache-2.0
"""For how many more replicas of each target nodes have accelerators; followed only while a binding has a choice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from controller.autoscale.allocation.inventory import room_for
from controller.cluster.informer import Informer, InformerTiming, Selection
from controller.cluster.resources import NODES, PODS
from controller.roles.work.node_room import room, slim_to_requests
from controller.roles.work.slimming import slim_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.cluster.client import Client
    from controller.reconcile.model_infer.observed import NodeRoom
    from controller.roles.scaling.resolving import Resolved

# All pods of a cluster are added up at most so often.
_EACH_S: Final = 2.0


class Rooms:
    """``run`` follows nodes and all pods while ``of`` is asked about a binding that has a choice."""

    def __init__(self, client: Client, timing: InformerTiming) -> None:
        self._client = client
        self._timing = timing
        self._askers: set[str] = set()
        self._wake = asyncio.Event()
        self._followed: tuple[Informer, Informer] | None = None
        self._is_old = True
        self._nodes: tuple[float, list[NodeRoom]] = (float("-inf"), [])

    def of(self, key: str, resolved: Sequence[Resolved]) -> Mapping[str, int]:
        """By target; without those of which it is unknown. ``key``: of the binding.

        Empty where no target of a stage has room: then all may be asked for, as nodes may be added for pods that find none.
        """
        choices = [one for one in resolved if has_choice(one, resolved)]
        if not choices:
            self.forget(key)
            return {}
        if key not in self._askers:
            self._askers.add(key)
            self._wake.set()
        nodes = self._free()
        if nodes is None:
            return {}
        found = {
            one.spec.name: room_for(nodes, one.spec.accelerator, one.spec.accelerators, _pods_of_replica(one))
            for one in choices
            if one.spec.accelerator is not None
        }
        return {one.spec.name: found[one.spec.name] for one in choices if _is_possible(one, resolved, found)}

    def forget(self, key: str) -> None:
        """The binding is gone, or has no choice any more."""
        if key in self._askers:
            self._askers.discard(key)
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            if self._askers:
                await self._follow()
            else:
                await self._wake.wait()

    async def _follow(self) -> None:
        nodes = Informer(self._client, NODES, Selection(), timing=self._timing, slim=slim_node)
        pods = Informer(self._client, PODS, Selection(), timing=self._timing, slim=slim_to_requests)
        for one in (nodes, pods):
            one.subscribe(self._changed)
        self._followed, self._is_old = (nodes, pods), True
        tasks = [asyncio.create_task(one.run(), name=f"room: {one.resource.plural}") for one in (nodes, pods)]
        try:
            while self._askers:
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._followed = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self, _: str) -> None:
        self._is_old = True

    def _free(self) -> list[NodeRoom] | None:
        """What nodes have left; None while that is unknown."""
        if self._followed is None:
            return None
        nodes, pods = self._followed
        if not (nodes.synced.is_set() and pods.synced.is_set()):
            return None
        now_s = asyncio.get_running_loop().time()
        if self._is_old and now_s >= self._nodes[0] + _EACH_S:
            self._nodes = now_s, room(nodes.objects.values(), pods.objects.values())
            self._is_old = False
        return self._nodes[1]


def has_choice(target: Resolved, resolved: Sequence[Resolved]) -> bool:
    """Whether nodes' accelerators can decide between this target and another one of its stage."""
    spec = target.spec
    several = sum(one.spec.stage == spec.stage for one in resolved) > 1
    return several and spec.accelerator is not None and spec.accelerators > 0


def _is_possible(one: Resolved, resolved: Sequence[Resolved], found: Mapping[str, int]) -> bool:
    """Whether some target of the stage has room, or may have it."""
    return any(found.get(each.spec.name, 1) > 0 for each in resolved if each.spec.stage == one.spec.stage)


def _pods_of_replica(target: Resolved) -> int:
    """Of those that are there; one where there is none yet."""
    if target.kind is None or not target.pods:
        return 1
    units: dict[str, int] = {}
    for pod in target.pods:
        unit = target.kind.unit_of(pod)
        units[unit] = units.get(unit, 0) + 1
    return max(units.values())
