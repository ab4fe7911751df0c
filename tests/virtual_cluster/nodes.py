# SPDX-License-Identifier: Apache-2.0
"""Virtual nodes and their pods; what the cluster does with those of nodes that are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.api_resources import NODES, PODS, Object, key_of
from controller.models.model_infer import names
from tests.fake_api.answers import ApiError
from tests.virtual_cluster.clock import rfc3339
from tests.virtual_cluster.engine_pod import EnginePod

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from tests.fake_api.storage import ObjectChange
    from tests.virtual_cluster.clock import Clock
    from tests.virtual_cluster.engine_pod import Why
    from tests.virtual_cluster.requests import Requests
    from tests.virtual_cluster.server import VirtualApiServer

_NOTICED_S: Final = 40.0
_EVICTED_S: Final = 300.0
_COLLECTED_S: Final = 20.0


class EngineTiming(msgspec.Struct, frozen=True):
    """From and to how many seconds things take; evenly spread between. ``start``: from a container's creation to its
    process. ``load``: from there to readiness. ``crash``: how long an engine that crashes lives.
    """

    start: tuple[float, float] = (1.0, 8.0)
    load: tuple[float, float] = (5.0, 60.0)
    crash: tuple[float, float] = (1.0, 20.0)


class Nodes:
    """The kubelets of all nodes, and the controllers of the cluster that watch over nodes."""

    def __init__(
        self, server: VirtualApiServer, clock: Clock, rng: random.Random, requests: Requests, timing: EngineTiming
    ) -> None:
        self._server, self._clock, self._rng = server, clock, rng
        self._requests = requests
        self._timing = timing
        self._down: dict[str, int] = {}
        self._losses = 0
        # by uid
        self._pods: dict[str, EnginePod] = {}
        server.subscribe(self._saw)

    def add(self, name: str, capacity: Mapping[str, str]) -> None:
        """A node that is ready."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}}
        self._server.create(NODES, node)
        self._server.change(
            NODES,
            name,
            lambda one: {**one, "status": {"capacity": dict(capacity), "allocatable": dict(capacity)}},
            "status",
        )
        self._set_ready(name, "True")

    def living(self) -> list[EnginePod]:
        """Pods with a node, by key."""
        return sorted((one for one in self._pods.values() if not one.is_gone), key=lambda one: (one.key, one.uid))

    def names(self) -> list[str]:
        """The nodes that are up."""
        return [one["metadata"]["name"] for one in self._server.nodes() if one["metadata"]["name"] not in self._down]

    def lose(self, name: str, *, back_after_s: float | None, rebooted: bool) -> None:
        """The node stops; it comes back with or without its processes, or its object is deleted in ten minutes."""
        if name in self._down or self._server.find(NODES, name) is None:
            return
        self._losses += 1
        loss = self._down[name] = self._losses
        for one in self._on(name):
            self._requests.lose(one.uid, "node lost")
        self._clock.after(_NOTICED_S, lambda: self._notice(name, loss))
        self._clock.after(_NOTICED_S + _EVICTED_S, lambda: self._evict(name, loss))
        if back_after_s is None:
            self._clock.after(600.0, lambda: self._forget(name))
        else:
            self._clock.after(back_after_s, lambda: self._return(name, rebooted=rebooted))

    # the interface for pods

    def is_up(self, node: str) -> bool:
        """Whether the node has not been lost."""
        return node not in self._down

    def partners_run(self, pod: Object) -> bool:
        """Whether all pods of its replica have processes."""
        size = _group_size(pod)
        partners = self._partners(pod)
        return len(partners) == size and all(one.runs and self.is_up(one.node) for one in partners)

    def ended(self, pod: Object, why: Why) -> None:
        """The engine's other pods end with it, once they have found each other."""
        self._requests.lose(pod["metadata"]["uid"], why)
        for one in self._partners(pod):
            if one.uid != pod["metadata"]["uid"] and one.is_ready and not one.machine.is_deleted:
                self._requests.lose(one.uid, why)
                self._clock.after(1.0, one.crash)

    def is_busy(self, pod: Object) -> bool:
        """Whether it has running requests."""
        return self._requests.in_flight(pod["metadata"]["uid"]) > 0

    def start_s(self) -> float:
        """Another time for each container."""
        return self._rng.uniform(*self._timing.start)

    def load_s(self) -> float:
        """Another time for each engine."""
        return self._rng.uniform(*self._timing.load)

    def crash_s(self) -> float:
        """Another time for each run."""
        return self._rng.uniform(*self._timing.crash)

    # what happens to nodes

    def _notice(self, name: str, loss: int) -> None:
        """The node lifecycle controller: the node is unknown, and its pods are not ready."""
        if self._down.get(name) != loss or self._server.find(NODES, name) is None:
            return
        self._set_ready(name, "Unknown")
        for pod in self._server.pods():
            if pod["spec"].get("nodeName") == name:
                self._server.set_status(PODS, pod, _not_ready(pod, rfc3339(self._clock.now_s)))

    def _evict(self, name: str, loss: int) -> None:
        """Pods without a toleration of their own are deleted; they remain until their kubelet or another client removes
        them.
        """
        if self._down.get(name) == loss:
            for pod in self._server.pods():
                if pod["spec"].get("nodeName") == name:
                    self._delete(pod, None)

    def _forget(self, name: str) -> None:
        """The cloud has taken the node away; the pod garbage collector removes what was on it."""
        if name in self._down and self._server.find(NODES, name) is not None:
            self._server.delete(NODES, name)
            for one in self._on(name):
                one.vanish("node lost")
            self._clock.after(_COLLECTED_S, lambda: self._collect(name))

    def _collect(self, name: str) -> None:
        for pod in self._server.pods():
            if pod["spec"].get("nodeName") == name:
                self._delete(pod, 0)

    def _return(self, name: str, *, rebooted: bool) -> None:
        self._down.pop(name, None)
        if self._server.find(NODES, name) is None:
            return
        self._set_ready(name, "True")
        for one in self._on(name):
            now = self._server.find(PODS, one.key)
            if now is None or now["metadata"]["uid"] != one.uid:
                one.vanish("node lost")
                continue
            one.on_update(now)
            if rebooted:
                one.crash("node lost", 137)
            one.go_on()
        for pod in self._server.pods():
            if pod["spec"].get("nodeName") == name and pod["metadata"]["uid"] not in self._pods:
                self._run(pod)

    def _delete(self, pod: Object, grace_s: int | None) -> None:
        try:
            self._server.delete(PODS, key_of(pod), uid=pod["metadata"]["uid"], grace_s=grace_s)
        except ApiError:
            return  # it is gone

    def _set_ready(self, name: str, value: str) -> None:
        condition = {"type": "Ready", "status": value, "lastTransitionTime": rfc3339(self._clock.now_s)}
        condition["reason"] = "KubeletReady" if value == "True" else "NodeStatusUnknown"
        self._server.change(
            NODES, name, lambda one: {**one, "status": {**one["status"], "conditions": [condition]}}, "status"
        )

    def _saw(self, change: ObjectChange) -> None:
        """Pods that were bound, changed or removed."""
        if change.place != ("", PODS.plural):
            return
        pod = change.after
        if pod is None:
            assert change.before is not None
            life = self._pods.pop(change.before["metadata"]["uid"], None)
            if life is not None:
                life.vanish()
            return
        life = self._pods.get(pod["metadata"]["uid"])
        if life is not None:
            life.on_update(pod)
        elif pod["spec"].get("nodeName") and self.is_up(pod["spec"]["nodeName"]):
            self._run(pod)

    def _run(self, pod: Object) -> None:
        life = self._pods[pod["metadata"]["uid"]] = EnginePod(pod, self._server, self._clock, self)
        life.on_update(pod)
        self._clock.after(0.05, life.go_on)

    def _on(self, name: str) -> list[EnginePod]:
        return [one for one in self.living() if one.node == name]

    def _partners(self, pod: Object) -> list[EnginePod]:
        """The pods of the same replica of the same role, itself included."""
        mine = _replica(pod)
        return [one for one in self.living() if _replica(one.pod) == mine and not one.machine.is_deleted]


def _replica(pod: Object) -> tuple[str, ...]:
    own = pod["metadata"].get("labels") or {}
    keys = (names.MODEL_INFER, names.GROUP, names.ROLE, names.ROLE_REPLICA, names.ROLE_REVISION)
    return tuple(own.get(name, "") for name in keys)


def _group_size(pod: Object) -> int:
    env = pod["spec"]["containers"][0].get("env") or ()
    return int(next((one["value"] for one in env if one["name"] == "GROUP_SIZE"), "1"))


def _not_ready(pod: Object, at: str) -> Object:
    """The status of a pod after its node stopped reporting."""
    status = pod.get("status") or {}
    conditions = [
        {**one, "status": "False", "reason": "NodeNotReady", "lastTransitionTime": at}
        if one["type"] == "Ready" and one["status"] == "True"
        else one
        for one in status.get("conditions") or ()
    ]
    return {**status, "conditions": conditions}
