# SPDX-License-Identifier: Apache-2.0
"""Tokens in use and waiting, over what engines can hold.

Source: llm-d's workload-variant-autoscaler, ``internal/engines/analyzers/saturation_v2`` (second form). For each ready
engine, with the mean prompt ``I`` and answer ``O`` of the last five minutes::

    k1 = cache * kv_cache_threshold
    k2 = tokens in use while queue_length_threshold or more wait; else the mean of the last ten such observations of the
         target and length class (answers below 100, below 500, longer); else, from the engine's scheduler,
         n * (I + O/2) with n = min(max_batched_tokens * O / (I + O), max_sequences); else k1
    capacity = min(k1, k2), of a target the median of its engines
    demand   = sum(tokens in use + waiting * I) + uncached tokens at the gateways + requests at the gateways * O

    demand / scale_up_utilization - capacity of ready and pending replicas > 0: as many more
    capacity of ready replicas - demand / scale_down_utilization > 0: as many whole replicas fewer

What is different from the original: the gateways' waiting tokens are counted, not guessed from bytes; the usage of an
engine that does not report its cache is the tokens that gateways have sent to it; an engine without data counts as at
the upper utilisation, and prevents scale-in; a target without ready engines has the capacity of its last ready ones,
else that of another target in proportion to ``capacity``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from controller.api.shared_types import Count, Positive, Utilization
from controller.api.strategies import StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.strategies.engine_loads import (
    WeightedEngineLoad,
    capacity_after_scale_in,
    kv_and_queue,
    pending_units,
    ready_loads,
    round_down_units,
    round_up_units,
)
from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation, TargetSituation

LENGTH_WINDOW_S: Final = 300.0
_OBSERVATIONS: Final = 10


class TokensParameters(Spec, frozen=True):
    """llm-d's workload-variant-autoscaler, second form: tokens in use and waiting, over what engines hold.
    ``scale_up_utilization`` and ``scale_down_utilization``: the band of the share in use. ``kv_cache_threshold``: the
    share of a cache that counts as its capacity. ``queue_length_threshold``: with so many waiting, tokens in use are an
    engine's capacity. ``max_batched_tokens`` and ``max_sequences``: of the engines' scheduler.
    """

    CEL: ClassVar = (
        CelRule(
            "self.scaleDownUtilization < self.scaleUpUtilization",
            "scaleDownUtilization must be below scaleUpUtilization; what lies between is the zone without changes",
        ),
    )

    scale_up_utilization: Utilization = 0.85
    scale_down_utilization: Utilization = 0.7
    kv_cache_threshold: Utilization = 0.8
    queue_length_threshold: Positive = 5.0
    max_batched_tokens: Count = 8192
    max_sequences: Count = 256


class MeanTokenLengths(msgspec.Struct, frozen=True):
    """Mean tokens of a prompt and of an answer."""

    prompt: float = 0.0
    answer: float = 0.0

    @property
    def length_class(self) -> str:
        """The length class, by the answer."""
        return "short" if self.answer < 100 else "medium" if self.answer < 500 else "long"


class TokensMemory(msgspec.Struct, frozen=True):
    """``observed``: tokens in use of engines with full queues, by target and length class. ``capacities``: of a
    replica, by target. ``lengths``: the last known ones.
    """

    observed: Mapping[str, tuple[float, ...]] = {}
    capacities: Mapping[str, float] = {}
    lengths: MeanTokenLengths = MeanTokenLengths()


class _Counted(msgspec.Struct, frozen=True):
    """``demand``: tokens of the engines whose load is known. ``unknown``: units of the others."""

    memory: TokensMemory
    demand: float
    unknown: float


class TokensStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: TokensParameters = TokensParameters()
    name: str = "Tokens"

    def recommend(
        self, situation: Situation, memory: TokensMemory | None
    ) -> tuple[Recommendation, TokensMemory | None]:
        """As many more or fewer as tokens call for."""
        counted = self._count(situation, memory or TokensMemory())
        after, up = counted.memory, self.parameters.scale_up_utilization
        unit = _capacity_of(situation.targets[0], situation, after) if situation.targets else None
        if unit is None:
            return Recommendation(self.name, None, "what an engine can hold is not known"), after
        ready = _supply(situation, after)
        demand = counted.demand + counted.unknown * unit * up + _at_gateways(situation, after.lengths)
        required = demand / up - ready - pending_units(situation) * unit
        spare = ready - demand / self.parameters.scale_down_utilization
        inputs = {"demand_tokens": demand, "ready_capacity_tokens": ready, "replica_capacity_tokens": unit}
        message = f"{demand:.0f} tokens in use or waiting, {ready:.0f} fit into ready engines, {unit:.0f} into one"
        current = situation.current_replicas
        if required > 0:
            desired = current + round_up_units(required / unit, situation)
            return Recommendation(
                self.name, desired, f"{message}; above {up:g} of that and what is starting", inputs
            ), after
        fewer = round_down_units(max(spare, 0.0) / unit, situation)
        if fewer <= 0:
            return Recommendation(self.name, current, f"{message}; enough, and no replica too many", inputs), after
        if counted.unknown:
            return Recommendation(self.name, None, f"{message}, but the load of some engines is unknown", inputs), after
        return Recommendation(
            self.name, capacity_after_scale_in(situation, fewer), f"{message}; fewer carry that", inputs
        ), after

    def _count(self, situation: Situation, memory: TokensMemory) -> _Counted:
        lengths = _lengths(situation) or memory.lengths
        observed, capacities = dict(memory.observed), dict(memory.capacities)
        demand = unknown = 0.0
        loads = ready_loads(situation)
        for target in situation.targets:
            own = []
            for load in loads:
                if load.target != target.name:
                    continue
                cache = _cache(load, target)
                used, waiting = _used(load, cache)
                if load.report is None:
                    unknown += load.units
                    continue
                demand += used + waiting * lengths.prompt
                if cache:
                    own.append(
                        self._capacity(f"{target.name}|{lengths.length_class}", observed, lengths, cache, used, waiting)
                    )
            if own:
                capacities[target.name] = statistics.median(own)
        return _Counted(TokensMemory(observed, capacities, lengths), demand, unknown)

    def _capacity(
        self,
        key: str,
        observed: dict[str, tuple[float, ...]],
        lengths: MeanTokenLengths,
        cache: float,
        used: float,
        waiting: float,
    ) -> float:
        """min(k1, k2) of one engine; what is observed of it is added to ``observed``."""
        memory_bound = cache * self.parameters.kv_cache_threshold
        if waiting >= self.parameters.queue_length_threshold and used > 0:
            observed[key] = (*observed.get(key, ()), used)[-_OBSERVATIONS:]
            return min(memory_bound, used)
        if key in observed:
            return min(memory_bound, statistics.fmean(observed[key]))
        derived = steady_tokens(lengths, self.parameters.max_batched_tokens, self.parameters.max_sequences)
        return min(memory_bound, derived) if derived > 0 else memory_bound


def steady_tokens(lengths: MeanTokenLengths, max_batched_tokens: float, max_sequences: float) -> float:
    """Tokens in use of an engine that is as busy as its scheduler allows; 0 if lengths are unknown."""
    if lengths.answer <= 0:
        return 0.0
    sequences = min(max_batched_tokens * lengths.answer / (lengths.prompt + lengths.answer), max_sequences)
    return sequences * (lengths.prompt + lengths.answer / 2)


def _lengths(situation: Situation) -> MeanTokenLengths | None:
    rates = situation.traffic.rates(LENGTH_WINDOW_S, situation.now_s)
    if rates is None or rates.finished <= 0:
        return None
    return MeanTokenLengths(rates.prompt_tokens / rates.finished, rates.output_tokens / rates.finished)


def _cache(load: WeightedEngineLoad, target: TargetSituation) -> float:
    """Tokens that an engine's cache holds: reported, else learned, else declared; 0 if unknown."""
    reported = load.report.kv_capacity_tokens if load.report is not None else 0.0
    learned = target.speed.kv_tokens if target.speed is not None else None
    return reported or learned or target.spec.capacity.kv_tokens or 0.0


