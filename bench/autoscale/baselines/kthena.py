# SPDX-License-Identifier: Apache-2.0
"""Kthena's autoscaler: HPA's ratio, a stable policy of one replica or doubling in 15 s, and panic.

Source: volcano-sh/kthena, ``pkg/autoscaler/algorithm/{recommendation,revision}.go``, ``autoscaler/{scaler,status}.go``,
``datastructure/sliding_window.go``. Every 15 s. In panic (at least twice the current replicas are recommended, and 60 s
after that) replicas grow up to elevenfold in a period and never shrink. As in its code, the limit of scaling in counts
from the *smallest* corrected number of the period, although its name says the largest.

Several kinds of engine (``heterogeneousTarget``, ``autoscaler/optimizer.go``) count as one fleet: replicas of all kinds
are counted alike, whatever each of them carries. The resulting number is filled in from the lower bounds in batches
that grow by ``cost_expansion_rate_percent``, the cheapest batch first. That order is our allocation mode Expansion,
which is used here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from bench.autoscale.baselines.baseline import (
    clamp_to_bounds,
    current_replicas,
    merge_targets,
    ready_reports,
    waiting_per_engine,
)
from controller.autoscaler.decision.allocation.variants import expansion_sequence, variant_from_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.autoscaler.decision.situation import Situation


class RecommendationSample(msgspec.Struct, frozen=True):
    """``recommended``: by the metric. ``corrected``: after all rules."""

    at_s: float
    recommended: int
    corrected: int


class KthenaState(msgspec.Struct, frozen=True):
    """``samples``: of the longest window, by time. ``panic_until_s``: None before any panic."""

    samples: tuple[RecommendationSample, ...] = ()
    panic_until_s: float | None = None


class Kthena(msgspec.Struct, frozen=True):
    """``target``: requests in flight of one replica. The other fields have Kthena's names and defaults, in seconds and
    per cent; ``up_window_s`` and ``down_window_s`` are its stabilisation windows.
    """

    target: float
    tolerance_percent: float = 10
    instances: int = 1
    percent: int = 100
    stable_s: float = 15.0
    up_window_s: float = 0.0
    down_window_s: float = 0.0
    panic_percent: int = 1000
    panic_period_s: float = 15.0
    panic_threshold_percent: int = 200
    panic_hold_s: float = 60.0
    cost_expansion_rate_percent: int = 200
    period_s: float = 15.0

    def desired_replicas(self, situation: Situation, memory: KthenaState | None) -> tuple[int, KthenaState | None]:
        """The metric's recommendation, corrected."""
        before, current, now_s = memory or KthenaState(), current_replicas(situation), situation.now_s
        recommended = self.recommended(situation)
        if recommended is None:
            return current, before
        until_s = before.panic_until_s
        if recommended * 100 >= current * self.panic_threshold_percent:
            until_s = now_s + self.panic_hold_s
        is_panic = until_s is not None and now_s <= until_s
        corrected = (
            self._in_panic(recommended, current, before.samples, now_s)
            if is_panic
            else self._stable(recommended, current, before.samples, now_s)
        )
        corrected = clamp_to_bounds(corrected, situation)
        longest = 2 * max(self.stable_s, self.panic_period_s, self.up_window_s, self.down_window_s)
        kept = tuple(one for one in before.samples if one.at_s >= now_s - longest)
        return corrected, KthenaState((*kept, RecommendationSample(now_s, recommended, corrected)), until_s)

    def desired_replicas_by_kind(
        self, situation: Situation, memory: KthenaState | None
    ) -> tuple[Mapping[str, int], KthenaState | None]:
        """The number for all kinds together, filled in batch by batch."""
        total, after = self.desired_replicas(merge_targets(situation), memory)
        variants = [variant_from_target(one) for one in situation.targets]
        least = {one.name: one.least for one in variants}
        order = expansion_sequence(variants, self.cost_expansion_rate_percent)
        more = Counter(order[: max(0, total - sum(least.values()))])
        return {name: count + more[name] for name, count in least.items()}, after

    def recommended(self, situation: Situation) -> int | None:
        """By the metric; None if no engine has a value."""
        current, reports = current_replicas(situation), ready_reports(situation)
        inside = clamp_to_bounds(current, situation)
        if inside != current:
            return inside
        held = waiting_per_engine(situation)
        values = [one.in_flight + held for one in reports if one is not None]
        found = recommended_instances(
            values,
            self.target,
            current=current,
            unready=max(current - len(reports), 0),
            missing=len(reports) - len(values),
            tolerance=self.tolerance_percent / 100,
        )
        return None if found is None else clamp_to_bounds(found, situation)

    def _in_panic(self, recommended: int, current: int, samples: Sequence[RecommendationSample], now_s: float) -> int:
        past = smallest_corrected_replicas(samples, current, self.panic_period_s, now_s)
        if past > 0:
            recommended = min(recommended, past + int(past * self.panic_percent / 100))
        return max(recommended, current)

    def _stable(self, recommended: int, current: int, samples: Sequence[RecommendationSample], now_s: float) -> int:
        past = smallest_corrected_replicas(samples, current, self.stable_s, now_s)
        if recommended < current:
            window = [
                one.recommended for one in samples if self.down_window_s and one.at_s + self.down_window_s >= now_s
            ]
            floor = min(past - self.instances, past - past * self.percent // 100)
            return min(max([recommended, floor, *window]), current)
        if recommended > current:
            window = [one.recommended for one in samples if self.up_window_s and one.at_s + self.up_window_s >= now_s]
            ceiling = max(past + self.instances, past + past * self.percent // 100)
            return max(min([recommended, ceiling, *window]), current)
        return recommended


def recommended_instances(
    values: Sequence[float], target: float, *, current: int, unready: int, missing: int, tolerance: float
) -> int | None:
    """The ratio rule. Unlike HPA's, a ratio of exactly 1 counts as growing."""
    if not values:
        return None
    total, count = float(sum(values)), len(values)
    ratio = total / count / target
    with_unready = unready > 0 and ratio >= 1
    if not with_unready and not missing:
        return current if abs(ratio - 1) <= tolerance else math.ceil(ratio * count)
    count += missing
    if ratio < 1:
        total += missing * target
    if with_unready:
        count += unready
    corrected = total / count / target
    if abs(corrected - 1) <= tolerance or (ratio >= 1) != (corrected >= 1):
        return current
    asked = math.ceil(corrected * count)
    turned = (corrected < 1 and asked > current) or (corrected >= 1 and asked < current)
    return current if turned else asked


def smallest_corrected_replicas(
    samples: Sequence[RecommendationSample], current: int, period_s: float, now_s: float
) -> int:
    """The smallest of ``current`` and the corrected numbers that were valid within the period.

    A number is valid until the next one; the last one for two periods.
    """
    found = [current]
    for one, following in itertools.pairwise(samples):
        if following.at_s - one.at_s <= 2 * period_s and following.at_s + period_s >= now_s:
            found.append(one.corrected)
    if samples and samples[-1].at_s + 2 * period_s >= now_s:
        found.append(samples[-1].corrected)
    return min(found)
