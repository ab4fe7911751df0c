# SPDX-License-Identifier: Apache-2.0
"""Rate limits of ModelRoutes: the buckets that a request is charged to, those in this process's memory, and refusals.

Clients choose some names that have a bucket each, such as the value of a header. They are hashed, and bounded in
number. Each name has an account of its own, but only so many of a tenant's at a time. Were there no bound, a client
would have a full allowance with every new name. Beyond the bound all new names share one account, until a name has not
been used for so long that its account would be full again: then a new one may take its place at no gain.

So a tenant with a limit L for each name is granted at most ``(MOST_NAMES + 1) * L``, and its names take the places of
nobody else's.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.admission.buckets import Bucket, Claim, Limit
from extproc.errors import LimitsUnavailable, RateLimited

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.admission.identity import Caller
    from extproc.api.admission import RateLimit
    from extproc.api.model_route import ModelRoute

# Of one tenant, for one limit or queue.
MOST_NAMES: Final = 1_000
# Tenants remembered, the least recently used forgotten first: about 100 KB each at most.
_MOST_OWNERS: Final = 10_000
_HASH_BYTES: Final = 16
# What all names beyond the bound are called. No hash is.
OTHERS: Final = "others"


class ChosenNames:
    """The names in use, by their owners."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def account(self, owner: str, name: str, now: float, *, idle_s: float) -> str:
        """The account of ``name``: its hash, the same in every process, or OTHERS.

        ``owner``: whose bound holds. ``idle_s``: unused for so long, a name may give up its place.
        """
        names = self._owners.get(owner)
        if names is None:
            names = self._owners[owner] = OrderedDict()
            if len(self._owners) > _MOST_OWNERS:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        # cryptographic: who can choose names must not be able to choose somebody else's account
        found = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
        if found not in names and len(names) >= MOST_NAMES:
            oldest = next(iter(names))
            if now - names[oldest] < idle_s:
                return OTHERS
            del names[oldest]
        names[found] = now
        names.move_to_end(found)
        return found


