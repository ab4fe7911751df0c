# SPDX-License-Identifier: Apache-2.0
"""What a process knows of the buckets in the shared store, and what it owes them for grants of its own while the store was away.

Each answer of the store says how full its buckets are. While it does not answer, they cannot be fuller than that and the inflow
since: so much is left for all processes together, and each grants its part of it. What it has granted so is charged to the
store with the first question that it answers again. A store that comes back empty is told how full its buckets were.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.buckets import Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.admission.limits import Charge

# Buckets that are remembered, and owed to. The oldest are forgotten first.
_MOST_KEYS: Final = 100_000


class Debt(msgspec.Struct, frozen=True):
    """Tokens that are to be taken from a bucket of the store, whatever its level is."""

    key: str
    limit: Limit
    amount: float


class _Seen(msgspec.Struct, frozen=True):
    level: float
    at_s: float


class StoreMemory:
    """Of one process."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._debts: OrderedDict[str, Debt] = OrderedDict()

    @property
    def has_debts(self) -> bool:
        """Whether anything is owed."""
        return bool(self._debts)

    def saw(self, charges: Sequence[Charge], levels: Sequence[float], now: float) -> None:
        """The store has said how full its buckets are."""
        for charge, level in zip(charges, levels, strict=True):
            self._seen[charge.key] = _Seen(level, now)
            self._seen.move_to_end(charge.key)
            if len(self._seen) > _MOST_KEYS:
                self._seen.popitem(last=False)

    def most_left(self, key: str, limit: Limit, now: float) -> float:
        """Tokens that the bucket can have at most, before what is owed to it."""
        seen = self._seen.get(key)
        if seen is None:
            return limit.capacity
        return min(limit.capacity, seen.level + limit.rate * max(0.0, now - seen.at_s))

    def owe(self, key: str, limit: Limit, amount: float) -> None:
        """So many tokens were used of the bucket without the store; negative: fewer than was said before."""
        held = self._debts.pop(key, None)
        owed = amount + (0.0 if held is None else held.amount)
        # a refund of what the store has been charged already is lost: it may be as old as the outage
        if owed > 0:
            self._debts[key] = Debt(key, limit, owed)
        if len(self._debts) > _MOST_KEYS:
            self._debts.popitem(last=False)

    def take_debt(self, key: str) -> float:
        """What is owed to the bucket. The caller charges it to the store, or gives it back by ``owe``."""
        debt = self._debts.pop(key, None)
        return 0.0 if debt is None else debt.amount

    def take_debts(self, most: int) -> list[Debt]:
        """The same for as many buckets, the oldest debts first."""
        return [self._debts.popitem(last=False)[1] for _ in range(min(most, len(self._debts)))]
