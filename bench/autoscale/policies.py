# SPDX-License-Identifier: Apache-2.0
"""Autoscalers by name, each with the grid of its knob: the live one, baselines, a fixed number, the oracle.

The oracle has each arrival with its lengths, and their cost for an engine
(``bench.autoscale.simulated_fleet``). It is a bound in one respect: no other scaler can order replicas before it
observes load. It is no bound in another: costs are those of the mean batch, the needs of a window are averaged, and its
knob, the share of engines' time to use, is one number for a whole load; a scaler that uses engines more exactly can be
cheaper.

Of several kinds of engine it takes the mix for each second that makes the whole load cheapest, starts included
(``bench.autoscale.load_profiles``), and orders each kind its own start time ahead.

The grids span what a fleet of the lab's engines can need: a replica that keeps its TPOT runs some 20 requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from bench.autoscale.baselines.aibrix import AibrixApa
from bench.autoscale.baselines.baseline import hpa, kpa
from bench.autoscale.baselines.dynamo import DynamoPlanner
from bench.autoscale.baselines.kthena import Kthena
from bench.autoscale.baselines.llm_d import KedaQueue, KedaSlo
from bench.autoscale.baselines.wva import WvaV1, WvaV2
from bench.autoscale.load_profiles import LoadProfile, cheapest_plan, variant_mixes
from bench.autoscale.simulated_fleet import engine_capacity, prompt_prefill_s
from bench.workload.sessions import Workload
from controller.api.autoscaling import LatencyObjective, ScaleToZero
from controller.api.autoscaling_binding import AutoscalingPolicyBinding, AutoscalingPolicyBindingSpec
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityParameters
from controller.autoscaler.decision.strategies.tokens import TokensParameters
from controller.autoscaler.decision.strategies.work import WorkParameters
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.autoscale.baselines.baseline import Baseline
    from bench.autoscale.simulated_fleet import Variant
    from controller.autoscaler.decision.saved_state import BindingMemory
    from controller.autoscaler.decision.situation import Situation

# The percentile of latencies in the policies' objective.
PERCENTILE: Final = 90.0
# Arrivals are averaged over so long, so that chance alone adds no replica.
WINDOW_S: Final = 15.0
# Of the epoch: the lab's clock begins at 0, and schedules need a day.
_BEGIN_S: Final = 1_700_000_000.0
# Shorter than the default of ten minutes, because the lab's idle times are short.
_TO_ZERO: Final = ScaleToZero(idle=Duration("60s"))
_IN_FLIGHT: Final = (6.0, 8.0, 12.0, 16.0, 22.0)
# What a replica of the lab's second kind carries, about, in replicas of the first: only a grid is spread by it.
_SECOND_CARRIES: Final = 2.7
# On loads with several kinds of engine, baselines that support one also get a fleet of the second kind.
_ONE_KIND: Final = frozenset({"hpa-running-waiting", "kpa", "llmd-keda", "llmd-slo", "aibrix-apa", "dynamo"})
OURS: Final = "attache"
# Ours with another strategy is no baseline.
OWN: Final = frozenset({OURS, "attache-utilization"})
# Policies with knowledge of the future.
BOUNDS: Final = frozenset({"oracle"})


class Scaler(Protocol):
    """Called once a period. It may keep state."""

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """Replicas by target; targets that are left out stay as they are."""
        ...


class ScalerSetup(msgspec.Struct, frozen=True):
    """A scaler's inputs. ``knob``: the value of the policy's knob. ``workload``: future arrivals, for the oracle alone.
    ``min_replicas``: of the first target; the others may have none. ``initial``: replicas of the first target at the
    start.
    """

    load: LoadProfile
    workload: Workload
    knob: float
    period_s: float
    min_replicas: int = 1
    initial: int = 1


def scaled_objective(setup: ScalerSetup, share: float = 1.0) -> LatencyObjective:
    """The load's objective as a policy has it, or a share of its latencies."""
    asked = setup.load.objective
    return LatencyObjective(
        ttft=_duration(asked.ttft_s * share), tpot=_duration(asked.tpot_s * share), percentile=PERCENTILE
    )


