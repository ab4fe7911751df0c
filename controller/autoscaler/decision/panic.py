# SPDX-License-Identifier: Apache-2.0
"""Panic: while a steep rise lasts, and some time after it, replicas only grow.

Source: knative/serving, ``pkg/autoscaler/scaling/autoscaler.go``. A panic begins when what is asked for reaches
``threshold`` times what is ready, and ends ``hold_s`` after it last did. While it lasts, no answer is below the largest
one of this panic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from controller.api.autoscaling import Panic


class PanicState(msgspec.Struct, frozen=True):
    """``last_at_s``: when the threshold was last reached. ``most``: the largest answer so far, in replicas."""

    last_at_s: float
    most: float


def follow(
    state: PanicState | None, *, asked: float, ready: float, threshold: float, hold_s: float, now_s: float
) -> PanicState | None:
    """The state after what is asked for is known: begun, prolonged, ended, or as it was; None: no panic.

    ``asked`` and ``ready``: replicas; none ready counts as one.
    """
    if asked / max(ready, 1.0) >= threshold:
        return PanicState(now_s, state.most if state is not None else 0.0)
    if state is not None and state.last_at_s + hold_s < now_s:
        return None
    return state


def held(state: PanicState, desired: float) -> PanicState:
    """The state with an answer counted in; ``most`` of it is the answer to give."""
    return PanicState(state.last_at_s, max(state.most, desired))


def panicking(
    panic: Panic, state: PanicState | None, *, recommended: float, ready: float, now_s: float
) -> PanicState | None:
    """For laws without windows of their own: the state after a combined recommendation; None: no panic.

    While it is not None, ``most`` of it is the answer, and limits of scaling out do not apply.
    """
    state = follow(
        state,
        asked=recommended,
        ready=ready,
        threshold=panic.threshold_percent / 100,
        hold_s=float(panic.hold),
        now_s=now_s,
    )
    return None if state is None else held(state, recommended)
