"""From requests to the numbers that people compare. Times in seconds; errors count as missed objectives, and have no times."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from bench.load.summary import rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.lab.trial import Row


class Objective(msgspec.Struct, frozen=True):
    """What a good answer is: its first token within ``ttft_s``, and each more within ``tpot_s`` on average."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1

    def is_met(self, row: Row) -> bool:
        """Errors never are."""
        return not row.error and row.ttft_s <= self.ttft_s and row.tpot_s <= self.tpot_s


class Spread(msgspec.Struct, frozen=True):
    """Percentiles by the nearest rank."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Measures(msgspec.Struct, frozen=True):
    """``tpot_s`` as vLLM defines it: after the first token, of answers with more than one. ``excess_ttft_s``: over an idle engine that holds all
    that was sent before. ``goodput``: requests a second that met the objective, ``attainment`` their share of all. ``imbalance``: the busiest
    engine's requests over the mean. ``fairness``: Jain's index of the mean TTFT of labels, 1 if all are equal.
    """

    requests: int
    errors: int
    ttft_s: Spread
    excess_ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    cached_token_ratio: float
    goodput: float
    attainment: float
    requests_per_s: float
    output_tokens_per_s: float
    imbalance: float
    fairness: float
    duration_s: float


def measure(rows: Sequence[Row], duration_s: float, objective: Objective) -> Measures:
    """Of one trial, or of several with their durations added up."""
    good = [row for row in rows if not row.error]
    met = sum(1 for row in good if objective.is_met(row))
    prompt_tokens = sum(row.prompt_tokens for row in good)
    seconds = duration_s or math.inf
    return Measures(
        requests=len(rows),
        errors=len(rows) - len(good),
        ttft_s=spread(row.ttft_s for row in good),
        excess_ttft_s=spread(max(0.0, row.ttft_s - row.ideal_s) for row in good),
        tpot_s=spread(row.tpot_s for row in good if row.output_tokens > 1),
        e2e_s=spread(row.e2e_s for row in good),
        cached_token_ratio=sum(row.cached_tokens for row in good) / prompt_tokens if prompt_tokens else 0.0,
        goodput=met / seconds,
        attainment=met / len(rows) if rows else 0.0,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=sum(row.output_tokens for row in good) / seconds,
        imbalance=_imbalance(good),
        fairness=_fairness(good),
        duration_s=duration_s,
    )


def spread(values: Iterable[float]) -> Spread:
    """All 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    return Spread(math.fsum(ordered) / len(ordered), *(rank(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def _imbalance(rows: Sequence[Row]) -> float:
    served: dict[int, int] = defaultdict(int)
    for row in rows:
        served[row.engine] += 1
    return max(served.values()) * len(served) / len(rows) if rows else 0.0


def _fairness(rows: Sequence[Row]) -> float:
    by_label: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_label[row.label].append(row.ttft_s)
    means = [sum(values) / len(values) for values in by_label.values()]
    squares = sum(mean * mean for mean in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else 1.0
