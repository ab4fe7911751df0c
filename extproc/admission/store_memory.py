# SPDX-License-Identifier: Apache-2.0
"""What a process knows of the buckets in the shared store, and what it owes them.

It owes what it granted by itself while the store was away.

Each answer of the store says how full its buckets are. While it does not answer, they cannot be fuller than that and
the inflow since: so much is left for all processes together, and each grants its part of it.

What a process has granted so is charged to the store exactly once, in whatever order its messages arrive and whichever
answers are lost. Every message carries a Statement with running totals: all that the process has used without the
store, and how much of it is in the level that it knows. The store keeps the total that it was charged for, and takes
what is new. A store that comes back empty begins with the level that the process knows, and takes what that level does
not have.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import msgspec

from extproc.admission.buckets import Limit

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
    """Of one process."""

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