# In the key of a bucket, before a name that a client has chosen.
CHOSEN: Final = "/~"
Resource = Literal["requests", "input_tokens", "output_tokens", "total_tokens"]
RESOURCES: Final[tuple[Resource, ...]] = ("requests", "input_tokens", "output_tokens", "total_tokens")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: expected before it is dispatched, reported afterwards. ``is_guess``: of the output, at
    least.
    """

    input_tokens: float
    output_tokens: float
    is_guess: bool = False

    def of(self, resource: Resource) -> float:
        """The amount of ``resource`` in this usage."""
        match resource:
            case "requests":
                return 1.0
            case "input_tokens":
                return self.input_tokens
            case "output_tokens":
                return self.output_tokens
            case "total_tokens":
                return self.input_tokens + self.output_tokens


NO_USAGE: Final = Usage(0.0, 0.0)


class Charge(msgspec.Struct, frozen=True):
    """What a request needs of one bucket.

    ``key``: names the bucket. ``amount``: in units of ``resource``. ``is_global``: the bucket is in the shared store.
    ``needs_redis``: without the shared store the request is refused instead of charged to a local bucket.
    ``enough``: at this level it is granted even if it is more than that; the bucket is in debt then.
    """

    key: str
    limit: Limit
    resource: Resource
    amount: float
    is_global: bool = False
    needs_redis: bool = False
    enough: float = math.inf

    @property
    def needed(self) -> float:
        """The level that the bucket must have."""
        return min(self.amount, self.enough)


class Grant(msgspec.Struct, frozen=True):
    """A reservation in several buckets: for each charge the claim, and the level left in the bucket.

    ``is_global``: the reservation is in the store that all machines share. ``owed``: it was made without the store,
    which is to be charged for it: the charges as the store would have had them.
    """

    charges: Sequence[Charge]
    claims: Sequence[Claim]
    levels: Sequence[float]
    is_global: bool = False
    owed: Sequence[Charge] = ()


class StoreAway(msgspec.Struct, frozen=True):
    """The shared store does not answer. ``most_left``: for each charge, what its bucket has left at most."""

    most_left: Sequence[float]


class RouteLimits:
    """The limits of one ModelRoute."""

    def __init__(self, route: ModelRoute, names: ChosenNames | None = None) -> None:
        """``names``: the values of headers that are in use, kept over changes of the route."""
        self._route = route.metadata.key
        self._limits = route.spec.rate_limits
        self._names = ChosenNames() if names is None else names

    def charges(self, caller: Caller, headers: Mapping[str, str], usage: Usage, now: float = 0.0) -> list[Charge]:
        """One charge for each amount that the limits name."""
        return [
            Charge(
                key=f"{self._route}/{index}/{resource}/{subject}",
                limit=_limit(limit, amount),
                resource=resource,
                amount=_amount(usage, resource, _limit(limit, amount)),
                is_global=limit.scope == "Global",
                needs_redis=limit.scope == "Global" and limit.without_redis == "Refuse",
            )
            for index, limit in enumerate(self._limits)
            for subject in [self._subject(index, limit, caller, headers, now)]
            for resource in RESOURCES
            if (amount := getattr(limit, resource)) is not None
        ]

    def _subject(self, index: int, limit: RateLimit, caller: Caller, headers: Mapping[str, str], now: float) -> str:
        match limit.per:
            case "Tenant":
                return caller.tenant
            case "User":
                # two tenants may have users of the same name; a token may name a tenant with a slash
                tenant = caller.tenant.replace("%", "%25").replace("/", "%2F")
                return f"{tenant}/{caller.user}"
            case "ApiKey":
                return caller.api_key
            case "Header":
                owner = f"{self._route}/{index}/{caller.tenant}"
                value = headers.get((limit.header or "").lower(), "")
                # an empty bucket is full again after this time
                name = self._names.account(owner, value, now, idle_s=limit.burst * limit.unit_s)
                return f"{caller.tenant}{CHOSEN}{name}"
            case "Route":
                return ""


def refusal(charges: Sequence[Charge], levels: Sequence[float]) -> RateLimited:
    """The error for charges that buckets at ``levels`` cannot grant; it names the one with the longest wait."""
    shortfalls = [charge.needed - level for charge, level in zip(charges, levels, strict=True)]
    waits = [
        shortfall / charge.limit.rate if shortfall > 0 else 0.0
        for charge, shortfall in zip(charges, shortfalls, strict=True)
    ]
    worst = max(range(len(charges)), key=lambda index: waits[index])
    charge, headers = charges[worst], rate_limit_headers(charges, levels)
    resource, capacity = charge.resource.replace("_", " "), math.floor(charge.limit.capacity)
    kind = "requests" if charge.resource == "requests" else "tokens"
    if charge.needed > charge.limit.capacity:
        message = (
            f"The request needs {math.ceil(charge.amount)} {resource}, "
            f"and no more than {capacity} are granted at once; shorten the prompt or lower max_tokens."
        )
        return RateLimited(message, kind=kind, headers=headers, retry_after_s=None)
    wait_s = waits[worst]
    message = (
        f"Rate limit reached for {resource}: the request needs {math.ceil(charge.amount)}, "
        f"{max(0, math.floor(levels[worst]))} of {capacity} are left. Please try again in {_duration(wait_s)}."
    )
    return RateLimited(message, kind=kind, headers=headers, retry_after_s=max(1, math.ceil(wait_s)))


def unavailable() -> LimitsUnavailable:
    """The error while Redis does not answer, for limits with ``withoutRedis: Refuse``."""
    return LimitsUnavailable("Rate limits cannot be checked at the moment; try again soon.", retry_after_s=1)


def rate_limit_headers(charges: Sequence[Charge], levels: Sequence[float]) -> dict[str, str]:
    """OpenAI's ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``, each of the emptiest bucket."""
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens"):
        held = [
            (level / charge.limit.capacity, level, charge.limit)
            for charge, level in zip(charges, levels, strict=True)
            if (charge.resource == "requests") == (kind == "requests")
        ]
        if held:
            _, level, limit = min(held, key=lambda one: one[0])
            headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(limit.capacity))
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = _duration((limit.capacity - level) / limit.rate)
    return headers


def granted_headers(grants: Sequence[Grant]) -> dict[str, str]:
    """The same headers for granted reservations."""
    charges = [charge for grant in grants for charge in grant.charges]
    return rate_limit_headers(charges, [level for grant in grants for level in grant.levels])


def _amount(usage: Usage, resource: Resource, limit: Limit) -> float:
    """What to reserve. A guess of the output alone must not make a request larger than the whole bucket."""
    amount = usage.of(resource)
    if not usage.is_guess or resource not in {"output_tokens", "total_tokens"}:
        return amount
    known = usage.input_tokens if resource == "total_tokens" else 0.0
    return max(known, min(amount, limit.capacity))


