# SPDX-License-Identifier: Apache-2.0
"""Measures of trials that people compare, and their columns in tables."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from bench.reporting.report_elements import Table
from bench.reporting.request_results import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.lab.trial import RequestRow
    from bench.reporting.request_results import ConfidenceInterval

# Seconds, unless a heading has a unit.
COLUMNS: Final[Mapping[str, Callable[[Measures], str]]] = {
    "TTFT mean": lambda one: f"{one.ttft_s.mean:.3f}",
    "p50": lambda one: f"{one.ttft_s.p50:.3f}",
    "p90": lambda one: f"{one.ttft_s.p90:.3f}",
    "p99": lambda one: f"{one.ttft_s.p99:.2f}",
    "excess": lambda one: f"{one.excess_ttft_s.mean:.3f}",
    "TPOT, ms": lambda one: f"{1000 * one.tpot_s.mean:.1f}",
    "E2E": lambda one: f"{one.e2e_s.mean:.2f}",
    "cached": lambda one: f"{one.cached_token_ratio:.1%}",
    "goodput, 1/s": lambda one: f"{one.goodput:.2f}",
    "errors": lambda one: str(one.errors),
    "imbalance": lambda one: f"{one.imbalance:.2f}",
    "fairness": lambda one: f"{one.fairness:.3f}",
}
# What fits on a terminal.
NARROW: Final = tuple(COLUMNS)[:10]


class LatencyObjective(msgspec.Struct, frozen=True):
    """What counts for goodput: the first token within ``ttft_s``, each further one within ``tpot_s`` on average."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1

    def is_met(self, row: RequestRow) -> bool:
        """Errors never meet it."""
        return not row.error and row.ttft_s <= self.ttft_s and row.tpot_s <= self.tpot_s


class Measures(msgspec.Struct, frozen=True):
    """The measures of one policy. Errors miss the objective and have no times.

    | measure | meaning |
    |---|---|
    | `excess_ttft_s` | TTFT beyond the lower bound: an idle engine that holds all that was sent before |
    | `tpot_s` | time per output token after the first, of answers with more than one (vLLM's definition) |
    | `goodput` | requests per second that met the objective |
    | `attainment` | the share of all requests that met the objective, 0 to 1 |
    | `imbalance` | the busiest engine's requests over the mean of all engines; 1 if all serve as many |
    | `fairness` | Jain's index of the mean TTFT of labels; 1 if all are equal |
    """

    requests: int
    errors: int
    ttft_s: Distribution
    excess_ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    cached_token_ratio: float
    goodput: float
    attainment: float
    requests_per_s: float
    output_tokens_per_s: float
    imbalance: float
    fairness: float
    duration_s: float


def compute_measures(
    rows: Sequence[RequestRow], duration_s: float, objective: LatencyObjective, *, engines: int | None = None
) -> Measures:
    """Of one trial, or of several as one. ``duration_s``: the sum of their durations in virtual time.

    ``engines``: how many there were; None: those that served something.
    """
    good = [row for row in rows if not row.error]
    met = sum(1 for row in good if objective.is_met(row))
    prompt_tokens = sum(row.prompt_tokens for row in good)
    seconds = duration_s or math.inf
    return Measures(
        requests=len(rows),
        errors=len(rows) - len(good),
        ttft_s=distribution(row.ttft_s for row in good),
        excess_ttft_s=distribution(max(0.0, row.ttft_s - row.ideal_s) for row in good),
        tpot_s=distribution(row.tpot_s for row in good if row.output_tokens > 1),
        e2e_s=distribution(row.e2e_s for row in good),
        cached_token_ratio=sum(row.cached_tokens for row in good) / prompt_tokens if prompt_tokens else 0.0,
        goodput=met / seconds,
        attainment=met / len(rows) if rows else 0.0,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=sum(row.output_tokens for row in good) / seconds,
        imbalance=_imbalance(good, engines),
        fairness=_fairness(good),
        duration_s=duration_s,
    )


def _imbalance(rows: Sequence[RequestRow], engines: int | None) -> float:
    served: dict[int, int] = defaultdict(int)
    for row in rows:
        served[row.engine] += 1
    return max(served.values()) * (engines or len(served)) / len(rows) if rows else 0.0


def _fairness(rows: Sequence[RequestRow]) -> float:
    by_label: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_label[row.label].append(row.ttft_s)
    means = [sum(values) / len(values) for values in by_label.values()]
    squares = sum(mean * mean for mean in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else 1.0


def policy_table(
    title: str,
    policies: Mapping[str, Measures],
    intervals: Mapping[str, ConfidenceInterval],
    *,
    columns: tuple[str, ...] = tuple(COLUMNS),
) -> Table:
    """A row for each policy, in the order of ``policies``. ``columns``: keys of COLUMNS.

    ``intervals``: of each policy's mean TTFT, in a second column.
    """
    first, *others = columns
    rows = [
        [name, COLUMNS[first](one), _interval(intervals[name]), *(COLUMNS[column](one) for column in others)]
        for name, one in policies.items()
    ]
    return Table(title, ["policy", first, "95%", *others], rows)


def _interval(found: ConfidenceInterval) -> str:
    return f"{found.low:.3f} to {found.high:.3f}"
