# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: kinds of engine and their capacity, replicas that start and drain, and what they cost.

With r requests a second of P seconds of prefill and O tokens of output each, an engine makes ``s = (1 - r P) / T + r``
steps a second: r compute prompts, the others only write and take T, which depends on the batch; the batch is
``r O / s`` requests, because each gets a token in each step. The largest r with ``s >= 1 / tpot_s`` whose batch fits
into the cache is the capacity; what prefill leaves of a second at this rate is the cost of the output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.engine.step_time import StepBatch, prefill_s
from bench.lab.hardware_spec_parser import engine_profiles
from bench.stack.loopback_stack import documents
from bench.virtual.engines import addresses
from bench.virtual.simulation import Simulation
from controller.api.autoscaling_binding import ScaleTarget
from controller.api.shared_types import ObjectReference
from extproc.api.config_loader import load_snapshot
from extproc.api.model_server import StaticEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.virtual.engines import EngineProfile
    from extproc.api.config_snapshot import Snapshot

BLOCK_SIZE: Final = 64
_STEPS: Final = 60
_HOUR_S = 3600.0
# More addresses than any fleet uses: a replica that is gone does not lend its own to another.
_ADDRESSES: Final = 2000
# Requests wait in front of the engines, in a queue that new engines take from. None is refused for waiting.
_FLOW_CONTROL: Final[Mapping[str, Any]] = {
    "timeout": "30m",
    "noEndpointTimeout": "30m",
    "maxRequests": 1_000_000,
    "maxBytes": "64Gi",
    "bands": [{"name": "all", "priority": -(2**31), "share": 1, "maxRequests": 1_000_000, "maxBytes": "64Gi"}],
}
# And without any engine, for the first one.
_ACTIVATION: Final[Mapping[str, Any]] = {"holdTimeout": "30m", "maxRequests": 100_000, "maxBytes": "64Gi"}


class Variant(msgspec.Struct, frozen=True):
    """One target of the binding in the lab. ``name``: of the target. ``hardware`` and ``model``: as in
    ``bench.lab.hardware_spec_parser``. ``cost``: of a replica and hour. ``accelerators``: of one replica. ``start_s``:
    from the order to the first request. ``jitter``: the share of it by which starts differ, evenly, up and down.
    ``max_replicas``: its bound.
    """

    name: str
    hardware: str
    model: str = "32b"
    cost: float = 1.0
    accelerators: int = 1
    start_s: float = 60.0
    jitter: float = 0.1
    max_replicas: int = 16

    def engine_profile(self) -> EngineProfile:
        """The simulated engine. Raises HardwareUnknown."""
        (kind,) = engine_profiles(self.hardware, self.model, count=1, block_size=BLOCK_SIZE)
        return kind

    def draw_start_s(self, rng: random.Random) -> float:
        """How long the next replica takes to start."""
        return self.start_s * rng.uniform(1 - self.jitter, 1 + self.jitter)

    def scale_target(self, min_replicas: int) -> ScaleTarget:
        """As a binding has it."""
        return ScaleTarget(
            name=self.name,
            ref=ObjectReference(api_version="apps/v1", kind="Deployment", name=self.name),
            min_replicas=min_replicas,
            max_replicas=self.max_replicas,
            cost=self.cost,
            accelerator=self.hardware,
            accelerators=self.accelerators,
        )


# A 32B model on two A100s costs one unit an hour. The other cost is chosen, not a vendor's: by
# ``bench.autoscale.simulated_fleet`` the H100s carry 2.7 times as much.
ONE: Final = (Variant("a100", "a100x2", cost=1.0, accelerators=2),)
SEVERAL: Final = (*ONE, Variant("h100", "h100x2", cost=2.6, accelerators=2, start_s=90.0, max_replicas=3))


class MeanRequestTokens(msgspec.Struct, frozen=True):
    """Lengths in tokens: of the uncached part of a prompt, of its cached part, of the answer."""

    uncached: float
    cached: float
    output: float


