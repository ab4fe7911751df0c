# SPDX-License-Identifier: Apache-2.0
"""Rate limits of ModelRoutes: the buckets that a request is charged to.

Budgets are charged in the same way (``budgets.py``): their limits fill at rate 0, and end with their window.

Clients choose some names that have a bucket each, such as the value of a header. They are hashed, and bounded in
number. Each name has an account of its own, but only so many of a tenant's at a time. Were there no bound, a client
would have a full allowance with every new name. Beyond the bound all new names share one account, until a name has not
been used for so long that its account would be full again: then a new one may take its place at no gain.

So a tenant with a limit L for each name is granted at most ``(MOST_NAMES + 1) * L``, and its names never replace those
of another tenant.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.admission.identity import CallerMatcher, caller_matcher
from extproc.admission.token_buckets import Limit, Reservation
from extproc.api.admission import Unit
from extproc.api.pricing import TokenCounts, cost_micros
from extproc.wire_names import ANONYMOUS, truncate_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.admission.identity import Caller
    from extproc.api.admission import KeyRateLimit, RateLimit
    from extproc.api.model_route import ModelRoute
    from extproc.api.pricing import Price

# Of one tenant, for one limit or queue.
MOST_NAMES: Final = 1_000
# Most tenants with names, the least recently used dropped first: about 100 KB each at most.
_MOST_OWNERS: Final = 10_000
_HASH_BYTES: Final = 16
# The account of all names beyond the bound; no hash is equal to it.
OTHERS: Final = "others"
# In the key of a bucket, before a name that a client has chosen.
CHOSEN: Final = "/~"
Resource = Literal["requests", "input_tokens", "output_tokens", "total_tokens", "cost_micros"]
# Of rate limits.
RESOURCES: Final[tuple[Resource, ...]] = ("requests", "input_tokens", "output_tokens", "total_tokens")


class ClientChosenNames:
    """The names in use, by their owners."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def account_name(self, owner: str, name: str, now: float, *, idle_s: float) -> str:
        """The account of ``name``: its hash, the same in every process, or OTHERS.

        ``owner``: the tenant whose bound applies. ``idle_s``: a name that was unused for so long may be replaced.
        """
        names = self._owners.get(owner)
        if names is None:
            names = self._owners[owner] = OrderedDict()
            if len(self._owners) > _MOST_OWNERS:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        # cryptographic: a client that can choose names must not be able to choose the account of another
        found = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
        if found not in names and len(names) >= MOST_NAMES:
            oldest = next(iter(names))
            if now - names[oldest] < idle_s:
                return OTHERS
            del names[oldest]
        names[found] = now
        names.move_to_end(found)
        return found


class RequestUsage(msgspec.Struct, frozen=True):
    """Tokens of a request: expected before it is dispatched, reported afterwards. ``known``: what is no guess; None:
    all. ``cost_micros``: what they cost, 0 without a price.
    """

    input_tokens: float
    output_tokens: float
    known: RequestUsage | None = None
    cost_micros: float = 0.0

    @property
    def requests(self) -> float:
        """It is of one request."""
        return 1.0

    @property
    def total_tokens(self) -> float:
        """Input and output."""
        return self.input_tokens + self.output_tokens

    def amount_of(self, resource: Resource) -> float:
        """The amount of ``resource`` in this usage."""
        amount: float = getattr(self, resource)
        return amount

    def with_cost(self, price: Price | None, *, cached: int = 0, written: int = 0, reasoning: int = 0) -> RequestUsage:
        """With its cost by ``price``; the keywords are parts of its tokens."""
        if price is None:
            return self
        counts = TokenCounts(math.ceil(self.input_tokens), cached, written, math.ceil(self.output_tokens), reasoning)
        known = None if self.known is None else self.known.with_cost(price)
        return RequestUsage(self.input_tokens, self.output_tokens, known, float(cost_micros(price, counts)))


NO_USAGE: Final = RequestUsage(0.0, 0.0)


class ChargedBudget(msgspec.Struct, frozen=True):
    """The budget that a charge is for. ``key``: ``namespace/route/name``, or ``gateway/-/name``. ``title``: its name
    for clients. ``holder``: whose budget it is: tenant, user, API key or gateway. ``window``: hour, day, week or month.
    ``unit``: tokens, or a currency. ``soft``: the level of its bucket below which answers warn.
    """

    key: str
    name: str
    title: str
    holder: str
    window: str
    unit: str
    soft: float = -math.inf


class Charge(msgspec.Struct, frozen=True):
    """The amount that a request requires of one bucket.

    ``key``: names the bucket. ``amount``: in units of ``resource``. ``is_global``: the bucket is in the shared store.
    ``needs_redis``: without the shared store the request is refused instead of charged to a local bucket.
    ``enough``: at this level it is granted even if it is more than that; the bucket is in debt then.
    ``budget``: None for a rate limit. ``ends_in_s``: until its window ends. ``unit`` and ``whose``: what clients are
    told of a rate limit; no names.
    """

    key: str
    limit: Limit
    resource: Resource
    amount: float
    is_global: bool = False
    needs_redis: bool = False
    enough: float = math.inf
    budget: ChargedBudget | None = None
    ends_in_s: float = 0.0
    unit: Unit = "second"
    whose: str = "all callers"

    @property
    def needed_level(self) -> float:
        """The level that the bucket must have."""
        return min(self.amount, self.enough)


