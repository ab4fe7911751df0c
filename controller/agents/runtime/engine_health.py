# SPDX-License-Identifier: Apache-2.0
"""Decides whether the engine is ready and alive, from its answers and its silence."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

Phase = Literal["starting", "warming", "serving"]

# The reasons why an engine is not ready, as words for logs and metrics.
NEVER_ANSWERED: Final = "the model has not answered yet"
WARMING: Final = "warming up"
DRAINING: Final = "draining"


class HealthSettings(msgspec.Struct, frozen=True):
    """``consecutive_failures``: probes in a row until not ready. ``dead_after_s``: of silence until the engine is dead.

    An unanswered probe counts as one failure for each ``probe_timeout_s``: no second one is sent meanwhile, so probes
    never pile up in an engine that hangs.
    """

    failures: int = 3
    probe_timeout_s: float = 2.0
    dead_after_s: float = 120.0
    stalled_after_s: float = 120.0


class EngineHealth(msgspec.Struct, frozen=True):
    """``phase``: ``starting`` until the model has answered a request, ``warming`` until the warm-up is over.

    ``asked_at_s``: when the probe under way was sent. ``consecutive_failures``: bad answers since the last good one.
    ``answered_at_s``: the last good answer since the engine started. ``progressed_at_s``: the engine last computed
    something, or had nothing to compute.
    """

    phase: Phase = "starting"
    asked_at_s: float | None = None
    failures: int = 0
    answered_at_s: float | None = None
    progress: tuple[float | None, ...] = ()
    progressed_at_s: float | None = None


def on_probe_sent(health: EngineHealth, now_s: float) -> EngineHealth:
    """A probe was sent."""
    return replace(health, asked_at_s=now_s)


def on_probe_ok(health: EngineHealth, now_s: float) -> EngineHealth:
    """The answer to the probe was good; the first one, to a request for a token, ends ``starting``."""
    phase: Phase = "warming" if health.phase == "starting" else health.phase
    return replace(health, phase=phase, asked_at_s=None, failures=0, answered_at_s=now_s)


def on_probe_failed(health: EngineHealth) -> EngineHealth:
    """The answer was bad, or the connection broke."""
    return replace(health, asked_at_s=None, failures=health.failures + 1)


def on_connection_refused(health: EngineHealth) -> EngineHealth:
    """The port refused: the engine has not started, or restarts, and must answer a request again."""
    return EngineHealth(failures=health.failures + 1)


def on_warm_up_done(health: EngineHealth) -> EngineHealth:
    """The warm-up is over."""
    return replace(health, phase="serving") if health.phase == "warming" else health


def on_metrics_read(
    health: EngineHealth, *, running: float | None, progress: tuple[float | None, ...], now_s: float
) -> EngineHealth:
    """A metrics page was read. An engine whose counters stand still while requests run does not progress.

    Waiting requests alone prove nothing: in a decode engine they may wait for another engine. Unknown is no standstill:
    ``running`` None, ``progress`` empty.
    """
    stands_still = bool(running) and bool(progress) and progress == health.progress
    if stands_still and health.progressed_at_s is not None:
        return health
    return replace(health, progress=progress, progressed_at_s=now_s)


def consecutive_failures(health: EngineHealth, settings: HealthSettings, now_s: float) -> int:
    """Failures in a row, those of a probe that has no answer yet included."""
    if health.asked_at_s is None:
        return health.failures
    return health.failures + int((now_s - health.asked_at_s) / settings.probe_timeout_s)


def is_stalled(health: EngineHealth, settings: HealthSettings, now_s: float) -> bool:
    """Whether requests run, and nothing has been computed for long."""
    return health.progressed_at_s is not None and now_s - health.progressed_at_s >= settings.stalled_after_s


def why_not_ready(health: EngineHealth, settings: HealthSettings, *, is_draining: bool, now_s: float) -> str:
    """Why the engine should get no requests; empty if it should."""
    if is_draining:
        return DRAINING
    if health.phase == "starting":
        return NEVER_ANSWERED
    if health.phase == "warming":
        return WARMING
    count = consecutive_failures(health, settings, now_s)
    if count >= settings.failures:
        return f"{count} probes in a row failed or had no answer"
    if is_stalled(health, settings, now_s):
        return f"requests run, and the engine has computed nothing for {settings.stalled_after_s:g} s"
    return ""


def why_not_alive(health: EngineHealth, settings: HealthSettings, now_s: float) -> str:
    """Why the engine should be restarted; empty if it should not.

    An engine that has never answered may be loading: the startup probe limits how long that may take.
    """
    if health.answered_at_s is None:
        return ""
    silent_s = now_s - health.answered_at_s
    if silent_s >= settings.dead_after_s and consecutive_failures(health, settings, now_s) >= settings.failures:
        return f"no good answer for {silent_s:.0f} s"
    stalled_s = now_s - (now_s if health.progressed_at_s is None else health.progressed_at_s)
    if stalled_s >= settings.stalled_after_s + settings.dead_after_s:
        return f"requests run, and the engine has computed nothing for {stalled_s:.0f} s"
    return ""
