# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: replicas that start and drain under the live core, ordered by a scaler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.autoscale.replicas import Replica, victims
from bench.stack import documents
from bench.virtual.engines import addresses
from bench.virtual.simulation import Simulation
from extproc.api.load import load
from extproc.api.model_server import StaticEndpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.autoscale.variants import Variant
    from extproc.api.snapshot import Snapshot

# More addresses than any fleet uses: a replica that is gone does not lend its own to another.
_ADDRESSES: Final = 2000
# What waits, waits in front of the engines: a queue that new engines take from. Nobody is refused for waiting.
_FLOW_CONTROL: Final[Mapping[str, Any]] = {
    "timeout": "30m",
    "noEndpointTimeout": "30m",
    "maxRequests": 1_000_000,
    "maxBytes": "64Gi",
    "bands": [{"name": "all", "priority": -(2**31), "share": 1, "maxRequests": 1_000_000, "maxBytes": "64Gi"}],
}
# And without any engine, for the first one.
_ACTIVATION: Final[Mapping[str, Any]] = {"holdTimeout": "30m", "maxRequests": 100_000, "maxBytes": "64Gi"}


class Order(msgspec.Struct, frozen=True):
    """What a scaler asked for, where that was a change. ``desired``: replicas by target."""

    at_s: float
    desired: Mapping[str, int]


class Fleet:
    """Replicas under one core. ``replicas``: all that ever were. ``orders``: the changes, the initial fleet first."""

    def __init__(
        self,
        variants: Sequence[Variant],
        initial: Mapping[str, int],
        *,
        seed: int,
    ) -> None:
        """``initial``: replicas by target that serve from the beginning; at least one in all."""
        self.variants = {one.name: one for one in variants}
        self.replicas: list[Replica] = []
        self.orders = [Order(0.0, {name: initial.get(name, 0) for name in self.variants})]
        self._kinds = {one.name: one.kind() for one in variants}
        self._rng = random.Random(f"starts/{seed}")
        self._numbers = Counter[str]()
        self._addresses = iter(addresses(_ADDRESSES))
        for name, count in self.desired.items():
            for _ in range(count):
                # as if it had been ordered in time
                self._create(name, -self.variants[name].start_s).ready_at_s = 0.0
        engines = {one.address: self._kinds[one.target] for one in self.replicas}
        self._snapshot = _snapshot(list(engines))
        self.simulation = Simulation(self._snapshot, engines, seed=seed)

    @property
    def desired(self) -> Mapping[str, int]:
        """What was ordered last."""
        return self.orders[-1].desired

    def order(self, desired: Mapping[str, int], now: float) -> None:
        """Have so many replicas of each target: start new ones, or let some go. Targets left out stay as they are."""
        asked = {**self.desired, **desired}
        if asked != self.desired:
            self.orders.append(Order(now, asked))
        changed = False
        for name, count in asked.items():
            wanted = [one for one in self.replicas if one.target == name and one.is_wanted]
            for _ in range(count - len(wanted)):
                self._start(name, now)
            if count < len(wanted):
                in_flight = {one.address: self.simulation.in_flight(one.address) for one in wanted}
                for one in victims(wanted, len(wanted) - count, in_flight):
                    self._let_go(one, now)
                changed = True
        if changed:
            self._tell(now)
            self.collect(now)

    def collect(self, now: float) -> None:
        """Replicas that have drained are gone. To be called now and then."""
        done = [
            one
            for one in self.replicas
            if one.draining_at_s is not None and one.gone_at_s is None and not self.simulation.in_flight(one.address)
        ]
        for one in done:
            one.gone_at_s = now
        if done:
            self._tell(now)
            for one in done:
                self.simulation.remove_engine(one.address)

    def _create(self, target: str, now: float) -> Replica:
        variant = self.variants[target]
        self._numbers[target] += 1
        made = Replica(
            name=f"{target}-{self._numbers[target]}",
            target=target,
            address=next(self._addresses),
            cost=variant.cost,
            accelerators=variant.accelerators,
            created_at_s=now,
        )
        self.replicas.append(made)
        return made

    def _start(self, target: str, now: float) -> None:
        made = self._create(target, now)

        def ready(later: float) -> None:
            if made.gone_at_s is None:
                made.ready_at_s = later
                self.simulation.add_engine(made.address, self._kinds[target])
                self._tell(later)

        self.simulation.at(now + self.variants[target].drawn_start_s(self._rng), ready)

    def _let_go(self, replica: Replica, now: float) -> None:
        if replica.is_starting:
            replica.gone_at_s = now
        else:
            replica.draining_at_s = now

    def _tell(self, now: float) -> None:
        """The core gets the endpoints as they are now, as from the controller."""
        serving = [one for one in self.replicas if one.ready_at_s is not None and one.gone_at_s is None]
        listed = tuple(StaticEndpoint(address=one.address, draining=one.draining_at_s is not None) for one in serving)
        (server,) = self._snapshot.servers
        changed = msgspec.structs.replace(server, spec=msgspec.structs.replace(server.spec, listed=listed))
        self._snapshot = msgspec.structs.replace(self._snapshot, servers=(changed,))
        self.simulation.apply(self._snapshot, now)


def _snapshot(engines: list[str]) -> Snapshot:
    more = {"flowControl": dict(_FLOW_CONTROL), "activation": dict(_ACTIVATION)}
    return load({"lab.yaml": documents(engines, gateway={}, more=more).encode()})
