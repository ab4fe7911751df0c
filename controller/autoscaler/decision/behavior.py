# SPDX-License-Identifier: Apache-2.0
"""How fast and within which bounds replicas change: HPA's behaviour block, panic, schedules.

The behaviour block is that of HorizontalPodAutoscaler v2, exactly.

Source: kubernetes, ``pkg/controller/podautoscaler/horizontal.go``, ``normalizeDesiredReplicasWithBehaviors`` (1.36).
First the recommendation is stabilised: between the smallest one of the window of ``scaleUp`` and the largest one of
that of ``scaleDown``, what is nearest to the current replicas. Then it is limited: each policy allows a change in its
period, counted from what there was when the period began; ``selectPolicy`` takes the policy with the most or the least
change.

Where nothing is written, the defaults are those of Kubernetes:

| | scaleUp | scaleDown |
|---|---|---|
| ``stabilizationWindowSeconds`` | 0 | 300 |
| ``policies`` | 4 pods or 100 % in 15 s, whichever is more | 100 % in 15 s |
| ``tolerance`` | 0.1 | 0.1 |

One difference: HPA may drop a change after the longest period of the policies of its own direction, although those of
the other direction count it, too. Here it is kept for the longest period of all policies.

The history has the recommendations of the strategies, never their stabilised values: otherwise an old peak would be
prolonged for ever. Bounds of a target come after this. Where several targets differ in capacity, replicas are
fractions: nothing is rounded then (``whole=False``), and "Pods" are replicas of the first target.

Panic: while a steep rise lasts, and some time after it, replicas only grow.

Source: knative/serving, ``pkg/autoscaler/scaling/autoscaler.go``. A panic begins when the recommended replicas reach
``threshold`` times the ready ones, and ends ``hold_s`` after that was last so. While it lasts, no answer is below the
largest one of this panic.

Schedules are bounds by time: windows that begin at a cron line's times and hold for a duration. Cron lines are read in
their own time zone. Where clocks change, they do what Debian's cron does: a time that does not exist is taken at once
after the change, and a time that exists twice counts once. A duration is elapsed time, independent of changes of the
clock.

Where windows overlap, the largest minimum and the smallest maximum hold. Where these contradict each other, the maximum
does, because it limits cost.
"""

from __future__ import annotations

import math
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Final

import msgspec
from cronsim import CronSim, CronSimError

from controller.api.autoscaling import ScalingRule
from controller.autoscaler.decision.decision import AppliedRule
from extproc.api.calendar_windows import parse_time_zone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.api.autoscaling import Behavior, Panic, ScalingRules, Schedule

DEFAULT_TOLERANCE: Final = 0.1
_UP_WINDOW_S: Final = 0
_DOWN_WINDOW_S: Final = 300
_UP_POLICIES: Final = (ScalingRule("Pods", 4, 15), ScalingRule("Percent", 100, 15))
_DOWN_POLICIES: Final = (ScalingRule("Percent", 100, 15),)


class PastRecommendation(msgspec.Struct, frozen=True):
    """The strategies' combined recommendation at an instant, before any correction."""

    at_s: float
    replicas: float


class ReplicaChange(msgspec.Struct, frozen=True):
    """A change that was made. ``change``: replicas more; negative: fewer."""

    at_s: float
    change: float


class ScalingHistory(msgspec.Struct, frozen=True):
    """``recommendations`` and ``changes``: by time, for the longest window of the behaviour."""

    recommendations: tuple[PastRecommendation, ...] = ()
    changes: tuple[ReplicaChange, ...] = ()


def hpa_tolerance(rules: ScalingRules) -> float:
    """The tolerance of one direction."""
    return rules.tolerance if rules.tolerance is not None else DEFAULT_TOLERANCE


def apply_behavior(
    behavior: Behavior, past: ScalingHistory, *, recommended: float, current: float, now_s: float, whole: bool = True
) -> tuple[float, tuple[AppliedRule, ...]]:
    """The recommendation as the behaviour allows it, and what changed it. ``past``: without this recommendation."""
    stable = stabilize(behavior, past.recommendations, recommended=recommended, current=current, now_s=now_s)
    limited = limit_by_policies(behavior, past.changes, desired=stable, current=current, now_s=now_s, whole=whole)
    steps = []
    if stable != recommended:
        steps.append(AppliedRule("Stabilized", recommended, stable, _why_stabilized(behavior, recommended, current)))
    if limited != stable:
        way = "scaleUp" if stable > current else "scaleDown"
        steps.append(AppliedRule("Limited", stable, limited, f"the policies of {way} allow no faster change"))
    return limited, tuple(steps)


