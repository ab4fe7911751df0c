# SPDX-License-Identifier: Apache-2.0
"""The inputs of a scaling decision: targets with their engines, the demand of clients, and the age of the data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property

import msgspec

from controller.api.autoscaling import LatencyObjective
from controller.api.autoscaling_binding import ScaleTarget
from controller.autoscaler.decision.traffic import Traffic


class EngineState(enum.Enum):
    """READY serves. STARTING is scheduled, or will be soon. UNSCHEDULABLE fits on no node. FAILING does not start.
    DRAINING gets no new requests and will be deleted.
    """

    READY = "ready"
    STARTING = "starting"
    UNSCHEDULABLE = "unschedulable"
    FAILING = "failing"
    DRAINING = "draining"


class EngineReport(msgspec.Struct, frozen=True, gc=False):
    """An engine's load. ``at_s``: its time. ``in_flight`` and ``in_flight_tokens``: sent by all gateways together.
    ``waiting``, ``running``, ``kv_usage``: from the engine's metrics; None where it has none. ``kv_capacity_tokens``: 0
    if unknown.
    """

    at_s: float
    in_flight: int = 0
    in_flight_tokens: float = 0.0
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: float = 0.0


class Engine(msgspec.Struct, frozen=True, gc=False):
    """One replica of a target: the entry pod of a group, or the pod. ``name``: its pod's. ``report``: None if its load
    is unknown, which never counts as idle.
    """

    name: str
    state: EngineState
    created_at_s: float
    ready_at_s: float | None = None
    report: EngineReport | None = None


class ReplicaSpeed(msgspec.Struct, frozen=True, gc=False):
    """The speed of one replica. ``prefill_tokens_per_s``: of prefill work. ``step_s`` and ``step_s_per_token``: of a
    decode step with no tokens in flight, and for each of them. ``kv_tokens``: that its cache holds; None if unknown.
    ``is_measured``: learned from answers; otherwise declared, or a guess. ``is_step_known``: the step is no guess.
    ``followed_s``: for how long it has been smoothed.
    """

    prefill_tokens_per_s: float
    step_s: float
    step_s_per_token: float
    kv_tokens: float | None = None
    is_measured: bool = False
    is_step_known: bool = True
    followed_s: float = 0.0


class TargetSituation(msgspec.Struct, frozen=True, dict=True):
    """One target of a binding. ``spec``: from the binding. ``current``: replicas in the object's spec; None if the
    object does not exist. ``speed``: of its replicas; None if unknown. ``capacity``: work of one replica, in replicas
    of the binding's first target. ``start_s``: from a replica's creation to its first request. ``blocked``: why no more
    can be had for now; empty if they can. ``headroom``: further replicas for which nodes have accelerators; None if
    unknown. ``pools``: where its accelerators are counted, shared with other targets; None: the pool named as their
    kind. ``set_by``: the last writer of the replicas, if not this autoscaler; empty otherwise. ``set_at_s``: when.
    """

    spec: ScaleTarget
    current: int | None
    engines: tuple[Engine, ...] = ()
    speed: ReplicaSpeed | None = None
    capacity: float = 1.0
    start_s: float = 60.0
    blocked: str = ""
    headroom: int | None = None
    pools: tuple[str, ...] | None = None
    set_by: str = ""
    set_at_s: float = 0.0

    @property
    def name(self) -> str:
        """Unique in its binding."""
        return self.spec.name

    def engines_in_state(self, *states: EngineState) -> tuple[Engine, ...]:
        """Its engines in these states."""
        if len(states) == 1:
            return self._by_state.get(states[0], ())
        return tuple(one for one in self.engines if one.state in states)

    @cached_property
    def _by_state(self) -> Mapping[EngineState, tuple[Engine, ...]]:
        """Cached, as a decision reads it many times; not a field, so comparisons and copies ignore it."""
        found: dict[EngineState, tuple[Engine, ...]] = {}
        for one in self.engines:
            found[one.state] = (*found.get(one.state, ()), one)
        return found


class Backlog(msgspec.Struct, frozen=True):
    """Requests that wait at the gateways now. ``requests``: their number. ``tokens``: uncached tokens of their prompts.
    ``oldest_s``: how long the first of them has waited. ``at_zero``: number of those for which no engine exists.
    """

    requests: int = 0
    tokens: float = 0.0
    oldest_s: float = 0.0
    at_zero: int = 0


class Freshness(msgspec.Struct, frozen=True):
    """Age and completeness of the data. ``age_s``: of the oldest data of any gateway. ``gateways``: number of gateways.
    ``silent``: gateways without a recent report; their last counts are used. ``unreported``: ready engines without a
    recent report. ``since_s``: how long data have been without a gap. ``cut_off_s``: how long the watches of pods and
    targets have been interrupted; None: they are current.
    """

    age_s: float = 0.0
    gateways: int = 1
    silent: tuple[str, ...] = ()
    unreported: tuple[str, ...] = ()
    since_s: float = float("inf")
    cut_off_s: float | None = None


class MetricReading(msgspec.Struct, frozen=True):
    """A metric of the policy. ``at_s``: of the sample. ``by_engine``: values by the engine's name; ``total``: one value
    for all replicas; exactly one of them is set. ``problem``: why neither is. ``is_lower_bound``: part of the value is
    unknown, so the metric may recommend more replicas but not fewer.
    """

    at_s: float
    by_engine: Mapping[str, float] | None = None
    total: float | None = None
    problem: str = ""
    is_lower_bound: bool = False


def objective_of_stage(objective: LatencyObjective | None, stage: str) -> LatencyObjective | None:
    """What replicas of the stage change: prefill engines TTFT, decode engines TPOT. A policy with only the other one
    has nothing better, so that one holds.
    """
    if objective is None or objective.ttft is None or objective.tpot is None or stage == "Both":
        return objective
    return msgspec.structs.replace(objective, **{"tpot" if stage == "Prefill" else "ttft": None})


class Situation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One stage of a binding (prefill, decode, or both in one) at one instant. Values derived from its fields are
    computed once.

    ``targets``: in the order of the binding, with the same stage. ``traffic``: of the stage's ModelServers.
    ``objective``: latencies to keep, those of the stage. ``metrics``: by the names in the policy.
    """

    now_s: float
    targets: tuple[TargetSituation, ...]
    traffic: Traffic = Traffic()
    waiting: Backlog = Backlog()
    freshness: Freshness = Freshness()
    metrics: Mapping[str, MetricReading] = {}
    objective: LatencyObjective | None = None

    @cached_property
    def engines(self) -> tuple[Engine, ...]:
        """Of all targets."""
        return tuple([engine for target in self.targets for engine in target.engines])

    @cached_property
    def ready_engines(self) -> tuple[Engine, ...]:
        """Engines that serve."""
        return tuple([one for one in self.engines if one.state is EngineState.READY])

    @cached_property
    def starting_engines(self) -> tuple[Engine, ...]:
        """Engines that will serve."""
        return tuple([one for one in self.engines if one.state is EngineState.STARTING])

    @cached_property
    def current_replicas(self) -> float:
        """Replicas of the objects' specs, in replicas of the first target."""
        return sum([(one.current or 0) * one.capacity for one in self.targets])

    def engine_units(self, state: EngineState) -> float:
        """Engines in this state, in replicas of the first target."""
        known = self._units.get(state)
        if known is None:
            known = self._units[state] = sum([len(one.engines_in_state(state)) * one.capacity for one in self.targets])
        return known

    @cached_property
    def _units(self) -> dict[EngineState, float]:
        return {}
