# SPDX-License-Identifier: Apache-2.0
"""A UsageReport as JSON, CSV or a table, and as the pages of OpenAI's usage and costs APIs. Pure but for the query."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.usage.queries import (
    BadQuery,
    Query,
    check_query,
    interval_bounds,
    intervals,
    parse_instant,
    parse_number,
    single_value,
)
from controller.usage.rollups import DAY_S, HOUR_S, SUMS
from extproc.api.calendar_windows import parse_time_zone
from extproc.api.pricing import TokenCounts
from extproc.api.quantities import money_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.usage.queries import ReportRow, UsageReport

    # What runs a query.
    Runner = Callable[[Query], UsageReport]

_TOKENS: Final = frozenset(TokenCounts.__struct_fields__)
_COUNTS: Final = tuple(name for name in SUMS if name != "cost_micros")
# A spreadsheet takes text that begins with these for a formula.
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")
# OpenAI's names of the dimensions, and of ours.
_GROUPS: Final = {"project_id": "tenant", "user_id": "user", "api_key_id": "key", "model": "model"}
_FILTERS: Final = {"project_ids": "tenant", "user_ids": "user", "api_key_ids": "key", "models": "model"}
_COST_GROUPS: Final = {"project_id": "tenant", "line_item": "model"}
# By bucket_width: our name, seconds, buckets of a page by default and at most.
_WIDTHS: Final[Mapping[str, tuple[Literal["minute", "hour", "day"], int, int, int]]] = {
    "1m": ("minute", 60, 60, 1440),
    "1h": ("hour", HOUR_S, 24, 168),
    "1d": ("day", DAY_S, 7, 31),
}
_COST_WIDTH: Final[tuple[Literal["day"], int, int, int]] = ("day", DAY_S, 7, 180)
_PAGE: Final = "page_"
_PAGES: Final = re.compile(rf"{_PAGE}[0-9]{{1,11}}")
_NO_SOURCES: Final[Mapping[str, float]] = {}
# Of one page: buckets times groups.
_MOST_RESULTS: Final = 50_000


def _shown_name(name: str) -> str:
    return f"{name}_tokens" if name in _TOKENS else name


def as_json(report: UsageReport, until_s: float | None = None, sources: Mapping[str, float] = _NO_SOURCES) -> bytes:
    """The body of ``GET /v1/usage``. ``until_s``: every request of this gateway that ended before it is in the report;
    ``sources``: the same for each log of the store.
    """
    query = report.query
    return msgspec.json.encode(
        {
            "object": "usage",
            "start": _time(query.start, query.zone),
            "end": _time(query.end, query.zone),
            "group_by": [*([query.width] if query.width else []), *query.groups],
            "data": [
                {
                    **_place(row, query),
                    **{_shown_name(name): number for name, number in row.sums.items()},
                    "cost_micros": row.costs,
                }
                for row in report.rows
            ],
            "next_page": None if report.next_offset is None else str(report.next_offset),
            "until_s": until_s,
            **({"sources": [{"source": name, "until_s": at} for name, at in sources.items()]} if sources else {}),
        }
    )


def as_csv(report: UsageReport) -> str:
    """With a header, and a column of cost for each currency."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header, rows = _cells(report)
    writer.writerow([_shown_name(name) for name in header])
    writer.writerows([_inert(cell) for cell in row] for row in rows)
    return out.getvalue()


def as_table(report: UsageReport) -> str:
    """For a terminal: columns that are zero everywhere are left out, costs have a point."""
    header, rows = _cells(report)
    costs = {f"cost_micros_{currency}": currency for currency in report.currencies}
    kept = [
        index
        for index, name in enumerate(header)
        if name == "requests" or isinstance(rows[0][index] if rows else "", str) or any(row[index] for row in rows)
    ]
    lines = [[costs.get(header[index], header[index]) for index in kept]]
    lines.extend(
        [money_text(int(row[index])) if header[index] in costs else str(row[index]) for index in kept] for row in rows
    )
    return align_columns(lines, [isinstance(rows[0][index], str) if rows else True for index in kept])


def align_columns(lines: Sequence[Sequence[str]], is_left: Sequence[bool]) -> str:
    """Columns of the same width, each to the left or to the right. Cells are made printable."""
    shown = [[_printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in shown) for column in range(len(is_left))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in shown
    )


def _cells(report: UsageReport) -> tuple[list[str], list[list[str | int]]]:
    query = report.query
    header = [*(["start", "end"] if query.width else []), *query.groups, *_COUNTS]
    rows: list[list[str | int]] = []
    for row in report.rows:
        cells: list[str | int] = [*_place(row, query).values(), *(row.sums[name] for name in _COUNTS)]
        rows.append([*cells, *(row.costs.get(currency, 0) for currency in report.currencies)])
    return [*header, *(f"cost_micros_{currency}" for currency in report.currencies)], rows


def _place(row: ReportRow, query: Query) -> dict[str, str]:
    """Its interval and its names."""
    times = {"start": _time(row.start, query.zone), "end": _time(row.end, query.zone)} if query.width else {}
    return {**times, **row.names}


def _time(at: int, zone: str) -> str:
    return datetime.fromtimestamp(at, parse_time_zone(zone)).isoformat()


