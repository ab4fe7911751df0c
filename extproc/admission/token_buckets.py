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
was left and records it as a debt to the store.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEAST_SHRINK: Final = 1e-9
_ROUNDING: Final = 1e-6
# Most buckets whose levels are kept, and most with debts. The oldest are dropped first.
_MOST_KEYS: Final = 100_000
# An answer that is older than the last one by no more was overtaken by it; by more, and the store's clock was set back.
_LONGEST_OVERTAKING_S: Final = 10.0
# A window of a budget is kept so long after its end: requests that began in it are settled there. Answers are longer
# only in the background.
SETTLED_BY_S: Final = 86_400.0
T = TypeVar("T")


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The size of a bucket: ``rate`` in tokens a second, ``capacity`` in tokens.

    ``ends_at_s``: of a budget, which fills at rate 0: when its window ends, seconds since 1970; 0: it never does.
    """

    rate: float
    capacity: float
    ends_at_s: float = 0.0


class BucketLevel(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a bucket has left. ``reserved``: how many of them running requests of its sender have reserved;
    0 where ``level`` has that subtracted already.
    """

    key: str
    limit: Limit
    level: float
    reserved: float = 0.0


class Reservation(msgspec.Struct, frozen=True, array_like=True):
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

    def refill(self, limit: Limit, now: float) -> None:
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

    def reserve(self, amount: float) -> Reservation:
        """Take ``amount`` tokens and return the claim to settle later. The caller checks ``shortfall`` first."""
        amount = at_least_zero(amount)
        claim = Reservation(amount, self.shrink, self.epoch)
        self.level -= amount
        self.claims += amount
        return claim

    def settle(self, claim: Reservation, used: float) -> None:
        """End a reservation: the request used ``used`` tokens. Call ``fill`` first."""
        held = claim.amount * self.shrink / claim.shrink if claim.epoch == self.epoch else 0.0
        unused = claim.amount - at_least_zero(used)
        self.claims = at_least_zero(self.claims - held)
        self.level += min(unused, held)


def at_least_zero(amount: float) -> float:
    """``amount`` if it is finite and above 0, else 0."""
    # NaN compares as False
    return amount if 0.0 < amount < math.inf else 0.0


class BudgetWindowTables(Generic[T]):
    """A table for each calendar window of budgets, by when the window ends, in seconds since 1970. No entry is dropped
    before: it would be full again.
    """

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._tables: dict[float, T] = {}

    def __iter__(self) -> Iterator[T]:
        """All tables; they may change meanwhile."""
        return iter(tuple(self._tables.values()))

    def get(self, ends_at_s: float) -> T | None:
        """None if the window has no table."""
        return self._tables.get(ends_at_s)

    def get_or_create(self, ends_at_s: float) -> T:
        """A new one if the window has none."""
        found = self._tables.get(ends_at_s)
        if found is None:
            found = self._tables[ends_at_s] = self._new()
        return found

    def drop_ended(self, ended_by_s: float) -> list[T]:
        """Drop and return the tables of windows that had ended then."""
        return [self._tables.pop(one) for one in tuple(self._tables) if one <= ended_by_s]


class BucketReportToStore(msgspec.Struct, frozen=True):
    """This process's state of a bucket, in every message about it.

    ``most_left``: tokens that the bucket has at most, before what is owed. ``owed``: tokens that this process has used
    without the store, ever. ``told``: how many of these are already subtracted from ``most_left``. ``uncovered``: how
    many of the others inflow has not covered: in a long outage the store's bucket is full, and more inflow is lost.
    ``seen_at_s``: of the answer that ``most_left`` follows from, by the store's clock; 0: of none.
    """

    most_left: float
    owed: float = 0.0
    told: float = 0.0
    uncovered: float = math.inf
    seen_at_s: float = 0.0


class _Debt(msgspec.Struct):
    """Running totals of one bucket. ``sent``: the largest total that was stated; the store may have taken it.
    ``own``: the bucket as if only this process had used it since the store's last answer, without refunds.
    """

    limit: Limit
    owed: float
    sent: float
    told: float
    own: Bucket


class _Seen(msgspec.Struct, frozen=True):
    """A level, when its answer was read, and when it was so by the store's clock. ``limit``: of a budget."""

    level: float
    at_s: float
    store_at_s: float
    limit: Limit | None = None


