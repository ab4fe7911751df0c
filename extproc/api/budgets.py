# SPDX-License-Identifier: Apache-2.0
"""Budgets: how much callers may use in a calendar window, in tokens, requests or money."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api.admission import OTHERS_NAMED, CallerNames, Fraction, Tokens
from extproc.api.calendar_windows import WindowKind, parse_time_zone
from extproc.api.pricing import Currency
from extproc.api.quantities import Money
from extproc.api.spec import CelRule, Name, Spec, list_map_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.api.config_errors import Finding, Path

# Begins the names of budgets that keys have themselves.
_OF_KEY: Final = "key:"
EVERY: Final[Mapping[str, str]] = MappingProxyType(
    {"hour": "hourly", "day": "daily", "week": "weekly", "month": "monthly"}
)
_NO_MAX: Final = "limits nothing; write tokens, inputTokens, outputTokens, requests or money"


class BudgetMax(Spec, frozen=True):
    """The most that may be used in one window; each given amount holds. ``tokens``: of prompts and answers.
    ``input_tokens``: of prompts. ``output_tokens``: of answers. ``requests``: number of requests. ``money``: cost by
    the prices of the ModelServers that served.
    """

    CEL: ClassVar = (
        CelRule(
            "has(self.tokens) || has(self.inputTokens) || has(self.outputTokens) || has(self.requests) ||"
            " has(self.money)",
            _NO_MAX,
        ),
    )

    tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    requests: Tokens | None = None
    money: Money | None = None


class Budget(Spec, frozen=True):
    """How much each tenant, user or API key may use in each calendar window.

    Of a ModelRoute it counts the requests of that route, of a GatewayConfig those of all routes together. Requests
    reserve what they may use, and are settled by what they have used.

    ``name``: in messages, headers and metrics. ``per``: the key by which use is counted; ``Route`` counts all callers
    together. ``tenants``, ``users``, ``api_keys``: it applies only to these callers, by verified names; all given
    fields must match. ``others``: it applies to callers that no budget beside it names. ``window``: weeks begin on
    Monday. ``time_zone``: in which windows begin, such as Europe/Berlin. ``max``: the most in a window. ``currency``:
    of money. ``soft``: from this share of the maximum on, answers have the header x-attache-budget-warning.
    """

    CEL: ClassVar = (
        CelRule("self.scope == 'Global' || self.withoutRedis == 'Local'", "withoutRedis goes with scope: Global"),
        CelRule("!self.others || !(has(self.tenants) || has(self.users) || has(self.apiKeys))", OTHERS_NAMED),
    )

    name: Name
    window: WindowKind
    max: BudgetMax
    per: Literal["Tenant", "User", "ApiKey", "Route"] = "Tenant"
    tenants: CallerNames = ()
    users: CallerNames = ()
    api_keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1000)] = ()
    others: bool = False
    time_zone: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UTC"
    currency: Currency = "USD"
    soft: Fraction | None = None
    # Local: each machine grants the whole budget. Global: machines that share a Redis grant it together.
    scope: Literal["Local", "Global"] = "Local"
    # While Redis cannot be reached, each process grants its share of what a Global budget had left, or its requests are
    # answered 503.
    without_redis: Literal["Local", "Refuse"] = "Local"


class KeyBudget(Spec, frozen=True):
    """How much one API key may use in each calendar window, over all routes.

    ``window``: weeks begin on Monday. ``time_zone``: in which windows begin. ``max``: the most in a window.
    ``currency``: of money. ``soft``: from this share of the maximum on, answers have the header
    x-attache-budget-warning.
    """

    window: WindowKind
    max: BudgetMax
    time_zone: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UTC"
    currency: Currency = "USD"
    soft: Fraction | None = None
    # Local: each machine grants the whole budget. Global: machines that share a Redis grant it together.
    scope: Literal["Local", "Global"] = "Local"

    def as_budget(self) -> Budget:
        """As a budget of the gateway. Its name is none that a configuration can have."""
        return Budget(
            name=f"{_OF_KEY}{self.window.lower()}",
            window=self.window,
            max=self.max,
            per="ApiKey",
            time_zone=self.time_zone,
            currency=self.currency,
            soft=self.soft,
            scope=self.scope,
        )


def budget_title(name: str, of_key: str) -> str:
    """A budget's name for people. One that a key has itself has no name that anybody could know: it is the ``monthly
    budget of`` ``of_key``.
    """
    window = EVERY.get(name.removeprefix(_OF_KEY)) if name.startswith(_OF_KEY) else None
    return name if window is None else f"{window} budget of {of_key}"


Budgets = Annotated[tuple[Budget, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))]


def check_budgets(budgets: Sequence[Budget]) -> Iterator[Finding]:
    """Each has a name of its own, limits something, and has windows in a zone that is known."""
    names: set[str] = set()
    for index, one in enumerate(budgets):
        path: Path = ("spec", "budgets", index)
        if one.name in names:
            yield (*path, "name"), f"'{one.name}' is there already; give each budget a name of its own"
        names.add(one.name)
        yield from _check_max(one.max, path)
        if one.others and (one.tenants or one.users or one.api_keys):
            yield (*path, "others"), OTHERS_NAMED
        if one.scope == "Local" and one.without_redis == "Refuse":
            yield (*path, "withoutRedis"), "has no effect on a Local budget; write scope: Global, or leave it out"
        yield from _check_zone(one.time_zone, path)


def check_key_budgets(budgets: Sequence[KeyBudget], path: Path) -> Iterator[Finding]:
    """Of one key: one for each kind of window."""
    for index, one in enumerate(budgets):
        where: Path = (*path, "budgets", index)
        if any(one.window == before.window for before in budgets[:index]):
            yield (*where, "window"), f"a budget for this window is there already; write one for each {one.window}"
        yield from _check_max(one.max, where)
        yield from _check_zone(one.time_zone, where)


def _check_max(most: BudgetMax, path: Path) -> Iterator[Finding]:
    if not any((most.tokens, most.input_tokens, most.output_tokens, most.requests, most.money is not None)):
        yield (*path, "max"), _NO_MAX
    if most.money == 0:
        yield (*path, "max", "money"), "is 0, so nothing that costs could go; write more, or a ModelAccessPolicy"


def _check_zone(time_zone: str, path: Path) -> Iterator[Finding]:
    try:
        parse_time_zone(time_zone)
    except ValueError as error:
        yield (*path, "timeZone"), str(error)
