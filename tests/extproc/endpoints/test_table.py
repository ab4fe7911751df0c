# SPDX-License-Identifier: Apache-2.0
"""Rows of endpoints across changes of the configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.in_flight import backlog_of, backlogs, begin_request, end_request
from extproc.endpoints.learned_speeds import learn_prefill_rate
from extproc.endpoints.table import INITIAL_PREFILL_RATE, EndpointTable


def table_of(*addresses: str) -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints(addresses)
    return table


def test_endpoints_that_stay_keep_their_row_and_what_is_known() -> None:
    table = table_of("a", "b", "c")
    row = table.row_of("b")
    assert row is not None
    begin_request(table, row, work=100, now=0.0)

    gone = table.replace_endpoints(["c", "b", "d"])

    assert gone == [0]
    assert table.row_of("b") == row
    assert table.in_flight[row] == 1
    assert table.row_of("d") == 0
    assert table.in_flight[0] == 0


def test_a_release_from_an_earlier_use_of_the_row_changes_nothing() -> None:
    table = table_of("a")
    endpoint = begin_request(table, 0, work=1, now=0.0)
    table.replace_endpoints([])
    table.replace_endpoints(["a"])
    begin_request(table, 0, work=1, now=0.0)

    end_request(table, endpoint, 0.0)

    assert table.in_flight[0] == 1


@given(st.lists(st.sets(st.sampled_from([f"e{n}" for n in range(40)])), max_size=12))
def test_rows_are_distinct_and_only_the_configured_are_active(configurations: list[set[str]]) -> None:
    table = EndpointTable()
    for addresses in configurations:
        table.replace_endpoints(sorted(addresses))
        rows = [table.row_of(address) for address in addresses]
        assert len(set(rows)) == len(addresses) == len(table) == table.is_active.sum()
        assert {table.addresses[row] for row in rows if row is not None} == addresses
    assert len(table.addresses) <= 64  # rows are used again


def test_waiting_prefill_drains_at_the_learned_rate_and_is_gone_with_the_last_request() -> None:
    table = table_of("a")
    table.prefill_rate[0] = 1000.0
    first = begin_request(table, 0, work=3000, now=10.0)
    second = begin_request(table, 0, work=500, now=11.0)

    assert backlog_of(table, 0, 11.0) == 2500
    assert backlogs(table, 12.0)[0] == 1500
    end_request(table, first, 12.0)
    # whoever is over does not wait: at most the second does
    assert backlog_of(table, 0, 12.0) == 500
    end_request(table, second, 12.0)
    assert backlog_of(table, 0, 12.0) == 0
    assert table.in_flight[0] == 0


def test_one_endpoints_rate_is_assumed_of_the_others_until_they_have_samples() -> None:
    table = table_of("a", "b", "c")
    for _ in range(200):
        learn_prefill_rate(table, 0, tokens_ahead=30_000, ttft_s=1.0)
    assert table.prefill_rate[1] == table.prefill_rate[2] == pytest.approx(table.prefill_rate[0])
    for _ in range(200):
        learn_prefill_rate(table, 1, tokens_ahead=5_000, ttft_s=1.0)
    assert table.prefill_rate[1] == pytest.approx(5_000, rel=0.05)
    assert table.prefill_rate[0] == pytest.approx(30_000, rel=0.05)


def test_the_prefill_rate_is_learned_from_long_prompts_only() -> None:
    table = table_of("a")
    learn_prefill_rate(table, 0, tokens_ahead=100, ttft_s=0.5)
    assert table.prefill_rate[0] == INITIAL_PREFILL_RATE
    for _ in range(100):
        learn_prefill_rate(table, 0, tokens_ahead=8000, ttft_s=0.4)
    assert 19_900 < table.prefill_rate[0] <= 20_000


def test_a_new_endpoint_is_assumed_to_be_like_the_others() -> None:
    table = table_of("a", "b", "c")
    table.prefill_rate[:3], table.rate_samples[:3] = [5_000, 20_000, 21_000], 1
    table.replace_endpoints(["a", "b", "c", "d"])

    row = table.row_of("d")
    assert row is not None
    assert table.prefill_rate[row] == 20_000
