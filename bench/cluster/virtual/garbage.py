# SPDX-License-Identifier: Apache-2.0
"""The garbage collector of a virtual cluster, for what was made after its owner had gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cluster.fake.answers import Refused
from controller.kube.resources import key_of

if TYPE_CHECKING:
    import random

    from bench.cluster.fake.storage import Change
    from bench.cluster.virtual.clock import Clock
    from bench.cluster.virtual.server import Server


class GarbageCollector:
    """The storage itself deletes what is there when its owner goes."""

    def __init__(self, server: Server, clock: Clock, rng: random.Random) -> None:
        self._server, self._clock, self._rng = server, clock, rng
        self._living: set[str] = set()
        server.subscribe(self._saw)

    def _saw(self, change: Change) -> None:
        if change.after is None:
            assert change.before is not None
            self._living.discard(change.before["metadata"]["uid"])
        elif change.before is None:
            metadata = change.after["metadata"]
            self._living.add(metadata["uid"])
            owners = {one["uid"] for one in metadata.get("ownerReferences") or ()}
            if owners and not owners & self._living:
                self._clock.after(self._rng.uniform(0.1, 5.0), lambda: self._collect(change))

    def _collect(self, change: Change) -> None:
        thing = change.after
        assert thing is not None
        kind = next(one for one in self._server.stored() if (one.resource.group, one.resource.plural) == change.place)
        try:
            self._server.delete(kind.resource, key_of(thing), uid=thing["metadata"]["uid"])
        except Refused:
            return  # it is gone
