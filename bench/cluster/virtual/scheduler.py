# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a virtual cluster: pending pods to nodes with room, oldest first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bench.cluster.node.scheduler import NowhereToGo, choose, rooms
from bench.cluster.virtual.clock import rfc3339
from controller.kube.resources import NODES, PODS, Object, key_of

if TYPE_CHECKING:
    import random

    from bench.cluster.fake.storage import Change
    from bench.cluster.virtual.clock import Clock
    from bench.cluster.virtual.server import Server

_PLACES = (("", PODS.plural), ("", NODES.plural))


class Scheduler:
    """Looks a little after any change of a pod or a node."""

    def __init__(self, server: Server, clock: Clock, rng: random.Random) -> None:
        self._server, self._clock, self._rng = server, clock, rng
        self._is_due = False
        server.subscribe(self._saw)

    def _saw(self, change: Change) -> None:
        if change.place in _PLACES and not self._is_due and _may_change_a_place(change):
            self._is_due = True
            self._clock.after(self._rng.uniform(0.01, 0.3), self._round)

    def _round(self) -> None:
        self._is_due = False
        nodes = self._server.nodes()
        pending = [one for one in self._server.pods() if _is_pending(one)]
        for pod in sorted(pending, key=lambda one: (one["metadata"]["creationTimestamp"], key_of(one))):
            try:
                chosen = choose(pod, rooms(nodes, self._server.pods()), len(nodes))
            except NowhereToGo as error:
                self._say(pod, scheduled=False, why=str(error))
            else:
                self._server.change(PODS, key_of(pod), functools.partial(_bound, chosen))
                self._say(pod, scheduled=True)

    def _say(self, pod: Object, *, scheduled: bool, why: str = "") -> None:
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


def _may_change_a_place(change: Change) -> bool:
    """Whether a pod came or went, or a node changed; a status of a pod changes no place."""
    if change.place != ("", PODS.plural) or change.before is None or change.after is None:
        return True
    return _is_over(change.before) != _is_over(change.after)


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
