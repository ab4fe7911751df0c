# SPDX-License-Identifier: Apache-2.0
"""Requests on the engines of a virtual cluster, and those that were cut off."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from controller.api.drain_mark import DRAINING
from controller.kube.api_resources import PODS, Object
from controller.models.model_infer import names
from controller.models.model_infer.model_infer_state import PodLoad
from tests.virtual_cluster.engine_pod import Why

if TYPE_CHECKING:
    import random

    from tests.virtual_cluster.clock import Clock
    from tests.virtual_cluster.server import VirtualApiServer


class Cut(msgspec.Struct, frozen=True):
    """Requests that their engine did not end."""

    at_s: float
    uid: str
    count: int
    why: Why


class Requests:
    """A gateway: sends requests to ready entry pods that are not draining. ``answers``: whether it reports loads."""

    def __init__(self, server: VirtualApiServer, clock: Clock, rng: random.Random) -> None:
        self.cuts: list[Cut] = []
        self.ended = 0
        self.answers = True
        self._server, self._clock, self._rng = server, clock, rng
        self._running: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._until_s = 0.0
        self._each_s = 0.0

    def flow(self, *, each_s: float, until_s: float) -> None:
        """A request about every ``each_s`` seconds, until then."""
        self._each_s, self._until_s = each_s, until_s
        self._clock.after(self._rng.uniform(0, each_s), self._arrive)

    def in_flight(self, uid: str) -> int:
        """Running requests of the pod with this uid."""
        return self._running[uid]

    def loads(self, keys: frozenset[str]) -> dict[str, PodLoad]:
        """A gateway's report of the loads of these pods; only entry pods have one."""
        if not self.answers:
            return {}
        found: dict[str, PodLoad] = {}
        for key in sorted(keys):
            pod = self._server.find(PODS, key)
            if pod is not None and is_entry(pod):
                found[key] = PodLoad(self._running[pod["metadata"]["uid"]], cached_tokens=hash_of(key))
        return found

    def lose(self, uid: str, why: Why) -> None:
        """The engine has ended."""
        count = self._running.pop(uid, 0)
        self._restarts[uid] += 1
        if count:
            self.cuts.append(Cut(self._clock.now_s, uid, count, why))

    def _arrive(self) -> None:
        if self._clock.now_s >= self._until_s:
            return
        serving = [one for one in self._server.pods() if takes_requests(one)]
        if serving:
            pod = self._rng.choice(serving)
            uid = pod["metadata"]["uid"]
            self._running[uid] += 1
            run = self._restarts[uid]
            long_s = self._rng.choice((2.0, 10.0, 40.0, 150.0))
            self._clock.after(self._rng.uniform(0.5, long_s), lambda: self._end(uid, run))
        self._clock.after(self._rng.uniform(0, 2 * self._each_s), self._arrive)

    def _end(self, uid: str, run: int) -> None:
        if self._restarts[uid] == run:
            self._running[uid] -= 1
            self.ended += 1


def is_entry(pod: Object) -> bool:
    """Whether requests are sent to pods like this."""
    return (pod["metadata"].get("labels") or {}).get(names.ENTRY) == "true"


def is_ready(pod: Object) -> bool:
    """Whether the pod's status has the condition Ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def takes_requests(pod: Object) -> bool:
    """Whether a gateway gives it new requests."""
    metadata = pod["metadata"]
    draining = DRAINING in (metadata.get("annotations") or {})
    return is_entry(pod) and is_ready(pod) and not draining and "deletionTimestamp" not in metadata


def hash_of(key: str) -> int:
    """A number that differs by key and is the same in every run."""
    return sum(ord(letter) * (place + 7) for place, letter in enumerate(key)) % 1000
