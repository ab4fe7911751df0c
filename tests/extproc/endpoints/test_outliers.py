# SPDX-License-Identifier: Apache-2.0
"""Back-off, and outliers."""

from __future__ import annotations

import math

import pytest

from extproc.endpoints.health import EngineFailure
from extproc.endpoints.outliers import (
    begin_probe,
    record_bad_answer,
    record_failure,
    record_good_answer,
    record_success,
    share_bounds,
)
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
    table.healths[0].reasons.add(EngineFailure.ERROR)
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
    table.healths[0].reasons.add(EngineFailure.ERROR)
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


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace([f"10.0.0.{number}:8000" for number in range(count)])
    return table


def serve(table: EndpointTable, rows: range, answers: int, *, failing: frozenset[int] = frozenset()) -> list[int]:
    """Each row answers so often; the rows that became suspects."""
    news = []
    for _ in range(answers):
        for row in rows:
            if row not in failing:
                record_good_answer(table, row, now=1.0, sent_at_s=0.5)
            elif record_bad_answer(table, row, EngineFailure.ERROR, now=1.0):
                news.append(row)
    return news


def test_the_bounds_of_a_share_are_wilsons() -> None:
    # by hand, with z = 3: all of 9 failed, so the lower bound is n / (n + z^2) = 9 / 18
    assert share_bounds(9, 9) == (pytest.approx(0.5), pytest.approx(1.0))
    assert share_bounds(0, 9) == (pytest.approx(0.0), pytest.approx(0.5))
    # 18 of 36: (0.5 + 9/72 +- 3 sqrt(0.25/36 + 9/(4*1296))) / 1.25
    half = 3 * math.sqrt(0.25 / 36 + 9 / 5184) / 1.25
    assert share_bounds(18, 36) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert share_bounds(0, 0) == (0.0, 1.0)


def test_an_endpoint_that_fails_while_the_others_serve_is_a_suspect_after_a_few_answers() -> None:
    table = table_of(3)
    assert serve(table, range(3), 7, failing=frozenset({1})) == []
    assert serve(table, range(3), 5, failing=frozenset({1})) == [1]


def test_an_endpoint_that_falls_ill_after_a_long_time_is_found_as_soon() -> None:
    table = table_of(3)
    serve(table, range(3), 1000)
    assert serve(table, range(3), 16, failing=frozenset({1})) == [1]


def test_what_fails_everywhere_counts_against_nobody() -> None:
    table = table_of(3)
    assert serve(table, range(3), 200, failing=frozenset({0, 1, 2})) == []


def test_at_most_half_of_the_endpoints_are_suspects() -> None:
    table = table_of(4)
    suspects = serve(table, range(4), 500, failing=frozenset({0, 1, 2}))
    assert len(suspects) <= 2


def test_an_endpoint_without_others_is_no_suspect() -> None:
    table = table_of(1)
    assert serve(table, range(1), 100, failing=frozenset({0})) == []


def test_another_failure_of_a_suspect_is_news_again() -> None:
    table = table_of(3)
    serve(table, range(3), 30, failing=frozenset({1}))
    assert not record_bad_answer(table, 1, EngineFailure.ERROR, now=1.0)
    assert record_bad_answer(table, 1, EngineFailure.NO_USAGE, now=1.0)
    assert not record_bad_answer(table, 1, EngineFailure.ERROR, now=1.0), "once each, if they take turns"


def test_a_suspect_is_cleared_by_good_answers_in_a_row_to_probes() -> None:
    table = table_of(3)
    serve(table, range(3), 30, failing=frozenset({1}))
    table.healths[1].probe_at_s = 10.0
    # sent before the probe: it says nothing of now
    assert not any(record_good_answer(table, 1, now=11.0, sent_at_s=5.0) for _ in range(9))
    assert not record_good_answer(table, 1, now=11.0, sent_at_s=10.0)
    record_bad_answer(table, 1, EngineFailure.ERROR, now=1.0)
    cleared = [record_good_answer(table, 1, now=11.0, sent_at_s=10.0) for _ in range(3)]
    assert cleared == [False, False, True]
    assert not table.healths[1].is_suspect


def test_an_equal_refusal_is_remembered() -> None:
    health = table_of(1).healths[0]
    assert not health.is_repeated(7)
    assert health.is_repeated(7)
    for number in range(100, 200):
        health.is_repeated(number)
    assert not health.is_repeated(7), "the memory is bounded"
