# SPDX-License-Identifier: Apache-2.0
"""``extproc slo``: how well objectives are kept, by what running processes have counted over their windows."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.api.status_page_contents import SLO_PATH, SloObjectiveCounts
from extproc.cli.common import fetch_page, to_printable
from extproc.cli.top_view import UNBOUNDED, format_table
from extproc.metrics.slo_attainment import Attainment, merge_attainments

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S: Final = 5.0
_HOUR_S: Final = 3600
_HEADS: Final = (
    "ROUTE",
    "CLASS",
    "OBJECTIVE",
    "PROMISED",
    "ATTAINED",
    "REQUESTS",
    "LEFT OUT",
    "BUDGET LEFT",
    "BURN RATE",
)
_decoder: Final = msgspec.json.Decoder(SloObjectiveCounts)
# What a date can be.
_LAST_S: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


def parser(prog: str = "extproc slo") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Show for each objective of each ModelRoute which share of its requests met it, how much of the error "
            "budget is left, and the worst hours of the window."
        ),
        epilog="Exit status: 0; 1 if an error budget is used up; 2 if a process does not answer.",
    )
    made.add_argument(
        "metrics",
        nargs="*",
        default=["127.0.0.1:9003"],
        metavar="ADDRESS",
        help="metrics address of each process (default: 127.0.0.1:9003)",
    )
    made.add_argument(
        "--worst", type=int, default=3, metavar="N", help="show the N worst hours of each (default: %(default)s)"
    )
    return made


def main(words: list[str], prog: str = "extproc slo") -> int:
    """Exit status: 0; 1 if an error budget is used up; 2 if a process does not answer."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        pages = [_address(one) for one in options.metrics]
        if options.worst < 0:
            raise ValueError(f"--worst {options.worst}: write 0 or more")
    except ValueError as error:
        made.error(str(error))
    try:
        found = merge_attainments(one for page in pages for one in _read(page))
    except _Unread as error:
        print(to_printable(f"{error}; is extproc running there?"), file=sys.stderr)
        return 2
    if not found:
        print("no ModelRoute has objectives; write slo in the spec of one")
        return 0
    wall_clock = time.time  # noqa: TID251 - an edge
    print(to_printable("\n".join(render(found, now_s=wall_clock(), worst=options.worst))))
    return int(any(one.budget_left <= 0 for one in found if one.missed_requests))


class _Unread(Exception):
    """A page could not be read."""


def _address(text: str) -> str:
    """Host and port, which may be written as the URL of a page; raises ValueError."""
    address = text.removeprefix("http://").removesuffix("/").removesuffix("/metrics").removesuffix(SLO_PATH)
    parse_endpoint(address)
    return address


def _read(page: str) -> list[SloObjectiveCounts]:
    """Raises _Unread."""
    try:
        text = fetch_page(f"http://{page}{SLO_PATH}", timeout_s=_TIMEOUT_S)
        return [_decoder.decode(line) for line in text.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise _Unread(f"no objectives at {page}: {getattr(error, 'reason', error)}") from error


def render(found: Sequence[Attainment], *, now_s: float, worst: int) -> list[str]:
    """The table, and the worst hours of each objective that was missed."""
    hour = int(now_s // _HOUR_S)
    lines = format_table(_HEADS, [_row(one, hour) for one in found], width=UNBOUNDED)
    hours = [
        f"{one.counts.route} {one.counts.name} {one.counts.objective}: {bad:,} of {requests:,} missed"
        f" ({bad / requests:.1%}) in the hour from {datetime.fromtimestamp(at * _HOUR_S, UTC):%Y-%m-%d %H:%M} UTC"
        for one in found
        for at, bad, requests in one.worst_hours(worst)
        if 0 <= at * _HOUR_S < _LAST_S
    ]
    unseen = [
        f"{one.counts.route} {one.counts.name} {one.counts.objective}: no request counted; TTFT and TPOT are of"
        " streamed answers alone"
        for one in found
        if not one.requests and one.counts.objective != "e2e"
    ]
    return [*lines, *(["Worst hours:", *hours, ""] if hours else []), *unseen]


def _row(one: Attainment, hour: int) -> list[str]:
    counts, requests, burn = one.counts, one.requests, one.burn_rate(hour)
    return [
        counts.route,
        counts.name,
        f"{counts.objective} {_duration(counts.target_s)}",
        f"{100 * counts.share:.6g}% in {_duration(counts.window_s)}",
        f"{_floored(1.0 - one.missed_requests / requests)}%" if requests else "-",
        f"{requests:,}",
        f"{counts.excluded:,}",
        f"{one.budget_left:.1%}" if requests else "-",
        "-" if burn is None else f"{burn:.2f}",
    ]


def _floored(share: float) -> str:
    """In percent. What is not all is never shown as 100."""
    return f"{int(share * 1e5 + 1e-6) / 1e3:.3f}"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.4g}{unit}"
    return f"{seconds * 1000:.4g}ms"