class Grant(msgspec.Struct, frozen=True):
    """A reservation in several buckets: for each charge the claim, and the level left in the bucket.

    ``is_global``: the reservation is in the store that all machines share. ``owed``: it was made without the store,
    which is to be charged for it: the charges as the store would have had them.
    """

    charges: Sequence[Charge]
    claims: Sequence[Reservation]
    levels: Sequence[float]
    is_global: bool = False
    owed: Sequence[Charge] = ()


class StoreUnavailable(msgspec.Struct, frozen=True):
    """The shared store does not answer. ``most_left``: for each charge, what its bucket has left at most."""

    most_left: Sequence[float]


def _callers(limit: RateLimit) -> CallerMatcher | None:
    """Whom the limit names; None: nobody in particular."""
    named = limit.tenants or limit.users or limit.api_keys
    return caller_matcher(limit.tenants, limit.users, limit.api_keys) if named else None


class RouteLimits:
    """The limits of one ModelRoute."""

    def __init__(self, route: ModelRoute, names: ClientChosenNames | None = None) -> None:
        """``names``: the values of headers that are in use, kept over changes of the route."""
        self._route = route.metadata.key
        # with its number, which its buckets are called by, and whom it names
        self._limits = [(index, limit, _callers(limit)) for index, limit in enumerate(route.spec.rate_limits)]
        self._names = ClientChosenNames() if names is None else names

    def charges(
        self, caller: Caller, headers: Mapping[str, str], usage: RequestUsage, now: float = 0.0
    ) -> list[Charge]:
        """One charge for each amount that the limits name."""
        return [
            Charge(
                key=f"{self._route}/{index}/{resource}/{subject}",
                limit=_limit(limit, amount),
                resource=resource,
                amount=amount_to_reserve(usage, resource, _limit(limit, amount)),
                is_global=limit.scope == "Global",
                needs_redis=limit.scope == "Global" and limit.without_redis == "Refuse",
                unit=limit.unit,
                whose=whose,
            )
            for index, limit in self._limits_of(caller)
            for subject, whose in [self._subject(index, limit, caller, headers, now)]
            for resource in RESOURCES
            if (amount := getattr(limit, resource)) is not None
        ]

    def _limits_of(self, caller: Caller) -> list[tuple[int, RateLimit]]:
        names = truncate_name(caller.tenant), truncate_name(caller.user), caller.api_key
        named = {index for index, _, callers in self._limits if callers is not None and callers.matches(*names)}
        return [
            (index, limit)
            for index, limit, callers in self._limits
            if index in named or (callers is None and not (limit.others and named))
        ]

    def _subject(
        self, index: int, limit: RateLimit, caller: Caller, headers: Mapping[str, str], now: float
    ) -> tuple[str, str]:
        """In the key of the bucket, and what its clients are told instead."""
        match limit.per:
            case "Tenant":
                return caller.tenant, "all anonymous callers" if caller.tenant == ANONYMOUS else "this tenant"
            case "User":
                # two tenants may have users of the same name; a token may name a tenant with a slash
                tenant = caller.tenant.replace("%", "%25").replace("/", "%2F")
                whose = "this user" if caller.user else "all callers of this tenant without a user"
                return f"{tenant}/{caller.user}", whose
            case "ApiKey":
                return caller.api_key, "this API key" if caller.api_key else "all callers without an API key"
            case "Header":
                owner = f"{self._route}/{index}/{caller.tenant}"
                value = headers.get((limit.header or "").lower(), "")
                # an empty bucket is full again after this time
                name = self._names.account_name(owner, value, now, idle_s=limit.burst * limit.unit_s)
                which = "further values" if name == OTHERS else "this value"
                return f"{caller.tenant}{CHOSEN}{name}", f"{which} of {limit.header}"
            case "Route":
                return "", "all callers of this route"


def api_key_charges(limits: Sequence[KeyRateLimit], caller: Caller, usage: RequestUsage) -> list[Charge]:
    """One charge for each amount that the caller's API key has itself, over all routes."""
    return [
        # no name of an object has the sign
        Charge(
            key=f"$key/{limit.unit}/{resource}/{caller.api_key}",
            limit=_limit(limit, amount),
            resource=resource,
            amount=amount_to_reserve(usage, resource, _limit(limit, amount)),
            is_global=limit.scope == "Global",
            unit=limit.unit,
            whose="this API key on all routes",
        )
        for limit in limits
        for resource in RESOURCES
        if (amount := getattr(limit, resource)) is not None
    ]


def amount_to_reserve(usage: RequestUsage, resource: Resource, limit: Limit) -> float:
    """The amount to reserve. An estimate alone must not make a request larger than the whole bucket."""
    amount, known = usage.amount_of(resource), usage.known
    if known is None or amount <= limit.capacity:
        return amount
    return max(known.amount_of(resource), limit.capacity)


def _limit(limit: RateLimit | KeyRateLimit, amount: int) -> Limit:
    return Limit(rate=amount / limit.unit_s, capacity=amount * limit.burst)
