# SPDX-License-Identifier: Apache-2.0
"""The shared store of limits, as the scripts in Redis keep it (a test compares them), in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.admission.limit_refusals import limit_refusal
from extproc.admission.rate_limits import Charge, Grant, RequestUsage
from extproc.admission.token_buckets import Bucket

if TYPE_CHECKING:
    from extproc.admission.token_buckets import BucketReportToStore
    from extproc.refusals import RateLimited


class Store:
    """All buckets, and what each process has paid into them."""

    def __init__(self) -> None:
        self.is_there = True
        self.buckets: dict[str, Bucket] = {}
        self._paid: dict[tuple[str, str], float] = {}
        # when each bucket was born, and with how much it began
        self._born: dict[str, tuple[float, float]] = {}
        self._first_epoch = 0

    def forget(self) -> None:
        """It comes back empty."""
        self.buckets.clear()
        self._paid.clear()

    def bucket(self, process: str, charge: Charge, stated: BucketReportToStore, now: float) -> Bucket:
        """Filled, and charged with what the process owes."""
        key, limit = charge.key, charge.limit
        if key not in self.buckets:
            self._first_epoch += 1_000_000
            began = min(limit.capacity, stated.most_left)
            self.buckets[key], self._born[key] = Bucket(began, now, epoch=self._first_epoch), (now, began)
        bucket = self.buckets[key]
        bucket.refill(limit, now)
        born_at_s, began = self._born[key]
        inflow = limit.rate * (now - born_at_s)
        less = min(limit.capacity, began + inflow) - stated.most_left
        if 0 < stated.seen_at_s < born_at_s and less > 0:
            bucket.level -= less
            self._born[key] = born_at_s, stated.most_left - inflow
        paid = self._paid.get((key, process), 0.0)
        debt = max(0.0, stated.owed - max(paid, stated.told))
        bucket.level -= min(debt, stated.uncovered)
        if debt > 0:
            self._paid[key, process] = stated.owed
        return bucket

    def reserve(
        self, process: str, charge: Charge, stated: BucketReportToStore, now: float
    ) -> tuple[Grant | RateLimited, float]:
        """What it answers, and the level that is left."""
        bucket = self.bucket(process, charge, stated, now)
        if bucket.shortfall(charge.amount) > 0:
            return limit_refusal([charge], [bucket.level]), bucket.level
        claim = bucket.reserve(charge.amount)
        return Grant([charge], [claim], [bucket.level], is_global=True), bucket.level

    def settle(
        self, process: str, grant: Grant, used: RequestUsage | None, stated: BucketReportToStore, now: float
    ) -> float:
        """The level that is left."""
        (charge,), (claim,) = grant.charges, grant.claims
        bucket = self.bucket(process, charge, stated, now)
        bucket.settle(claim, 0.0 if used is None else used.amount_of(charge.resource))
        return bucket.level
