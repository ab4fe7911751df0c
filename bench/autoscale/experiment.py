# SPDX-License-Identifier: Apache-2.0
"""Which cells to run: all settings on the tuning halves, from which each policy gets its own, and all on the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.cell import Cell
from bench.autoscale.loads import Half, load_named
from bench.autoscale.policies import policies_for, policy_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.autoscale.cell import CellResult

# Operators ask for so much; of the settings that attain it in tuning, the cheapest is taken.
GOAL: Final = 0.95


class Plan(msgspec.Struct, frozen=True):
    """What to compare. ``period_s``: between two decisions, of every policy; 0: each has its own. ``seeds``: of the
    held halves; tuning takes half as many, rounded up. ``start_s`` and ``duration_s``: as in Cell.
    """

    loads: Sequence[str]
    policies: Sequence[str]
    seeds: int = 2
    period_s: float = 5.0
    start_s: float = 0.0
    duration_s: float = 0.0

    def cells(self, half: Half) -> list[Cell]:
        """Every policy at every setting on every load."""
        seeds = self.seeds if half is Half.HELD else -(-self.seeds // 2)
        return [
            Cell(load, half, policy, knob, seed, self.period_s, self.start_s, self.duration_s)
            for seed in range(seeds)
            for load in self.loads
            for policy in policies_for(self.policies, len(load_named(load).variants))
            for knob in policy_named(policy).grid
        ]


class Tuned(msgspec.Struct, frozen=True):
    """What tuning has found for a policy: ``knob``, of ``trials`` settings. ``attainment`` and ``cost``: its means over
    the tuning halves of all loads; the cost is of an hour.
    """

    policy: str
    knob: float
    attainment: float
    cost: float
    trials: int


def tuned(results: Iterable[CellResult], goal: float = GOAL) -> dict[str, Tuned]:
    """For each policy the cheapest setting that attains the goal in the mean of the loads; if none does, the one that
    attains most. Settings that were run on fewer loads or seeds than others of the policy are left out.
    """
    by_setting: Mapping[str, dict[float, list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        by_setting[one.cell.policy][one.cell.knob].append(one)
    found = {}
    for policy, settings in by_setting.items():
        most = max(len(each) for each in settings.values())
        whole = {knob: each for knob, each in settings.items() if len(each) == most}
        means = [_mean(policy, knob, each, len(whole)) for knob, each in whole.items()]
        good = [one for one in means if one.attainment >= goal]
        found[policy] = (
            min(good, key=lambda one: one.cost) if good else max(means, key=lambda one: (one.attainment, -one.cost))
        )
    return found


def _mean(policy: str, knob: float, results: Sequence[CellResult], trials: int) -> Tuned:
    count = len(results)
    attainment = sum(one.attainment for one in results) / count
    return Tuned(policy, knob, attainment, sum(one.bill.cost / one.hours for one in results) / count, trials)
