# SPDX-License-Identifier: Apache-2.0
"""The price in force at a ModelServer; where engines are paid by the hour, derived from how fast they are.

A token costs what its engine costs in the time that the token takes it (llm-d and vLLM's production stack count alike:
cost per token = cost per hour / tokens per hour):

    input  = perHour / 3600 / prefill rate                  tokens of prompts that an engine computes in a second
    output = perHour / 3600 * time per token / running      answers that it writes side by side
    cached = 0                                              nothing is computed

So an engine that is busy all the time with both earns its hour. Where engines prefill or decode, the input is the price
of those that prefill, and the output that of those that decode. Speeds are the typical ones of all engines (geometric
mean) as learned from answers. Before the first answer, the price that a process of this machine derived last holds, if
it was saved. Else each request costs what it would if it had an engine of assumed speeds for itself: requests without a
price would spend no budget, however many come. Rates are rounded to two digits and derived anew once a minute, so that
not every request has another price.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.pricing import NO_PRICES, HourlyPrice, Price, PriceSchedule, Rates, price_with_id
from extproc.endpoints.table import INITIAL_PREFILL_RATE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from extproc.endpoints.table import Bools, EndpointTable

    Stages = tuple[Bools, Bools, NDArray[np.intp]]

_DERIVED_FOR_S: Final = 60.0
_MILLION: Final = 1_000_000
_SECONDS: Final = 3600.0
# Of an answer before there is one.
_ASSUMED_TPOT_S: Final = 0.05
# The weight of the number of answers at once, each time that rates are derived.
_WEIGHT: Final = 0.2


class DerivedPrice(msgspec.Struct, frozen=True):
    """The price that was derived last, and from what."""

    hourly: HourlyPrice
    price: Price


class Prices:
    """The prices of one ModelServer."""

    def __init__(self, prices: PriceSchedule = NO_PRICES) -> None:
        self.list = prices
        self._derived: Price | None = None
        self._derived_from: HourlyPrice | None = None
        self._derive_at_s = 0.0
        self._running = 0.0
        # of an earlier process
        self.saved: DerivedPrice | None = None

    @property
    def last_derived(self) -> DerivedPrice | None:
        """The one that was derived last."""
        if self._derived is None or self._derived_from is None:
            return self.saved
        return DerivedPrice(self._derived_from, self._derived)

    def price_at(self, wall_s: float, table: EndpointTable, stages: Callable[[], Stages | None]) -> Price | None:
        """The price in force; None if there is none. ``table``: of the engines. ``stages``: the rows that prefill,
        those that decode, and the group of each row; None: every engine does both.
        """
        found = self.list.price_at(wall_s)
        if not isinstance(found, HourlyPrice):
            return found
        if found is not self._derived_from or not self._derive_at_s > wall_s > self._derive_at_s - 2 * _DERIVED_FOR_S:
            self._derived, self._derived_from = self._derive(found, table, stages()), found
            # before the first answer, every request may be the one that has brought it
            self._derive_at_s = wall_s + (_DERIVED_FOR_S if self._derived is not None else 0.0)
        if self._derived is not None:
            return self._derived
        if self.saved is not None and self.saved.hourly == found:
            return self.saved.price
        return derived_price(found, prefill_rate=INITIAL_PREFILL_RATE, tpot_s=_ASSUMED_TPOT_S, running=1.0)

    def _derive(self, price: HourlyPrice, table: EndpointTable, stages: Stages | None) -> Price | None:
        prefilled, decoded = table.is_active & (table.rate_samples > 0), table.is_active & (table.tpot_s > 0)
        if stages is None:
            prefilled = decoded = prefilled & decoded
        else:
            prefilled, decoded = prefilled & stages[0], decoded & stages[1]
        if not (prefilled.any() and decoded.any()):
            return None
        now = max(1.0, float(table.in_flight[decoded].mean()))
        self._running = now if not self._running else self._running + _WEIGHT * (now - self._running)
        return derived_price(
            price,
            prefill_rate=_typical(table.prefill_rate[prefilled].tolist()),
            tpot_s=_typical(table.tpot_s[decoded].tolist()),
            running=self._running,
        )


def derived_price(price: HourlyPrice, *, prefill_rate: float, tpot_s: float, running: float) -> Price:
    """``prefill_rate``: tokens a second. ``tpot_s``: seconds for each token of an answer, of ``running`` at once."""
    per_second = price.micros / _SECONDS
    rates = Rates(
        input=_rounded(_MILLION * per_second / prefill_rate),
        output=_rounded(_MILLION * per_second * tpot_s / running),
        cached=0,
    )
    return price_with_id(Price(id="", currency=price.currency, rates=rates, is_derived=True))


def _typical(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _rounded(micros: float) -> int:
    """To two digits."""
    return round(float(f"{micros:.1e}"))
