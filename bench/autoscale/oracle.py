# SPDX-License-Identifier: Apache-2.0
"""A fleet that knows the future: as many engines as the coming arrivals need, ordered their start time ahead.

It knows each arrival and its lengths, and what they cost an engine (``bench.autoscale.capacity``). It is a bound in one
sense: nobody else can order before load is seen. It is none in another: costs are those of the mean batch, the needs of
a window are averaged, and its knob, the share of engines' time to use, is one number for all of a load; a scaler that
uses engines more exactly can be cheaper.

Of several kinds of engine it takes the mix for each second that makes the whole load cheapest, starts included
(``bench.autoscale.mixes``), and orders each kind its own start time ahead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from bench.autoscale.capacity import capacity, prefill_of
from bench.autoscale.mixes import cheapest_plan, mixes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.autoscale.loads import Load
    from bench.autoscale.scaler import Setup
    from bench.autoscale.variants import Variant
    from bench.workload.sessions import Workload
    from controller.autoscaler.decision.situation import Situation

# Arrivals of so long are averaged, so that chance alone calls for nobody.
WINDOW_S: Final = 15.0


def work_by_second(load: Load, workload: Workload) -> list[float]:
    """Engine time, in seconds of the load's first variant, that the arrivals of each second need.

    The cached share of a prompt is taken to be the mean's.
    """
    kind, mean = load.variants[0].kind(), load.mean
    per_output_s = capacity(kind, mean, load.objective.tpot_s).output_token_s
    uncached = mean.uncached / (mean.uncached + mean.cached)
    seconds = [0.0] * math.ceil(load.duration_s)
    for session in workload.sessions:
        for turn in session.turns:
            prompt = sum(piece.tokens for piece in turn.pieces)
            second = min(len(seconds) - 1, int(session.begins_at_s))
            seconds[second] += prefill_of(kind, uncached * prompt, (1 - uncached) * prompt)
            seconds[second] += per_output_s * turn.output_tokens
    return seconds


def needed(work: Sequence[float], utilization: float, window_s: float = WINDOW_S) -> list[int]:
    """Engines that each second's work needs, averaged over a window around it. ``utilization``: the share of an
    engine's time to use.
    """
    return [math.ceil(one - 1e-9) for one in units_needed(work, utilization, window_s)]


def units_needed(work: Sequence[float], utilization: float, window_s: float = WINDOW_S) -> list[float]:
    """The same, not rounded up to whole engines."""
    half = max(0, int(window_s // 2))
    found = []
    for second in range(len(work)):
        near = work[max(0, second - half) : second + half + 1]
        found.append(sum(near) / len(near) / utilization)
    return found


def orders_ahead(need: Sequence[int], lead_s: float, min_replicas: int) -> list[int]:
    """What to have ordered at each second: the most that is needed from then until an engine ordered now would be
    there.

    So an engine comes when it is needed, and goes when it is not needed for as long as a new one would take to start.
    """
    lead = math.ceil(lead_s) + 1
    return [max(min_replicas, *need[second : second + lead + 1]) for second in range(len(need))]


class Oracle:
    """Follows the plan that it made of the whole workload."""

    def __init__(self, setup: Setup) -> None:
        work = work_by_second(setup.load, setup.workload)
        self._plans = _one_kind(setup, work) if len(setup.load.variants) == 1 else _several_kinds(setup, work)
        self._most = {one.name: one.max_replicas for one in setup.load.variants}

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """By the clock alone."""
        return {
            name: min(self._most[name], plan[min(len(plan) - 1, int(situation.now_s))])
            for name, plan in self._plans.items()
        }


def _lead_s(variant: Variant, setup: Setup) -> float:
    return variant.start_s * (1 + variant.jitter) + setup.period_s


def _one_kind(setup: Setup, work: Sequence[float]) -> dict[str, list[int]]:
    (one,) = setup.load.variants
    return {one.name: orders_ahead(needed(work, setup.knob), _lead_s(one, setup), setup.min_replicas)}


def _several_kinds(setup: Setup, work: Sequence[float]) -> dict[str, list[int]]:
    variants = setup.load.variants
    leads_s = {one.name: _lead_s(one, setup) for one in variants}
    initial = {variants[0].name: setup.initial}
    plan = cheapest_plan(mixes_of(setup.load, setup.min_replicas), units_needed(work, setup.knob), leads_s, initial)
    return {name: orders_ahead([mix[name] for mix in plan], lead_s, 0) for name, lead_s in leads_s.items()}
