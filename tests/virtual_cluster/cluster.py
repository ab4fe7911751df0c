# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in virtual time: server, scheduler, garbage collector, nodes with engines, requests, one manager."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from bench.cluster.node.pod_scheduler import PodUnschedulable, choose_node, node_capacities
from controller.kube.api_resources import NODES, PODS, Object, key_of
from controller.models.model_infer.model_infer_state import GangSchedulingApis
from tests.fake_api.answers import ApiError
from tests.virtual_cluster.clock import Clock, rfc3339
from tests.virtual_cluster.manager import Faults, Manager
from tests.virtual_cluster.nodes import EngineTiming, Nodes
from tests.virtual_cluster.requests import Requests
from tests.virtual_cluster.server import VirtualApiServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.kube.reconcile_plan import Plan
    from controller.models.model_infer.model_infer_state import ModelInferState
    from tests.fake_api.storage import ObjectChange
    from tests.virtual_cluster.manager import Witness

_PLACES = (("", PODS.plural), ("", NODES.plural))


class Scheduler:
    """Runs shortly after any change of a pod or a node."""

    def __init__(self, server: VirtualApiServer, clock: Clock, rng: random.Random) -> None:
        self._server, self._clock, self._rng = server, clock, rng
        self._is_due = False
        server.subscribe(self._saw)

    def _saw(self, change: ObjectChange) -> None:
        if change.place in _PLACES and not self._is_due and _may_change_a_place(change):
            self._is_due = True
            self._clock.after(self._rng.uniform(0.01, 0.3), self._round)

    def _round(self) -> None:
        self._is_due = False
        nodes = self._server.nodes()
        pending = [one for one in self._server.pods() if _is_pending(one)]
        for pod in sorted(pending, key=lambda one: (one["metadata"]["creationTimestamp"], key_of(one))):
            try:
                chosen = choose_node(pod, node_capacities(nodes, self._server.pods()), len(nodes))
            except PodUnschedulable as error:
                self._set_scheduled(pod, scheduled=False, why=str(error))
            else:
                self._server.change(PODS, key_of(pod), functools.partial(_bound, chosen))
                self._set_scheduled(pod, scheduled=True)

    def _set_scheduled(self, pod: Object, *, scheduled: bool, why: str = "") -> None:
        status = pod.get("status") or {}
        known: Object = next((one for one in status.get("conditions") or () if one["type"] == "PodScheduled"), {})
        value = "True" if scheduled else "False"
        if known.get("status") == value and known.get("message", "") == why:
            return
        condition = {"type": "PodScheduled", "status": value, "lastTransitionTime": rfc3339(self._clock.now_s)}
        if why:
            condition.update(reason="Unschedulable", message=why)
        others = [one for one in status.get("conditions") or () if one["type"] != "PodScheduled"]
        self._server.set_status(PODS, pod, {**status, "conditions": [*others, condition]})


def _bound(node: str, pod: Object) -> Object:
    return {**pod, "spec": {**pod["spec"], "nodeName": node}}


def _is_pending(pod: Object) -> bool:
    spec = pod["spec"]
    return not spec.get("nodeName") and not spec.get("schedulingGates") and "deletionTimestamp" not in pod["metadata"]


def _may_change_a_place(change: ObjectChange) -> bool:
    """Whether a pod came or went, or a node changed; a status of a pod changes no place."""
    if change.place != ("", PODS.plural) or change.before is None or change.after is None:
        return True
    return _is_over(change.before) != _is_over(change.after)


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class GarbageCollector:
    """The storage itself deletes what is there when its owner goes."""

    def __init__(self, server: VirtualApiServer, clock: Clock, rng: random.Random) -> None:
        self._server, self._clock, self._rng = server, clock, rng
        self._living: set[str] = set()
        server.subscribe(self._saw)

    def _saw(self, change: ObjectChange) -> None:
        if change.after is None:
            assert change.before is not None
            self._living.discard(change.before["metadata"]["uid"])
        elif change.before is None:
            metadata = change.after["metadata"]
            self._living.add(metadata["uid"])
            owners = {one["uid"] for one in metadata.get("ownerReferences") or ()}
            if owners and not owners & self._living:
                self._clock.after(self._rng.uniform(0.1, 5.0), lambda: self._collect(change))

    def _collect(self, change: ObjectChange) -> None:
        thing = change.after
        assert thing is not None
        kind = next(one for one in self._server.stored() if (one.resource.group, one.resource.plural) == change.place)
        try:
            self._server.delete(kind.resource, key_of(thing), uid=thing["metadata"]["uid"])
        except ApiError:
            return  # it is gone


class VirtualCluster:
    """Everything that happens in it follows from ``seed`` and from what is done to it."""

    def __init__(
        self,
        seed: int,
        reconcile: Callable[[ModelInferState, float], Plan],
        witness: Witness,
        *,
        gang: GangSchedulingApis = GangSchedulingApis(),  # noqa: B008 - frozen
        has_capacity: bool = True,
        timing: EngineTiming = EngineTiming(),  # noqa: B008 - frozen
    ) -> None:
        rng = random.Random(seed)
        self.clock = Clock()
        self.server = VirtualApiServer(self.clock)
        self.faults = Faults(rng)
        self.garbage_collector = GarbageCollector(self.server, self.clock, rng)
        self.requests = Requests(self.server, self.clock, rng)
        self.scheduler = Scheduler(self.server, self.clock, rng)
        self.nodes = Nodes(self.server, self.clock, rng, self.requests, timing)
        self.manager = Manager(
            self.server,
            self.clock,
            self.faults,
            self.requests,
            reconcile,
            witness,
            gang=gang,
            has_capacity=has_capacity,
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
