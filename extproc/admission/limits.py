"""Rate limits of ModelRoutes: what a request asks of which buckets, and what its caller is told."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.admission.buckets import Bucket, Claim, Limit
from extproc.errors import LimitsUnavailable, RateLimited

if TYPE_CHECKING:
    from extproc.admission.identity import Caller
    from extproc.config.admission import RateLimit
    from extproc.config.types import ModelRoute

# Buckets that are kept; the longest unused is forgotten first, and begins full again.
MOST_BUCKETS: Final = 100_000

Resource = Literal["requests", "input_tokens", "output_tokens", "total_tokens"]
_RESOURCES: Final[tuple[Resource, ...]] = ("requests", "input_tokens", "output_tokens", "total_tokens")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: before it goes as expected, afterwards as reported."""

    input_tokens: float
    output_tokens: float

    def of(self, resource: Resource) -> float:
        """How much of a resource that is."""
        match resource:
            case "requests":
                return 1.0
            case "input_tokens":
                return self.input_tokens
            case "output_tokens":
                return self.output_tokens
            case "total_tokens":
                return self.input_tokens + self.output_tokens


NOTHING: Final = Usage(0.0, 0.0)


class Ask(msgspec.Struct, frozen=True):
    """What a request wants of one bucket."""

    key: str
    limit: Limit
    resource: Resource
    amount: float
    is_global: bool = False
    needs_redis: bool = False


class Grant(msgspec.Struct, frozen=True):
    """What was reserved: for each ask its claim, and the level that is left."""

    asks: Sequence[Ask]
    claims: Sequence[Claim]
    levels: Sequence[float]
    # by the store that all machines share
    is_global: bool = False


class RouteLimits:
    """The limits of one ModelRoute."""

    def __init__(self, route: ModelRoute) -> None:
        self._route = route.metadata.name
        self._limits = route.spec.rate_limits

    def asks(self, caller: Caller, headers: Mapping[str, str], usage: Usage) -> list[Ask]:
        """One for every number in the limits."""
        return [
            Ask(
                key=f"{self._route}/{index}/{resource}/{who}",
                limit=_limit(limit, amount),
                resource=resource,
                amount=usage.of(resource),
                is_global=limit.scope == "Global",
                needs_redis=limit.scope == "Global" and limit.without_redis == "Refuse",
            )
            for index, limit in enumerate(self._limits)
            for who in [_who(limit, caller, headers)]
            for resource in _RESOURCES
            if (amount := getattr(limit, resource)) is not None
        ]


class LocalLimits:
    """The buckets of this process."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def reserve(self, asks: Sequence[Ask], now: float) -> Grant:
        """All or nothing; raises RateLimited."""
        buckets = [self._bucket(ask, now) for ask in asks]
        lacks = [bucket.lacks(ask.amount) for ask, bucket in zip(asks, buckets, strict=True)]
        if any(lack > 0 for lack in lacks):
            raise refusal(asks, [bucket.level for bucket in buckets])
        claims = [bucket.take(ask.amount) for ask, bucket in zip(asks, buckets, strict=True)]
        return Grant(asks, claims, [bucket.level for bucket in buckets])

    def settle(self, grant: Grant, used: Usage | None, now: float) -> None:
        """What it was in the end; None: it never went, and counts as no request either."""
        for ask, claim in zip(grant.asks, grant.claims, strict=True):
            self._bucket(ask, now).settle(claim, 0.0 if used is None else used.of(ask.resource))

    def spent_elsewhere(self, key: str, limit: Limit, amount: float, now: float) -> None:
        """Another process of this machine has taken it, or, below 0, given it back."""
        ask = Ask(key, limit, "requests", 0.0)
        bucket = self._bucket(ask, now)
        bucket.level = min(limit.capacity, bucket.level - amount)

    def _bucket(self, ask: Ask, now: float) -> Bucket:
        bucket = self._buckets.get(ask.key)
        if bucket is None:
            bucket = self._buckets[ask.key] = Bucket(ask.limit.capacity, now)
            if len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(ask.key)
        bucket.fill(ask.limit, now)
        return bucket


def refusal(asks: Sequence[Ask], levels: Sequence[float]) -> RateLimited:
    """What a caller is told whose asks the buckets at these levels do not grant: of the one that takes longest."""
    lacks = [ask.amount - level for ask, level in zip(asks, levels, strict=True)]
    waits = [lack / ask.limit.rate if lack > 0 else 0.0 for ask, lack in zip(asks, lacks, strict=True)]
    worst = max(range(len(asks)), key=lambda index: waits[index])
    ask, headers = asks[worst], rate_limit_headers(asks, levels)
    what, capacity = ask.resource.replace("_", " "), math.floor(ask.limit.capacity)
    kind = "requests" if ask.resource == "requests" else "tokens"
    if ask.amount > ask.limit.capacity:
        message = (
            f"The request needs {math.ceil(ask.amount)} {what}, and no more than {capacity} are granted at once; "
            "shorten the prompt or lower max_tokens."
        )
        return RateLimited(message, kind=kind, headers=headers, retry_after_s=None)
    wait_s = waits[worst]
    message = (
        f"Rate limit reached for {what}: the request needs {math.ceil(ask.amount)}, "
        f"{max(0, math.floor(levels[worst]))} of {capacity} are left. Please try again in {_duration(wait_s)}."
    )
    return RateLimited(message, kind=kind, headers=headers, retry_after_s=max(1, math.ceil(wait_s)))


def unavailable() -> LimitsUnavailable:
    """The answer while Redis is away, where a limit is not to be granted without it."""
    return LimitsUnavailable("Rate limits cannot be checked at the moment; try again soon.", retry_after_s=1)


def rate_limit_headers(asks: Sequence[Ask], levels: Sequence[float]) -> dict[str, str]:
    """OpenAI's ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``, each of the bucket that is emptiest."""
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens"):
        held = [
            (level / ask.limit.capacity, level, ask.limit)
            for ask, level in zip(asks, levels, strict=True)
            if (ask.resource == "requests") == (kind == "requests")
        ]
        if held:
            _, level, limit = min(held, key=lambda one: one[0])
            headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(limit.capacity))
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = _duration((limit.capacity - level) / limit.rate)
    return headers


def granted_headers(grants: Sequence[Grant]) -> dict[str, str]:
    """The same of what was granted."""
    asks = [ask for grant in grants for ask in grant.asks]
    return rate_limit_headers(asks, [level for grant in grants for level in grant.levels])


def _limit(limit: RateLimit, amount: int) -> Limit:
    return Limit(rate=amount / limit.unit_s, capacity=amount * limit.burst)


def _who(limit: RateLimit, caller: Caller, headers: Mapping[str, str]) -> str:
    match limit.per:
        case "Tenant":
            return caller.tenant
        case "User":
            # two tenants may have users of the same name
            return f"{caller.tenant}/{caller.user}"
        case "ApiKey":
            return caller.api_key
        case "Header":
            return headers.get((limit.header or "").lower(), "")
        case "Route":
            return ""


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 6m0s, 1h2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
