# SPDX-License-Identifier: Apache-2.0
"""Which kinds of engine carry so much work at the least cost, by trying all mixes of them.

A load has two kinds, each with at most 16 replicas, so there are few mixes. The live autoscaler's allocation is another
program (``controller.autoscaler.decision.allocation``): what judges it does not use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bench.autoscale.capacity import capacity
from bench.autoscale.variants import Variant

if TYPE_CHECKING:
    from bench.autoscale.loads import Load

# Rounding of sums of capacities.
_NOTHING = 1e-9


def worths(load: Load) -> dict[str, float]:
    """What one replica of each variant carries, in replicas of the first."""
    rates = [capacity(one.kind(), load.mean, load.objective.tpot_s).requests_per_s for one in load.variants]
    return {one.name: rate / rates[0] for one, rate in zip(load.variants, rates, strict=True)}


class Mixes(msgspec.Struct, frozen=True):
    """All mixes within the variants' bounds. ``counts``: replicas of each variant, a row a mix. ``units``: what a mix
    carries, in replicas of the first variant. ``costs``: of an hour.
    """

    variants: Sequence[Variant]
    counts: np.ndarray
    units: np.ndarray
    costs: np.ndarray

    def carrying(self, units: float) -> np.ndarray:
        """Whether each mix carries so much; if none does, those that carry most."""
        return self.units >= min(units, float(self.units.max())) - _NOTHING

    def named(self, row: int) -> dict[str, int]:
        """A mix as an order."""
        return {one.name: int(count) for one, count in zip(self.variants, self.counts[row], strict=True)}

    def cheapest(self, units: float) -> dict[str, int]:
        """The mix with the least cost that carries so much; of equals the one with the fewest replicas."""
        rows = np.flatnonzero(self.carrying(units))
        return self.named(int(min(rows, key=lambda row: (self.costs[row], self.counts[row].sum()))))


def mixes_of(load: Load, min_replicas: int) -> Mixes:
    """``min_replicas``: of the first variant."""
    variants, worth = load.variants, worths(load)
    bounds = [range(0 if number else min_replicas, one.max_replicas + 1) for number, one in enumerate(variants)]
    counts = np.array(list(itertools.product(*bounds)))
    return Mixes(
        variants,
        counts,
        counts @ np.array([worth[one.name] for one in variants]),
        counts @ np.array([one.cost for one in variants]),
    )


def cheapest_plan(
    mixes: Mixes, needs: Sequence[float], leads_s: Mapping[str, float], initial: Mapping[str, int]
) -> list[dict[str, int]]:
    """For each second the mix that serves, so that all seconds together cost least and every need is carried.

    A replica costs from its order on, so each start costs its lead time as well. Exact, by dynamic programming from the
    last second to the first. ``initial``: what serves before the first second.
    """
    prices = np.array([one.cost for one in mixes.variants])
    leads = np.array([leads_s[one.name] for one in mixes.variants])
    added = np.maximum(0, mixes.counts[None, :, :] - mixes.counts[:, None, :])
    starts = added @ (prices * leads)
    later = np.zeros(len(mixes.counts))
    choices = []
    for units in reversed(needs):
        value = np.where(mixes.carrying(units), mixes.costs + later, np.inf)
        totals = starts + value[None, :]
        choices.append(totals.argmin(axis=1))
        later = totals.min(axis=1)
    row = int(np.flatnonzero((mixes.counts == [initial.get(one.name, 0) for one in mixes.variants]).all(axis=1))[0])
    plan = []
    for choice in reversed(choices):
        row = int(choice[row])
        plan.append(mixes.named(row))
    return plan
