# SPDX-License-Identifier: Apache-2.0
"""When a drain is over, by what is seen and when."""

from __future__ import annotations

from controller.agents.runtime.drain import DrainSettings, DrainState, EngineLoad, next_drain_state

SETTINGS = DrainSettings(settle_s=5.0, timeout_s=60.0)
IDLE, BUSY, UNKNOWN, GONE = EngineLoad(0, 0), EngineLoad(3, 1), EngineLoad(), EngineLoad(is_gone=True)


def drained(*seen: tuple[float, EngineLoad], finishes_requests: bool = False) -> DrainState:
    drain = DrainState(0.0)
    for now_s, load in seen:
        drain = next_drain_state(drain, load, SETTINGS, finishes_requests=finishes_requests, now_s=now_s)
    return drain


def test_idle_twice_in_a_row_after_the_settle_time() -> None:
    assert drained((1.0, IDLE), (4.9, IDLE)).outcome == ""
    assert drained((4.0, IDLE), (5.0, IDLE)).outcome == "idle"
    assert drained((4.0, IDLE), (5.0, BUSY), (6.0, IDLE)).outcome == ""
    assert drained((4.0, IDLE), (5.0, BUSY), (6.0, IDLE), (7.0, IDLE)).outcome == "idle"


def test_a_waiting_request_is_a_request() -> None:
    assert drained((6.0, EngineLoad(0, 1)), (7.0, EngineLoad(0, 1))).outcome == ""


def test_the_grace_ends_it() -> None:
    assert drained((59.9, BUSY)).outcome == ""
    ended = drained((60.0, BUSY))
    assert (ended.outcome, ended.ended_at_s) == ("timeout", 60.0)


def test_unknown_is_not_idle_and_the_last_that_was_known_is_told() -> None:
    ended = drained((6.0, IDLE), (7.0, UNKNOWN), (8.0, IDLE), (60.0, UNKNOWN))
    assert ended.outcome == "timeout"
    assert ended.load == IDLE


def test_an_engine_that_is_gone_needs_no_settle_time() -> None:
    assert drained((0.5, GONE)).outcome == ""
    assert drained((0.5, GONE), (1.0, GONE)).outcome == "gone"


def test_an_engine_that_finishes_its_requests_by_itself_has_to_have_none_waiting() -> None:
    waiting_only = EngineLoad(None, 0)
    assert drained((6.0, waiting_only), (7.0, waiting_only)).outcome == ""
    assert drained((6.0, waiting_only), (7.0, waiting_only), finishes_requests=True).outcome == "idle"
    assert drained((6.0, EngineLoad(None, 2)), (7.0, EngineLoad(None, 2)), finishes_requests=True).outcome == ""


def test_what_is_over_stays_over() -> None:
    ended = drained((4.0, IDLE), (5.0, IDLE))
    assert next_drain_state(ended, BUSY, SETTINGS, finishes_requests=False, now_s=9.0) == ended
