# SPDX-License-Identifier: Apache-2.0
"""A fleet that knows the future: as many engines as the coming arrivals need, ordered their start time ahead.

It knows each arrival and its lengths, and what they cost an engine (``bench.autoscale.capacity``). It is a bound in one
sense: nobody else can order before load is seen. It is none in another: costs are those of the mean batch, the needs of
a window are averaged, and its knob, the share of engines' time to use, is one number for all of a load; a scaler that
uses engines more exactly can be cheaper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from bench.autoscale.capacity import capacity, prefill_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.autoscale.loads import Load
    from bench.autoscale.scaler import Setup
    from bench.workload.sessions import Workload
    from controller.autoscale.situation import Situation

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
    half = max(0, int(window_s // 2))
    found = []
    for second in range(len(work)):
        near = work[max(0, second - half) : second + half + 1]
        found.append(math.ceil(sum(near) / len(near) / utilization - 1e-9))
    return found


def orders_ahead(need: Sequence[int], lead_s: float, min_replicas: int) -> list[int]:
    """What to have ordered at each second: the most that is needed from then until an engine ordered now would be there.

    So an engine comes when it is needed, and goes when it is not needed for as long as a new one would take to start.
    """
    lead = math.ceil(lead_s) + 1
    return [max(min_replicas, *need[second : second + lead + 1]) for second in range(len(need))]


class Oracle:
    """Follows the plan that it made of the whole workload."""

    def __init__(self, setup: Setup) -> None:
        first = setup.load.variants[0]
        self._target = first.name
        lead_s = first.start_s * (1 + first.jitter) + setup.period_s
        need = needed(work_by_second(setup.load, setup.workload), setup.knob)
        self._plan = orders_ahead(need, lead_s, setup.min_replicas)
        self._most = first.max_replicas

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """By the clock alone."""
        second = min(len(self._plan) - 1, int(situation.now_s))
        return {self._target: min(self._most, self._plan[second])}
