# SPDX-License-Identifier: Apache-2.0
"""Prices: what requests cost, against fractions; exact amounts, mistakes with advice, which price is in force."""

from __future__ import annotations

import copy
import json
import math
import pickle
from datetime import datetime
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.config_errors import ConfigInvalid
from extproc.api.pricing import HourlyPrice, Price, Rates, RateTier, TokenCounts, compile_prices, cost_micros
from extproc.api.quantities import Money, money_text
from tests.extproc.scenes import configuration

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

COUNTS = st.integers(0, 10**9)
RATES = st.integers(0, 10**9)
GPT = Price("p1", "USD", Rates(input=2_500_000, output=10_000_000, cached=1_250_000))


@pytest.mark.parametrize(
    ("tokens", "micros"),
    [
        (TokenCounts(), 0),
        (TokenCounts(input=1000, output=100), 3500),
        (TokenCounts(input=1000, cached=400, output=100), 3000),
        # reasoning is part of the output, and costs as it does
        (TokenCounts(input=1000, output=100, reasoning=60), 3500),
        # one token costs 1.25 micro-units
        (TokenCounts(input=1, cached=1), 2),
        # no more can be cached than was sent
        (TokenCounts(input=100, cached=1_000_000), 125),
    ],
)
def test_what_a_request_costs(tokens: TokenCounts, micros: int) -> None:
    assert cost_micros(GPT, tokens) == micros


def test_a_long_prompt_costs_what_its_tier_says() -> None:
    tiers = (RateTier(1000, Rates(input=5_000_000)), RateTier(2000, Rates(input=7_000_000)))
    price = Price("p", "USD", Rates(input=1_000_000), request=10, tiers=tiers)
    assert [cost_micros(price, TokenCounts(input=count)) for count in (1000, 1001, 2000, 2001)] == [
        1010,
        5015,
        10010,
        14017,
    ]


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, RATES, RATES, RATES)
def test_a_cost_is_rounded_up_once(
    fresh: int, cached: int, written: int, text: int, reasoning: int, rate: int, other: int, third: int
) -> None:
    rates = Rates(input=rate, cached=other, written=third, output=rate, reasoning=other)
    tokens = TokenCounts(fresh + cached + written, cached, written, text + reasoning, reasoning)
    exact = Fraction(fresh * rate + cached * other + written * third + text * rate + reasoning * other, 10**6)
    assert cost_micros(Price("p", "USD", rates, request=7), tokens) == 7 + math.ceil(exact)


ENDPOINT = "endpoints: [{address: '10.0.0.1:8000'}]"


def priced(pricing: object) -> Snapshot:
    return configuration(servers={"llama": f"{ENDPOINT}\npricing: {json.dumps(pricing)}"})


@pytest.mark.parametrize(
    ("given", "micros"),
    [(2.5, 2_500_000), ("0.075", 75_000), (1e-06, 1), (0.1, 100_000), ("100.00", 10**8), (0, 0), (10**9, 10**15)],
)
def test_amounts_are_exact(given: object, micros: int) -> None:
    amount = Money(given)
    assert int(amount) == micros
    assert (copy.copy(amount), pickle.loads(pickle.dumps(amount))) == (amount, amount)  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (-1, "is negative; write 0 or more"),
        ("0.0000001", "more than 6 digits behind the point"),
        (1e10, "too large; write at most 1000000000"),
        ("1e999", "not an amount"),
        ("$5", "decimals without a currency"),
        (True, "not an amount"),
        (None, "has no value"),
        ("nan", "not an amount"),
        ("1" * 100, "not an amount"),
    ],
)
def test_what_is_no_amount_is_refused_with_advice(given: object, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        Money(given)


@given(st.integers(0, 10**15))
def test_text_of_an_amount_is_the_amount(micros: int) -> None:
    assert int(Money(money_text(micros))) == micros


def test_the_price_in_force_changes_at_its_instant() -> None:
    december = datetime.fromisoformat("2026-12-01T00:00:00+00:00").timestamp()
    snapshot = priced(
        [
            {"from": "2026-12-01T00:00:00Z", "currency": "EUR", "perMillion": {"input": "3", "output": 12}},
            {"perMillion": {"input": 2.5, "output": 10, "cachedInput": 0.25}, "perRequest": "0.001"},
        ]
    )
    prices = compile_prices(snapshot.servers[0].spec.pricing)
    before, after = prices.price_at(december - 1e-3), prices.price_at(december)
    assert isinstance(before, Price)
    assert isinstance(after, Price)
    assert (before.currency, after.currency) == ("USD", "EUR")
    assert before.id != after.id
    # 900 uncached at 2.5, 100 cached at 0.25, 50 written at 10, all per million, and a thousandth for the request
    assert cost_micros(before, TokenCounts(input=1000, cached=100, output=50)) == 1000 + 2250 + 25 + 500


def test_ids_follow_the_content() -> None:
    one, same, other = (
        compile_prices(priced([{"perMillion": {"input": amount}}]).servers[0].spec.pricing).price_at(0.0)
        for amount in ("2.5", 2.50, "2.51")
    )
    assert one == same
    assert isinstance(one, Price)
    assert isinstance(other, Price)
    assert one.id != other.id


def test_an_hourly_price_keeps_its_amount() -> None:
    assert compile_prices(priced([{"perHour": "3.20"}]).servers[0].spec.pricing).price_at(0.0) == HourlyPrice(
        "USD", 3_200_000
    )


@pytest.mark.parametrize(
    ("pricing", "message"),
    [
        ([{"currency": "USD"}], "sets no price"),
        ([{"perHour": 3, "perMillion": {"input": 1}}], "write it alone"),
        ([{"perHour": 0}], "no rates can be derived"),
        ([{"perRequest": 1, "tiers": [{"aboveInputTokens": 5, "perMillion": {}}]}], "write perMillion, too"),
        ([{"perMillion": {}}, {"perMillion": {}}], "has no 'from'"),
        ([{"from": "2026-12-01T00:00:00Z", "perRequest": 1}] * 2, "same instant"),
        (
            [{"from": "2026-12-01T00:00:00Z", "perRequest": 1}, {"from": "2026-12-01T01:00:00+01:00", "perRequest": 1}],
            "same instant",
        ),
        ([{"perRequest": 1, "currency": "usd"}], "no currency"),
        ([{"perRequest": -1}], "is negative"),
        ([{"perMillion": {"input": "2.1234567"}}], "more than 6 digits"),
        (
            [{"perMillion": {}, "tiers": [{"aboveInputTokens": one, "perMillion": {}} for one in (9, 5)]}],
            "not in order",
        ),
    ],
)
def test_a_mistake_says_what_to_write(pricing: object, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        priced(pricing)
