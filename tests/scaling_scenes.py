# SPDX-License-Identifier: Apache-2.0
"""Situations for tests of scaling strategies, in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.api.autoscaling_binding import ScaleTarget
from controller.api.shared_types import ObjectReference
from controller.autoscaler.decision.situation import (
    Backlog,
    Engine,
    EngineReport,
    EngineState,
    Freshness,
    MetricReading,
    Situation,
    TargetSituation,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.status_page_contents import TPOT_BOUNDS_S, TTFT_BOUNDS_S, bucket_index

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

NOW_S = 1000.0


def report(
    *,
    kv: float | None = None,
    waiting: float | None = None,
    running: float | None = None,
    in_flight: int = 0,
    tokens: float = 0.0,
    cache: float = 0.0,
) -> EngineReport:
    return EngineReport(NOW_S, in_flight, tokens, waiting, running, kv, cache)


def engine(name: str, given: EngineReport | None = None, state: EngineState = EngineState.READY) -> Engine:
    return Engine(name, state, created_at_s=0.0, ready_at_s=0.0, report=given)


def target(
    engines: Iterable[Engine] = (),
    *,
    name: str = "a",
    current: int | None = None,
    capacity: float = 1.0,
    blocked: str = "",
    spec: ScaleTarget | None = None,
) -> TargetSituation:
    """``current``: as many as there are engines, if left out."""
    them = tuple(engines)
    written = spec or ScaleTarget(name, ObjectReference("ModelInfer", name), 1000)
    return TargetSituation(written, len(them) if current is None else current, them, None, capacity, blocked=blocked)


def situation(
    *targets: TargetSituation,
    traffic: Traffic | None = None,
    waiting: Backlog | None = None,
    silent: Sequence[str] = (),
    unreported: Sequence[str] = (),
    metrics: dict[str, MetricReading] | None = None,
    now_s: float = NOW_S,
) -> Situation:
    return Situation(
        now_s=now_s,
        targets=targets,
        traffic=traffic or Traffic(),
        waiting=waiting or Backlog(),
        freshness=Freshness(silent=tuple(silent), unreported=tuple(unreported)),
        metrics=metrics or {},
    )


def pool(*reports: EngineReport | None, **kwargs: object) -> Situation:
    """One target whose engines are ready."""
    return situation(target(engine(f"e{number}", one) for number, one in enumerate(reports)), **kwargs)  # type: ignore[arg-type]


def steady(
    *, requests: float = 0.0, prompt: float = 0.0, answer: float = 0.0, seconds: float = 400.0, now_s: float = NOW_S
) -> Traffic:
    """Requests a second with prompts and answers of so many tokens, for so long, all answered."""
    count = requests * seconds
    last = TrafficTotals(arrivals=count, finished=count, prompt_tokens=count * prompt, output_tokens=count * answer)
    begin = TrafficPoint(now_s - seconds, TrafficTotals())
    # points within the windows too: constant rates
    between = [
        TrafficPoint(now_s - seconds + step, _share(last, step / seconds)) for step in range(10, int(seconds), 10)
    ]
    return Traffic((begin, *between, TrafficPoint(now_s, last)))


def latencies(*, ttft_s: float | None = None, tpot_s: float | None = None, now_s: float = NOW_S) -> Traffic:
    """A hundred requests in the last half minute, all with these latencies."""
    ttft = _histogram(ttft_s, TTFT_BOUNDS_S)
    tpot = _histogram(tpot_s, TPOT_BOUNDS_S)
    return Traffic(
        (
            TrafficPoint(now_s - 120, TrafficTotals()),
            TrafficPoint(now_s - 30, TrafficTotals()),
            TrafficPoint(now_s, TrafficTotals(arrivals=100, finished=100, ttft=ttft, tpot=tpot)),
        )
    )


def some_report(rng: random.Random) -> EngineReport | None:
    """Any load of an engine; in one of eight cases unknown, in one of eight incomplete."""
    if not rng.randrange(8):
        return None
    incomplete = not rng.randrange(8)
    return report(
        kv=None if incomplete else round(rng.random(), 2),
        waiting=float(rng.choice((0, 0, 0, 1, 2, 3, 5, 8, 30))),
        in_flight=rng.randrange(40),
        tokens=float(rng.randrange(80_000)),
        cache=float(rng.choice((0, 50_000, 80_000))) if incomplete else 80_000.0,
    )


def _share(totals: TrafficTotals, share: float) -> TrafficTotals:
    return TrafficTotals(
        arrivals=totals.arrivals * share,
        finished=totals.finished * share,
        prompt_tokens=totals.prompt_tokens * share,
        output_tokens=totals.output_tokens * share,
    )


def _histogram(value_s: float | None, bounds: tuple[float, ...]) -> tuple[int, ...]:
    counts = [0] * (len(bounds) + 1)
    if value_s is not None:
        counts[bucket_index(value_s, bounds)] = 100
    return tuple(counts)
