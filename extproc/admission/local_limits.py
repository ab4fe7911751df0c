# SPDX-License-Identifier: Apache-2.0
"""The buckets of rate limits in the memory of this process."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.buckets import Bucket, Limit
from extproc.admission.chosen_names import MOST_NAMES
from extproc.admission.limits import CHOSEN, Charge, Grant, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.admission.limits import Usage

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
