# SPDX-License-Identifier: Apache-2.0
"""A factor on what a model of engines' work says, so that it agrees with what is measured.

Learned speeds have errors, and the model leaves things out. Measured TPOT says how busy engines were: 1 - alpha / TPOT.
The factor moves towards what makes the model say the same, so errors of learned speeds cancel out but for alpha's.

- Latency within the objective: it moves both ways. Answers of the last minute were served by the replicas of that time,
  so the most that there were count; after many have gone, nothing is concluded.
- Latency above the objective: it only grows. The fewest replicas of that time count. Besides, where no more were called
  for than are ready since a while, it grows slowly whatever TPOT says: TTFT may be what is late.

It stays within its bounds, and without news it falls back to 1 over hours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.latency import (
    ANSWERED_S,
    LEAST_CORRECTION,
    MOST_CORRECTION,
    measured_correction,
    worst_latency,
)
from controller.autoscaler.decision.situation import EngineState

if TYPE_CHECKING:
    from controller.autoscaler.decision.queueing import RequestWork
    from controller.autoscaler.decision.situation import Situation, Speed

# In which the factor follows what is measured.
_FOLLOWING_S: Final = 60.0
# Where more replicas than that share have just gone, measured answers say nothing about those that are left.
_AS_MANY: Final = 1.15
# It grows by so much of itself in a second for each multiple of the objective. It halves its distance from 1 in an
# hour: what the model does not know of an engine stays so, and each trial of less makes replicas come and go.
_GROWTH_PER_S: Final = 1 / 240
_HALVING_S: Final = 3600.0
_SETTLED_S: Final = 180.0
_MOST_ELAPSED_S: Final = 60.0


class Extreme(msgspec.Struct, frozen=True):
    """A number of replicas, and when there were as many."""

    replicas: float
    at_s: float


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """``factor``: see the module. ``at_s``: when it was looked at last. ``enough_since_s``: since when no more replicas
    were called for than were ready; None: they are now. ``ready``: replicas; ``steady_since_s``: since when they are as
    many, nothing waits and none is starting. ``most`` and ``fewest``: replicas ready in the time of measured answers.
    """

    at_s: float
    factor: float = 1.0
    enough_since_s: float | None = None
    ready: float = 0.0
    steady_since_s: float = 0.0
    most: Extreme | None = None
    fewest: Extreme | None = None


def corrected(
    situation: Situation,
    before: Correction | None,
    *,
    needed: float,
    work: RequestWork,
    speed: Speed,
    guard: bool,
) -> Correction:
    """``needed``: replicas for load as it is, by the model. ``guard``: whether measured latencies count at all."""
    now_s, ready = situation.now_s, situation.units(EngineState.READY)
    before = before or Correction(at_s=now_s, ready=ready, steady_since_s=now_s)
    elapsed_s = min(_MOST_ELAPSED_S, max(0.0, now_s - before.at_s))
    is_calm = not situation.waiting.requests and not situation.starting
    steady_since_s = before.steady_since_s if is_calm and ready == before.ready else now_s
    # what waits is late for another reason: it came when there were too few
    is_enough = needed * before.factor <= ready and not situation.waiting.requests
    since_s = (before.enough_since_s if before.enough_since_s is not None else now_s) if is_enough else None
    most, fewest = _extreme(before.most, ready, now_s, sign=1), _extreme(before.fewest, ready, now_s, sign=-1)
    factor = 1 + (before.factor - 1) * 0.5 ** (elapsed_s / _HALVING_S)
    if guard:
        worst = worst_latency(situation) or 0.0
        # what arrived before there were enough is late, and ends late
        is_settled = since_s is not None and now_s - max(since_s, steady_since_s) > _SETTLED_S
        if worst > 1:
            if is_settled and is_calm:
                factor = before.factor * (1 + min(1.0, worst - 1) * elapsed_s * _GROWTH_PER_S)
            if not situation.waiting.requests:
                shown = measured_correction(situation, fewest.replicas, work, speed) or 0.0
                factor = max(factor, _towards(before.factor, shown, elapsed_s))
        elif not situation.waiting.requests and most.replicas <= _AS_MANY * ready:
            measured = measured_correction(situation, most.replicas, work, speed)
            factor = factor if measured is None else _towards(before.factor, measured, elapsed_s)
    return Correction(
        at_s=now_s,
        factor=min(MOST_CORRECTION, max(LEAST_CORRECTION, factor)),
        enough_since_s=since_s,
        ready=ready,
        steady_since_s=steady_since_s,
        most=most,
        fewest=fewest,
    )


def _towards(before: float, measured: float, elapsed_s: float) -> float:
    return before + (measured - before) * min(1.0, elapsed_s / _FOLLOWING_S)


def _extreme(before: Extreme | None, ready: float, now_s: float, *, sign: int) -> Extreme:
    """The most (``sign`` 1) or fewest (-1) replicas that were ready in the time of the measured answers."""
    if before is None or (ready - before.replicas) * sign >= 0 or now_s - before.at_s > ANSWERED_S:
        return Extreme(ready, now_s)
    return before
