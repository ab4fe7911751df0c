# SPDX-License-Identifier: Apache-2.0
"""Budgets of ModelRoutes and of the GatewayConfig: the buckets that a request is charged to, by calendar windows.

A budget is a limit of rate 0: its bucket never fills. The start of the window is part of the bucket's key, so a new
window is a new bucket, and nothing is ever reset. A request reserves what it may use, and is settled by what it has
used, in the window in which it began. So at any moment, what is used and what is reserved is at most the budget, and
the excess is at most by how much the requests in flight were estimated too low.

An evicted bucket would be full again. So buckets stay until their window has ended, and the number of callers that have
buckets of their own is bounded instead. Those beyond the bound share one with others of their tenant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.identity import caller_matcher
from extproc.admission.rate_limits import Charge, ChargedBudget, Resource, amount_to_reserve
from extproc.admission.token_buckets import BudgetWindowTables, Limit
from extproc.api.budgets import budget_title
from extproc.api.calendar_windows import CalendarWindow, calendar_window, parse_time_zone
from extproc.wire_names import truncate_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.admission.identity import Caller, CallerMatcher
    from extproc.admission.rate_limits import RequestUsage
    from extproc.api.authentication import ApiKey
    from extproc.api.budgets import Budget, KeyBudget

# No key of a rate limit begins so, and no name of an object has the sign.
_PREFIX: Final = "$budget"
# Before the key of a bucket in the shared store: this process's part of it while the store is away.
ALONE: Final = "alone/"
GATEWAY: Final = "gateway/-"
# Buckets of users and of API keys, in all windows that are open; and as many of tenants.
MOST_ACCOUNTS: Final = 100_000
# The account of those beyond; no name is escaped so.
OTHERS: Final = "~others"
_MAXIMA: Final[Mapping[str, Resource]] = {
    "tokens": "total_tokens",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "requests": "requests",
    "money": "cost_micros",
}
# Of a key.
_PARTS: Final = 8
_HOLDERS: Final[Mapping[str, str]] = {"Tenant": "tenant", "User": "user", "ApiKey": "API key", "Route": "gateway"}


class BudgetKey(msgspec.Struct, frozen=True):
    """What names a bucket: ``alone/$budget/NAMESPACE/ROUTE/NAME/START-END/RESOURCE/TENANT/CALLER`` as text.

    ``budget``: ``namespace/route/name``, or ``gateway/-/name``. ``window``: ``START-END``, seconds since 1970.
    ``tenant``: of a user or an API key. ``name``: of the tenant, user or API key; empty: all callers. Either is None
    for all those who have no account of their own. ``is_alone``: a process's part of a Global budget.
    """

    budget: str
    window: str
    resource: str
    tenant: str | None = ""
    name: str | None = ""
    is_alone: bool = False

    def to_text(self) -> str:
        """As buckets, messages and Redis have it."""
        prefix = f"{ALONE if self.is_alone else ''}{_PREFIX}/{self.budget}/{self.window}/{self.resource}"
        return f"{prefix}/{_escaped(self.tenant)}/{_escaped(self.name)}"

    @classmethod
    def parse(cls, text: str) -> BudgetKey | None:
        """None for a key of a rate limit."""
        plain = text.removeprefix(ALONE)
        parts = plain.split("/")
        if parts[0] != _PREFIX or len(parts) != _PARTS:
            return None
        _, namespace, route, name, window, resource, tenant, caller = parts
        is_alone = plain != text
        return cls(f"{namespace}/{route}/{name}", window, resource, _plain(tenant), _plain(caller), is_alone)

    @property
    def caller_text(self) -> str:
        """For people: a tenant, or a user or key behind its tenant's name; empty: all callers."""
        return "/".join(OTHERS if one is None else one for one in (self.tenant, self.name) if one != "")

    @property
    def owner_tenant(self) -> str:
        """The tenant among whose users and API keys it is; empty for an account of whole tenants."""
        return "" if self.tenant is None or self.name is None else self.tenant

    @property
    def wider_account(self) -> BudgetKey:
        """The next wider account: of its tenant, then of all tenants; itself if there is none."""
        if self.owner_tenant:
            return msgspec.structs.replace(self, name=None)
        if not self.tenant and not self.name:
            return self
        return msgspec.structs.replace(self, tenant=self.tenant and None, name=None)


class _Accounts(msgspec.Struct):
    """Of one window: ``keys`` of buckets, and their number by ``owners``. ``shared``: those of the keys that are shared
    for want of room.
    """

    keys: set[str] = msgspec.field(default_factory=set)
    shared: set[str] = msgspec.field(default_factory=set)
    owners: Counter[str] = msgspec.field(default_factory=Counter)