class EngineCapacity(msgspec.Struct, frozen=True):
    """What one engine can do at its TPOT. ``requests_per_s``: of the mean request. ``output_token_s``: engine time of a
    token of output.
    """

    requests_per_s: float
    output_token_s: float


def engine_capacity(kind: EngineProfile, mean: MeanRequestTokens, tpot_s: float) -> EngineCapacity:
    """The largest rate of mean requests at which steps are short enough, and no more than all of the time is used."""
    low, high = 0.0, 1 / max(1e-9, prompt_prefill_s(kind, mean.uncached, mean.cached))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _has_steps(kind, mean, tpot_s, middle):
            low = middle
        else:
            high = middle
    left = 1 - low * prompt_prefill_s(kind, mean.uncached, mean.cached)
    return EngineCapacity(low, left / max(1e-9, low * mean.output))


def prompt_prefill_s(kind: EngineProfile, uncached: float, cached: float) -> float:
    """Engine time of one prompt."""
    return prefill_s(kind.speed, max(1, round(uncached)), round(cached), budget=kind.limits.max_num_batched_tokens)


def _has_steps(kind: EngineProfile, mean: MeanRequestTokens, tpot_s: float, rate: float) -> bool:
    """Whether the batch at this rate settles where its steps are short enough and its tokens fit into the cache."""
    left = 1 - rate * prompt_prefill_s(kind, mean.uncached, mean.cached)
    if left <= 0:
        return False
    held = mean.uncached + mean.cached + mean.output / 2
    headroom = min(float(kind.limits.max_num_seqs), kind.limits.num_gpu_blocks * kind.limits.block_size / held)
    batch, steps = 1.0, 0.0
    for _ in range(_STEPS):
        count = max(1, round(batch))
        one = StepBatch(requests=count, tokens=count, pairs=0.0, read=round(batch * held), decodes=count)
        steps = left / kind.speed.seconds(one) + rate
        batch = rate * mean.output / steps
        if batch > headroom:
            return False
    return steps >= 1 / tpot_s


class Replica(msgspec.Struct):
    """One replica. ``target``: of which variant. ``cost``: of an hour. ``created_at_s``: when it was ordered; from then
    on it costs. ``ready_at_s``: its first instant of service. ``draining_at_s``: since when it gets nothing new.
    ``gone_at_s``: the last instant that it costs. None: not yet.
    """

    name: str
    target: str
    address: str
    cost: float
    accelerators: int
    created_at_s: float
    ready_at_s: float | None = None
    draining_at_s: float | None = None
    gone_at_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """It gets requests."""
        return self.ready_at_s is not None and self.draining_at_s is None and self.gone_at_s is None

    @property
    def is_starting(self) -> bool:
        """It will get requests."""
        return self.ready_at_s is None and self.gone_at_s is None

    @property
    def counts_as_ordered(self) -> bool:
        """It counts against what was ordered: a draining one cannot be had back."""
        return self.is_ready or self.is_starting

    def billed_s(self, since_s: float, until_s: float) -> float:
        """How long it has cost in a time."""
        end = until_s if self.gone_at_s is None else min(self.gone_at_s, until_s)
        return max(0.0, end - max(since_s, self.created_at_s))

    def serving_s(self, since_s: float, until_s: float) -> float:
        """How long it could take requests in a time."""
        if self.ready_at_s is None:
            return 0.0
        ends = [one for one in (self.draining_at_s, self.gone_at_s, until_s) if one is not None]
        return max(0.0, min(ends) - max(since_s, self.ready_at_s))


class FleetCost(msgspec.Struct, frozen=True):
    """What a fleet has used. ``replica_hours``: paid for. ``cost``: by the variants' costs. ``wasted_gpu_s``:
    GPU-seconds of replicas that were starting or draining.
    """

    replica_hours: float
    cost: float
    wasted_gpu_s: float


def fleet_cost(replicas: Iterable[Replica], since_s: float, until_s: float) -> FleetCost:
    """Of all replicas, from one instant to another."""
    hours = cost = wasted_s = 0.0
    for one in replicas:
        paid_s = one.billed_s(since_s, until_s)
        hours += paid_s / _HOUR_S
        cost += one.cost * paid_s / _HOUR_S
        wasted_s += one.accelerators * (paid_s - one.serving_s(since_s, until_s))
    return FleetCost(hours, cost, wasted_s)