class SharedStoreCopy:
    """One process's copy of the levels in the shared store, and its debts to them.

    Each answer of the store has the levels of its buckets. While it does not answer, a bucket has at most that level
    plus the inflow since: this is left for all processes together, and each grants its part of it.

    These grants are charged to the store exactly once, in whatever order the process's messages arrive and whichever
    answers are lost. Every message carries a Statement with running totals: all tokens that the process has used
    without the store, and how many of them are subtracted from its copy of the level. The store keeps the total that it
    was charged for, and charges the difference. A store that comes back empty begins with the process's copy of the
    level, and charges the tokens that are not subtracted from it. If another process has a lower copy from before, the
    difference is subtracted, too.

    A store that was away for longer than its bucket takes to fill has lost inflow that paid for a part of them. So it
    charges only what inflow has not covered, had this process been alone.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        # of budgets, by when their window ends: none is dropped before, which would refill it
        self._of_budgets: BudgetWindowTables[dict[str, _Seen]] = BudgetWindowTables(dict)
        # only buckets with debts that the store has not confirmed
        self._debts: OrderedDict[str, _Debt] = OrderedDict()
        # the totals of another debt begin here: above those of all debts that are forgotten
        self._begin = 0.0

    @property
    def has_debts(self) -> bool:
        """Whether anything is owed."""
        return bool(self._debts)

    def level_before_debts(self, key: str, limit: Limit, now: float) -> float:
        """Tokens that the bucket can have at most, before what is owed to it."""
        seen = self._last_seen(key, limit)
        if seen is None:
            return limit.capacity
        more = 0.0 if seen.limit is None else limit.capacity - seen.limit.capacity
        return min(limit.capacity, seen.level + more + limit.rate * max(0.0, now - seen.at_s))

    def record_overdraft(self, key: str, limit: Limit, amount: float, now: float) -> None:
        """Record tokens used of the bucket while the store was unreachable; negative: fewer than recorded before."""
        if not math.isfinite(amount):
            return
        debt = self._debts.get(key)
        if debt is None:
            if amount <= 0:
                return
            own = Bucket(self.level_before_debts(key, limit, now), now)
            debt = self._debts[key] = _Debt(limit, self._begin, self._begin, self._begin, own)
        debt.own.refill(limit, now)
        debt.own.level -= at_least_zero(amount)
        # a refund of what the store may have been charged already is lost: it may be as old as the outage
        debt.limit, debt.owed = limit, max(debt.sent, debt.owed + amount)
        if debt.owed <= debt.told:
            self._forget(key)
        if len(self._debts) > _MOST_KEYS:
            self._forget(next(iter(self._debts)))

    def unreported_debt(self, key: str, limit: Limit) -> float:
        """Of a budget, which does not fill: what ``most_left`` has and this process has used meanwhile."""
        debt = self._debts.get(key)
        return debt.owed - debt.told if debt is not None and limit.ends_at_s else 0.0

    def make_bucket_report(self, key: str, limit: Limit, now: float) -> BucketReportToStore:
        """The Statement for a message that is sent now."""
        most_left, debt, seen = (
            self.level_before_debts(key, limit, now),
            self._debts.get(key),
            self._last_seen(key, limit),
        )
        owed, told, uncovered = 0.0, 0.0, math.inf
        if debt is not None:
            owed = debt.sent = debt.owed
            told = debt.told
            if not limit.ends_at_s:
                debt.own.refill(limit, now)
                uncovered = max(0.0, most_left - debt.own.level)
        return BucketReportToStore(most_left, owed, told, uncovered, 0.0 if seen is None else seen.store_at_s)

    def cap_level(self, key: str, limit: Limit, level: float, now: float) -> None:
        """A budget has no more than ``level`` left, from another source than the store."""
        known = self._of_budgets.get_or_create(limit.ends_at_s)
        if key not in known or known[key].level > level:
            known[key] = _Seen(level, now, 0.0, limit)

    def on_store_answer(
        self,
        key: str,
        stated: BucketReportToStore,
        level: float,
        *,
        store_at_s: float,
        now: float,
        budget: Limit | None = None,
    ) -> None:
        """Record an answer: the store has charged what was ``stated``, and had ``level`` left at ``store_at_s`` by its
        clock. ``budget``: the bucket's limit, if it is that of a budget.
        """
        debt = self._debts.get(key)
        if debt is not None:
            debt.told = max(debt.told, stated.owed)
            if debt.owed <= debt.told:
                self._forget(key)
        if budget is not None and self._of_budgets.get(budget.ends_at_s) is None:
            self._of_budgets.drop_ended(store_at_s - SETTLED_BY_S)
        known: dict[str, _Seen] = self._seen if budget is None else self._of_budgets.get_or_create(budget.ends_at_s)
        seen = known.get(key)
        if seen is not None and 0 < seen.store_at_s - store_at_s < _LONGEST_OVERTAKING_S:
            return
        known[key] = _Seen(level, now, store_at_s, budget)
        if budget is not None:
            return
        if debt is not None:
            debt.own = Bucket(level - max(0.0, debt.owed - debt.told), now)
        self._seen.move_to_end(key)
        if len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def buckets_in_debt(self, most: int) -> list[tuple[str, Limit]]:
        """At most ``most`` buckets with debts, the least recently returned first."""
        keys = [key for key, _ in zip(self._debts, range(most), strict=False)]
        for key in keys:
            self._debts.move_to_end(key)
        return [(key, self._debts[key].limit) for key in keys]

    def budget_levels(self) -> list[tuple[str, Limit, float]]:
        """Of the budgets in the store, their levels as last known."""
        return [
            (key, one.limit, one.level)
            for known in self._of_budgets
            for key, one in known.items()
            if one.limit is not None
        ]

    def _last_seen(self, key: str, limit: Limit) -> _Seen | None:
        known = self._of_budgets.get(limit.ends_at_s) if limit.ends_at_s else self._seen
        return known.get(key) if known else None

    def _forget(self, key: str) -> None:
        self._begin = max(self._begin, self._debts.pop(key).owed)
