# SPDX-License-Identifier: Apache-2.0
"""Outliers."""

from __future__ import annotations

import math

import pytest

from extproc.endpoints.health import EndpointHealth, EngineFailure
from extproc.endpoints.outliers import mostly_fails, record_bad_answer, record_good_answer, wilson_bounds
from extproc.endpoints.table import EndpointTable


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints([f"10.0.0.{number}:8000" for number in range(count)])
    return table


def serve(table: EndpointTable, rows: range, answers: int, *, failing: frozenset[int] = frozenset()) -> list[int]:
    """Each row answers so often; the rows that became suspects."""
    news = []
    for _ in range(answers):
        for row in rows:
            if row not in failing:
                record_good_answer(table, row, now=1.0)
            elif record_bad_answer(table, row, EngineFailure.ERROR):
                news.append(row)
    return news


def test_the_bounds_of_a_share_are_wilsons() -> None:
    # by hand, with z = 3: all of 9 failed, so the lower bound is n / (n + z^2) = 9 / 18
    assert wilson_bounds(9, 9) == (pytest.approx(0.5), pytest.approx(1.0))
    assert wilson_bounds(0, 9) == (pytest.approx(0.0), pytest.approx(0.5))
    # 18 of 36: (0.5 + 9/72 +- 3 sqrt(0.25/36 + 9/(4*1296))) / 1.25
    half = 3 * math.sqrt(0.25 / 36 + 9 / 5184) / 1.25
    assert wilson_bounds(18, 36) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert wilson_bounds(0, 0) == (0.0, 1.0)


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
    assert not record_bad_answer(table, 1, EngineFailure.ERROR)
    assert record_bad_answer(table, 1, EngineFailure.NO_USAGE)
    assert not record_bad_answer(table, 1, EngineFailure.ERROR), "once each, if they take turns"


def test_a_model_server_fails_if_most_of_its_answers_do_beyond_chance() -> None:
    # by hand, as above: n failures of n are too few while n / (n + 9) < 1/2; the counts are decayed
    health = EndpointHealth()
    found = []
    for _ in range(10):
        health.count_answer("", has_failed=True)
        found.append(mostly_fails(health))
    assert found == [False] * 9 + [True]
    for number in range(1000):
        health.count_answer("", has_failed=number % 5 == 0)
        assert number < 30 or not mostly_fails(health), "one in five is not most"


def test_failures_of_one_tenant_count_no_more_than_those_of_all_others_and_one() -> None:
    health = EndpointHealth()
    for _ in range(100):
        health.count_answer("bell", has_failed=False)
        if health.should_count_failure("evil"):
            health.count_answer("evil", has_failed=True)
        assert not mostly_fails(health)
    assert health.failed < 2
    alone = EndpointHealth()
    for _ in range(10):
        assert alone.should_count_failure("evil")
        alone.count_answer("evil", has_failed=True)
    assert mostly_fails(alone), "where nobody else asks, there is nobody else to hear"


def test_an_equal_refusal_is_remembered() -> None:
    health = table_of(1).healths[0]
    assert not health.is_repeated_refusal(7)
    assert health.is_repeated_refusal(7)
    for number in range(100, 200):
        health.is_repeated_refusal(number)
    assert not health.is_repeated_refusal(7), "the memory is bounded"
