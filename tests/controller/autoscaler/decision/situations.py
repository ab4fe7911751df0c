# SPDX-License-Identifier: Apache-2.0
"""Situations for tests, with load that is the same every second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.api.autoscaling_binding import (
    AutoscalingPolicyBinding,
    AutoscalingPolicyBindingSpec,
    ScaleTarget,
)
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.situation import (
    Backlog,
    Engine,
    EngineReport,
    EngineState,
    Freshness,
    ReplicaSpeed,
    Situation,
    TargetSituation,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.spec import Metadata
from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, bucket_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.api.autoscaling import LatencyObjective

NOW_S = 1_780_000_000.0
PROMPT, OUTPUT = 1000.0, 200.0
# With PROMPT and OUTPUT: 0.1 s of prefill, and 200 * 5e-7 * 1100 = 0.11 s of decode a request.
SPEED = ReplicaSpeed(prefill_tokens_per_s=10_000.0, step_s=0.01, step_s_per_token=5e-7, is_measured=True)


def spec_of(name: str = "main", *, least: int = 1, most: int = 40, stage: str = "Both") -> ScaleTarget:
    """A target that is a Deployment."""
    return ScaleTarget(
        name=name,
        ref=ObjectReference(kind="Deployment", name=name, api_version="apps/v1"),
        min_replicas=least,
        max_replicas=most,
        stage=stage,  # type: ignore[arg-type]  # one of the three
    )


def binding_of(*targets: ScaleTarget) -> AutoscalingPolicyBinding:
    """A binding of these targets."""
    return AutoscalingPolicyBinding(
        metadata=Metadata(name="chat"), spec=AutoscalingPolicyBindingSpec(policy_ref="policy", targets=targets)
    )


def engines_of(
    name: str, *, ready: int = 0, starting: int = 0, now_s: float = NOW_S, age_s: float = 10.0
) -> tuple[Engine, ...]:
    """``age_s``: of those that start."""
    serving = [
        Engine(f"{name}-{index}", EngineState.READY, now_s - 1000, now_s - 940, EngineReport(now_s))
        for index in range(ready)
    ]
    coming = [Engine(f"{name}-{ready + index}", EngineState.STARTING, now_s - age_s) for index in range(starting)]
    return (*serving, *coming)


def target_of(
    *,
    ready: int = 1,
    starting: int = 0,
    spec: ScaleTarget | None = None,
    speed: ReplicaSpeed | None = SPEED,
    age_s: float = 10.0,
) -> TargetSituation:
    """A target whose replicas all exist."""
    spec = spec or spec_of()
    engines = engines_of(spec.name, ready=ready, starting=starting, age_s=age_s)
    return TargetSituation(spec=spec, current=ready + starting, engines=engines, speed=speed)


def traffic_of(
    rate: Callable[[float], float] | float,
    *,
    seconds: int = 600,
    now_s: float = NOW_S,
    before: float = 0.0,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
) -> Traffic:
    """``rate``: requests a second, also as a function of the seconds before now (negative). ``before``: requests that
    had come before. Latencies: of all requests.
    """
    arrivals, points = before, []
    for second in range(-seconds, 1):
        arrivals += rate if isinstance(rate, (int, float)) else rate(second)
        points.append(TrafficPoint(now_s + second, _totals(arrivals, ttft_s, tpot_s)))
    return Traffic(tuple(points))


def _totals(arrivals: float, ttft_s: float | None, tpot_s: float | None) -> TrafficTotals:
    return TrafficTotals(
        arrivals=arrivals,
        finished=arrivals,
        prompt_tokens=arrivals * PROMPT,
        output_tokens=arrivals * OUTPUT,
        prefill_work=arrivals * PROMPT,
        ttft=_histogram(arrivals, ttft_s, TTFT_BOUNDS_S),
        tpot=_histogram(arrivals, tpot_s, TPOT_BOUNDS_S),
    )


def _histogram(number: float, value_s: float | None, bounds: tuple[float, ...]) -> tuple[int, ...]:
    if value_s is None:
        return ()
    counts = [0] * (len(bounds) + 1)
    counts[bucket_index(value_s, bounds)] = int(number)
    return tuple(counts)


def situation_of(
    targets: Sequence[TargetSituation] | TargetSituation,
    *,
    traffic: Traffic | None = None,
    waiting: Backlog | None = None,
    freshness: Freshness | None = None,
    objective: LatencyObjective | None = None,
    now_s: float = NOW_S,
) -> Situation:
    """Fresh data of one gateway unless it is said otherwise."""
    return Situation(
        now_s=now_s,
        targets=(targets,) if isinstance(targets, TargetSituation) else tuple(targets),
        traffic=traffic if traffic is not None else Traffic(),
        waiting=waiting or Backlog(),
        freshness=freshness or Freshness(),
        objective=objective,
    )
