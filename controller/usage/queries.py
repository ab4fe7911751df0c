# SPDX-License-Identifier: Apache-2.0
"""Reports as queries: parameters to a checked Query, and a Query to numbers. One code for all databases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import sqlalchemy as sa

from controller.usage.rollups import DAY_S, DIMENSIONS, ENDS, HOUR_S, SUMS
from controller.usage.store import SUMS_KEPT, horizons, positions, requests, rollups_day, rollups_hour
from extproc.api.calendar_windows import calendar_window, parse_time_zone, utc_offset_changes, utc_offset_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import tzinfo

MINUTE_S: Final = 60
WIDTHS: Final[Mapping[str, int]] = {"minute": MINUTE_S, "hour": HOUR_S, "day": DAY_S}
# Currencies have columns of their own.
_OF_SUMS: Final = tuple(one for one in DIMENSIONS if one != "currency")
# Sums go by the names of keys, and not by classes.
_OF_ROWS: Final = frozenset({"key_id", "service_class"})
GROUPS: Final = (*_OF_SUMS, *sorted(_OF_ROWS))
_PARAMETERS: Final = ("start", "end", "group_by", "tz", "limit", "page", "format", *GROUPS)
# Names that a request may list for one dimension.
_MOST_VALUES: Final = 100
_MOST_DAYS: Final = 3 * 366
# Reports by minute read rows.
_MOST_MINUTES: Final = 2 * 1440
_MOST_ROW_DAYS: Final = 32
DEFAULT_ROWS: Final = 1_000
MOST_ROWS: Final = 10_000
_LAST_PAGE: Final = 10_000_000
_MOST_NAME: Final = 256
_EPOCH: Final = re.compile(r"[0-9]{1,11}(\.[0-9]{1,9})?")
# Reports are of times between 1970 and 2200, with room for the clocks of all zones.
_LAST_S: Final = 7_258_118_400


class BadQuery(Exception):
    """A parameter cannot be used; the message says which, and what to write. ``parameter``: its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """``start`` to before ``end``, in seconds since 1970. ``width``: of the intervals of time, in ``zone``; None: all
    at once. ``groups``: further dimensions. ``filters``: values that each dimension may have. ``limit`` rows behind the
    first ``offset``.
    """

    start: int
    end: int
    width: Literal["minute", "hour", "day"] | None = None
    zone: str = "UTC"
    groups: tuple[str, ...] = ()
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    limit: int = DEFAULT_ROWS
    offset: int = 0


class ReportRow(msgspec.Struct, frozen=True):
    """``start``, ``end``: of its interval. ``names``: by dimension. ``sums``: by the names of SUMS, without cost.
    ``costs``: micro-units by currency.
    """

    start: int
    end: int
    names: Mapping[str, str]
    sums: Mapping[str, int]
    costs: Mapping[str, int]


class TableTimeRange(msgspec.Struct, frozen=True):
    """What a report reads of one table: ``start`` to before ``end``, in seconds since 1970."""

    table: sa.Table
    start: int
    end: int


class UsageReport(msgspec.Struct, frozen=True):
    """``source``: the tables that were read. ``next_offset``: where the next page begins, None if this is the last."""

    query: Query
    source: str
    currencies: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    next_offset: int | None


