# SPDX-License-Identifier: Apache-2.0
"""The buckets of rate limits and budgets in the memory of this process."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.budgets import BudgetAccountAllocator
from extproc.admission.limit_refusals import limit_refusal
from extproc.admission.rate_limits import CHOSEN, MOST_NAMES, Charge, Grant
from extproc.admission.token_buckets import SETTLED_BY_S, Bucket, BucketLevel, BudgetWindowTables, Limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from extproc.admission.rate_limits import RequestUsage

# Buckets kept. The least recently used is dropped first and starts full again.
MAX_BUCKETS: Final = 100_000
_MAX_TABLES: Final = 10_000
# Most that are sent to a process that starts: a message of half a megabyte.
MOST_LEVELS: Final = 10_000
_ROUNDING: Final = 1e-6


class _NamedBucket(Bucket, kw_only=True):
    """``limit``: as it was last asked for."""

    limit: Limit


class LocalLimits:
    """The buckets in the memory of this process."""

    def __init__(self, accounts: BudgetAccountAllocator | None = None) -> None:
        """``accounts``: the callers that have buckets of budgets."""
        self._accounts = BudgetAccountAllocator() if accounts is None else accounts
        self._buckets: OrderedDict[str, _NamedBucket] = OrderedDict()
        # of names that clients have chosen, by the prefix of the name: they can evict only their own kind
        self._chosen: OrderedDict[str, OrderedDict[str, _NamedBucket]] = OrderedDict()
        # of budgets: none is dropped before its window has ended, and requests that began in it have
        self._budgets: BudgetWindowTables[dict[str, _NamedBucket]] = BudgetWindowTables(dict)
        # of budgets, what running requests of other processes have reserved: by process and key
        self._reserved: dict[str, dict[str, tuple[Limit, float]]] = {}
        # how often levels have changed other than by inflow
        self.changes = 0

    @property
    def bucket_count(self) -> int:
        """How many there are."""
        tables = (self._buckets, *self._chosen.values(), *self._budgets)
        return sum(len(table) for table in tables)

    def reserve(
        self, charges: Sequence[Charge], now: float, unseen_amount: Callable[[str], float] = lambda _: 0.0
    ) -> Grant:
        """Reserve all charges or none; raises RateLimited or BudgetSpent. The grant's charges name the buckets that
        were charged. ``unseen_amount``: what others have taken of a bucket that its level has not subtracted.
        """
        owned, buckets, levels, is_short = [], [], [], False
        for charge in charges:
            key, bucket = self._bucket(charge.key, charge.limit, now)
            taken = unseen_amount(key)
            is_short = is_short or bucket.shortfall(charge.needed_level + taken) > 0
            owned.append(charge if key == charge.key else msgspec.structs.replace(charge, key=key))
            buckets.append(bucket)
            levels.append(bucket.level - taken)
        if is_short:
            raise limit_refusal(owned, levels)
        self.changes += 1
        claims = []
        for index, bucket in enumerate(buckets):
            claim = bucket.reserve(owned[index].amount)
            claims.append(claim)
            levels[index] -= claim.amount
        return Grant(owned, claims, levels)

    def settle(self, grant: Grant, used: RequestUsage | None, now: float) -> None:
        """Settle with the actual usage; None refunds all: the request was never dispatched."""
        self.changes += 1
        for charge, claim in zip(grant.charges, grant.claims, strict=True):
            key, limit = charge.key, charge.limit
            bucket = self._budget_bucket(key, limit) if limit.ends_at_s else self._rate_bucket(key, limit, now)
            # a budget's window that has ended long ago is forgotten, and its use with it
            if bucket is not None:
                bucket.settle(claim, 0.0 if used is None else used.amount_of(charge.resource))

    def spend_unreserved(self, key: str, limit: Limit, amount: float, now: float) -> None:
        """``amount`` was used, or refunded if negative, and nothing is reserved for it here."""
        _, bucket = self._bucket(key, limit, now)
        self.changes += 1
        bucket.level = min(limit.capacity, bucket.level - amount)

    def on_remote_spend(
        self, origin: str, key: str, limit: Limit, amount: float, now: float, *, reserved: float = 0.0
    ) -> None:
        """The process ``origin`` on this machine has taken ``amount``, or refunded it if negative. ``reserved``: by how
        much what its running requests have reserved has changed.
        """
        if reserved:
            known = self._reserved_by(origin, key)
            # a reservation that is not known here is not in the level either: it was given back, or never heard of
            amount += max(0.0, -reserved - known)
            self._set_reserved(origin, key, limit, known + reserved)
        self.spend_unreserved(key, limit, amount, now)

    def on_process_gone(self, origin: str, now: float) -> None:
        """The process ``origin`` is gone: what its requests have used is charged when it becomes known."""
        for key, (limit, amount) in self._reserved.pop(origin, {}).items():
            self.spend_unreserved(key, limit, -amount, now)

    def merge_levels(self, origin: str, levels: Sequence[BucketLevel], now: float) -> None:
        """Lower the buckets to the ``levels`` of the process ``origin``, and to what is reserved of them."""
        self.changes += 1
        for one in levels:
            _, bucket = self._bucket(one.key, one.limit, now)
            level = one.level
            if one.limit.ends_at_s:
                bucket.level -= one.reserved - self._reserved_by(origin, one.key)
                self._set_reserved(origin, one.key, one.limit, one.reserved)
                level -= bucket.claims + self._reserved_elsewhere(one.key)
            bucket.level = min(bucket.level, level)

    def levels(self, now: float) -> list[BucketLevel]:
        """The levels of all buckets that are not full: of budgets all, of rate limits the most recently used ones. From
        those of budgets nothing is subtracted that is only reserved: the processes that read them may outlive those
        that have reserved it.
        """
        found = [
            BucketLevel(key, bucket.limit, bucket.level + bucket.claims + self._reserved_elsewhere(key), bucket.claims)
            for key, bucket in self._budget_buckets()
            if bucket.level < bucket.limit.capacity
        ]
        most = MOST_LEVELS + len(found)
        for key, bucket in islice(self._last_used(), 2 * MOST_LEVELS):
            bucket.refill(bucket.limit, now)
            if bucket.level < bucket.limit.capacity:
                found.append(BucketLevel(key, bucket.limit, bucket.level))
            if len(found) == most:
                break
        return found

    def budget_levels(self) -> Iterator[BucketLevel]:
        """The levels of the buckets of budgets that are not full. Requests may come between two of them: to read
        200,000 takes a quarter of a second.
        """
        return (
            BucketLevel(key, bucket.limit, bucket.level)
            for key, bucket in self._budget_buckets()
            if bucket.level < bucket.limit.capacity
        )

    def _budget_buckets(self) -> list[tuple[str, _NamedBucket]]:
        return [one for window in self._budgets for one in window.items()]

    def _reserved_by(self, origin: str, key: str) -> float:
        found = self._reserved.get(origin, {}).get(key)
        return 0.0 if found is None else found[1]

    def _reserved_elsewhere(self, key: str) -> float:
        return sum(found[1] for one in self._reserved.values() if (found := one.get(key)) is not None)

    def _set_reserved(self, origin: str, key: str, limit: Limit, amount: float) -> None:
        if amount > _ROUNDING:
            self._reserved.setdefault(origin, {})[key] = limit, amount
        elif (known := self._reserved.get(origin)) is not None:
            known.pop(key, None)

    def level_of(self, charge: Charge) -> float:
        """What a budget has left, with nothing changed."""
        key, limit = charge.key, charge.limit
        bucket = self._budget_bucket(key, limit)
        if bucket is None:
            bucket = self._budget_bucket(self._accounts.account_key(key, limit.ends_at_s), limit)
        return limit.capacity if bucket is None else bucket.level

    def forget_ended(self, wall_s: float) -> None:
        """Forget the windows of budgets that have ended some time ago: requests that run still have begun in them."""
        self._accounts.forget_ended(wall_s)
        self._budgets.drop_ended(wall_s - SETTLED_BY_S)

    def recent_levels(self, now: float, most: int) -> list[BucketLevel]:
        """The levels of the buckets that were used last, at most ``most``; nothing changes."""
        return [
            BucketLevel(key, one.limit, min(one.limit.capacity, one.level + one.limit.rate * (now - one.filled_at_s)))
            for key, one in islice(self._last_used(), most)
        ]

    def cap_levels(self, levels: Sequence[BucketLevel], now: float) -> None:
        """Lower the buckets to levels from another source."""
        self.changes += 1
        for one in levels:
            _, bucket = self._bucket(one.key, one.limit, now)
            bucket.level = min(bucket.level, one.level)

    def _last_used(self) -> Iterator[tuple[str, _NamedBucket]]:
        yield from reversed(self._buckets.items())
        for table in reversed(self._chosen.values()):
            yield from reversed(table.items())

    def _bucket(self, key: str, limit: Limit, now: float) -> tuple[str, _NamedBucket]:
        """The bucket of ``key``, and its own key: of a budget beyond the bounds of accounts, that of a shared one."""
        if not limit.ends_at_s:
            return key, self._rate_bucket(key, limit, now)
        window = self._budgets.get_or_create(limit.ends_at_s)
        bucket = window.get(key)
        if bucket is None:
            key = self._accounts.account_key(key, limit.ends_at_s)
            bucket = window.get(key)
        if bucket is None:
            bucket = window[key] = _NamedBucket(limit.capacity, now, limit=limit)
        elif bucket.limit is not limit:
            # a larger maximum gives its callers more at once, and a smaller one takes from them
            bucket.level += limit.capacity - bucket.limit.capacity
            bucket.limit = limit
        return key, bucket

    def _rate_bucket(self, key: str, limit: Limit, now: float) -> _NamedBucket:
        table, most = self._table(key)
        bucket = table.get(key)
        if bucket is None:
            bucket = table[key] = _NamedBucket(limit.capacity, now, limit=limit)
            if len(table) > most:
                table.popitem(last=False)
        else:
            table.move_to_end(key)
            bucket.limit = limit
        bucket.refill(limit, now)
        return bucket

    def _budget_bucket(self, key: str, limit: Limit) -> _NamedBucket | None:
        window = self._budgets.get(limit.ends_at_s)
        return None if window is None else window.get(key)

    def _table(self, key: str) -> tuple[OrderedDict[str, _NamedBucket], int]:
        """The table of the bucket of ``key``, and the most buckets that it may have."""
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
        # twice as many as this process has names: other processes of this machine have names, too
        return table, 2 * MOST_NAMES