def stabilize(
    behavior: Behavior, history: Sequence[PastRecommendation], *, recommended: float, current: float, now_s: float
) -> float:
    """The value nearest to ``current`` between the windows' smallest (up) and largest (down) recommendation."""
    up_s, down_s = _window_s(behavior.scale_up, _UP_WINDOW_S), _window_s(behavior.scale_down, _DOWN_WINDOW_S)
    up = min([recommended, *(one.replicas for one in history if one.at_s > now_s - up_s)])
    down = max([recommended, *(one.replicas for one in history if one.at_s > now_s - down_s)])
    return min(max(current, up), down)


def limit_by_policies(
    behavior: Behavior,
    changes: Sequence[ReplicaChange],
    *,
    desired: float,
    current: float,
    now_s: float,
    whole: bool = True,
) -> float:
    """``desired``, or as far towards it as the policies allow now."""
    if desired > current:
        return min(desired, max(current, _most(behavior.scale_up, changes, current, now_s, whole=whole)))
    if desired < current:
        return max(desired, min(current, _least(behavior.scale_down, changes, current, now_s, whole=whole)))
    return desired


def add_recommendation(behavior: Behavior, past: ScalingHistory, new: PastRecommendation) -> ScalingHistory:
    """``past`` with a recommendation, without what no window or period can need any more.

    A recommendation is dropped as well if a later one is at least as large and a later one at least as small: it can be
    neither the largest nor the smallest of any window. So a steady load leaves a handful, however long the windows are.
    """
    windows = _window_s(behavior.scale_up, _UP_WINDOW_S), _window_s(behavior.scale_down, _DOWN_WINDOW_S)
    kept, smallest, largest = [new], new.replicas, new.replicas
    for one in reversed(past.recommendations):
        if one.at_s <= new.at_s - max(windows):
            break
        if one.replicas < smallest or one.replicas > largest:
            kept.append(one)
        smallest, largest = min(smallest, one.replicas), max(largest, one.replicas)
    periods = [rule.period_seconds for rule in (*_up_policies(behavior), *_down_policies(behavior))]
    changes = tuple(one for one in past.changes if one.at_s > new.at_s - max(periods))
    return ScalingHistory(tuple(reversed(kept)), changes)


def _most(rules: ScalingRules, changes: Sequence[ReplicaChange], current: float, now_s: float, *, whole: bool) -> float:
    if rules.select_policy == "Disabled":
        return current
    limits = []
    for rule in rules.policies or _UP_POLICIES:
        began = _when_period_began(rule, changes, current, now_s)
        if rule.type == "Pods":
            limits.append(began + rule.value)
        else:
            # rounded up, or a small number would never grow by a few per cent
            grown = began * (1 + rule.value / 100)
            limits.append(float(math.ceil(grown)) if whole else grown)
    return min(limits) if rules.select_policy == "Min" else max(limits)


def _least(
    rules: ScalingRules, changes: Sequence[ReplicaChange], current: float, now_s: float, *, whole: bool
) -> float:
    if rules.select_policy == "Disabled":
        return current
    limits = []
    for rule in rules.policies or _DOWN_POLICIES:
        began = _when_period_began(rule, changes, current, now_s)
        if rule.type == "Pods":
            limits.append(began - rule.value)
        else:
            shrunk = began * (1 - rule.value / 100)
            limits.append(float(math.trunc(shrunk)) if whole else shrunk)
    return max(limits) if rules.select_policy == "Min" else min(limits)


def _when_period_began(rule: ScalingRule, changes: Sequence[ReplicaChange], current: float, now_s: float) -> float:
    return current - sum(one.change for one in changes if one.at_s > now_s - rule.period_seconds)


def _window_s(rules: ScalingRules, default_s: int) -> int:
    given = rules.stabilization_window_seconds
    return default_s if given is None else given


