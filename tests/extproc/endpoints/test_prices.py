# SPDX-License-Identifier: Apache-2.0
"""Prices derived from what engines cost an hour, by what each engine does."""

from __future__ import annotations

import numpy as np

from extproc.api.pricing import PriceSpec, Rates, compile_prices
from extproc.api.quantities import Money
from extproc.endpoints.prices import Prices
from extproc.endpoints.table import EndpointConfig, EndpointTable


def test_prefill_and_decode_engines_have_the_prices_of_their_own_work() -> None:
    table = EndpointTable()
    table.replace_endpoints({f"10.0.0.{number}:8000": EndpointConfig() for number in (1, 2)})
    prefills, decodes = (np.arange(table.is_active.size) == row for row in (0, 1))
    # the one that prefills writes no answers, and the one that decodes reads no prompts
    table.rate_samples[0], table.prefill_rate[0], table.in_flight[0] = 10, 20_000.0, 1
    table.prefill_rate[1], table.tpot_s[1], table.in_flight[1] = 100.0, 0.02, 10
    listed = compile_prices([PriceSpec(per_hour=Money("3.6"))])
    price = Prices(listed).price_at(0.0, table, lambda: (prefills, decodes, np.zeros(table.is_active.size, np.intp)))
    assert price is not None
    # 1,000 micro-units a second: over 20,000 prompt tokens, or over 10 answers of 50 tokens each
    assert price.rates == Rates(input=50_000, output=2_000_000, cached=0)
    # without roles none of them has shown both speeds: a request has an engine of 20 tokens a second for itself
    assumed = Prices(listed).price_at(0.0, table, lambda: None)
    assert assumed is not None
    assert assumed.is_derived
    assert assumed.rates == Rates(input=100_000, output=50_000_000, cached=0)
