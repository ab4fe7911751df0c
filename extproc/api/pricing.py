# SPDX-License-Identifier: Apache-2.0
"""Prices of a ModelServer: as they are written, which is in force at an instant, and what a request costs by it.

A ModelServer has a list of prices, usually one. Each holds from its ``from`` on, until the next one's. Amounts are
whole micro-units of the currency; a request's cost is rounded once, at its end. Counts of tokens are inclusive: the
input has the cached and the written tokens in it, the output has the reasoning.
"""

from __future__ import annotations

from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from extproc.api.quantities import Money
from extproc.api.spec import CURRENCY, CelRule, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path

# Prices are per million tokens.
_MILLION: Final = 1_000_000
Currency = Annotated[str, msgspec.Meta(pattern=CURRENCY, max_length=3)]
_ID_BYTES: Final = 6
_COSTS_NOTHING: Final = "sets no price; write perMillion, perRequest or perHour"
_PER_HOUR_ALONE: Final = "perHour is what the other rates are derived from; write it alone, or leave it out"
_TIERS_NEED_RATES: Final = "tiers change the rates of perMillion; write perMillion, too"


class TokenCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of a request. ``cached``: of the input, those that a cache had. ``written``: of the input, those that a
    cache was asked to keep (Anthropic's ``cache_creation_input_tokens``). ``reasoning``: of the output.
    """

    input: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    reasoning: int = 0


class Rates(msgspec.Struct, frozen=True, omit_defaults=True):
    """Micro-units of the currency per million tokens of each kind. None: as the whole that the kind is part of."""

    input: int = 0
    output: int = 0
    cached: int | None = None
    written: int | None = None
    reasoning: int | None = None


class RateTier(msgspec.Struct, frozen=True):
    """The rates of a request whose input has more than ``above`` tokens."""

    above: int
    rates: Rates


class Price(msgspec.Struct, frozen=True, omit_defaults=True):
    """What requests cost from some instant on. ``id``: names it in usage rows; prices that differ have different ids.

    ``request``: micro-units for each request. ``tiers``: by rising ``above``. ``is_derived``: it was computed from what
    the engines cost an hour, and how fast they are.
    """

    id: str
    currency: str
    rates: Rates
    request: int = 0
    tiers: tuple[RateTier, ...] = ()
    is_derived: bool = False


def cost_micros(price: Price, tokens: TokenCounts) -> int:
    """What a request with ``tokens`` costs, in micro-units of the currency, rounded up once.

    Counts that contradict each other (more cached tokens than input) cost what their whole costs at most.
    """
    rates = price.rates
    for tier in price.tiers:
        if tokens.input > tier.above:
            rates = tier.rates
    cost = tokens.input * rates.input + tokens.output * rates.output
    cached = min(tokens.cached, tokens.input)
    if rates.cached is not None:
        cost += cached * (rates.cached - rates.input)
    if rates.written is not None:
        cost += min(tokens.written, tokens.input - cached) * (rates.written - rates.input)
    if rates.reasoning is not None:
        cost += min(tokens.reasoning, tokens.output) * (rates.reasoning - rates.output)
    return price.request - -cost // _MILLION


class PerMillion(Spec, frozen=True):
    """Prices of a million tokens. ``input``: of prompts. ``output``: of answers. ``cached_input``: of prompt tokens
    found in a cache; without it, as input. ``cache_write``: of prompt tokens that the client asked a cache to keep;
    without it, as input. ``reasoning``: of output that is reasoning; without it, as output.
    """

    input: Money = Money(0)
    output: Money = Money(0)
    cached_input: Money | None = None
    cache_write: Money | None = None
    reasoning: Money | None = None

    def micro_rates(self) -> Rates:
        """The same in micro-units."""
        return Rates(
            input=int(self.input),
            output=int(self.output),
            cached=_plain(self.cached_input),
            written=_plain(self.cache_write),
            reasoning=_plain(self.reasoning),
        )


class PriceTier(Spec, frozen=True):
    """Other rates for longer prompts. ``above_input_tokens``: for requests with more tokens of input than this.
    ``per_million``: prices of a million of all their tokens.
    """

    above_input_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    per_million: PerMillion


class PriceSpec(Spec, frozen=True):
    """What requests cost from some instant on: by tokens, by requests, or both; or derived from hours alone.

    ``effective_from``: since when; without it, always before the others. ``currency``: by ISO 4217. ``per_million``:
    prices of a million tokens. ``per_request``: price of each request that an engine answers. ``tiers``: rates of
    longer prompts. ``per_hour``: what one engine costs an hour; the rates of tokens are derived from it and from the
    engines' learned speeds.
    """

    CEL: ClassVar = (
        CelRule("has(self.perMillion) || has(self.perRequest) || has(self.perHour)", _COSTS_NOTHING),
        CelRule("!has(self.perHour) || !(has(self.perMillion) || has(self.perRequest))", _PER_HOUR_ALONE),
        CelRule("!has(self.tiers) || has(self.perMillion)", _TIERS_NEED_RATES),
    )

    effective_from: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(default=None, name="from")
    currency: Currency = "USD"
    per_million: PerMillion | None = None
    per_request: Money | None = None
    tiers: Annotated[tuple[PriceTier, ...], msgspec.Meta(max_length=16)] = ()
    per_hour: Money | None = None


def check_pricing(pricing: Sequence[PriceSpec]) -> Iterator[Finding]:
    """Each sets a price, in one way, and begins at an instant of its own."""
    since: set[float] = set()
    for index, one in enumerate(pricing):
        path: Path = ("spec", "pricing", index)
        if one.per_million is None and one.per_request is None and one.per_hour is None:
            yield path, _COSTS_NOTHING
        if one.per_hour is not None and (one.per_million is not None or one.per_request is not None):
            yield (*path, "perHour"), _PER_HOUR_ALONE
        if one.per_hour == 0:
            yield (*path, "perHour"), "is 0, from which no rates can be derived; write perMillion: {input: 0}"
        if one.tiers and one.per_million is None:
            yield (*path, "tiers"), _TIERS_NEED_RATES
        bounds = [tier.above_input_tokens for tier in one.tiers]
        if bounds != sorted(set(bounds)):
            yield (*path, "tiers"), "are not in order; write each with a larger aboveInputTokens than the one before"
        begins_s = _begins_s(one)
        if begins_s in since:
            another = "begins at the same instant as another price" if one.effective_from else "has no 'from'"
            yield path, f"{another}; give each price but one a 'from' of its own"
        since.add(begins_s)


class HourlyPrice(msgspec.Struct, frozen=True):
    """What one engine costs an hour, in micro-units."""

    currency: str
    micros: int


class PriceSchedule(msgspec.Struct, frozen=True):
    """Prices by the instant from which they hold, seconds since 1970, in rising order."""

    since_s: tuple[float, ...]
    prices: tuple[Price | HourlyPrice, ...]

    def price_at(self, wall_s: float) -> Price | HourlyPrice | None:
        """The price in force; None before the first one."""
        found = None
        for since_s, price in zip(self.since_s, self.prices, strict=True):
            if since_s > wall_s:
                break
            found = price
        return found


NO_PRICES: Final = PriceSchedule((), ())


def compile_prices(pricing: Sequence[PriceSpec]) -> PriceSchedule:
    """Of a ModelServer; expects what ``check_pricing`` accepts."""
    ordered = sorted(pricing, key=_begins_s)
    return PriceSchedule(tuple(map(_begins_s, ordered)), tuple(map(_compiled, ordered)))


def price_with_id(price: Price) -> Price:
    """``price`` with the digest of its content as its id."""
    bare = msgspec.structs.replace(price, id="")
    return msgspec.structs.replace(bare, id=blake2b(msgspec.json.encode(bare), digest_size=_ID_BYTES).hexdigest())


def _compiled(one: PriceSpec) -> Price | HourlyPrice:
    if one.per_hour is not None:
        return HourlyPrice(one.currency, int(one.per_hour))
    return price_with_id(
        Price(
            id="",
            currency=one.currency,
            rates=Rates() if one.per_million is None else one.per_million.micro_rates(),
            request=_plain(one.per_request) or 0,
            tiers=tuple(RateTier(tier.above_input_tokens, tier.per_million.micro_rates()) for tier in one.tiers),
        )
    )


def _begins_s(one: PriceSpec) -> float:
    return float("-inf") if one.effective_from is None else one.effective_from.timestamp()


def _plain(amount: Money | None) -> int | None:
    return None if amount is None else int(amount)
