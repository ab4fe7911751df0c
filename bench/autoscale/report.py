# SPDX-License-Identifier: Apache-2.0
"""The lab's tables: cost and attainment of each load, who dominates whom, what equal attainment costs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from bench.autoscale.cell import GOAL, CellResult
from bench.autoscale.policies import BOUNDS, OURS, OWN, policy_named
from bench.reporting.pages import Table
from bench.reporting.results import Interval, mean_interval, nearest_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.autoscale.cell import Tuned

_DRAWS: Final = 1000


class Spot(msgspec.Struct, frozen=True):
    """One policy at one setting on one load, over all seeds. ``attainment``: 0 to 1. ``cost``: an hour, in the mean.
    ``low`` and ``high``: of the 95% interval of the attainment.
    """

    policy: str
    load: str
    knob: float
    attainment: float
    low: float
    high: float
    cost: float


def spot(results: Sequence[CellResult]) -> Spot:
    """``results``: of all seeds of a policy at one setting on one load."""
    cell = results[0].cell
    interval = attainment_interval(results)
    hours = sum(one.hours for one in results)
    cost = sum(one.bill.cost for one in results) / hours
    return Spot(cell.policy, cell.load, cell.knob, interval.value, interval.low, interval.high, cost)


def attainment_interval(results: Sequence[CellResult]) -> Interval:
    """By bootstrap over the windows of all seeds."""
    blocks = [[1.0] * one.met + [0.0] * (one.due - one.met) for result in results for one in result.windows if one.due]
    return mean_interval(blocks)


def dominates(one: Spot, other: Spot) -> bool:
    """Whether it meets the targets more often and costs less."""
    return one.attainment > other.attainment and one.cost < other.cost


def cost_at(frontier: Sequence[Spot], attainment: float) -> float | None:
    """What a policy costs at an attainment, between the settings of its knob that were run; None where they do not
    reach.

    Only settings that no cheaper one of the same policy surpasses count, and between two of them the straight line. An
    attainment below all of them costs what the cheapest costs.
    """
    best = unsurpassed(frontier)
    if not best or attainment > best[-1].attainment:
        return None
    if attainment <= best[0].attainment:
        return best[0].cost
    for low, high in itertools.pairwise(best):
        if attainment <= high.attainment:
            share = (attainment - low.attainment) / (high.attainment - low.attainment)
            return low.cost + share * (high.cost - low.cost)
    return None


def unsurpassed(spots: Sequence[Spot]) -> list[Spot]:
    """Those that attain more than every cheaper one, by cost."""
    best: list[Spot] = []
    for one in sorted(spots, key=lambda one: (one.cost, -one.attainment)):
        if not best or one.attainment > best[-1].attainment:
            best.append(one)
    return best


def extra_cost(ours: Spot, frontier: Sequence[Spot]) -> float | None:
    """Our cost over the other policy's at our attainment, minus 1: -0.15 is fifteen percent less. None where the other
    never attains as much.
    """
    other = cost_at(frontier, ours.attainment)
    return None if other is None else ours.cost / other - 1


def extra_interval(
    ours: Sequence[CellResult], frontier: Sequence[Sequence[CellResult]], *, seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of ``extra_cost``, by bootstrap over windows of the runs.

    ``frontier``: the other policy's results, by setting. Attainments are drawn anew, with the same windows for both
    policies as far as they have as many; costs stay, because a run has one. Where the other policy does not attain as
    much in a draw, its cost is without bound, and the extra is minus infinity.
    """
    mine = _drawn_attainment(ours, seed)
    theirs = [(spot(each), _drawn_attainment(each, seed)) for each in frontier]
    cost = spot(ours).cost
    found = []
    for draw in range(_DRAWS):
        spots = [msgspec.structs.replace(one, attainment=float(drawn[draw])) for one, drawn in theirs]
        other = cost_at(spots, float(mine[draw]))
        found.append(-math.inf if other is None else cost / other - 1)
    found.sort()
    return found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS) - 1]


def _drawn_attainment(results: Sequence[CellResult], seed: int) -> np.ndarray:
    windows = [one for result in sorted(results, key=lambda one: one.cell.seed) for one in result.windows]
    due, met = np.array([one.due for one in windows], float), np.array([one.met for one in windows], float)
    drawn = np.random.default_rng(seed).integers(0, len(windows), (_DRAWS, len(windows)))
    return np.asarray(met[drawn].sum(axis=1) / np.maximum(1.0, due[drawn].sum(axis=1)))


# What we promise: so much less than the best peer in the mean of the loads, and nowhere so much more.
LESS_IN_THE_MEAN: Final = 0.15
MORE_IN_A_CELL: Final = 0.03
_HEADINGS: Final = (
    "policy",
    "setting",
    "in target",
    "95%",
    "cost/h",
    "TTFT p99 s",
    "TPOT p99 ms",
    "orders/h",
    "turns/h",
    "to order s",
    "wasted GPU h",
)


class Line(msgspec.Struct, frozen=True):
    """A policy at one setting on one load, over its seeds. ``is_hindsight``: nothing was tuned, and this setting is the
    best on the very load.
    """

    spot: Spot
    results: Sequence[CellResult]
    is_hindsight: bool = False


class Equal(msgspec.Struct, frozen=True):
    """Our cost against a load's peers at our attainment. ``extra``: by peer, our cost over its, minus 1; None: it never
    attains as much. ``low`` and ``high``: the 95% interval of the extra over the best peer; minus infinity where that
    peer does not attain as much.
    """

    ours: Line
    extra: Mapping[str, float | None]
    low: float = 0.0
    high: float = 0.0

    @property
    def load(self) -> str:
        """Its name."""
        return self.ours.spot.load

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
    for (load, policy, _), each in sorted(grouped.items(), key=lambda one: one[0]):
        found[load][policy].append(Line(spot(each), each))
    return found