def _duration(value_s: float) -> Duration:
    return Duration(f"{value_s * 1000:.0f}ms")


class Policy(msgspec.Struct, frozen=True):
    """A scaler by name. ``knob``: what is varied, in words; ``grid``: the values to try, which are tuned on.
    ``native_period_s``: how often its own program decides. ``has_zero``: it may scale to zero, and is then called at
    once when a request arrives. ``kind``: which of a load's variants its fleet begins with, and is the first for it.
    """

    name: str
    make: Callable[[ScalerSetup], Scaler]
    knob: str
    grid: tuple[float, ...]
    native_period_s: float
    has_zero: bool = False
    kind: int = 0


def work_by_second(load: LoadProfile, workload: Workload) -> list[float]:
    """Engine time, in seconds of the load's first variant, that the arrivals of each second need.

    The cached share of a prompt is taken to be the mean's.
    """
    kind, mean = load.variants[0].engine_profile(), load.mean_request
    per_output_s = engine_capacity(kind, mean, load.objective.tpot_s).output_token_s
    uncached = mean.uncached / (mean.uncached + mean.cached)
    seconds = [0.0] * math.ceil(load.duration_s)
    for session in workload.sessions:
        for turn in session.turns:
            prompt = sum(piece.tokens for piece in turn.pieces)
            second = min(len(seconds) - 1, int(session.begins_at_s))
            seconds[second] += prompt_prefill_s(kind, uncached * prompt, (1 - uncached) * prompt)
            seconds[second] += per_output_s * turn.output_tokens
    return seconds


def required_engines(work: Sequence[float], utilization: float, window_s: float = WINDOW_S) -> list[int]:
    """Engines that each second's work needs, averaged over a window around it. ``utilization``: the share of an
    engine's time to use.
    """
    return [math.ceil(one - 1e-9) for one in required_fractional_engines(work, utilization, window_s)]


