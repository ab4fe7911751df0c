# SPDX-License-Identifier: Apache-2.0
"""Speeds and start times of replicas, as measured, and their allowed utilisation by models of queues.

How busy engines may be for latencies to stay within their objectives, from models of queues.

An engine works in steps. A step takes ``alpha`` seconds, and longer for each token of context that it reads (``beta``)
and for the prompts that it computes in it. Work that a request adds, in seconds of engine time:

    prefill  I / Vp                 I: uncached work of the prompt; Vp: prefill speed
    decode   O * beta * L           O: tokens of the answer; L = prompt + O / 2: mean tokens of context

With ``rate`` requests a second, the share of time that goes into such work is rho = rate * (prefill + decode). What is
left is spent in steps' own ``alpha``. So there are (1 - rho) / alpha steps a second, and as each running request gets a
token in each step:

    TPOT = alpha / (1 - rho)        hence rho <= 1 - alpha / objective

That is a mean over time. While a request decodes (D seconds), the work that arrives varies: a sum of rate * D works w
that vary about as much as they are large has variance 2 * rho * w * D. A pool shares this out, so n engines need room
for z standard deviations of the pool's work, not n times that of each: R + z * sqrt(2 * R * w / D) with R = n * rho,
the rule of square roots (Halfin and Whitt, 1981).

Prompts wait for prompts before them. Prefill gets what decode leaves of an engine, so a prompt takes
S = prefill / (1 - rho_decode), at a utilisation of x = rho_prefill / (1 - rho_decode). Sakasegawa (1977): with n
servers a job has to wait with the probability x ** sqrt(2 * (n + 1)), nearly. How long, follows the queue of one
engine, as a prompt cannot move once it is sent: exponential with mean S / (1 - x) for works that vary about as much as
they are large.

    P(wait > t) = x ** sqrt(2 * (n + 1)) * exp(-(1 - x) * t / S)

Speeds are learned, else declared, else typical. A start lasts from a replica's creation until it serves.
"""

from __future__ import annotations

import math
from functools import cached_property
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.situation import ReplicaSpeed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.api.autoscaling import LatencyObjective
    from controller.api.autoscaling_binding import EngineCapacity
    from controller.autoscaler.decision.offered_load import MeanRequestWork
    from controller.autoscaler.decision.situation import TargetSituation
    from extproc.api.status_page_contents import EngineDemand

LEAST_UTILIZATION: Final = 0.3
MOST_UTILIZATION: Final = 0.9
# The share of a cache that may be in use; the rest is for fluctuation, without which requests are preempted.
MOST_CACHE: Final = 0.9
_NORMAL: Final = NormalDist()
_HALVINGS: Final = 20
# An 8B model on an H100. Defaults for missing values where others are known.
_TYPICAL: Final = ReplicaSpeed(prefill_tokens_per_s=15_000.0, step_s=0.0075, step_s_per_token=8e-8)
# Estimates of the gateways follow single answers. Those for scaling need not: engines stay as they are, and where they
# do not, the strategy's correction follows what is measured at once.
_SMOOTHING_S: Final = 600.0
# The first estimates come from few answers, so they count no more than this.
_FIRST_S: Final = 30.0
# Most starts kept.
MOST_STARTS: Final = 32
_LEAST_S: Final = 1.0


class RequestWork(msgspec.Struct, frozen=True):
    """The work of one request for an engine. ``prefill_s`` and ``decode_s``: engine seconds beyond the time of the
    steps themselves. ``output_tokens``: steps. ``context_tokens``: mean tokens in its cache.
    """

    prefill_s: float
    decode_s: float
    output_tokens: float
    context_tokens: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.prefill_s + self.decode_s


def utilization_for_tpot(step_s: float, tpot_s: float) -> float:
    """The share of time that may go into work for steps to follow each other within ``tpot_s``."""
    return min(MOST_UTILIZATION, max(LEAST_UTILIZATION, 1 - step_s / tpot_s))


def replicas_for_tpot(rate: float, work: RequestWork, *, step_s: float, tpot_s: float, percent: float) -> float:
    """``percent``: of requests that should have ``tpot_s``."""
    busy = rate * work.total_s
    duration_s = max(tpot_s, work.output_tokens * tpot_s)
    spare = max(0.0, _NORMAL.inv_cdf(percent / 100)) * math.sqrt(2 * busy * work.total_s / duration_s)
    return (busy + spare) / utilization_for_tpot(step_s, tpot_s)