def chosen(lines: Mapping[str, Sequence[Line]], settings: Mapping[str, Tuned]) -> dict[str, Line]:
    """Of each policy the line at the setting that tuning gave it; without tuning the best one, in hindsight.

    A policy whose tuned setting was not run on the load is left out.
    """
    found = {}
    for policy, each in lines.items():
        if policy not in settings:
            found[policy] = _best(each)
        elif mine := [one for one in each if one.spot.knob == settings[policy].knob]:
            found[policy] = mine[0]
    return found


def _best(lines: Sequence[Line]) -> Line:
    good = [one for one in lines if one.spot.attainment >= GOAL]
    best = (
        min(good, key=lambda one: one.spot.cost)
        if good
        else max(lines, key=lambda one: (one.spot.attainment, -one.spot.cost))
    )
    return msgspec.structs.replace(best, is_hindsight=True)


def load_table(load: str, lines: Mapping[str, Line]) -> Table:
    """The most in target first."""
    ordered = sorted(lines.items(), key=lambda one: -one[1].spot.attainment)
    styles = ["bold" if policy == OURS else "" for policy, _ in ordered]
    return Table(f"Load {load}", _HEADINGS, [_cells(policy, line) for policy, line in ordered], row_styles=styles)


def _cells(policy: str, line: Line) -> list[str]:
    found, results = line.spot, line.results
    hours = sum(one.hours for one in results)
    delays = sorted(delay for one in results for delay in one.to_order_s)
    return [
        f"**{policy}**" if policy == OURS else policy,
        f"{found.knob:g}" + ("*" if line.is_hindsight else ""),
        f"{found.attainment:.1%}",
        f"{100 * found.low:.1f} to {100 * found.high:.1f}",
        f"{found.cost:.2f}",
        f"{max(one.ttft_s.p99 for one in results):.1f}",
        f"{1000 * max(one.tpot_s.p99 for one in results):.0f}",
        f"{sum(one.orders for one in results) / hours:.0f}",
        f"{sum(one.reversals for one in results) / hours:.0f}",
        f"{nearest_rank(delays, 0.5):.0f}, {nearest_rank(delays, 0.99):.0f}" if delays else "none",
        f"{sum(one.bill.wasted_gpu_s for one in results) / len(results) / 3600:.2f}",
    ]


def unanswered(lines: Mapping[str, Mapping[str, Sequence[Line]]]) -> list[str]:
    """Policies that refused or lost requests, in sentences."""
    said = []
    for load, policies in lines.items():
        for policy, each in policies.items():
            refused = sum(one.refused for line in each for one in line.results)
            lost = sum(one.lost for line in each for one in line.results)
            if refused or lost:
                said.append(f"{policy} on {load}: {refused} refused, {lost} lost, over all settings.")
    return said


def dominators(lines: Mapping[str, Line]) -> list[str]:
    """Peers that met the targets more often than we did, and cost less."""
    ours = lines.get(OURS)
    if ours is None:
        return []
    return [policy for policy, line in lines.items() if _is_peer(policy) and dominates(line.spot, ours.spot)]


def _is_peer(policy: str) -> bool:
    return policy not in BOUNDS and policy not in OWN


def equal_attainment(ours: Line, lines: Mapping[str, Sequence[Line]]) -> Equal:
    """``lines``: of all policies at all their settings on the held half, which is kinder to peers than to us."""
    peers = {policy: each for policy, each in lines.items() if _is_peer(policy)}
    extra = {policy: extra_cost(ours.spot, [one.spot for one in each]) for policy, each in peers.items()}
    found = Equal(ours, extra)
    if found.best is None:
        return found
    low, high = extra_interval(ours.results, [one.results for one in peers[found.best[0]]])
    return msgspec.structs.replace(found, low=low, high=high)


def summary_table(equals: Sequence[Equal], dominated: Mapping[str, Sequence[str]]) -> Table:
    """A row for each load."""
    rows = []
    for one in equals:
        best = ["none attains it", "", ""]
        if one.best is not None:
            best = [one.best[0], f"{one.best[1]:+.1%}", f"{_bound(one.low)} to {_bound(one.high)}"]
        spotted = one.ours.spot
        over = ", ".join(dominated.get(one.load, ())) or "nobody"
        rows.append([one.load, f"{spotted.attainment:.1%}", f"{spotted.cost:.2f}", *best, over])
    headings = ["load", "in target", "cost/h", "best peer at that", "our cost against it", "95%", "dominated by"]
    return Table("Summary", headings, rows)


def _bound(value: float) -> str:
    return "out of its reach" if value == -math.inf else f"{value:+.0%}"


def equal_table(equals: Sequence[Equal]) -> Table:
    """Our cost against each peer's: a row a peer, a column a load."""
    peers = sorted({peer for one in equals for peer in one.extra})
    rows = [[peer, *(_extra(one.extra[peer]) if peer in one.extra else "" for one in equals)] for peer in peers]
    return Table("Our cost at our attainment, against each peer", ["peer", *(one.load for one in equals)], rows)


def _extra(value: float | None) -> str:
    return "never" if value is None else f"{value:+.0%}"


def tuning_table(settings: Mapping[str, Tuned]) -> Table:
    """What each policy was set to."""
    rows = [
        (
            one.policy,
            policy_named(one.policy).knob,
            f"{one.knob:g}",
            str(one.trials),
            f"{one.attainment:.1%}",
            f"{one.cost:.2f}",
        )
        for one in settings.values()
    ]
    return Table("Tuning", ["policy", "what is set", "to", "of settings", "in target", "cost/h"], rows)


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
