# SPDX-License-Identifier: Apache-2.0
"""``extproc top``: engines, queues and tenants of running processes, live in the terminal, by their metrics pages."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from extproc.cli.top_view import Sample, render
from extproc.config.quantities import Duration
from extproc.config.validation import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S: Final = 5.0
_CLEAR: Final = "\x1b[H\x1b[2J"


def parser(prog: str = "extproc top") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Show engines, queues and tenants of running extproc processes, refreshed in the terminal until Ctrl-C."
        ),
        epilog="Exit status: 0, or 2 if a process does not answer.",
    )
    made.add_argument(
        "metrics",
        nargs="*",
        default=["127.0.0.1:9003"],
        metavar="IP:PORT",
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
    """Exit status: 0, 2 if a process does not answer."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        for one in options.metrics:
            parse_address(one)
        interval_s = max(0.1, Duration(options.interval))
    except ValueError as error:
        made.error(str(error))
    try:
        for text in _pictures(options.metrics, interval_s, options.tenants):
            print(text if options.once else _CLEAR + text, flush=True)
            if options.once:
                break
    except OSError as error:
        print(f"no metrics at {', '.join(options.metrics)}: {error}; is extproc running there?", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _pictures(pages: list[str], interval_s: float, tenants: int) -> Iterator[str]:
    clock = time.monotonic  # noqa: TID251 - an edge
    before, before_s = _read(pages), clock()
    while True:
        time.sleep(interval_s)
        now, now_s = _read(pages), clock()
        yield render(before, now, seconds=now_s - before_s, tenants=tenants)
        before, before_s = now, now_s


def _read(pages: list[str]) -> Sample:
    """The sum over all processes; raises OSError."""
    reading = Sample()
    for page in pages:
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                reading.add(sample.name, sample.labels, sample.value)
    return reading
