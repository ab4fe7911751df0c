# SPDX-License-Identifier: Apache-2.0
"""Policies by cost and attainment over their knobs: who dominates whom, and what equal attainment costs."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from bench.reporting.intervals import Interval, mean_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.autoscale.cell import CellResult


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