def _limit(limit: RateLimit, amount: int) -> Limit:
    return Limit(rate=amount / limit.unit_s, capacity=amount * limit.burst)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 6m0s, 1h2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


# Buckets kept. The least recently used is dropped first and starts full again.
MAX_BUCKETS: Final = 100_000
_MAX_TABLES: Final = 10_000
# As many are told to a process that starts: a message of half a megabyte.
MOST_LEVELS: Final = 10_000


class BucketLevel(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a bucket has left."""

    key: str
    limit: Limit
    level: float


class _NamedBucket(Bucket, kw_only=True):
    """``limit``: as it was last asked for."""

    limit: Limit


class LocalLimits:
    """The buckets in the memory of this process."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _NamedBucket] = OrderedDict()
        # of names that clients have chosen, by what stands before the name: they can push out only their own kind
        self._chosen: OrderedDict[str, OrderedDict[str, _NamedBucket]] = OrderedDict()
        # how often levels have changed other than by inflow
        self.changes = 0

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets) + sum(len(table) for table in self._chosen.values())

    def reserve(self, charges: Sequence[Charge], now: float) -> Grant:
        """Reserve all charges or none; raises RateLimited."""
        buckets = [self._bucket(charge, now) for charge in charges]
        shortfalls = [bucket.shortfall(charge.needed) for charge, bucket in zip(charges, buckets, strict=True)]
        if any(shortfall > 0 for shortfall in shortfalls):
            raise refusal(charges, [bucket.level for bucket in buckets])
        self.changes += 1
        claims = [bucket.reserve(charge.amount) for charge, bucket in zip(charges, buckets, strict=True)]
        return Grant(charges, claims, [bucket.level for bucket in buckets])

    def settle(self, grant: Grant, used: Usage | None, now: float) -> None:
        """Settle with the actual usage; None refunds all: the request was never dispatched."""
        self.changes += 1
        for charge, claim in zip(grant.charges, grant.claims, strict=True):
            self._bucket(charge, now).settle(claim, 0.0 if used is None else used.of(charge.resource))

    def spent_elsewhere(self, key: str, limit: Limit, amount: float, now: float) -> None:
        """Another process on this machine has reserved ``amount``, or refunded it if negative."""
        charge = Charge(key, limit, "requests", 0.0)
        bucket = self._bucket(charge, now)
        self.changes += 1
        bucket.level = min(limit.capacity, bucket.level - amount)

    def levels(self, now: float) -> list[BucketLevel]:
        """Of all buckets that are not full, or of as many as were used last."""
        found = []
        for key, bucket in islice(self._last_used(), 2 * MOST_LEVELS):
            bucket.fill(bucket.limit, now)
            if bucket.level < bucket.limit.capacity:
                found.append(BucketLevel(key, bucket.limit, bucket.level))
            if len(found) == MOST_LEVELS:
                break
        return found

    def lower(self, told: Sequence[BucketLevel], now: float) -> None:
        """Another process knows these levels: no bucket stays above."""
        self.changes += 1
        for one in told:
            bucket = self._bucket(Charge(one.key, one.limit, "requests", 0.0), now)
            bucket.level = min(bucket.level, one.level)

    def _last_used(self) -> Iterator[tuple[str, _NamedBucket]]:
        yield from reversed(self._buckets.items())
        for table in reversed(self._chosen.values()):
            yield from reversed(table.items())

    def _bucket(self, charge: Charge, now: float) -> _NamedBucket:
        table, most = self._table(charge.key)
        bucket = table.get(charge.key)
        if bucket is None:
            bucket = table[charge.key] = _NamedBucket(charge.limit.capacity, now, limit=charge.limit)
            if len(table) > most:
                table.popitem(last=False)
        else:
            table.move_to_end(charge.key)
            bucket.limit = charge.limit
        bucket.fill(charge.limit, now)
        return bucket

    def _table(self, key: str) -> tuple[OrderedDict[str, _NamedBucket], int]:
        """Where the bucket of ``key`` is kept, and how many are kept there."""
        owner, mark, _ = key.rpartition(CHOSEN)
        if not mark:
            return self._buckets, MAX_BUCKETS
        table = self._chosen.get(owner)
        if table is None:
            table = self._chosen[owner] = OrderedDict()
            if len(self._chosen) > _MAX_TABLES:
                self._chosen.popitem(last=False)
        else:
            self._chosen.move_to_end(owner)
        # twice as many as have names here: other processes of this machine name some, too
        return table, 2 * MOST_NAMES