def _printable(text: str) -> str:
    """Names are tenants' own: nothing of them reaches a terminal as a command."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _inert(cell: str | int) -> str | int:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULAS) else cell


def completions_page(
    parameters: Mapping[str, Sequence[str]], owned: Mapping[str, str], now_s: float, run: Runner
) -> dict[str, Any]:
    """``GET /v1/organization/usage/completions``; raises BadQuery. ``owned``: filters that the caller cannot leave."""
    width = single_value(parameters, "bucket_width", "1d")
    if width not in _WIDTHS:
        raise BadQuery("bucket_width", f"write one of {', '.join(_WIDTHS)}")
    wanted = _listed(parameters, "group_by")
    groups = _groups(wanted, {**_GROUPS, "batch": ""})
    query, buckets, following = _page(parameters, owned, now_s, _WIDTHS[width], groups, _FILTERS)
    nulls = dict.fromkeys([*_GROUPS, "batch", "service_tier"])
    found: dict[int, list[dict[str, Any]]] = {}
    for row in _complete(run(query)).rows:
        names = {theirs: row.names[ours] for theirs, ours in _GROUPS.items() if ours in row.names}
        found.setdefault(row.start, []).append(
            {
                "object": "organization.usage.completions.result",
                "input_tokens": row.sums["input"],
                "input_cached_tokens": row.sums["cached"],
                "output_tokens": row.sums["output"],
                "input_audio_tokens": 0,
                "output_audio_tokens": 0,
                "num_model_requests": row.sums["requests"] - row.sums["refused"],
                **nulls,
                **names,
            }
        )
    return _answer(buckets, found, following)


def costs_page(
    parameters: Mapping[str, Sequence[str]], owned: Mapping[str, str], now_s: float, run: Runner
) -> dict[str, Any]:
    """``GET /v1/organization/costs``; raises BadQuery. Amounts are in whole units, as OpenAI writes them."""
    if single_value(parameters, "bucket_width", "1d") != "1d":
        raise BadQuery("bucket_width", "costs have buckets of 1d alone")
    groups = _groups(_listed(parameters, "group_by"), _COST_GROUPS)
    query, buckets, following = _page(
        parameters, owned, now_s, _COST_WIDTH, groups, {"project_ids": "tenant", "api_key_ids": "key"}
    )
    found: dict[int, list[dict[str, Any]]] = {}
    for row in _complete(run(query)).rows:
        names = {theirs: row.names.get(ours) for theirs, ours in _COST_GROUPS.items()}
        found.setdefault(row.start, []).extend(
            {
                "object": "organization.costs.result",
                "amount": {"value": micros / 1_000_000, "currency": currency.lower()},
                **names,
            }
            for currency, micros in row.costs.items()
        )
    return _answer(buckets, found, following)


def _page(
    parameters: Mapping[str, Sequence[str]],
    owned: Mapping[str, str],
    now_s: float,
    width: tuple[Literal["minute", "hour", "day"], int, int, int],
    groups: tuple[str, ...],
    filters: Mapping[str, str],
) -> tuple[Query, list[tuple[int, int]], int | None]:
    """The query of one page, its buckets, and where the next page begins."""
    name, seconds, default, most = width
    if not single_value(parameters, "start_time", ""):
        raise BadQuery("start_time", "is required; write seconds since 1970")
    start = parse_instant("start_time", single_value(parameters, "start_time", ""), UTC, default=0)
    end = parse_instant("end_time", single_value(parameters, "end_time", ""), UTC, default=now_s + 1)
    limit = parse_number(parameters, "limit", default, least=1, most=most)
    page = single_value(parameters, "page", "")
    if page:
        if not _PAGES.fullmatch(page):
            raise BadQuery("page", "write the next_page of the page before")
        start = max(start, parse_instant("page", page.removeprefix(_PAGE), UTC, default=0))
    first = interval_bounds(name, start, UTC)[0]
    last = first + limit * seconds
    whole = interval_bounds(name, max(end - 1, first), UTC)[1]
    narrowed = {ours: _listed(parameters, theirs) for theirs, ours in filters.items()}
    query = check_query(
        Query(
            start=first,
            end=min(last, whole),
            width=name,
            groups=groups,
            filters=restrict_to_owner([(ours, tuple(values)) for ours, values in narrowed.items() if values], owned),
            limit=_MOST_RESULTS,
        )
    )
    return query, list(intervals(query)), last if last < whole else None


def restrict_to_owner(
    wanted: Sequence[tuple[str, tuple[str, ...]]], owned: Mapping[str, str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Filters that let nothing through that is not the caller's own."""
    others = [(name, values) for name, values in wanted if name not in owned]
    own = [
        (name, (value,) if value in next((values for one, values in wanted if one == name), (value,)) else ())
        for name, value in owned.items()
    ]
    return (*others, *own)


def _complete(report: UsageReport) -> UsageReport:
    if report.next_offset is not None:
        raise BadQuery("group_by", f"gives more than {_MOST_RESULTS} results; write a smaller limit, or fewer groups")
    return report


def _answer(
    buckets: Sequence[tuple[int, int]], found: Mapping[int, list[dict[str, Any]]], following: int | None
) -> dict[str, Any]:
    return {
        "object": "page",
        "data": [
            {"object": "bucket", "start_time": start, "end_time": end, "results": found.get(start, [])}
            for start, end in buckets
        ],
        "has_more": following is not None,
        "next_page": None if following is None else f"{_PAGE}{following}",
    }


def _groups(wanted: Sequence[str], known: Mapping[str, str]) -> tuple[str, ...]:
    for name in wanted:
        if name not in known:
            raise BadQuery("group_by", f"'{name[:40]}' is unknown; write some of {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in wanted if known[name]))


def _listed(parameters: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """OpenAI's clients write lists as ``name=a&name=b`` or ``name[]=a``, people as ``name=a,b``."""
    texts = [*parameters.get(name, ()), *parameters.get(f"{name}[]", ())]
    return [part for text in texts for part in (text.split(",") if name == "group_by" else [text]) if part]
