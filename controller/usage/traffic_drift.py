# SPDX-License-Identifier: Apache-2.0
"""Drift: whether the requests of late, or their answers, are other than those before.

Two periods are compared by the population stability index (PSI), the sum of (p - q) ln(p / q) over buckets, with the
share p of the requests of late and q of those before. Its bounds are those of Siddiqi, Credit Risk Scorecards, 2006:
below 0.1 nothing has changed, from 0.25 on much has. Buckets of numbers are half powers of two wide. Each bucket gets
half a request in both periods, so that a bucket which was empty counts for something finite.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import sqlalchemy as sa

from controller.usage.store import requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHIFTED: Final = 0.1
CHANGED: Final = 0.25
# What is compared: numbers of tokens, microseconds, and how answers ended.
_NUMBERS: Final = ("input", "output", "ttft_us", "duration_us")
_KINDS: Final = ("finish", "ended")
_BOUNDS: Final = tuple(sorted({round(2 ** (half / 2)) for half in range(69)}))
_SMOOTHING: Final = 0.5
# Names of finishes are the engines' own.
_MOST_BUCKETS: Final = 100_000


class ComparedPeriods(msgspec.Struct, frozen=True):
    """In seconds since 1970: ``before`` to before ``start``, and that to before ``end``."""

    before: int
    start: int
    end: int


class ColumnDrift(msgspec.Struct, frozen=True):
    """One column of one group. ``names``: by dimension. ``requests_before``, ``requests``: of both periods.
    ``usual_before``, ``usual``: the upper bound of the bucket with the median, or the most frequent kind.
    """

    names: Mapping[str, str]
    column: str
    requests_before: int
    requests: int
    usual_before: str
    usual: str
    psi: float

    @property
    def verdict(self) -> str:
        """``same``, ``shifted`` or ``changed``."""
        return "changed" if self.psi >= CHANGED else "shifted" if self.psi >= SHIFTED else "same"


def psi(before: Mapping[Any, int], now: Mapping[Any, int]) -> float:
    """The index of two histograms: 0 if they have the same shape."""
    buckets = before.keys() | now.keys()
    totals = [sum(one.values()) + _SMOOTHING * len(buckets) for one in (before, now)]
    shares = [
        tuple((one.get(bucket, 0) + _SMOOTHING) / total for one, total in zip((before, now), totals, strict=True))
        for bucket in buckets
    ]
    return sum((p - q) * math.log(p / q) for q, p in shares)


def find_drift(
    connection: sa.Connection, periods: ComparedPeriods, groups: Sequence[str], *, least: int
) -> tuple[list[ColumnDrift], int]:
    """The largest first, of groups with at least ``least`` requests in both periods; and how many groups have fewer.
    Requests that extproc refused are left out. Raises SQLAlchemyError.
    """
    found: list[ColumnDrift] = []
    small = set[tuple[str, ...]]()
    for column in (*_NUMBERS, *_KINDS):
        for names, (before, now) in _histograms(connection, periods, groups, column).items():
            requests_before, requests_now = sum(before.values()), sum(now.values())
            if min(requests_before, requests_now) < least:
                # streamed answers alone have a TTFT: another column may have enough
                if column == _NUMBERS[0]:
                    small.add(names)
                continue
            usual_before, usual = (_usual(one, is_number=column in _NUMBERS) for one in (before, now))
            group = dict(zip(groups, names, strict=True))
            found.append(
                ColumnDrift(group, column, requests_before, requests_now, usual_before, usual, psi(before, now))
            )
    found.sort(key=lambda one: (-one.psi, tuple(one.names.values()), one.column))
    return found, len(small)


def _histograms(
    connection: sa.Connection, periods: ComparedPeriods, groups: Sequence[str], column: str
) -> Mapping[tuple[str, ...], tuple[dict[Any, int], dict[Any, int]]]:
    """By the names of each group: requests by bucket, before and of late."""
    value = requests.c[column]
    bucket: sa.ColumnElement[Any] = value
    if column in _NUMBERS:
        bucket = sa.case(*((value <= bound, sa.literal_column(str(bound))) for bound in _BOUNDS), else_=_BOUNDS[-1] * 2)
    is_late = sa.case((requests.c.at_us >= periods.start * 1_000_000, 1), else_=0)
    keys = [*(requests.c[name].label(name) for name in groups), is_late.label("is_late"), bucket.label("bucket")]
    numbers = (sa.text(str(index)) for index in range(1, len(keys) + 1))
    statement = (
        sa.select(*keys, sa.func.count().label("requests"))
        .where(
            requests.c.at_us >= periods.before * 1_000_000,
            requests.c.at_us < periods.end * 1_000_000,
            requests.c.refused == "",
            value.is_not(None),
        )
        .group_by(*numbers)
        .limit(_MOST_BUCKETS)
    )
    found: dict[tuple[str, ...], tuple[dict[Any, int], dict[Any, int]]] = defaultdict(lambda: ({}, {}))
    for *names, late, one, count in connection.execute(statement):
        found[tuple(names)][late][one] = count
    return found


def _usual(counts: Mapping[Any, int], *, is_number: bool) -> str:
    if not is_number:
        return str(max(counts, key=lambda one: (counts[one], one)))
    half, seen = sum(counts.values()) / 2, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= half:
            return str(bucket)
    return ""


def drift_table(found: Sequence[ColumnDrift], groups: Sequence[str]) -> Iterator[list[str]]:
    """A table: a header, and a line for each."""
    yield [*groups, "column", "requests_before", "requests", "usual_before", "usual", "psi", "verdict"]
    for one in found:
        counts = str(one.requests_before), str(one.requests)
        yield [*one.names.values(), one.column, *counts, one.usual_before, one.usual, f"{one.psi:.3f}", one.verdict]
