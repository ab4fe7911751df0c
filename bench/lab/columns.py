# SPDX-License-Identifier: Apache-2.0
"""The table of policies side by side, as the terminal and the HTML page show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.reporting.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.lab.measures import Measures
    from bench.reporting.intervals import Interval

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


def policy_table(
    title: str,
    policies: Mapping[str, Measures],
    intervals: Mapping[str, Interval],
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


def _interval(found: Interval) -> str:
    return f"{found.low:.3f} to {found.high:.3f}"