def choose_replicas_to_remove(replicas: Sequence[Replica], count: int, in_flight: dict[str, int]) -> list[Replica]:
    """Which of a target's replicas go: those that are starting, the newest first; then those with the least to do.

    ``in_flight``: requests by address.
    """
    starting = sorted((one for one in replicas if one.is_starting), key=lambda one: -one.created_at_s)
    ready = [one for one in replicas if one.is_ready]
    ready.sort(key=lambda one: (in_flight.get(one.address, 0), -one.created_at_s))
    return [*starting, *ready][:count]


class ScaleOrder(msgspec.Struct, frozen=True):
    """A change of a scaler's decision. ``desired``: replicas by target."""

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
        self.orders = [ScaleOrder(0.0, {name: initial.get(name, 0) for name in self.variants})]
        self._kinds = {one.name: one.engine_profile() for one in variants}
        self._rng = random.Random(f"starts/{seed}")
        self._numbers = Counter[str]()
        self._addresses = iter(addresses(_ADDRESSES))
        for name, count in self.ordered_replicas.items():
            for _ in range(count):
                # as if it had been ordered in time
                self._create(name, -self.variants[name].start_s).ready_at_s = 0.0
        engines = {one.address: self._kinds[one.target] for one in self.replicas}
        self._snapshot = _snapshot(list(engines))
        self.simulation = Simulation(self._snapshot, engines, seed=seed)

    @property
    def ordered_replicas(self) -> Mapping[str, int]:
        """What was ordered last."""
        return self.orders[-1].desired

    def scale_to(self, desired: Mapping[str, int], now: float) -> None:
        """Have so many replicas of each target: start new ones, or let some go. Targets left out stay as they are."""
        asked = {**self.ordered_replicas, **desired}
        if asked != self.ordered_replicas:
            self.orders.append(ScaleOrder(now, asked))
        changed = False
        for name, count in asked.items():
            wanted = [one for one in self.replicas if one.target == name and one.counts_as_ordered]
            for _ in range(count - len(wanted)):
                self._start(name, now)
            if count < len(wanted):
                in_flight = {one.address: self.simulation.in_flight(one.address) for one in wanted}
                for one in choose_replicas_to_remove(wanted, len(wanted) - count, in_flight):
                    self._let_go(one, now)
                changed = True
        if changed:
            self._set_endpoints(now)
            self.remove_drained(now)

    def remove_drained(self, now: float) -> None:
        """Replicas that have drained are gone. To be called now and then."""
        done = [
            one
            for one in self.replicas
            if one.draining_at_s is not None and one.gone_at_s is None and not self.simulation.in_flight(one.address)
        ]
        for one in done:
            one.gone_at_s = now
        if done:
            self._set_endpoints(now)
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
                self._set_endpoints(later)

        self.simulation.schedule_at(now + self.variants[target].draw_start_s(self._rng), ready)

    def _let_go(self, replica: Replica, now: float) -> None:
        if replica.is_starting:
            replica.gone_at_s = now
        else:
            replica.draining_at_s = now

    def _set_endpoints(self, now: float) -> None:
        """The core gets the endpoints as they are now, as from the controller."""
        serving = [one for one in self.replicas if one.ready_at_s is not None and one.gone_at_s is None]
        listed = tuple(StaticEndpoint(address=one.address, draining=one.draining_at_s is not None) for one in serving)
        (server,) = self._snapshot.servers
        changed = msgspec.structs.replace(server, spec=msgspec.structs.replace(server.spec, listed=listed))
        self._snapshot = msgspec.structs.replace(self._snapshot, servers=(changed,))
        self.simulation.apply_snapshot(self._snapshot, now)


def _snapshot(engines: list[str]) -> Snapshot:
    more = {"flowControl": dict(_FLOW_CONTROL), "activation": dict(_ACTIVATION)}
    return load_snapshot({"lab.yaml": documents(engines, gateway={}, more=more).encode()})
