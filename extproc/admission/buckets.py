# SPDX-License-Identifier: Apache-2.0
"""Token buckets with reservations: unused tokens are refunded, the limit always holds.

A bucket holds at most ``capacity`` tokens and fills at ``rate`` tokens a second. In any t seconds, no more than
``rate * t + capacity`` tokens can be used. A request reserves what it may need when it arrives; when it ends, the
reservation is settled and the unused part is refunded.

A plain refund would break the limit. Had the unused tokens never been reserved, the bucket might have been full in
the meantime, and the inflow would have been lost. So a bucket also keeps ``claims``, the sum of all possible refunds,
and maintains the invariant

    level + claims <= capacity

When inflow would violate it, all claims shrink in the same proportion: a claim is worth the reserved amount times the
bucket's current ``shrink`` over its ``shrink`` at the reservation.

The level is then never above that of an ideal bucket from which each request takes, on arrival, exactly what it will
use. Proof: let T be the ideal level. ``T >= level + sum(min(claim, unused))`` survives a reservation (both sides lose
what is used), inflow (the right side is at most the capacity and grows no faster) and a settlement (a claim becomes
level).

A request that used more than it reserved has the difference taken at its end. The level may become negative; inflow
pays the debt off.

The store that processes share has buckets of its own. While it does not answer, each process grants its part of what
was left and owes it to the store.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import msgspec

_LEAST_SHRINK: Final = 1e-9
_ROUNDING: Final = 1e-6


class Limit(msgspec.Struct, frozen=True):
    """The size of a bucket: ``rate`` in tokens a second, ``capacity`` in tokens."""

    rate: float
    capacity: float


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """One reservation.

    ``amount``: tokens reserved. ``shrink``, ``epoch``: the bucket's values at the reservation.
    """

    amount: float
    shrink: float
    epoch: int


class Bucket(msgspec.Struct):
    """The state of one limit for one caller.

    ``level``: tokens available, negative if in debt. ``filled_at_s``: the time up to which inflow is counted.
    ``claims``: the sum of all possible refunds, in tokens. ``shrink``: the product of all reductions of claims in
    this epoch.
    """

    level: float
    filled_at_s: float
    claims: float = 0.0
    shrink: float = 1.0
    # increases whenever all claims have shrunk to nothing; a claim of an earlier epoch is worth 0
    epoch: int = 0

    def fill(self, limit: Limit, now: float) -> None:
        """Add the inflow up to ``now``."""
        self.level = min(limit.capacity, self.level + limit.rate * max(0.0, now - self.filled_at_s))
        self.filled_at_s = max(now, self.filled_at_s)
        left = limit.capacity - self.level
        if self.claims > left:
            self.shrink *= left / self.claims
            self.claims = left
            if self.shrink < _LEAST_SHRINK or left <= 0:
                self.shrink, self.claims, self.epoch = 1.0, 0.0, self.epoch + 1

    def shortfall(self, amount: float) -> float:
        """Tokens missing to reserve ``amount``; 0 or less if there are enough."""
        return amount - self.level - _ROUNDING

    def reserve(self, amount: float) -> Claim:
        """Take ``amount`` tokens and return the claim to settle later. The caller checks ``shortfall`` first."""
        amount = at_least_zero(amount)
        claim = Claim(amount, self.shrink, self.epoch)
        self.level -= amount
        self.claims += amount
        return claim

    def settle(self, claim: Claim, used: float) -> None:
        """End a reservation: the request used ``used`` tokens. Call ``fill`` first."""
        held = claim.amount * self.shrink / claim.shrink if claim.epoch == self.epoch else 0.0
        self.claims = max(0.0, self.claims - held)
        self.level += min(claim.amount - at_least_zero(used), held)


def at_least_zero(amount: float) -> float:
    """An amount as buckets may see it: never below 0, never infinite, never NaN. All others are none at all."""
    return amount if math.isfinite(amount) and amount > 0 else 0.0


# Buckets that are remembered, and owed to. The oldest are forgotten first.
_MOST_KEYS: Final = 100_000
# An answer that is older than the last one by no more was overtaken by it; by more, and the store's clock was set back.
_LONGEST_OVERTAKING_S: Final = 10.0


class Statement(msgspec.Struct, frozen=True):
    """What every message says of its bucket.

    ``most_left``: tokens that the bucket has at most, before what is owed. ``owed``: tokens that this process has used
    without the store, ever. ``told``: how many of these ``most_left`` is without already.
    """

    most_left: float
    owed: float = 0.0
    told: float = 0.0


class _Debt(msgspec.Struct):
    """Running totals of one bucket. ``sent``: the largest total that was stated; the store may have taken it."""

    limit: Limit
    owed: float
    sent: float
    told: float


class _Seen(msgspec.Struct, frozen=True):
    """A level, when its answer was read, and when it was so by the store's clock."""

    level: float
    at_s: float
    store_at_s: float


