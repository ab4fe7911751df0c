# SPDX-License-Identifier: Apache-2.0
"""The lab's page: a table for each load, who dominates whom, and what equal attainment costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.cell import CellResult
from bench.autoscale.frontier import Spot, dominates, extra_cost, spot
from bench.autoscale.policies import BOUNDS, OURS
from bench.reporting.distribution import nearest_rank
from bench.reporting.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.autoscale.experiment import Tuned

# What we promise: so much less than the best peer in the mean of the loads, and nowhere so much more.
LESS_IN_THE_MEAN: Final = 0.15
MORE_IN_A_CELL: Final = 0.03

_HEADINGS: Final = (
    "policy",
    "setting",
    "in target",
    "95%",
    "cost an hour",
    "replicas",
    "TTFT p99, s",
    "TPOT p99, ms",
    "orders an hour",
    "reversals an hour",
    "to order p50, s",
    "p99",
    "wasted GPU-s",
    "refused",
    "lost",
)


class Line(msgspec.Struct, frozen=True):
    """A policy at one setting on one load, over its seeds."""

    spot: Spot
    results: Sequence[CellResult]


class Equal(msgspec.Struct, frozen=True):
    """Our cost against a load's peers at our attainment. ``extra``: by peer, our cost over its, minus 1; None: it never
    attains as much.
    """

    load: str
    attainment: float
    extra: Mapping[str, float | None]

    @property
    def best(self) -> tuple[str, float] | None:
        """The peer that is cheapest at our attainment; None if no peer attains as much."""
        reached = [(extra, peer) for peer, extra in self.extra.items() if extra is not None]
        if not reached:
            return None
        extra, peer = max(reached)
        return peer, extra


def lines_of(results: Iterable[CellResult]) -> dict[str, dict[str, list[Line]]]:
    """By load and policy: a line for each setting."""
    grouped: dict[tuple[str, str, float], list[CellResult]] = defaultdict(list)
    for one in results:
        grouped[one.cell.load, one.cell.policy, one.cell.knob].append(one)
    found: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for (load, policy, _), each in sorted(grouped.items()):
        found[load][policy].append(Line(spot(each), each))
    return found


def chosen(lines: Mapping[str, Sequence[Line]], settings: Mapping[str, Tuned]) -> dict[str, Line]:
    """Of each policy the line at the setting that tuning gave it."""
    return {
        policy: next(one for one in each if one.spot.knob == settings[policy].knob) for policy, each in lines.items()
    }


def load_table(load: str, lines: Mapping[str, Line]) -> Table:
    """The most in target first."""
    ordered = sorted(lines.items(), key=lambda one: -one[1].spot.attainment)
    styles = ["bold" if policy == OURS else "" for policy, _ in ordered]
    return Table(load, _HEADINGS, [_cells(policy, line) for policy, line in ordered], row_styles=styles)


def _cells(policy: str, line: Line) -> list[str]:
    found, results = line.spot, line.results
    hours = sum(one.hours for one in results)
    delays = sorted(delay for one in results for delay in one.to_order_s)
    return [
        policy + (" (knows the future)" if policy in BOUNDS else ""),
        f"{found.knob:g}",
        f"{found.attainment:.1%}",
        f"{found.low:.1%} to {found.high:.1%}",
        f"{found.cost:.2f}",
        f"{sum(one.bill.replica_hours for one in results) / hours:.2f}",
        f"{max(one.ttft_s.p99 for one in results):.1f}",
        f"{1000 * max(one.tpot_s.p99 for one in results):.0f}",
        f"{sum(one.orders for one in results) / hours:.0f}",
        f"{sum(one.reversals for one in results) / hours:.0f}",
        f"{nearest_rank(delays, 0.5):.0f}" if delays else "none",
        f"{nearest_rank(delays, 0.99):.0f}" if delays else "none",
        f"{sum(one.bill.wasted_gpu_s for one in results) / len(results):,.0f}",
        str(sum(one.refused for one in results)),
        str(sum(one.lost for one in results)),
    ]


def dominators(lines: Mapping[str, Line]) -> list[str]:
    """Peers that met the targets more often than we did, and cost less."""
    ours = lines.get(OURS)
    if ours is None:
        return []
    return [policy for policy, line in lines.items() if policy not in BOUNDS and dominates(line.spot, ours.spot)]


def equal_attainment(load: str, ours: Line, lines: Mapping[str, Sequence[Line]]) -> Equal:
    """``lines``: of all policies at all their settings on the held half, which is kinder to peers than to us."""
    extra = {
        policy: extra_cost(ours.spot, [one.spot for one in each])
        for policy, each in lines.items()
        if policy != OURS and policy not in BOUNDS
    }
    return Equal(load, ours.spot.attainment, extra)


def equal_table(equals: Sequence[Equal]) -> Table:
    """Our cost against each peer's, by load."""
    peers = sorted({peer for one in equals for peer in one.extra})
    rows = []
    for one in equals:
        best = one.best
        cells = [_extra(one.extra[peer]) if peer in one.extra else "" for peer in peers]
        rows.append(
            [one.load, f"{one.attainment:.1%}", "none attains it" if best is None else f"{best[1]:+.1%}", *cells]
        )
    return Table("Our cost at our attainment, against", ["load", "in target", "the best peer", *peers], rows)


def _extra(value: float | None) -> str:
    return "never" if value is None else f"{value:+.1%}"


def verdict(equals: Sequence[Equal], dominated: Mapping[str, Sequence[str]]) -> list[str]:
    """Whether what we promise holds, in sentences; each failure is told."""
    said = []
    for load, peers in dominated.items():
        if peers:
            said.append(f"FAILS on {load}: {', '.join(peers)} met the targets more often than {OURS} and cost less.")
    if not said:
        said.append(f"No peer met the targets more often than {OURS} and cost less, on any load.")
    best = {one.load: one.best[1] for one in equals if one.best is not None}
    if len(best) < len(equals):
        said.append(f"On {len(equals) - len(best)} of {len(equals)} loads no peer attains as much at any setting.")
    if best:
        mean = sum(best.values()) / len(best)
        word = "holds" if mean <= -LESS_IN_THE_MEAN else "FAILS"
        said.append(f"15% less than the best peer at equal attainment, in the mean of the loads: {word} ({mean:+.1%}).")
        worse = {load: extra for load, extra in best.items() if extra > MORE_IN_A_CELL}
        told = ", ".join(f"{load} {extra:+.1%}" for load, extra in worse.items())
        said.append(f"At most 3% more on any load: {'FAILS: ' + told if worse else 'holds'}.")
    return said