def _used(load: WeightedEngineLoad, cache: float) -> tuple[float, float]:
    """Tokens in use and requests that wait in the engine. What gateways have sent includes what waits there."""
    known = kv_and_queue(load.report) if load.report is not None and load.report.kv_usage is not None else None
    if known is not None and cache:
        return known[0] * cache, known[1]
    return (load.report.in_flight_tokens, 0.0) if load.report is not None else (0.0, 0.0)


def _capacity_of(target: TargetSituation, situation: Situation, memory: TokensMemory) -> float | None:
    """Tokens that a replica of the target can hold; None if unknown."""
    if known := memory.capacities.get(target.name):
        return known
    others = [
        memory.capacities[one.name] / one.capacity for one in situation.targets if memory.capacities.get(one.name)
    ]
    return statistics.median(others) * target.capacity if others else None


def _supply(situation: Situation, memory: TokensMemory) -> float:
    loads = ready_loads(situation)
    counts = {target.name: sum(load.target == target.name for load in loads) for target in situation.targets}
    return sum((_capacity_of(one, situation, memory) or 0.0) * counts[one.name] for one in situation.targets)


def _at_gateways(situation: Situation, lengths: MeanTokenLengths) -> float:
    """Tokens that wait, and those of their answers, unless other engines write these."""
    answers = 0.0 if situation.targets[0].spec.stage == "Prefill" else situation.waiting.requests * lengths.answer
    return situation.waiting.tokens + answers


TOKENS: Final = StrategyType(
    summary="tokens over capacity",
    make=lambda parameters, _: TokensStrategy(parameters),
    defaults=TokensParameters(),
)
