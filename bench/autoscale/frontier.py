# SPDX-License-Identifier: Apache-2.0
"""Policies by cost and attainment over their knobs: who dominates whom, and what equal attainment costs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from bench.lab.intervals import Interval, mean_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.autoscale.cell import CellResult


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
    """What a policy costs at an attainment, between the settings of its knob that were run; None where they do not reach.

    Only settings that no cheaper one of the same policy surpasses count, and between two of them the straight line. An
    attainment below all of them costs what the cheapest costs.
    """
    best: list[Spot] = []
    for one in sorted(frontier, key=lambda one: (one.cost, -one.attainment)):
        if not best or one.attainment > best[-1].attainment:
            best.append(one)
    if not best or attainment > best[-1].attainment:
        return None
    if attainment <= best[0].attainment:
        return best[0].cost
    for low, high in itertools.pairwise(best):
        if attainment <= high.attainment:
            share = (attainment - low.attainment) / (high.attainment - low.attainment)
            return low.cost + share * (high.cost - low.cost)
    return None


def extra_cost(ours: Spot, frontier: Sequence[Spot]) -> float | None:
    """Our cost over the other policy's at our attainment, minus 1: -0.15 is fifteen percent less. None where the other
    never attains as much.
    """
    other = cost_at(frontier, ours.attainment)
    return None if other is None else ours.cost / other - 1
