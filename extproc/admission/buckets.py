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
"""

from __future__ import annotations

import math
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
