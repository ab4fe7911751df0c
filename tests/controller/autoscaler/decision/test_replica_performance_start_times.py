# SPDX-License-Identifier: Apache-2.0
"""Start times as measured."""

from __future__ import annotations

import msgspec

from controller.autoscaler.decision.replica_performance import StartDurations, expected_start_s
from controller.autoscaler.decision.situation import Engine, EngineState
from tests.controller.autoscaler.decision.situations import target_of


def started(*took_s: float, prefix: str = "pod") -> StartDurations:
    """After engines that took so long."""
    engines = tuple(
        Engine(f"{prefix}-{index}", EngineState.READY, 100.0, 100.0 + took) for index, took in enumerate(took_s)
    )
    return StartDurations().with_started_engines(msgspec.structs.replace(target_of(), engines=engines))


def test_nine_of_ten_start_within_what_is_expected() -> None:
    assert expected_start_s(started(*range(10, 20)), 60.0) == 19.0
    assert started(*range(10, 20)).percentile(50) == 15.0


def test_before_any_start_the_given_time_counts() -> None:
    assert expected_start_s(None, 60.0) == 60.0
    assert expected_start_s(StartDurations(), 60.0) == 60.0


def test_an_engine_counts_once() -> None:
    target = msgspec.structs.replace(target_of(), engines=(Engine("a", EngineState.READY, 0.0, 30.0),))
    assert len(StartDurations().with_started_engines(target).with_started_engines(target).starts) == 1


def test_engines_that_still_start_do_not_count() -> None:
    assert StartDurations().with_started_engines(target_of(ready=0, starting=2)).starts == ()


def test_only_the_newest_are_remembered() -> None:
    assert len(started(*range(1, 100)).starts) == 32
