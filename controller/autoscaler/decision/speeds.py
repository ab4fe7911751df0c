# SPDX-License-Identifier: Apache-2.0
"""How fast a target's replicas are: learned, else declared, else typical."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.queueing import RequestWork, utilization_for_tpot
from controller.autoscaler.decision.situation import Speed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.api.autoscaling import LatencyObjective
    from controller.api.autoscaling_binding import EngineCapacity
    from controller.autoscaler.decision.load import PerRequest
    from extproc.api.status_pages import EngineDemand

# An 8B model on an H100. They fill in what is missing where something is known.
_TYPICAL: Final = Speed(prefill_tokens_per_s=15_000.0, step_s=0.0075, step_s_per_token=8e-8)
# Estimates of the gateways follow single answers. Those for scaling need not: engines stay as they are, and where they
# do not, the law's correction follows what is measured at once.
_SMOOTHING_S: Final = 600.0
# The first estimates come from few answers, so they count no more than this.
_FIRST_S: Final = 30.0


def speed_of(declared: EngineCapacity, reports: Iterable[EngineDemand]) -> Speed | None:
    """``reports``: of the target's engines, by all gateways. None if nothing is known.

    The median ignores an engine that is ill, and a gateway that has just begun to learn.
    """
    known = tuple(reports)
    prefill = _median([one.prefill_tokens_per_s for one in known])
    step = _median([one.step_s for one in known])
    step_per_token = _median([one.step_s_per_token for one in known])
    kv_tokens = _median([one.kv_capacity_tokens or None for one in known])
    values = (
        _first(prefill, declared.prefill_tokens_per_second),
        _first(step, declared.step),
        _first(step_per_token, declared.step_per_token),
    )
    if values == (None, None, None):
        return None
    return Speed(
        prefill_tokens_per_s=values[0] if values[0] is not None else _TYPICAL.prefill_tokens_per_s,
        step_s=values[1] if values[1] is not None else _TYPICAL.step_s,
        step_s_per_token=values[2] if values[2] is not None else _TYPICAL.step_s_per_token,
        kv_tokens=_first(kv_tokens, declared.kv_tokens),
        is_measured=prefill is not None or step is not None,
        is_step_known=values[1] is not None and values[2] is not None,
    )


def smoothed(before: Speed | None, new: Speed | None, elapsed_s: float) -> Speed | None:
    """A mean of logarithms over all of the time since the first measurement, then a moving one; a speed that is not
    known any more is kept.

    A first measurement replaces what was declared at once.
    """
    if before is None or new is None:
        return new if new is not None else before
    if (new.is_measured, new.is_step_known) != (before.is_measured, before.is_step_known):
        return new
    weight = elapsed_s / (max(_FIRST_S, before.followed_s) + elapsed_s)
    return Speed(
        prefill_tokens_per_s=_between(before.prefill_tokens_per_s, new.prefill_tokens_per_s, weight),
        step_s=_between(before.step_s, new.step_s, weight),
        step_s_per_token=_between(before.step_s_per_token, new.step_s_per_token, weight),
        kv_tokens=_first(new.kv_tokens, before.kv_tokens),
        is_measured=new.is_measured,
        is_step_known=new.is_step_known,
        followed_s=min(_SMOOTHING_S, before.followed_s + elapsed_s),
    )


def work_of(mean: PerRequest, speed: Speed, stage: str) -> RequestWork:
    """What the mean request asks of an engine with this speed. ``stage``: Prefill has no decode work, Decode no
    prefill.

    See ``queueing`` for the model.
    """
    context = mean.prompt_tokens + mean.output_tokens / 2
    decodes = stage != "Prefill"
    return RequestWork(
        prefill_s=mean.prefill_work / speed.prefill_tokens_per_s if stage != "Decode" else 0.0,
        decode_s=mean.output_tokens * speed.step_s_per_token * context if decodes else 0.0,
        output_tokens=mean.output_tokens if decodes else 0.0,
        context_tokens=context,
    )


def seconds_of_replica(mean: PerRequest, speed: Speed, stage: str, objective: LatencyObjective | None) -> float:
    """Time of one replica that a request takes up, counting in what must be left free for the objective's TPOT."""
    work = work_of(mean, speed, stage)
    tpot_s = objective.tpot if objective is not None else None
    free = utilization_for_tpot(speed.step_s, tpot_s) if tpot_s is not None and work.output_tokens > 0 else 1.0
    return work.total_s / free


def _median(values: list[float | None]) -> float | None:
    if len(values) == 1:
        return values[0]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _first(value: float | None, otherwise: float | None) -> float | None:
    return value if value is not None else otherwise


def _between(before: float, new: float, weight: float) -> float:
    if before <= 0 or new <= 0 or before == new:
        return new
    return math.exp((1 - weight) * math.log(before) + weight * math.log(new))
