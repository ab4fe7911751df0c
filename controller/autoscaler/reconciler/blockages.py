# SPDX-License-Identifier: Apache-2.0
"""What is remembered of targets whose new replicas found no node or did not start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.allocation.blocked import Blockage, judge
from controller.autoscaler.decision.situation import EngineState

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Target


_STUCK: Final = (EngineState.UNSCHEDULABLE, EngineState.FAILING)


class Blockages:
    """Of all bindings. A restart forgets them: what is stuck still is after the usual time."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Blockage] = {}

    def of(self, key: str, target: Target, now_s: float) -> str:
        """Why no more replicas of a target of the binding ``key`` can be had; empty if they can."""
        place = (key, target.name)
        if place not in self._known and not any(one.state in _STUCK for one in target.engines):
            return ""
        before = self._known.get(place, Blockage())
        after = judge(target, before, now_s)
        if after != before:
            self._known[place] = after
        return after.at(now_s)

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._known = {place: known for place, known in self._known.items() if place[0] != key}
