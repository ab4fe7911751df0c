# SPDX-License-Identifier: Apache-2.0
"""Rows to sums by hour and by day: what reports of long ranges are made of, and what outlives the rows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple

from controller.usage.rows import LEFT, REFUSED, REJECTED
from extproc.api.usage_log import OTHERS, UNROUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from controller.usage.rows import UsageRow

HOUR_S: Final = 3_600
DAY_S: Final = 86_400
# What sums are kept by; the first four are bounded for each day, the others are written by operators.
DIMENSIONS: Final = ("tenant", "key", "user", "model", "server", "route", "currency")
# Bounded for each tenant.
BOUNDED: Final = DIMENSIONS[1:4]
# What is summed: requests by how they ended and by flags, and amounts.
SUMS: Final = (
    *("requests", "refused", "rejected", "left", "failed", "unpriced", "estimated"),
    *("input", "cached", "written", "output", "reasoning", "cost_micros", "duration_us"),
)
# Those that are counted by the row's ``ended``.
ENDS: Final = {"refused": REFUSED, "rejected": REJECTED, "left": LEFT}
_ENDED: Final = {end: tuple(int(end == one) for one in ENDS.values()) for end in ENDS.values()}
_NO_END: Final = (0,) * len(ENDS)


class RollupKey(NamedTuple):
    """``start``: of the hour or the day, in seconds since 1970, UTC."""

    start: int
    tenant: str
    key: str
    user: str
    model: str
    server: str
    route: str
    currency: str


Increments = dict[RollupKey, tuple[int, ...]]


class NameCardinalityLimiter:
    """The names that each day keeps apart: ``most`` tenants, and of each tenant ``most`` keys, users and models. What
    comes after is ``(others)``.

    Of all tenants together there are four times ``most`` of each; beyond, a tenant has a thousandth of it. So no tenant
    takes the names of another one. ``load``: from the start of a day, what is kept already: dimension, tenant, name.
    """

    # Lines come in the order of requests' ends: of today, and of yesterday about midnight.
    _DAYS: Final = 4
    _OF_ALL: Final = 4
    _LEAST: Final = 1_000

    def __init__(self, most: int, load: Callable[[int], Iterable[tuple[str, str, str]]]) -> None:
        self._most = most
        self._load = load
        self._days: dict[int, _Names] = {}

    def bounded_tenant(self, day: int, name: str) -> str:
        """``name``, or ``(others)``."""
        return name if self._of(day).add_tenant(name, self._most) else OTHERS

    def bounded_name(self, day: int, dimension: str, tenant: str, name: str) -> str:
        """``name``, or ``(others)``. ``tenant``: as ``tenant`` gave it."""
        found = self._of(day)
        least = max(1, self._most // self._LEAST)
        most = self._most if found.count(dimension) < self._OF_ALL * self._most else least
        return name if not name or found.add(dimension, tenant, name, most) else OTHERS

    def clear_cached_names(self) -> None:
        """After a transaction that failed: its names are not kept."""
        self._days.clear()

    def _of(self, day: int) -> _Names:
        found = self._days.get(day)
        if found is None:
            self._days[day] = found = _Names()
            for dimension, tenant, name in self._load(day):
                found.add_tenant(tenant)
                if name:
                    found.add(dimension, tenant, name)
            while len(self._days) > self._DAYS:
                del self._days[min(one for one in self._days if one != day)]
        return found


class _Names:
    """Of one day."""

    def __init__(self) -> None:
        self._tenants: set[str] = set()
        self._of_tenants: dict[tuple[str, str], set[str]] = {}
        self._counts: Counter[str] = Counter()

    def count(self, dimension: str) -> int:
        return self._counts[dimension]

    def add_tenant(self, name: str, most: float = math.inf) -> bool:
        """Whether it is one of the names."""
        if name not in self._tenants and len(self._tenants) < most:
            self._tenants.add(name)
        return name in self._tenants

    def add(self, dimension: str, tenant: str, name: str, most: float = math.inf) -> bool:
        """Whether it is one of the names."""
        known = self._of_tenants.setdefault((dimension, tenant), set())
        if name not in known and len(known) < most:
            known.add(name)
            self._counts[dimension] += 1
        return name in known


def row_sums(row: UsageRow) -> tuple[int, ...]:
    """What one row adds, in the order of SUMS."""
    return (
        *(1, *_ENDED.get(row.ended, _NO_END), int(row.is_failed), int(row.is_unpriced), int(row.is_estimated)),
        *(row.input, row.cached, row.written, row.output, row.reasoning, row.cost_micros or 0, row.duration_us),
    )


def rollup_increments(rows: Iterable[UsageRow], names: NameCardinalityLimiter) -> tuple[Increments, Increments]:
    """What rows add to hours and to days, each sorted by key: writers that take rows in one order never deadlock."""
    # most rows of a batch are of few callers: names are looked up once for each of them
    groups: Increments = {}
    for row in rows:
        at_s = row.at_us // 1_000_000
        asked = row.model if row.server or row.route or row.status < 400 else UNROUTED
        names_of = (row.tenant, row.key, row.user, asked, row.server, row.route, row.currency)
        _add(groups, RollupKey(at_s - at_s % HOUR_S, *names_of), row_sums(row))
    hours: Increments = {}
    days: Increments = {}
    for one, added in groups.items():
        day = one.start - one.start % DAY_S
        tenant = names.bounded_tenant(day, one.tenant)
        kept = one._replace(
            tenant=tenant,
            key=names.bounded_name(day, "key", tenant, one.key),
            user=names.bounded_name(day, "user", tenant, one.user),
            model=names.bounded_name(day, "model", tenant, one.model),
        )
        _add(hours, kept, added)
        _add(days, kept._replace(start=day), added)
    return dict(sorted(hours.items())), dict(sorted(days.items()))


def _add(found: Increments, key: RollupKey, added: tuple[int, ...]) -> None:
    known = found.get(key)
    found[key] = added if known is None else tuple(map(add, known, added))
