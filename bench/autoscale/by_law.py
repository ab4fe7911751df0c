# SPDX-License-Identifier: Apache-2.0
"""A peer that is one law and a behaviour block, in a loop of its own: no other law beside it, and none of our rules.

Peers know nothing of kinds of engine: they scale the first target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from controller.autoscale.behavior import Past, Recommended, Scaled, behaved, remembered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.autoscale.scaler import Setup
    from controller.autoscale.law import Law
    from controller.autoscale.situation import Situation
    from controller.resources.autoscaling import Behavior


class ByLaw:
    """``behavior``: None where the program has nothing of the kind. What the law does not know changes nothing."""

    def __init__(self, setup: Setup, law: Law[Any], behavior: Behavior | None) -> None:
        self._law = law
        self._behavior = behavior
        self._least = setup.min_replicas
        self._memory: Any = None
        self._past = Past()
        self._seen: float | None = None

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """The law's answer within the behaviour block and the bounds."""
        first = situation.targets[0]
        current = float(first.current or 0)
        if self._seen is not None and current != self._seen:
            made = Scaled(situation.now_s, current - self._seen)
            self._past = Past(self._past.recommendations, (*self._past.changes, made))
        self._seen = current
        found, self._memory = self._law.recommend(situation, self._memory)
        if found.replicas is None:
            return {}
        asked = float(math.ceil(found.replicas))
        desired = asked if self._behavior is None else self._behaved(self._behavior, asked, current, situation.now_s)
        desired = min(float(first.spec.max_replicas), max(float(self._least), desired))
        return {first.name: int(desired)}

    def _behaved(self, behavior: Behavior, asked: float, current: float, now_s: float) -> float:
        desired, _ = behaved(behavior, self._past, recommended=asked, current=current, now_s=now_s)
        self._past = remembered(behavior, self._past, Recommended(now_s, asked))
        return desired
