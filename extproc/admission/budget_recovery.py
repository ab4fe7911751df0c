# SPDX-License-Identifier: Apache-2.0
"""What is left of budgets by the rows of the usage process: which rows are asked for, and whose each is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.budgets import GATEWAY
from extproc.admission.identity import Caller
from extproc.admission.rate_limits import RequestUsage
from extproc.admission.token_buckets import BucketLevel
from extproc.api.calendar_windows import CalendarWindow
from extproc.api.usage_log import OTHERS as FOLDED
from extproc.api.usage_log import unescape_name
from extproc.wire_names import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from extproc.admission.budgets import BudgetSet, CompiledBudget
    from extproc.admission.rate_limits import Charge, Resource
    from extproc.api.budgets import Budget

# What tells whose a usage row is.
_DIMENSIONS_OF: Final[Mapping[str, Sequence[str]]] = {
    "Tenant": ("tenant",),
    "User": ("tenant", "user"),
    "ApiKey": ("tenant", "key"),
    "Route": (),
}
_NO_COSTS: Final[Mapping[str, int]] = MappingProxyType({})
# Of whom no tenant is known. Where extproc was away, Envoy knows no more of an API key than its name.
_UNKNOWN_TENANTS: Final = ("", ANONYMOUS)


class UsageRollupRow(msgspec.Struct, frozen=True):
    """What one caller has used in a window, as the usage process has it. ``requests``: with those that were
    ``refused``. ``cost_micros``: by currency.
    """

    tenant: str = ""
    user: str = ""
    key: str = ""
    route: str = ""
    requests: int = 0
    refused: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_micros: Mapping[str, int] = _NO_COSTS

    @property
    def caller(self) -> Caller:
        """Who has used it."""
        return Caller(unescape_name(self.tenant), unescape_name(self.user), unescape_name(self.key))

    @property
    def caller_names(self) -> tuple[str | None, str | None, str | None]:
        """The tenant, the user and the API key; None for those of many callers together."""
        return _name(self.tenant), _name(self.user), _name(self.key)

    def amount_of(self, resource: Resource) -> float:
        """The amount of ``resource``."""
        if resource == "requests":
            return float(self.requests - self.refused)
        # as requests are charged: amounts in another currency count as they are
        cost = float(sum(self.cost_micros.values()))
        used = RequestUsage(float(self.input_tokens), float(self.output_tokens), cost_micros=cost)
        return used.amount_of(resource)


class UsageQuery(msgspec.Struct, frozen=True):
    """What is asked of the usage process: what was used in ``window``, by ``dimensions``.

    ``budgets``: the names of those that it is asked for. ``asks_for_keys``: the rows of callers without a tenant are
    asked for by API key, whose tenants the configuration has; nobody else's are, as keys may be many.
    """

    window: CalendarWindow
    dimensions: frozenset[str]
    budgets: frozenset[str]
    asks_for_keys: bool = False

    def dimensions_and_tenants(self) -> Iterator[tuple[frozenset[str], Sequence[str]]]:
        """Dimensions, and the tenants that are asked for; empty: all."""
        yield self.dimensions, ()
        if self.asks_for_keys:
            yield self.dimensions | {"key"}, _UNKNOWN_TENANTS


def usage_queries(groups: Iterable[Sequence[CompiledBudget]], wall_s: float, *, has_keys: bool) -> list[UsageQuery]:
    """One for all budgets that have the same window and need the same dimensions: rows are as many as callers, times
    routes. ``has_keys``: there are API keys.
    """
    found: dict[tuple[CalendarWindow, frozenset[str]], set[str]] = {}
    for group in groups:
        for one in group:
            found.setdefault((one.current_window(wall_s), _dimensions_for(one, group)), set()).add(one.name)
    return [
        UsageQuery(window, needed, frozenset(names), has_keys and "tenant" in needed and "key" not in needed)
        for (window, needed), names in found.items()
    ]


def _name(text: str) -> str | None:
    return None if text == FOLDED else unescape_name(text)


def _dimensions_for(one: CompiledBudget, group: Iterable[CompiledBudget]) -> frozenset[str]:
    """Those of rows that tell whose they are. ``group``: the budgets of the same route or gateway."""
    needed = {*_DIMENSIONS_OF[one.budget.per], *_named_dimensions(one.budget)}
    if one.budget.others:
        needed.update(name for other in group for name in _named_dimensions(other.budget))
    if not one.name.startswith(f"{GATEWAY}/"):
        needed.add("route")
    return frozenset(needed)


def _named_dimensions(budget: Budget) -> Iterable[str]:
    fields = (("tenant", budget.tenants), ("user", budget.users), ("key", budget.api_keys))
    return [name for name, names in fields if names]


class RemainingBudgets:
    """What rows, which come in pages, leave of the budgets that ``query`` is for."""

    def __init__(
        self,
        query: UsageQuery,
        budgets_of: Callable[[str], BudgetSet],
        owner_of: Callable[[str], Caller | None],
        wall_s: float,
    ) -> None:
        """``budgets_of``: those that hold for a route. ``owner_of``: whose an API key is, None if nobody knows."""
        self._query = query
        self._budgets_of = budgets_of
        self._owner_of = owner_of
        self._wall_s = wall_s
        self._spent: dict[str, tuple[Charge, float]] = {}

    def add_row(self, row: UsageRollupRow, *, is_by_key: bool = False) -> None:
        """Count a row. ``is_by_key``: of the second part of the query."""
        query = self._query
        if row.tenant in _UNKNOWN_TENANTS:
            if query.asks_for_keys and not is_by_key:
                return
            owner = self._owner_of(row.key) if row.key else None
            tenant, user = (ANONYMOUS, row.user) if owner is None else (owner.tenant, owner.user)
            row = msgspec.structs.replace(row, tenant=tenant, user=user)
        for budget in self._budgets_of(row.route).budgets_for(row.caller):
            if budget.name not in query.budgets or budget.current_window(self._wall_s) != query.window:
                continue
            for charge in budget.charges_without_amounts(*row.caller_names, self._wall_s):
                _, before = self._spent.get(charge.key, (charge, 0.0))
                self._spent[charge.key] = charge, before + row.amount_of(charge.resource)

    def levels(self) -> tuple[list[BucketLevel], list[BucketLevel]]:
        """Of Local budgets, and of Global ones."""
        found: tuple[list[BucketLevel], list[BucketLevel]] = [], []
        for key, (charge, used) in self._spent.items():
            found[charge.is_global].append(BucketLevel(key, charge.limit, charge.limit.capacity - used))
        return found
