# SPDX-License-Identifier: Apache-2.0
"""An Envoy that does not come, or stays away, is said once."""

from __future__ import annotations

from extproc.runtime.app import PATIENCE_S, EnvoySilenceDetector

START_S = 1000.0


def test_an_envoy_that_never_comes_is_missed_once() -> None:
    contact = EnvoySilenceDetector(started_at_s=START_S)
    looks = [START_S + one for one in (1, PATIENCE_S - 1, PATIENCE_S, PATIENCE_S + 1, 10 * PATIENCE_S)]
    found = [contact.update(now, last_stream_at_s=0.0, last_check_at_s=0.0) for now in looks]
    assert found == [None, None, True, None, None]
    assert contact.update(2000.0, last_stream_at_s=0.0, last_check_at_s=1999.5) is False


def test_an_envoy_that_asks_for_health_is_not_missed_while_nobody_asks_for_anything_else() -> None:
    contact = EnvoySilenceDetector(started_at_s=START_S)
    for second in range(300):
        now = START_S + second
        assert contact.update(now, last_stream_at_s=0.0, last_check_at_s=now - 0.5) is None


def test_an_envoy_that_asks_for_health_no_more_is_missed() -> None:
    contact = EnvoySilenceDetector(started_at_s=START_S)
    assert contact.update(START_S + 100, last_stream_at_s=START_S + 99, last_check_at_s=START_S + 99) is None
    assert (
        contact.update(START_S + 99 + PATIENCE_S, last_stream_at_s=START_S + 99, last_check_at_s=START_S + 99) is True
    )


def test_a_gateway_that_never_asks_for_health_may_have_no_requests_for_hours() -> None:
    contact = EnvoySilenceDetector(started_at_s=START_S)
    assert contact.update(START_S + 5000, last_stream_at_s=START_S + 10, last_check_at_s=0.0) is None