class BudgetAccountAllocator:
    """Who has buckets of their own; kept over changes of the configuration.

    A tenant's users and API keys have at most as many as are free for all others, over all budgets and windows: one
    tenant alone has half of them at most, and whoever comes after it half of the rest. Those beyond share the account
    of their tenant. So a tenant that invents users takes from its own, and not from others. Once an account is shared,
    all new callers of its budget share it: an own one would be full.
    """

    def __init__(self) -> None:
        self._windows: BudgetWindowTables[_Accounts] = BudgetWindowTables(_Accounts)
        self._owners: Counter[str] = Counter()
        self.count = 0

    def account_key(self, key: str, ends_at_s: float) -> str:
        """The key of the bucket that is charged: ``key``, or one that is shared."""
        window = self._windows.get_or_create(ends_at_s)
        if key in window.keys or (found := BudgetKey.parse(key)) is None:
            return key
        while (shared := found.wider_account) != found:
            text = shared.to_text()
            if text not in window.shared and self._has_capacity(found.owner_tenant):
                break
            window.shared.add(text)
            found, key = shared, text
        if key not in window.keys:
            window.keys.add(key)
            window.owners[found.owner_tenant] += 1
            self._owners[found.owner_tenant] += 1
            self.count += 1
        return key

    def forget_ended(self, wall_s: float) -> None:
        """Forget those of windows that have ended."""
        for gone in self._windows.drop_ended(wall_s):
            self._owners -= gone.owners
            self.count -= len(gone.keys)

    def _has_capacity(self, owner: str) -> bool:
        of_tenants = self._owners[""]
        if not owner:
            return of_tenants < MOST_ACCOUNTS
        return self._owners[owner] < MOST_ACCOUNTS - (self.count - of_tenants)


class _Maximum(msgspec.Struct, frozen=True):
    """One amount of a budget, in its current window."""

    resource: Resource
    prefix: str
    limit: Limit
    part: ChargedBudget


class CompiledBudget:
    """One budget of ``owner``: a route's ``namespace/name``, or GATEWAY."""

    def __init__(self, owner: str, budget: Budget, accounts: BudgetAccountAllocator) -> None:
        self.budget = budget
        self.name = f"{owner}/{budget.name}"
        self._accounts = accounts
        self._zone = parse_time_zone(budget.time_zone)
        self._is_global = budget.scope == "Global"
        self._needs_redis = self._is_global and budget.without_redis == "Refuse"
        named = budget.tenants or budget.users or budget.api_keys
        self.callers: CallerMatcher | None = (
            caller_matcher(budget.tenants, budget.users, budget.api_keys) if named else None
        )
        self._window = CalendarWindow(0, 0)
        self._maxima: list[_Maximum] = []

    def current_window(self, wall_s: float) -> CalendarWindow:
        """The window that is open."""
        if not self._window.start_s <= wall_s < self._window.end_s:
            self._window = calendar_window(wall_s, self.budget.window, self._zone)
            self._maxima = list(self._maxima_of(self._window))
        return self._window

    def charges_without_amounts(
        self, tenant: str | None, user: str | None, api_key: str | None, wall_s: float
    ) -> list[Charge]:
        """One for each amount that the budget limits, with nothing reserved. None: one of those who have no account of
        their own.
        """
        end_s, subject = self.current_window(wall_s).end_s, self._subject(tenant, user, api_key)
        account = f"{_escaped(subject[0])}/{_escaped(subject[1])}"
        return [
            Charge(
                self._accounts.account_key(one.prefix + account, end_s),
                one.limit,
                one.resource,
                0.0,
                self._is_global,
                self._needs_redis,
                budget=one.part,
            )
            for one in self._maxima
        ]

    def _subject(self, tenant: str | None, user: str | None, api_key: str | None) -> tuple[str | None, str | None]:
        """The tenant and the name in its keys; None for those who have no names of their own."""
        match self.budget.per:
            case "Tenant":
                return "", tenant
            case "User":
                return tenant, user if tenant is not None else None
            case "ApiKey":
                return tenant, api_key if tenant is not None else None
            case "Route":
                return "", ""

    def _maxima_of(self, window: CalendarWindow) -> Iterable[_Maximum]:
        budget = self.budget
        for field, resource in _MAXIMA.items():
            most = getattr(budget.max, field)
            if most is None:
                continue
            capacity = float(int(most))
            soft = -math.inf if budget.soft is None else capacity * (1.0 - budget.soft)
            unit = budget.currency if field == "money" else resource.replace("_", " ")
            yield _Maximum(
                resource,
                BudgetKey(self.name, f"{window.start_s}-{window.end_s}", resource).to_text().removesuffix("/"),
                Limit(0.0, capacity, float(window.end_s)),
                ChargedBudget(
                    self.name,
                    budget.name,
                    budget_title(budget.name, "this API key"),
                    _HOLDERS[budget.per],
                    budget.window.lower(),
                    unit,
                    soft,
                ),
            )


