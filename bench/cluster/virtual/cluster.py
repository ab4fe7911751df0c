# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in virtual time: server, scheduler, nodes with engines, requests, one manager."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from bench.cluster.virtual.clock import Clock
from bench.cluster.virtual.faults import Faults
from bench.cluster.virtual.garbage import GarbageCollector
from bench.cluster.virtual.manager import Manager
from bench.cluster.virtual.nodes import EngineTiming, Nodes
from bench.cluster.virtual.requests import Requests
from bench.cluster.virtual.scheduler import Scheduler
from bench.cluster.virtual.server import Server
from controller.models.model_infer.observed import PodGroups

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cluster.virtual.manager import Witness
    from controller.kube.plan import Plan
    from controller.kube.resources import Object
    from controller.models.model_infer.observed import Observed


class VirtualCluster:
    """Everything that happens in it follows from ``seed`` and from what is done to it."""

    def __init__(
        self,
        seed: int,
        reconcile: Callable[[Observed, float], Plan],
        witness: Witness,
        *,
        gang: PodGroups = PodGroups(),  # noqa: B008 - frozen
        has_room: bool = True,
        timing: EngineTiming = EngineTiming(),  # noqa: B008 - frozen
    ) -> None:
        rng = random.Random(seed)
        self.clock = Clock()
        self.server = Server(self.clock)
        self.faults = Faults(rng)
        self.garbage_collector = GarbageCollector(self.server, self.clock, rng)
        self.requests = Requests(self.server, self.clock, rng)
        self.scheduler = Scheduler(self.server, self.clock, rng)
        self.nodes = Nodes(self.server, self.clock, rng, self.requests, timing)
        self.manager = Manager(
            self.server, self.clock, self.faults, self.requests, reconcile, witness, gang=gang, has_room=has_room
        )

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds since the epoch."""
        return self.clock.now_s

    def pods(self) -> list[Object]:
        """As the server has them."""
        return self.server.pods()

    def living(self) -> list[tuple[str, str, str]]:
        """Key, uid and node of the pods whose processes run on nodes that are up."""
        return [(one.key, one.uid, one.node) for one in self.nodes.living() if self.nodes.is_up(one.node)]

    def in_flight(self, uid: str) -> int:
        """Running requests of a pod."""
        return self.requests.in_flight(uid)

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.clock.now_s + seconds
        while self.clock.step(until_s):
            pass