def replicas_for_ttft(rate: float, work: RequestWork, *, ttft_s: float, percent: float, replicas: float) -> float:
    """``replicas``: about how many there are to choose from."""
    if work.prefill_s <= 0:
        return 0.0
    own_s = work.prefill_s / MOST_UTILIZATION
    late = 1 - percent / 100
    power = math.sqrt(2 * (max(1.0, replicas) + 1))
    wait_s = max(0.0, ttft_s - own_s)
    low, high = 0.0, MOST_UTILIZATION
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_late = middle**power * math.exp(-(1 - middle) * wait_s / own_s) > late
        low, high = (low, middle) if is_late else (middle, high)
    return rate * work.prefill_s / max(LEAST_UTILIZATION, low) + rate * work.decode_s


def replicas_for_cache(rate: float, work: RequestWork, *, kv_tokens: float, tpot_s: float) -> float:
    """By Little's law: tokens in flight are the rate, times how long a request takes, times its context."""
    in_flight = rate * (work.prefill_s + work.output_tokens * tpot_s) * work.context_tokens
    return in_flight / (MOST_CACHE * kv_tokens)


def estimate_speed(declared: EngineCapacity, reports: Iterable[EngineDemand]) -> ReplicaSpeed | None:
    """``reports``: of the target's engines, by all gateways. None if nothing is known.

    The median ignores a degraded engine, and a gateway that has few measurements so far.
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
    return ReplicaSpeed(
        prefill_tokens_per_s=values[0] if values[0] is not None else _TYPICAL.prefill_tokens_per_s,
        step_s=values[1] if values[1] is not None else _TYPICAL.step_s,
        step_s_per_token=values[2] if values[2] is not None else _TYPICAL.step_s_per_token,
        kv_tokens=_first(kv_tokens, declared.kv_tokens),
        is_measured=prefill is not None or step is not None,
        is_step_known=values[1] is not None and values[2] is not None,
    )


def smooth_speed(before: ReplicaSpeed | None, new: ReplicaSpeed | None, elapsed_s: float) -> ReplicaSpeed | None:
    """A mean of logarithms over all of the time since the first measurement, then a moving one; the last speed is kept
    while no new one is measured.

    A first measurement replaces what was declared at once.
    """
    if before is None or new is None:
        return new if new is not None else before
    if (new.is_measured, new.is_step_known) != (before.is_measured, before.is_step_known):
        return new
    weight = elapsed_s / (max(_FIRST_S, before.followed_s) + elapsed_s)
    return ReplicaSpeed(
        prefill_tokens_per_s=_between(before.prefill_tokens_per_s, new.prefill_tokens_per_s, weight),
        step_s=_between(before.step_s, new.step_s, weight),
        step_s_per_token=_between(before.step_s_per_token, new.step_s_per_token, weight),
        kv_tokens=_first(new.kv_tokens, before.kv_tokens),
        is_measured=new.is_measured,
        is_step_known=new.is_step_known,
        followed_s=min(_SMOOTHING_S, before.followed_s + elapsed_s),
    )


def request_work(mean: MeanRequestWork, speed: ReplicaSpeed, stage: str) -> RequestWork:
    """The work of the mean request for an engine with this speed. ``stage``: Prefill has no decode work, Decode no
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


def replica_seconds_per_request(
    mean: MeanRequestWork, speed: ReplicaSpeed, stage: str, objective: LatencyObjective | None
) -> float:
    """Time of one replica that a request takes up, counting in what must be left free for the objective's TPOT."""
    work = request_work(mean, speed, stage)
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


class EngineStart(msgspec.Struct, frozen=True):
    """One start. ``engine``: its name."""

    engine: str
    took_s: float


class StartDurations(msgspec.Struct, frozen=True, dict=True):
    """``starts``: the newest last."""

    starts: tuple[EngineStart, ...] = ()

    def percentile(self, percent: float) -> float | None:
        """By the nearest rank; None without any."""
        ordered = self._ordered
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted([one.took_s for one in self.starts])

    @cached_property
    def _engines(self) -> frozenset[str]:
        return frozenset([one.engine for one in self.starts])

    def with_started_engines(self, target: TargetSituation) -> StartDurations:
        """With the start times of ready engines of ``target`` that are not recorded yet."""
        known = self._engines
        new = [
            EngineStart(one.name, max(_LEAST_S, one.ready_at_s - one.created_at_s))
            for one in target.engines
            if one.ready_at_s is not None and one.name not in known
        ]
        return StartDurations((*self.starts, *new)[-MOST_STARTS:]) if new else self


def expected_start_s(times: StartDurations | None, otherwise_s: float) -> float:
    """Nine of ten starts take at most so long; ``otherwise_s`` before any was seen."""
    measured = times.percentile(90) if times is not None else None
    return measured if measured is not None else otherwise_s