def required_fractional_engines(work: Sequence[float], utilization: float, window_s: float = WINDOW_S) -> list[float]:
    """The same, not rounded up to whole engines."""
    half = max(0, int(window_s // 2))
    found = []
    for second in range(len(work)):
        near = work[max(0, second - half) : second + half + 1]
        found.append(sum(near) / len(near) / utilization)
    return found


def hindsight_orders(need: Sequence[int], lead_s: float, min_replicas: int) -> list[int]:
    """What to have ordered at each second: the most that is needed from then until an engine ordered now would be
    there.

    So an engine comes when it is needed, and goes when it is not needed for as long as a new one would take to start.
    """
    lead = math.ceil(lead_s) + 1
    return [max(min_replicas, *need[second : second + lead + 1]) for second in range(len(need))]


class Oracle:
    """Follows the plan that it made of the whole workload."""

    def __init__(self, setup: ScalerSetup) -> None:
        work = work_by_second(setup.load, setup.workload)
        self._plans = _one_kind(setup, work) if len(setup.load.variants) == 1 else _several_kinds(setup, work)
        self._most = {one.name: one.max_replicas for one in setup.load.variants}

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """By the clock alone."""
        return {
            name: min(self._most[name], plan[min(len(plan) - 1, int(situation.now_s))])
            for name, plan in self._plans.items()
        }


def _lead_s(variant: Variant, setup: ScalerSetup) -> float:
    return variant.start_s * (1 + variant.jitter) + setup.period_s


def _one_kind(setup: ScalerSetup, work: Sequence[float]) -> dict[str, list[int]]:
    (one,) = setup.load.variants
    return {one.name: hindsight_orders(required_engines(work, setup.knob), _lead_s(one, setup), setup.min_replicas)}


def _several_kinds(setup: ScalerSetup, work: Sequence[float]) -> dict[str, list[int]]:
    variants = setup.load.variants
    leads_s = {one.name: _lead_s(one, setup) for one in variants}
    initial = {variants[0].name: setup.initial}
    plan = cheapest_plan(
        variant_mixes(setup.load, setup.min_replicas), required_fractional_engines(work, setup.knob), leads_s, initial
    )
    return {name: hindsight_orders([mix[name] for mix in plan], lead_s, 0) for name, lead_s in leads_s.items()}


class LiveAutoscaler:
    """One binding with all variants of the load as its targets."""

    def __init__(self, setup: ScalerSetup, policy: AutoscalingPolicySpec) -> None:
        targets = tuple(
            variant.scale_target(0 if number else setup.min_replicas)
            for number, variant in enumerate(setup.load.variants)
        )
        self._policy = policy
        self._binding = AutoscalingPolicyBinding(
            metadata=Metadata(name="lab"),
            spec=AutoscalingPolicyBindingSpec(policy_ref="lab", targets=targets),
        )
        self._memory: BindingMemory | None = None

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """As the manager would."""
        if self._policy.objective is not None:
            situation = msgspec.structs.replace(situation, objective=self._policy.objective)
        decision, self._memory = decide(
            self._policy, self._binding, [situation], self._memory, _BEGIN_S + situation.now_s
        )
        return {one.name: one.desired for one in decision.targets if one.desired is not None}


def autoscaler_with_headroom(setup: ScalerSetup) -> LiveAutoscaler:
    """The load's objective as it is. The knob: for how many times the load of now there is room."""
    work = Strategy(name="Work", work=WorkParameters(headroom=setup.knob))
    return LiveAutoscaler(setup, _policy(setup, scaled_objective(setup), (work,)))


def autoscaler_with_utilization(setup: ScalerSetup) -> LiveAutoscaler:
    """The knob: the utilization of the strategy Work."""
    work = Strategy(name="Work", work=WorkParameters(utilization=setup.knob))
    return LiveAutoscaler(setup, _policy(setup, scaled_objective(setup), (work,)))


def _policy(setup: ScalerSetup, objective: LatencyObjective, strategies: tuple[Strategy, ...]) -> AutoscalingPolicySpec:
    return AutoscalingPolicySpec(
        strategies=strategies,
        objective=objective,
        period=Duration(f"{setup.period_s:g}s"),
        scale_to_zero=None if setup.min_replicas else _TO_ZERO,
    )


class BaselineScaler:
    """A baseline in its loop. ``ask``: returns its replicas of each target, and its state for the next call."""

    def __init__(self, ask: Callable[[Situation, Any], tuple[Mapping[str, int], Any]]) -> None:
        self._ask = ask
        self._memory: Any = None

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """The baseline's replicas."""
        desired, self._memory = self._ask(situation, self._memory)
        return desired


def _of_first(baseline: Baseline[Any]) -> BaselineScaler:
    """It supports one kind of engine, and scales the first target."""

    def ask(situation: Situation, memory: object) -> tuple[Mapping[str, int], object]:
        desired, memory = baseline.desired_replicas(situation, memory)
        return {situation.targets[0].name: desired}, memory

    return BaselineScaler(ask)


def _baseline(make: Callable[[ScalerSetup], Baseline[Any]]) -> Callable[[ScalerSetup], Scaler]:
    return lambda setup: _of_first(make(setup))


def _kinds_baseline(make: Callable[[ScalerSetup], WvaV1 | WvaV2 | Kthena]) -> Callable[[ScalerSetup], Scaler]:
    """With one kind of engine: its simpler form."""

    def made(setup: ScalerSetup) -> Scaler:
        baseline = make(setup)
        return (
            _of_first(baseline) if len(setup.load.variants) == 1 else BaselineScaler(baseline.desired_replicas_by_kind)
        )

    return made


def _wva_v1(setup: ScalerSetup) -> WvaV1:
    return WvaV1(SpareCapacityParameters(kv_spare_trigger=setup.knob), period_s=setup.period_s)


def _wva_v2(setup: ScalerSetup) -> WvaV2:
    """The two utilizations stay as far apart as in the original."""
    up, down = setup.knob, setup.knob * 0.70 / 0.85
    return WvaV2(TokensParameters(scale_up_utilization=up, scale_down_utilization=down), period_s=setup.period_s)


def _slo(setup: ScalerSetup) -> Baseline[Any]:
    """The two thresholds stay in the original's proportion."""
    up, down = setup.knob, setup.knob * 0.40 / 0.55
    return KedaSlo(scaled_objective(setup), up, down, period_s=setup.period_s)


PEER_POLICIES: Final = (
    Policy(
        "hpa-running-waiting",
        _baseline(lambda setup: hpa(running=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy(
        "kpa",
        _baseline(lambda setup: kpa(target=setup.knob, period_s=setup.period_s)),
        "target concurrency",
        (6.0, 10.0, 16.0, 22.0, 30.0),
        2.0,
    ),
    Policy("wva-v1", _kinds_baseline(_wva_v1), "spare share of KV caches", (0.25, 0.4, 0.55, 0.65, 0.75), 30.0),
    Policy("wva-v2", _kinds_baseline(_wva_v2), "scale-up utilization", (0.12, 0.25, 0.4, 0.55, 0.7), 30.0),
    Policy(
        "llmd-keda",
        _baseline(lambda setup: KedaQueue(running=setup.knob, period_s=setup.period_s)),
        "running requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy("llmd-slo", _baseline(_slo), "share of the objective", (0.4, 0.55, 0.7, 0.85, 1.0), 15.0),
    Policy(
        "kthena",
        _kinds_baseline(lambda setup: Kthena(target=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy(
        "aibrix-apa",
        _baseline(lambda setup: AibrixApa(target=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        10.0,
    ),
    Policy(
        "dynamo",
        _baseline(lambda setup: DynamoPlanner(scaled_objective(setup, setup.knob), period_s=setup.period_s)),
        "share of the objective",
        (0.6, 0.75, 0.9, 1.0, 1.15),
        5.0,
    ),
)


def _second(policy: Policy) -> Policy:
    """The same baseline on a fleet of the second kind."""
    carries = _SECOND_CARRIES if policy.grid[-1] > 2 else 1.0
    return msgspec.structs.replace(
        policy, name=f"{policy.name}-second", grid=tuple(carries * one for one in policy.grid), kind=1
    )


SECOND_POLICIES: Final = tuple(_second(one) for one in PEER_POLICIES if one.name in _ONE_KIND)


class PolicyUnknown(ValueError):
    """There is no such policy; the message lists the known ones."""


class FixedReplicas:
    """Always the same number; of several kinds of engine the cheapest mix that carries as much."""

    def __init__(self, setup: ScalerSetup) -> None:
        first, *others = setup.load.variants
        self._desired = {first.name: math.ceil(setup.knob)}
        if others:
            self._desired = variant_mixes(setup.load, setup.min_replicas).cheapest_mix(setup.knob)

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """The knob."""
        del situation
        return self._desired


_POLICIES: Final = (
    Policy(OURS, autoscaler_with_headroom, "headroom", (1.0, 1.25, 1.5, 2.0, 3.0), 5.0, has_zero=True),
    Policy(
        "attache-utilization", autoscaler_with_utilization, "utilization", (0.5, 0.6, 0.7, 0.8, 0.9), 5.0, has_zero=True
    ),
    *PEER_POLICIES,
    Policy("fixed", FixedReplicas, "replicas", (4, 6, 8, 10, 12), 5.0),
    Policy("oracle", Oracle, "share of engines' time", (0.8, 0.95, 1.1, 1.25, 1.4), 5.0, has_zero=True),
)
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({each.name: each for each in _POLICIES})
# The same baselines on a fleet of the second kind of engine, for loads that have one.
SECONDS: Final[Mapping[str, Policy]] = MappingProxyType({each.name: each for each in SECOND_POLICIES})


def policy_named(name: str) -> Policy:
    """Raises PolicyUnknown."""
    found = POLICIES.get(name) or SECONDS.get(name)
    if found is None:
        msg = f"there is no policy {name}; there are {', '.join(POLICIES)}"
        raise PolicyUnknown(msg)
    return found


def with_second_variant_policies(names: Iterable[str], variants: int) -> list[str]:
    """``names``, and on a load with several kinds of engine also the forms of them that begin with the second."""
    asked = list(dict.fromkeys(names))
    more = [f"{each}-second" for each in asked if variants > 1 and f"{each}-second" in SECONDS]
    return [*asked, *(each for each in more if each not in asked)]
