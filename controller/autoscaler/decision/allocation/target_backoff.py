# SPDX-License-Identifier: Apache-2.0
"""Which targets are left out for a while because their new replicas find no node, or do not start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.situation import EngineState

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Engine, TargetSituation


_STUCK: Final = (EngineState.UNSCHEDULABLE, EngineState.FAILING)


class BackoffSettings(msgspec.Struct, frozen=True):
    """``patience_s``: in which replicas should find a node or start; longer, if the target's usual start takes longer.
    ``first_s``: for how long a target is left out the first time; each further time ``factor`` as long, up to
    ``longest_s``.
    """

    patience_s: float = 120.0
    first_s: float = 300.0
    factor: float = 2.0
    longest_s: float = 3600.0


class TargetBackoff(msgspec.Struct, frozen=True):
    """The back-off of a target. ``times``: consecutive back-offs. ``since_s`` and ``until_s``: of the last one.
    ``reason``: of the last one, as text.
    """

    times: int = 0
    since_s: float = 0.0
    until_s: float = 0.0
    reason: str = ""

    def reason_at(self, now_s: float) -> str:
        """Why the target is left out now; empty if it is not."""
        return self.reason if now_s < self.until_s else ""


def update_backoff(
    target: TargetSituation, before: TargetBackoff, now_s: float, rules: BackoffSettings | None = None
) -> TargetBackoff:
    """The new back-off state of ``target``.

    A back-off ends when its time is over; the target is then used again. The count restarts once a replica has become
    ready since, or after a time without failures as long as the longest back-off.
    """
    if now_s < before.until_s:
        return before
    if not before.times and all(one.state not in _STUCK for one in target.engines):
        # as nearly always
        return before
    rules = rules or BackoffSettings()
    stuck = [one for one in target.engines if _is_stuck(one, target, before, now_s, rules)]
    is_forgiven = any(
        one.state is EngineState.READY and one.ready_at_s is not None and one.ready_at_s > before.since_s
        for one in target.engines
    )
    if not stuck:
        is_long_ago = now_s - before.until_s > rules.longest_s
        return TargetBackoff() if before.times and (is_forgiven or is_long_ago) else before
    times = 1 if is_forgiven else before.times + 1
    length_s = min(rules.longest_s, rules.first_s * rules.factor ** min(times - 1, 64))
    return TargetBackoff(times, now_s, now_s + length_s, _reason(stuck, now_s))


def _is_stuck(
    one: Engine, target: TargetSituation, before: TargetBackoff, now_s: float, rules: BackoffSettings
) -> bool:
    if one.state not in _STUCK:
        return False
    # what was stuck before gets the same time again as a new one
    begun_s = max(one.created_at_s, before.until_s)
    return now_s - begun_s > max(rules.patience_s, target.start_s)


def _reason(stuck: list[Engine], now_s: float) -> str:
    oldest_s = now_s - min(one.created_at_s for one in stuck)
    unschedulable = sum(one.state is EngineState.UNSCHEDULABLE for one in stuck)
    parts = []
    if unschedulable:
        parts.append(f"{unschedulable} replicas find no node")
    if len(stuck) > unschedulable:
        parts.append(f"{len(stuck) - unschedulable} replicas do not start")
    return f"{' and '.join(parts)}, the oldest for {oldest_s:.0f} s"
