# SPDX-License-Identifier: Apache-2.0
"""Back-off after failures."""

from __future__ import annotations

from extproc.endpoints.backoff import begin_probe, record_failure, record_success
from extproc.endpoints.health import Failure
from extproc.endpoints.suspects import record_good_answer
from extproc.endpoints.table import EndpointTable


def test_an_endpoint_that_keeps_failing_is_avoided_longer_each_time_up_to_a_bound() -> None:
    table, now = EndpointTable(), 100.0
    table.replace(["a"])
    pauses = []
    for _ in range(8):
        record_failure(table, 0, now=now)
        pauses.append(table.retry_at_s[0] - now)
        # a failure of a request that was already on its way does not count
        record_failure(table, 0, now=now + 0.5)
        now = table.retry_at_s[0]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    record_success(table, 0)
    assert table.retry_at_s[0] == 0


def test_after_the_pause_one_request_at_a_time_tries_the_endpoint() -> None:
    table = EndpointTable()
    table.replace(["a"])
    record_failure(table, 0, now=100.0)
    begin_probe(table, 0, 100.5)
    assert table.retry_at_s[0] == 101.0, "a request during the pause, for want of another endpoint, is no probe"
    begin_probe(table, 0, 101.0)
    assert table.retry_at_s[0] == 106.0, "no other follows while the probe runs"
    record_failure(table, 0, now=101.2, sent_at_s=100.5)
    assert table.retry_at_s[0] == 106.0, "it was on its way before the probe"
    record_failure(table, 0, now=101.5, sent_at_s=101.0)
    assert table.retry_at_s[0] == 103.5, "the probe failed: twice the pause"


def test_a_suspects_good_answer_lets_the_next_probe_go_and_no_more() -> None:
    table = EndpointTable()
    table.replace(["a"])
    table.healths[0].reasons.add(Failure.ERROR)
    record_failure(table, 0, now=100.0)
    begin_probe(table, 0, 101.0)
    record_success(table, 0)
    assert table.retry_at_s[0] == 0
    begin_probe(table, 0, 101.1)
    assert table.retry_at_s[0] > 101.1
    table.healths[0].reasons.clear()
    record_success(table, 0)
    assert (table.retry_at_s[0], table.failures[0], table.has_failures) == (0, 0, False)


def test_a_probe_that_takes_long_counts_although_others_follow() -> None:
    table = EndpointTable()
    table.replace(["a"])
    table.healths[0].reasons.add(Failure.ERROR)
    record_failure(table, 0, now=100.0)
    begin_probe(table, 0, 101.0)
    begin_probe(table, 0, 106.0)
    begin_probe(table, 0, 111.0)
    assert [record_good_answer(table, 0, now=160.0 + sent, sent_at_s=101.0 + sent) for sent in range(3)][-1]


def test_an_endpoint_that_answers_nothing_is_left_alone_for_8_s_before_a_client_is_risked_again() -> None:
    table = EndpointTable()
    table.replace(["10.0.0.1:8000"])
    record_failure(table, 0, now=100.0, is_costly=True)
    assert table.retry_at_s[0] == 108.0
    begin_probe(table, 0, 108.0)
    record_failure(table, 0, now=111.0, sent_at_s=108.0, is_costly=True)
    assert table.retry_at_s[0] == 127.0
