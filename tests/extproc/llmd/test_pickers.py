# SPDX-License-Identifier: Apache-2.0
"""Picks over tables with numbers worked out by hand."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.learned_speeds import PromptCost
from extproc.endpoints.table import EndpointTable
from extproc.refusals import NoEndpoint
from extproc.scheduling.builtin_pickers import PrefixAware, PrefixAwareParameters, RoundRobin
from extproc.scheduling.picker import RequestDemandByRow, RequestFacts, View
from tests.extproc.breakers import trip

if TYPE_CHECKING:
    from extproc.endpoints.table import Floats

PICKER = PrefixAware(PrefixAwareParameters(others=0.5, request_cost_s=0.02))


def table_of(count: int, rate: float = 10_000.0) -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints(f"e{number}" for number in range(count))
    table.prefill_rate[:count] = rate
    return table


def cached(table: EndpointTable, **tokens: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    column = np.zeros(len(table.addresses))
    for address, count in tokens.items():
        column[table.row_of(address)] = count
    return column


def demand(input_tokens: float, cached_tokens: Floats) -> RequestDemandByRow:
    return RequestDemandByRow(cached_tokens, PromptCost().prefill_work(input_tokens - cached_tokens, cached_tokens))


def view(table: EndpointTable, input_tokens: float, cached_tokens: Floats, now: float) -> View:
    return View(table, demand(input_tokens, cached_tokens), RequestFacts("m", input_tokens), now)


def test_cost_is_uncached_and_waiting_tokens_over_the_rate_plus_requests() -> None:
    table = table_of(3)
    begin_request(table, 1, work=5_000, now=0.0)
    costs = PICKER.costs(table, demand(2_000, cached(table, e2=1_500)), 0.1)

    # the work of 2000 tokens is 2000 * (1 + 1000/20000) = 2100, that of 500 after 1500 is 500 * (1 + 1750/20000) =
    # 543.75 so the first costs 1.5 * 2100 / 10000, the last 1.5 * 543.75 / 10000; at the other 5000 - 0.1 s * 10000 =
    # 4000 tokens wait, 0.8 of its one request, which makes (2100 * (1.5 + 0.7 * 0.8 + 0.05) + 4000) / 10000 + 0.02
    assert costs[:3].tolist() == pytest.approx([0.315, 0.8631, 0.0815625])
    assert np.isinf(costs[3:]).all()


def test_a_cached_prefix_wins_until_its_endpoint_is_busier_than_it_saves() -> None:
    table = table_of(2)
    hit = cached(table, e0=8_000)

    def first() -> int:
        pick = PICKER.pick(view(table, 10_000, hit, 0.0), rng=random.Random(0))
        return pick.rows[0]

    assert first() == 0
    begin_request(table, 0, work=11_000, now=0.0)
    assert first() == 0  # 2900 * (1.5 + 0.7 + 0.05) + 11000 + a request, 200, against 1.5 * 12500
    begin_request(table, 0, work=1_000, now=0.0)
    assert first() == 1  # 2900 * (1.5 + 1.4 + 0.1) + 12000 + 400


def test_a_long_prompt_goes_where_few_requests_wait_and_a_short_one_where_little_work_does() -> None:
    table = table_of(2)
    for _ in range(10):
        begin_request(table, 0, work=1_000, now=0.0)
    begin_request(table, 1, work=14_000, now=0.0)

    assert PICKER.pick(view(table, 100, cached(table), 0.0), rng=random.Random(0)).rows[0] == 0
    assert PICKER.pick(view(table, 30_000, cached(table), 0.0), rng=random.Random(0)).rows[0] == 1


def test_an_answer_keeps_away_from_engines_whose_steps_are_long() -> None:
    table = table_of(2)
    begin_request(table, 0, work=0, tokens=100_000, now=0.0)
    begin_request(table, 1, work=0, tokens=10_000, now=0.0)
    asked = view(table, 10, cached(table), 0.0)
    # 200 tokens of an answer, each 8e-8 s longer for a token in flight: 0.2 * 1.6e-5 * 90,000 = 0.288 s apart
    asked = msgspec.structs.replace(asked, demand=msgspec.structs.replace(asked.demand, decode_s_per_token=200 * 8e-8))
    costs = PICKER.costs(table, asked.demand, 0.0)

    assert costs[0] - costs[1] == pytest.approx(0.288)


def test_a_faster_engine_gets_the_work() -> None:
    table = table_of(2)
    table.prefill_rate[1] = 30_000

    assert PICKER.pick(view(table, 9_000, cached(table), 0.0), rng=random.Random(0)).rows[0] == 1


def test_equal_endpoints_share_by_chance() -> None:
    table, rng = table_of(4), random.Random(0)
    firsts = [PICKER.pick(view(table, 10, cached(table), 0.0), rng=rng).rows[0] for _ in range(400)]

    assert all(70 < firsts.count(row) < 130 for row in range(4))


def test_fallbacks_follow_in_order_of_cost_and_are_bounded() -> None:
    table = table_of(6)
    for row, requests in enumerate([3, 1, 5, 0, 2, 4]):
        for _ in range(requests):
            begin_request(table, row, work=0, now=0.0)

    pick = PICKER.pick(view(table, 10, cached(table), 0.0), rng=random.Random(0))
    assert pick.rows == [3, 1, 4, 0]


def test_an_endpoint_that_just_failed_comes_last_though_it_is_idle() -> None:
    table = table_of(3)
    begin_request(table, 0, work=50_000, now=0.0)
    begin_request(table, 1, work=60_000, now=0.0)
    trip(table, 2, 0.0)

    assert PICKER.pick(view(table, 10, cached(table), 0.5), rng=random.Random(0)).rows == [
        0,
        1,
        2,
    ]
    assert PICKER.pick(view(table, 10, cached(table), 1.5), rng=random.Random(0)).rows[0] == 2


def test_if_all_failed_one_is_still_picked() -> None:
    table = table_of(2)
    for row in range(2):
        trip(table, row, 0.0)

    assert len(PICKER.pick(view(table, 1, cached(table), 0.0), rng=random.Random(0)).rows) == 2


@pytest.mark.parametrize("picker", [PICKER, RoundRobin()])
def test_without_endpoints_there_is_no_pick(picker: PrefixAware | RoundRobin) -> None:
    table = EndpointTable()
    with pytest.raises(NoEndpoint, match="none of its endpoints is ready"):
        picker.pick(view(table, 1, cached(table), 0.0), rng=random.Random(0))


def test_round_robin_takes_turns_and_skips_endpoints_that_just_failed() -> None:
    table, picker = table_of(3), RoundRobin()

    def pick() -> list[int]:
        one = msgspec.structs.replace(view(table, 1, cached(table), 0.0), choices=2)
        return picker.pick(one, rng=random.Random(0)).rows

    assert [pick() for _ in range(4)] == [[0, 1], [1, 2], [2, 0], [0, 1]]
    trip(table, 1, 0.0)
    assert pick() == [2, 0]


@given(
    loads=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e5), st.floats(0, 2000)), min_size=1, max_size=30),
    seed=st.integers(0, 100),
)
def test_the_first_choice_costs_least_and_no_row_comes_twice(loads: list[tuple[int, float, float]], seed: int) -> None:
    table = table_of(len(loads))
    hits = cached(table)
    for row, (requests, tokens, hit) in enumerate(loads):
        table.in_flight[row], table.backlog_tokens[row], hits[row] = requests, tokens, hit
    costs = PICKER.costs(table, demand(2000, hits), 0.0)
    pick = PICKER.pick(view(table, 2000, hits, 0.0), rng=random.Random(seed))

    cheapest = costs.argmin()
    assert costs[pick.rows[0]] <= costs.min() * 1.1 + 0.001
    assert hits[pick.rows[0]] >= hits[cheapest]
    assert len(set(pick.rows)) == len(pick.rows) == min(4, len(loads))
    others = [costs[row] for row in pick.rows[1:]]
    assert others == sorted(others)