class ApiKeyBudgets(msgspec.Struct, frozen=True):
    """Budgets that API keys have themselves. ``by_key``: by the name of the key. ``every``: all of them, each once."""

    by_key: Mapping[str, Sequence[CompiledBudget]] = MappingProxyType({})
    every: Sequence[CompiledBudget] = ()


_OF_NO_KEYS: Final = ApiKeyBudgets()


def compile_key_budgets(keys: Iterable[ApiKey], accounts: BudgetAccountAllocator) -> ApiKeyBudgets:
    """The budgets that keys have themselves, by their names. Equal ones are one object: each key has its own accounts
    there.
    """
    known: dict[KeyBudget, CompiledBudget] = {}
    found: dict[str, tuple[CompiledBudget, ...]] = {}
    for key in keys:
        if key.budgets and key.name not in found:
            for one in key.budgets:
                if one not in known:
                    known[one] = CompiledBudget(GATEWAY, one.as_budget(), accounts)
            found[key.name] = tuple(known[one] for one in key.budgets)
    return ApiKeyBudgets(found, tuple(known.values()))


class CallerCharges(msgspec.Struct, frozen=True):
    """What one caller is charged by all its budgets, while their windows are open: from ``since_s`` until ``until_s``.
    ``blank``: with nothing reserved.
    """

    blank: Sequence[Charge]
    since_s: float
    until_s: float

    def charges(self, usage: RequestUsage, wall_s: float) -> list[Charge]:
        """Those of a request that arrives at ``wall_s``, between the two."""
        return [
            Charge(
                one.key,
                one.limit,
                one.resource,
                amount_to_reserve(usage, one.resource, one.limit),
                one.is_global,
                one.needs_redis,
                budget=one.budget,
                ends_in_s=one.limit.ends_at_s - wall_s,
            )
            for one in self.blank
        ]


class BudgetSet:
    """The budgets that hold for the requests of one route: its own, those of the GatewayConfig, and those of keys.
    ``has_any``: whether there are any.
    """

    def __init__(self, *groups: Sequence[CompiledBudget], of_keys: ApiKeyBudgets = _OF_NO_KEYS) -> None:
        self._groups = [group for group in groups if group]
        self._of_keys = of_keys
        # where no budget names callers, all but those of keys are everybody's
        every = [one for group in self._groups for one in group]
        self._everybodys = every if all(one.callers is None for one in every) else None
        self.has_any = bool(every or of_keys.every)

    def budgets_for(self, caller: Caller) -> list[CompiledBudget]:
        """Those that apply to the caller."""
        if self._everybodys is not None:
            return [*self._everybodys, *self._of_keys.by_key.get(caller.api_key, ())]
        found: list[CompiledBudget] = []
        names = truncate_name(caller.tenant), truncate_name(caller.user), caller.api_key
        for group in self._groups:
            named = [one for one in group if one.callers is not None and one.callers.matches(*names)]
            found += named
            found += [one for one in group if one.callers is None and not (one.budget.others and named)]
        found += self._of_keys.by_key.get(caller.api_key, ())
        return found

    def budget_groups(self) -> Iterator[Sequence[CompiledBudget]]:
        """All of them, whomever they are for: the route's own, the gateway's, and those of keys."""
        yield from self._groups
        if self._of_keys.every:
            yield self._of_keys.every

    def accounts(self, caller: Caller, wall_s: float) -> CallerCharges:
        """Those of the caller, of all budgets that apply."""
        budgets = self.budgets_for(caller)
        windows = [one.current_window(wall_s) for one in budgets]
        return CallerCharges(
            [
                charge
                for one in budgets
                for charge in one.charges_without_amounts(caller.tenant, caller.user, caller.api_key, wall_s)
            ],
            max((one.start_s for one in windows), default=-math.inf),
            min((one.end_s for one in windows), default=math.inf),
        )

    def charges(self, caller: Caller, usage: RequestUsage, wall_s: float) -> list[Charge]:
        """All of them, of all budgets that apply."""
        return self.accounts(caller, wall_s).charges(usage, wall_s)


def _escaped(name: str | None) -> str:
    """A name with no slash, and not like OTHERS: two callers never have one key."""
    if name is None:
        return OTHERS
    if "%" in name or "/" in name or "~" in name:
        return name.replace("%", "%25").replace("/", "%2F").replace("~", "%7E")
    return name


def _plain(text: str) -> str | None:
    return None if text == OTHERS else text.replace("%7E", "~").replace("%2F", "/").replace("%25", "%")
