# SPDX-License-Identifier: Apache-2.0
"""When an engine is ready and alive, by its answers and its silence."""

from __future__ import annotations

import pytest

from controller.agents.runtime.engine_health import (
    DRAINING,
    NEVER_ANSWERED,
    WARMING,
    EngineHealth,
    HealthSettings,
    consecutive_failures,
    on_connection_refused,
    on_metrics_read,
    on_probe_failed,
    on_probe_ok,
    on_probe_sent,
    on_warm_up_done,
    why_not_alive,
    why_not_ready,
)

SETTINGS = HealthSettings(failures=3, probe_timeout_s=2.0, dead_after_s=60.0, stalled_after_s=100.0)


def ready(health: EngineHealth, now_s: float, *, is_draining: bool = False) -> str:
    return why_not_ready(health, SETTINGS, is_draining=is_draining, now_s=now_s)


def serving(at_s: float = 0.0) -> EngineHealth:
    return on_warm_up_done(on_probe_ok(on_probe_sent(EngineHealth(), at_s), at_s))


def test_the_phases_of_a_start() -> None:
    health = EngineHealth()
    assert ready(health, 0.0) == NEVER_ANSWERED
    health = on_probe_ok(on_probe_sent(health, 1.0), 5.0)
    assert ready(health, 5.0) == WARMING
    health = on_warm_up_done(health)
    assert ready(health, 6.0) == ""
    assert ready(health, 6.0, is_draining=True) == DRAINING


def test_bad_answers_count_until_a_good_one() -> None:
    health = on_probe_failed(on_probe_failed(serving()))
    assert ready(health, 1.0) == ""
    assert "3 probes" in ready(on_probe_failed(health), 1.0)
    assert ready(on_probe_ok(on_probe_failed(health), 2.0), 2.0) == ""


def test_silence_counts_as_failures_although_one_probe_is_under_way() -> None:
    health = on_probe_sent(serving(), 10.0)
    assert [consecutive_failures(health, SETTINGS, now_s) for now_s in (10.0, 11.9, 12.0, 14.0, 16.0)] == [
        0,
        0,
        1,
        2,
        3,
    ]
    assert ready(health, 15.9) == ""
    assert ready(health, 16.0) != ""


def test_dead_after_long_silence_only() -> None:
    health = on_probe_sent(serving(), 1.0)
    assert why_not_alive(health, SETTINGS, 59.0) == ""
    assert "no good answer for 60 s" in why_not_alive(health, SETTINGS, 60.0)


def test_no_probe_for_long_is_not_the_engines_fault() -> None:
    # the agent was stopped for an hour: no question was asked, so none was left unanswered
    assert why_not_alive(serving(), SETTINGS, 3600.0) == ""


def test_an_engine_that_never_answered_is_not_called_dead() -> None:
    assert why_not_alive(on_probe_sent(EngineHealth(), 0.0), SETTINGS, 1e6) == ""
    assert why_not_alive(on_connection_refused(EngineHealth()), SETTINGS, 1e6) == ""


def test_a_refused_connection_is_a_new_start() -> None:
    health = on_connection_refused(on_probe_sent(serving(), 1.0))
    assert health.phase == "starting"
    assert why_not_alive(health, SETTINGS, 1e6) == ""
    assert ready(health, 2.0) == NEVER_ANSWERED


def test_counters_that_stand_still_while_requests_run() -> None:
    health = on_metrics_read(serving(), running=1, progress=(1.0,), now_s=0.0)
    health = on_metrics_read(health, running=1, progress=(1.0,), now_s=99.0)
    assert ready(health, 99.0) == ""
    assert "computed nothing" in ready(health, 100.0)
    assert why_not_alive(health, SETTINGS, 159.0) == ""
    assert "computed nothing for 160 s" in why_not_alive(health, SETTINGS, 160.0)
    assert ready(on_metrics_read(health, running=1, progress=(2.0,), now_s=100.0), 100.0) == ""


@pytest.mark.parametrize(
    ("running", "progress"), [(0, (1.0,)), (None, (1.0,)), (1, ())], ids=["idle", "unknown load", "unknown progress"]
)
def test_what_is_no_standstill(running: float | None, progress: tuple[float, ...]) -> None:
    health = on_metrics_read(serving(), running=running, progress=progress, now_s=0.0)
    health = on_metrics_read(health, running=running, progress=progress, now_s=500.0)
    assert ready(health, 500.0) == ""