def _up_policies(behavior: Behavior) -> tuple[ScalingRule, ...]:
    return behavior.scale_up.policies or _UP_POLICIES


def _down_policies(behavior: Behavior) -> tuple[ScalingRule, ...]:
    return behavior.scale_down.policies or _DOWN_POLICIES


def _why_stabilized(behavior: Behavior, recommended: float, current: float) -> str:
    if recommended >= current:
        window_s = _window_s(behavior.scale_up, _UP_WINDOW_S)
        return f"so few were enough within the last {window_s} s (scaleUp.stabilizationWindowSeconds)"
    window_s = _window_s(behavior.scale_down, _DOWN_WINDOW_S)
    return f"so many were needed within the last {window_s} s (scaleDown.stabilizationWindowSeconds)"


class PanicState(msgspec.Struct, frozen=True):
    """``last_at_s``: when the threshold was last reached. ``most``: the largest answer so far, in replicas."""

    last_at_s: float
    most: float


def next_panic_state(
    state: PanicState | None, *, asked: float, ready: float, threshold: float, hold_s: float, now_s: float
) -> PanicState | None:
    """The panic state after a recommendation: begun, prolonged, ended or unchanged; None: no panic.

    ``asked`` and ``ready``: recommended and ready replicas; none ready counts as one.
    """
    if asked / max(ready, 1.0) >= threshold:
        return PanicState(now_s, state.most if state is not None else 0.0)
    if state is not None and state.last_at_s + hold_s < now_s:
        return None
    return state


def add_panic_recommendation(state: PanicState, desired: float) -> PanicState:
    """The state with an answer counted in; ``most`` of it is the answer to give."""
    return PanicState(state.last_at_s, max(state.most, desired))


def update_panic(
    panic: Panic, state: PanicState | None, *, recommended: float, ready: float, now_s: float
) -> PanicState | None:
    """For strategies without windows of their own: the state after a combined recommendation; None: no panic.

    While it is not None, ``most`` of it is the answer, and limits of scaling out do not apply.
    """
    state = next_panic_state(
        state,
        asked=recommended,
        ready=ready,
        threshold=panic.threshold_percent / 100,
        hold_s=float(panic.hold),
        now_s=now_s,
    )
    return None if state is None else add_panic_recommendation(state, recommended)


class ReplicaBounds(msgspec.Struct, frozen=True):
    """``least`` and ``most``: replicas; None: no bound. ``until_s``: they hold until then."""

    least: int | None = None
    most: int | None = None
    until_s: float = math.inf


def scheduled_bounds(schedules: Sequence[Schedule], now_s: float) -> ReplicaBounds:
    """``now_s``: since 1970. A schedule that cannot be read bounds nothing."""
    least: list[int] = []
    most: list[int] = []
    until_s = math.inf
    for schedule in schedules:
        try:
            began_s, next_s = _neighbours(schedule.start, parse_time_zone(schedule.time_zone), now_s)
        except (CronSimError, ValueError):
            continue
        until_s = min(until_s, next_s)
        ends_s = began_s + schedule.duration
        if now_s < ends_s:
            until_s = min(until_s, ends_s)
            least += [schedule.min_replicas] if schedule.min_replicas is not None else []
            most += [schedule.max_replicas] if schedule.max_replicas is not None else []
    highest = min(most) if most else None
    lowest = max(least) if least else None
    if lowest is not None and highest is not None:
        lowest = min(lowest, highest)
    return ReplicaBounds(lowest, highest, until_s)


def _neighbours(line: str, zone: tzinfo, now_s: float) -> tuple[float, float]:
    """The last time that is not later than ``now_s``, and the next one; infinite where there is none."""
    now = datetime.fromtimestamp(now_s, zone)
    # backwards, a fraction of a second makes the present second count
    past = _first(line, now.replace(microsecond=1), -math.inf, reverse=True)
    return past, _first(line, now, math.inf, reverse=False)


def _first(line: str, now: datetime, otherwise: float, *, reverse: bool) -> float:
    times = CronSim(line, now, reverse=reverse)
    found = next(times, None)
    return found.timestamp() if found is not None else otherwise
