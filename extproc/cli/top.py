# SPDX-License-Identifier: Apache-2.0
"""``extproc top``: engines, queues and tenants of running processes, live in the terminal, by their metrics pages."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from extproc.api.addresses import parse_endpoint
from extproc.api.quantities import Duration
from extproc.api.status_page_contents import ConfigReport
from extproc.cli.common import fetch_page, to_printable
from extproc.cli.top_view import MODEL_MISSING, UNBOUNDED, MetricsSnapshot, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_TIMEOUT_S: Final = 5.0
_CLEAR: Final = "\x1b[H\x1b[2J"


def parser(prog: str = "extproc top") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Show engines, queues and tenants of running extproc processes, refreshed in the terminal until Ctrl-C."
        ),
        epilog="Exit status: 0, or 2 if a process does not answer at the start.",
    )
    made.add_argument(
        "metrics",
        nargs="*",
        default=["127.0.0.1:9003"],
        metavar="ADDRESS",
        help="metrics address of each process (default: 127.0.0.1:9003)",
    )
    made.add_argument(
        "--interval", default="1s", metavar="DURATION", help="between two refreshes (default: %(default)s)"
    )
    made.add_argument(
        "--tenants", type=int, default=20, metavar="N", help="show the N largest tenants (default: %(default)s)"
    )
    made.add_argument("--once", action="store_true", help="print once, with rates over one interval, and end")
    return made


def main(words: list[str], prog: str = "extproc top") -> int:
    """Exit status: 0, 2 if a process does not answer at the start."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        pages = [_address(one) for one in options.metrics]
        if options.tenants < 0:
            raise ValueError(f"--tenants {options.tenants}: write 0 or more")
        interval_s = max(0.1, Duration(options.interval))
    except ValueError as error:
        made.error(str(error))
    try:
        for text in _pictures(pages, interval_s, options.tenants, is_live=not options.once):
            shown = to_printable(text)
            print(_CLEAR + _cropped(shown) if not options.once else shown, flush=True)
            if options.once:
                break
    except _Unread as error:
        print(to_printable(f"{error}; is extproc running there?"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _address(text: str) -> str:
    """Host and port, which may be written as the URL of the page; raises ValueError."""
    address = text.removeprefix("http://").removesuffix("/").removesuffix("/metrics")
    parse_endpoint(address)
    return address


class _Unread(Exception):
    """A page could not be read."""


def _pictures(pages: list[str], interval_s: float, tenants: int, *, is_live: bool) -> Iterator[str]:
    """Raises _Unread if the first reading fails, or any that is not ``is_live``."""
    clock = time.monotonic  # noqa: TID251 - an edge
    wall_clock = time.time  # noqa: TID251 - an edge
    before, before_s = _read(pages), clock()
    while True:
        time.sleep(interval_s)
        try:
            now, now_s = _read(pages), clock()
        except _Unread as error:
            if not is_live:
                raise
            yield f"{error}; trying again every {interval_s:g} s"
            continue
        width = shutil.get_terminal_size().columns if is_live else UNBOUNDED
        yield render(before, now, seconds=now_s - before_s, tenants=tenants, wall_now_s=wall_clock(), width=width)
        before, before_s = now, now_s


def _cropped(text: str) -> str:
    """As many lines as the terminal shows."""
    lines, most = text.splitlines(), max(2, shutil.get_terminal_size().lines - 1)
    if len(lines) <= most:
        return text
    kept = most - 1
    rest = f"... {len(lines) - kept} more lines; make the terminal taller, or run with --once"
    return "\n".join([*lines[:kept], rest])


def _read(pages: list[str]) -> MetricsSnapshot:
    """The sum over all processes; raises _Unread."""
    reading = MetricsSnapshot()
    for page in pages:
        one = MetricsSnapshot()
        try:
            text = fetch_page(f"http://{page}/metrics", timeout_s=_TIMEOUT_S).decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    one.add(sample.name, sample.labels, sample.value)
                    reading.add(sample.name, sample.labels, sample.value)
        except (OSError, ValueError) as error:
            raise _Unread(f"no metrics at {page}: {getattr(error, 'reason', error)}") from error
        if one.get(MODEL_MISSING):
            reading.wrong_models |= _wrong_models(page)
        if not one.has_extproc_metrics:
            raise _Unread(f"the page at {page} is not of extproc: its metrics are on 127.0.0.1:9003 by default")
    return reading


def _wrong_models(page: str) -> Mapping[str, str]:
    """What engines list instead, which metrics do not have: names of engines may be any text."""
    try:
        text = fetch_page(f"http://{page}/config", timeout_s=_TIMEOUT_S)
        return msgspec.json.decode(text, type=ConfigReport).wrong_models
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # its metrics name the engines all the same
        return {}