class StoreMemory:
    """What one process knows of the buckets in the shared store, and what it owes them.

    Each answer of the store says how full its buckets are. While it does not answer, they cannot be fuller than that
    and the inflow since: so much is left for all processes together, and each grants its part of it.

    What a process has granted so is charged to the store exactly once, in whatever order its messages arrive and
    whichever answers are lost. Every message carries a Statement with running totals: all that the process has used
    without the store, and how much of it is in the level that it knows. The store keeps the total that it was charged
    for, and takes what is new. A store that comes back empty begins with the level that the process knows, and takes
    what that level does not have.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        # only buckets that the store has not been told all of
        self._debts: OrderedDict[str, _Debt] = OrderedDict()
        # the totals of another debt begin here: above those of all debts that are forgotten
        self._begin = 0.0

    @property
    def has_debts(self) -> bool:
        """Whether anything is owed."""
        return bool(self._debts)

    def most_left(self, key: str, limit: Limit, now: float) -> float:
        """Tokens that the bucket can have at most, before what is owed to it."""
        seen = self._seen.get(key)
        if seen is None:
            return limit.capacity
        return min(limit.capacity, seen.level + limit.rate * max(0.0, now - seen.at_s))

    def owe(self, key: str, limit: Limit, amount: float) -> None:
        """So many tokens were used of the bucket without the store; negative: fewer than was said before."""
        if not math.isfinite(amount):
            return
        debt = self._debts.get(key)
        if debt is None:
            if amount <= 0:
                return
            debt = self._debts[key] = _Debt(limit, self._begin, self._begin, self._begin)
        # a refund of what the store may have been charged already is lost: it may be as old as the outage
        debt.limit, debt.owed = limit, max(debt.sent, debt.owed + amount)
        if debt.owed <= debt.told:
            self._forget(key)
        if len(self._debts) > _MOST_KEYS:
            self._forget(next(iter(self._debts)))

    def state(self, key: str, limit: Limit, now: float) -> Statement:
        """For a message that is sent now."""
        most_left, debt = self.most_left(key, limit, now), self._debts.get(key)
        if debt is None:
            return Statement(most_left)
        debt.sent = debt.owed
        return Statement(most_left, debt.owed, debt.told)

    def answered(self, key: str, stated: Statement, level: float, *, store_at_s: float, now: float) -> None:
        """The store has taken what was ``stated``, and had so much left by its clock at ``store_at_s``."""
        debt = self._debts.get(key)
        if debt is not None:
            debt.told = max(debt.told, stated.owed)
            if debt.owed <= debt.told:
                self._forget(key)
        seen = self._seen.get(key)
        if seen is not None and 0 < seen.store_at_s - store_at_s < _LONGEST_OVERTAKING_S:
            return
        self._seen[key] = _Seen(level, now, store_at_s)
        self._seen.move_to_end(key)
        if len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def owing(self, most: int) -> list[tuple[str, Limit]]:
        """As many buckets that something is owed to, those first that have waited longest for their turn."""
        keys = [key for key, _ in zip(self._debts, range(most), strict=False)]
        for key in keys:
            self._debts.move_to_end(key)
        return [(key, self._debts[key].limit) for key in keys]

    def _forget(self, key: str) -> None:
        self._begin = max(self._begin, self._debts.pop(key).owed)
