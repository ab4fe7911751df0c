"""Token buckets that settle: what was reserved and not used comes back, and no window ever sees more than the limit.

A bucket holds ``capacity`` and fills at ``rate``, so what is taken within any time t is at most ``rate * t + capacity``. A request
takes what it may need when it comes, and returns the rest when it is over. To return it simply would break the promise: had
the rest never been taken, the bucket might have been full meanwhile and what flowed in would have run over. So a bucket also
keeps its ``claims``, the sum of what may yet come back, and holds to

    level + claims <= capacity

While it fills, claims give way, all in the same proportion: each is what was reserved, times ``shrink`` now over ``shrink``
at the reservation. Then the level is never above that of a bucket from which every request took, when it came, just what
it used. Proof: call that level T. ``T >= level + sum(min(claim, unused))`` holds at a reservation (both sides lose what is used),
while filling (the right side is at most the capacity, and grows no faster) and at a settlement (a claim turns into level).

Whoever used more than was reserved has the difference taken later, if need be below 0: a debt that time pays off.
"""

from __future__ import annotations

from typing import Final

import msgspec

_LEAST_SHRINK: Final = 1e-9
_ROUNDING: Final = 1e-6


class Limit(msgspec.Struct, frozen=True):
    """A bucket's measures: ``rate`` a second, and ``capacity``."""

    rate: float
    capacity: float


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """What a reservation took, and how the bucket was then."""

    amount: float
    shrink: float
    epoch: int


class Bucket(msgspec.Struct):
    """One limit of one caller. A new one is full."""

    level: float
    filled_at_s: float
    claims: float = 0.0
    shrink: float = 1.0
    # begins anew when nothing is left of any claim
    epoch: int = 0

    def fill(self, limit: Limit, now: float) -> None:
        """Until ``now``."""
        self.level = min(limit.capacity, self.level + limit.rate * max(0.0, now - self.filled_at_s))
        self.filled_at_s = max(now, self.filled_at_s)
        left = limit.capacity - self.level
        if self.claims > left:
            self.shrink *= left / self.claims
            self.claims = left
            if self.shrink < _LEAST_SHRINK or left <= 0:
                self.shrink, self.claims, self.epoch = 1.0, 0.0, self.epoch + 1

    def shortfall(self, amount: float) -> float:
        """What is missing for ``amount``; 0 or less if it is there."""
        return amount - self.level - _ROUNDING

    def reserve(self, amount: float) -> Claim:
        """Reserve it."""
        claim = Claim(amount, self.shrink, self.epoch)
        self.level -= amount
        self.claims += amount
        return claim

    def settle(self, claim: Claim, used: float) -> None:
        """The request took ``used`` in the end. The bucket must have been filled until now."""
        held = claim.amount * self.shrink / claim.shrink if claim.epoch == self.epoch else 0.0
        self.claims = max(0.0, self.claims - held)
        self.level += min(claim.amount - used, held)