def parse_query(parameters: Mapping[str, Sequence[str]], now_s: float) -> Query:
    """A Query of the parameters of ``GET /v1/usage``; raises BadQuery. Without times: today, in the zone."""
    for name in parameters:
        if name not in _PARAMETERS:
            raise BadQuery(name[:40], f"is unknown; write some of {', '.join(_PARAMETERS)}")
    zone_name = single_value(parameters, "tz", "UTC")
    zone = checked_zone(zone_name)
    midnight = datetime.fromtimestamp(now_s, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    start = parse_instant("start", single_value(parameters, "start", ""), zone, default=midnight.timestamp())
    end = parse_instant("end", single_value(parameters, "end", ""), zone, default=now_s)
    if end >= int(now_s):
        # extend to the end of today, so that the query is aligned and can use sums
        end = max(end, interval_bounds("day", int(now_s), zone)[1])
    wanted = parse_names("group_by", parameters.get("group_by", ()), (*WIDTHS, *GROUPS))
    widths = [name for name in WIDTHS if name in wanted]
    if len(widths) > 1:
        raise BadQuery("group_by", f"takes one of {', '.join(WIDTHS)}")
    return check_query(
        Query(
            start=start,
            end=end,
            width=widths[0] if widths else None,  # type: ignore[arg-type] # a name of WIDTHS
            zone=zone_name,
            groups=tuple(name for name in GROUPS if name in wanted),
            filters=tuple((name, tuple(parameters[name])) for name in GROUPS if parameters.get(name)),
            limit=parse_number(parameters, "limit", DEFAULT_ROWS, most=MOST_ROWS, least=1),
            offset=parse_number(parameters, "page", 0, most=_LAST_PAGE, least=0),
        )
    )


def parse_names(parameter: str, texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those that ``texts`` list, with commas between them; raises BadQuery for one that is not ``known``."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise BadQuery(parameter, f"'{name[:40]}' is unknown; write some of {', '.join(known)}")
    return names


def check_query(query: Query) -> Query:
    """``query``, if it is bounded; raises BadQuery."""
    if query.end <= query.start:
        raise BadQuery("end", "is not after start")
    if query.end - query.start > _MOST_DAYS * DAY_S:
        raise BadQuery("start", f"a report covers at most {_MOST_DAYS} days; write a later start, or an earlier end")
    if query.width == "minute" and query.end - query.start > _MOST_MINUTES * MINUTE_S:
        raise BadQuery("start", f"a report by minute covers at most {_MOST_MINUTES // 1440} days; group by hour")
    if _needs_rows(query) and query.end - query.start > _MOST_ROW_DAYS * DAY_S:
        names = " or ".join(sorted(_OF_ROWS))
        raise BadQuery("start", f"a report by {names} covers at most {_MOST_ROW_DAYS} days; leave it out")
    for name, values in query.filters:
        if len(values) > _MOST_VALUES or any(len(value) > _MOST_NAME or not _is_text(value) for value in values):
            raise BadQuery(name, f"takes at most {_MOST_VALUES} names of {_MOST_NAME} characters")
    return query


def _needs_rows(query: Query) -> bool:
    return not _OF_ROWS.isdisjoint((*query.groups, *(name for name, _ in query.filters)))


def _is_text(value: str) -> bool:
    """Whether databases take it."""
    return "\0" not in value and value == value.encode(errors="replace").decode()


def checked_zone(name: str) -> tzinfo:
    """Raises BadQuery."""
    try:
        return parse_time_zone(name)
    except ValueError as error:
        raise BadQuery("tz", str(error)) from None


def parse_instant(parameter: str, text: str, zone: tzinfo, *, default: float) -> int:
    """Whole seconds since 1970: of such a number, or of a date or a time in ISO 8601, in ``zone`` if it has none."""
    if not text:
        return round(default)
    try:
        if _EPOCH.fullmatch(text):
            return _possible(int(float(text)))
        if len(text) > 40:
            raise ValueError
        found = datetime.fromisoformat(text)
        return _possible(int((found if found.tzinfo is not None else found.replace(tzinfo=zone)).timestamp()))
    except (ValueError, OverflowError):
        advice = "write 2026-11-23, 2026-11-23T08:00:00+01:00 or seconds since 1970"
        raise BadQuery(parameter, f"'{text[:40]}' is no time; {advice}") from None


def _possible(at: int) -> int:
    if not DAY_S <= at <= _LAST_S:
        raise ValueError
    return at


def single_value(parameters: Mapping[str, Sequence[str]], name: str, default: str) -> str:
    """The value of a parameter that may be there once; raises BadQuery."""
    values = parameters.get(name, ())
    if len(values) > 1:
        raise BadQuery(name, "is there more than once; write it once")
    return values[0] if values else default


def parse_number(parameters: Mapping[str, Sequence[str]], name: str, default: int, *, least: int, most: int) -> int:
    """The number of such a parameter; raises BadQuery."""
    text = single_value(parameters, name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise BadQuery(name, f"write a number from {least} to {most}")
    return int(text)


def intervals(query: Query) -> Iterator[tuple[int, int]]:
    """Start and end of each interval of a query with a width, in order; the first may begin before its start."""
    zone, width = parse_time_zone(query.zone), query.width or "day"
    at = interval_bounds(width, query.start, zone)[0]
    while at < query.end:
        start, end = interval_bounds(width, at, zone)
        yield start, end
        at = end


def interval_bounds(width: str, at: int, zone: tzinfo) -> tuple[int, int]:
    """Of the minute, hour or day of ``at``. A day has as many hours as clocks give it."""
    if width == "day":
        window = calendar_window(at, "Day", zone)
        return window.start_s, window.end_s
    seconds = WIDTHS[width]
    local = at + utc_offset_s(at, zone)
    start = at - local % seconds
    return start, start + seconds


def choose_tables(query: Query) -> tuple[TableTimeRange, ...]:
    """The smallest tables that answer exactly: sums by day, by hour with rows of what is before and after whole hours,
    or the rows themselves.
    """
    rows = (TableTimeRange(requests, query.start, query.end),)
    if _needs_rows(query):
        return rows
    changes = utc_offset_changes(parse_time_zone(query.zone), query.start, query.end)
    aligned = (query.start, query.end)
    by_day = query.width is None or (query.width == "day" and not any(ahead for _, ahead in changes))
    by_hour = query.width is None or not any(ahead % HOUR_S or at % HOUR_S for at, ahead in changes)
    if by_day and not any(at % DAY_S for at in aligned):
        return (TableTimeRange(rollups_day, query.start, query.end),)
    first, last = query.start + -query.start % HOUR_S, query.end - query.end % HOUR_S
    if not by_hour or query.width == "minute" or first >= last:
        return rows
    found = (
        TableTimeRange(requests, query.start, first),
        TableTimeRange(rollups_hour, first, last),
        TableTimeRange(requests, last, query.end),
    )
    return tuple(part for part in found if part.start < part.end)


def run_query(connection: sa.Connection, query: Query) -> UsageReport:
    """The numbers; raises BadQuery where they need rows or sums that are not kept any more, SQLAlchemyError."""
    parts = choose_tables(query)
    for part in parts:
        _check_is_kept(connection, query, part)
    currencies = tuple(sorted({one for part in parts for one in _currencies(connection, query, part)}))
    statement = _grouped(query, currencies, parts[0])
    keys = (() if query.width is None else ("interval",)) + query.groups
    numbers = [sa.text(str(index)) for index in range(1, len(keys) + 1)]
    if len(parts) > 1:
        every = sa.union_all(*(_grouped(query, currencies, part) for part in parts)).subquery()
        # a part without rows has no costs
        sums = [sa.func.sum(sa.func.coalesce(one, 0)).label(one.name) for one in every.c if one.name not in keys]
        statement = sa.select(*(every.c[name] for name in keys), *sums).group_by(*numbers)
    statement = statement.order_by(*numbers).limit(query.limit + 1).offset(query.offset)
    found = [dict(one) for one in connection.execute(statement).mappings() if one["sum_requests"]]
    rows = tuple(_row(one, query, currencies) for one in found[: query.limit])
    source = "+".join(dict.fromkeys(part.table.name for part in parts))
    return UsageReport(
        query, source, currencies, rows, query.offset + query.limit if len(found) > query.limit else None
    )


def _check_is_kept(connection: sa.Connection, query: Query, part: TableTimeRange) -> None:
    """Raises BadQuery."""
    has_rows = part.table is requests
    what = requests.name if has_rows else SUMS_KEPT
    since_s = connection.execute(sa.select(horizons.c.at_s).where(horizons.c.what == what)).scalar()
    if since_s is not None and part.start < since_s:
        since = datetime.fromtimestamp(since_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        without = f"no {' and no '.join(sorted(_OF_ROWS))}" if _needs_rows(query) else "whole hours and no minutes"
        other = f", or {without}" if has_rows else ""
        raise BadQuery("start", f"{'rows' if has_rows else 'sums'} are kept since {since}: write a later start{other}")


def _grouped(query: Query, currencies: Sequence[str], part: TableTimeRange) -> sa.Select[Any]:
    """The sums of one table, by the query's dimensions."""
    table = part.table
    time = sa.cast(table.c.at_us / 1_000_000, sa.BigInteger) if table is requests else table.c.start
    keys = [table.c[name].label(name) for name in query.groups]
    if query.width is not None:
        keys.insert(0, _interval(query, time, query.width).label("interval"))
    sums = [_sum(table, name).label(f"sum_{name}") for name in SUMS if name != "cost_micros"]
    costs = [
        sa.func.sum(sa.case((table.c.currency == currency, table.c.cost_micros), else_=0)).label(f"cost_{index}")
        for index, currency in enumerate(currencies)
    ]
    numbers = (sa.text(str(index)) for index in range(1, len(keys) + 1))
    return sa.select(*keys, *sums, *costs).where(*_conditions(query, part)).group_by(*numbers)


def _conditions(query: Query, part: TableTimeRange) -> list[sa.ColumnElement[bool]]:
    table = part.table
    time, unit = (table.c.at_us, 1_000_000) if table is requests else (table.c.start, 1)
    return [
        time >= part.start * unit,
        time < part.end * unit,
        *(table.c[name].in_(values) for name, values in query.filters),
    ]


def stored_until_by_source(connection: sa.Connection) -> dict[str, float]:
    """By the name of each log of the store: every request that ended before it is stored. Raises SQLAlchemyError."""
    query = sa.select(positions.c.source, positions.c.until_us).where(positions.c.until_us.is_not(None))
    return {source: until_us / 1_000_000 for source, until_us in connection.execute(query)}


def _currencies(connection: sa.Connection, query: Query, part: TableTimeRange) -> list[str]:
    currency = part.table.c.currency
    wanted = sa.select(currency).where(*_conditions(query, part), currency != "").distinct().limit(100)
    return list(connection.execute(wanted).scalars())


def _interval(query: Query, time: sa.ColumnElement[int], width: str) -> sa.ColumnElement[Any]:
    """The number of the interval, in local time, since 1970."""
    changes = utc_offset_changes(parse_time_zone(query.zone), query.start, query.end)
    ahead: Any = sa.literal_column(str(changes[0][1]))
    if len(changes) > 1:
        later: list[Any] = [(time >= at, sa.literal_column(str(seconds))) for at, seconds in reversed(changes[1:])]
        ahead = sa.case(*later, else_=ahead)
    local: sa.ColumnElement[Any] = time + ahead
    if width != "day":
        # the hour that comes twice is two intervals: what they are numbered by is not local time
        seconds = WIDTHS[width]
        return time - local % sa.literal_column(str(seconds))
    return local - local % sa.literal_column(str(DAY_S))


def _sum(table: sa.Table, name: str) -> sa.ColumnElement[int]:
    if table is not requests:
        return sa.func.coalesce(sa.func.sum(table.c[name]), 0)
    if name == "requests":
        return sa.func.count()
    if name in ENDS:
        return sa.func.coalesce(sa.func.sum(sa.case((table.c.ended == ENDS[name], 1), else_=0)), 0)
    flag = table.c.get(f"is_{name}")
    return sa.func.coalesce(sa.func.sum(table.c[name] if flag is None else sa.case((flag, 1), else_=0)), 0)


def _row(found: Mapping[str, Any], query: Query, currencies: Sequence[str]) -> ReportRow:
    start, end = query.start, query.end
    if query.width is not None:
        start, end = _bounds_of(query, int(found["interval"]))
    return ReportRow(
        start=start,
        end=end,
        names={name: found[name] for name in query.groups},
        sums={name: int(found[f"sum_{name}"]) for name in SUMS if name != "cost_micros"},
        costs={
            currency: cost for index, currency in enumerate(currencies) if (cost := int(found[f"cost_{index}"] or 0))
        },
    )


def _bounds_of(query: Query, interval: int) -> tuple[int, int]:
    zone = parse_time_zone(query.zone)
    if query.width != "day":
        return interval_bounds(query.width or "hour", interval, zone)
    # as local midnight, in the number of a clock in UTC
    noon = datetime.fromtimestamp(interval, UTC).replace(tzinfo=zone, hour=12)
    return interval_bounds("day", round(noon.timestamp()), zone)
