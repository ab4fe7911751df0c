# SPDX-License-Identifier: Apache-2.0
"""What tenants have waiting, and who gives way where no more may wait: the tenant with most makes room for others

A bound alone would be first come, first served: one tenant that fills it keeps all others out. Here whoever is alone
may use all of it, and a tenant that has less takes the place of the newest request of the one that has most, until they
have the same.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.core.record import Record
    from extproc.core.types import Arrival

# For one that comes: a large body is not worth a crowd of small ones, nor the time to look for them.
_MOST_GIVE_WAY: Final = 16


class Bounds(msgspec.Struct, frozen=True):
    """How many may wait, and how many bytes their bodies may have together."""

    requests: int
    bytes: int


class Holdings:
    """By tenant: how many requests wait, and the size of their bodies."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self._requests = Counter[str]()
        self._bytes = Counter[str]()

    def add(self, record: Record) -> None:
        """It waits from now on."""
        tenant, size = record.arrived.caller.tenant, len(record.arrived.body)
        self.requests += 1
        self.bytes += size
        self._requests[tenant] += 1
        self._bytes[tenant] += size

    def remove(self, record: Record) -> None:
        """It waits no more."""
        tenant, size = record.arrived.caller.tenant, len(record.arrived.body)
        self.requests -= 1
        self.bytes -= size
        self._requests[tenant] -= 1
        self._bytes[tenant] -= size
        if not self._requests[tenant]:
            del self._requests[tenant], self._bytes[tenant]

    def give_way(self, arrival: Arrival, bounds: Bounds, waiting: Iterable[Record]) -> Sequence[Record] | None:
        """Those of ``waiting`` that have to go so that ``arrival`` fits; None if it has no right to a place.

        ``waiting``: the newest first.
        """
        if self._fits(arrival, bounds, ()):
            return ()
        if len(arrival.body) > bounds.bytes:
            return None
        by_bytes = self.requests < bounds.requests
        held, mine = (self._bytes, len(arrival.body)) if by_bytes else (self._requests, 1)
        largest, most = max(held.items(), key=lambda item: item[1], default=("", 0))
        mine += held[arrival.caller.tenant]
        # it would have less than the newcomer's tenant then: nothing to look for among thousands that wait
        if largest == arrival.caller.tenant or most <= mine:
            return None
        # of those, first what matters least, and then what has waited least
        theirs = (one for one in waiting if one.arrived.caller.tenant == largest)
        going: list[Record] = []
        for one in heapq.nsmallest(_MOST_GIVE_WAY, theirs, lambda one: (one.arrived.priority, -one.arrived_at_s)):
            most -= len(one.arrived.body) if by_bytes else 1
            if most < mine:
                return None
            going.append(one)
            if self._fits(arrival, bounds, going):
                return going
        return None

    def _fits(self, arrival: Arrival, bounds: Bounds, without: Sequence[Record]) -> bool:
        size = self.bytes + len(arrival.body) - sum(len(one.arrived.body) for one in without)
        return self.requests - len(without) < bounds.requests and size <= bounds.bytes
