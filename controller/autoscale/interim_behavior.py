# SPDX-License-Identifier: Apache-2.0
"""Stabilisation windows of a behaviour block; to be replaced by the whole of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.autoscale.decision import Step

if TYPE_CHECKING:
    from controller.resources.autoscaling import Behavior


class Recommended(msgspec.Struct, frozen=True):
    """What the laws together asked for at an instant, before anything corrected it."""

    at_s: float
    replicas: float


class Scaled(msgspec.Struct, frozen=True):
    """A change that was made. ``change``: replicas more; negative: fewer."""

    at_s: float
    change: float


class Past(msgspec.Struct, frozen=True):
    """``recommendations`` and ``changes``: by time, as far back as the behaviour looks."""

    recommendations: tuple[Recommended, ...] = ()
    changes: tuple[Scaled, ...] = ()


def behaved(
    behavior: Behavior, past: Past, *, recommended: float, current: float, now_s: float, whole: bool = True
) -> tuple[float, tuple[Step, ...]]:
    """The recommendation as the behaviour allows it, and what changed it. ``past``: without this recommendation."""
    del whole
    up_s, down_s = behavior.scale_up.stabilization_window_seconds, behavior.scale_down.stabilization_window_seconds
    up = min([recommended, *(one.replicas for one in past.recommendations if one.at_s > now_s - (up_s or 0))])
    down = max([recommended, *(one.replicas for one in past.recommendations if one.at_s > now_s - (down_s or 0))])
    stable = min(max(current, up), down)
    steps = (Step("Stabilized", recommended, stable, "within the window"),) if stable != recommended else ()
    return stable, steps


def remembered(behavior: Behavior, past: Past, new: Recommended) -> Past:
    """``past`` with a recommendation, without what no window can need any more."""
    windows = (behavior.scale_up.stabilization_window_seconds, behavior.scale_down.stabilization_window_seconds)
    longest = max(window or 0 for window in windows)
    kept = tuple(one for one in past.recommendations if one.at_s > new.at_s - longest)
    return Past((*kept, new), past.changes)
