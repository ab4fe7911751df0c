# SPDX-License-Identifier: Apache-2.0
"""``make bench``: print what the request path costs; all in ``bench/out/overhead.json``.

``--quick`` compares the servers on the README's configuration alone, ``--only 2KB`` runs the cases whose name
contains it: together about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from rich.console import Console

from bench.micro import overhead
from bench.micro.compared_servers import GATEWAY_MISSING, GATEWAY_PYTHON
from bench.micro.overhead_figures import ServerFigures, markdown, server_figures, table, thread_cpu_lines
from bench.stack.loopback_stack import EnvoyMissing
from bench.stack.processes import StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.micro.compared_servers import BenchmarkCase

_WIDTH = 230  # of the table where there is no terminal


class BenchReport(msgspec.Struct, frozen=True):
    """Figures, and the rounds that they come from."""

    figures: list[ServerFigures]
    rounds: list[overhead.CaseResult]


def parser(prog: str = "bench.micro") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Measure what extproc costs a request: its rate and CPU time behind Envoy, compared with an ext_proc "
            "server that does nothing and other baselines. --quick --only 2KB takes about a minute."
        ),
        epilog="Exit status: 0; 2 if something could not be started; 130 after Ctrl-C or SIGTERM.",
    )
    add = made.add_argument
    add("--out", type=Path, metavar="DIR", default=Path("bench/out"), help="for overhead.json (default: %(default)s)")
    add("--only", metavar="TEXT", default="", help="only cases whose name contains TEXT, such as 2KB or pieces")
    add("--quick", action="store_true", help="only 2 KB and 100 KB with 8 endpoints")
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="more of them where other work disturbs (default: 8, or 10 with --quick)",
    )
    add("--against", type=Path, metavar="DIR", help="a checkout; its extproc is measured, too")
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.micro") -> int:
    """Exit status: 0, 2 if something could not be started, 130 after Ctrl-C or SIGTERM."""
    options = parser(prog).parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    cases = [case for case in overhead.CASES if _squeezed(options.only) in _squeezed(case.name)]
    if options.quick:
        cases = [case for case in cases if case in overhead.QUICK_CASES]
    try:
        report = uvloop.run(_measure(console, cases, _effort(options), against=options.against))
    except (StartFailed, EnvoyMissing) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; all processes are ended")
        return 130
    _print(console, report)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "overhead.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    page = options.out / "overhead.md"
    page.write_text(markdown(report.figures))
    console.print(f"written: {file}, {page}")
    return 0


def _squeezed(name: str) -> str:
    return name.replace(" ", "").lower()


def _effort(options: argparse.Namespace) -> overhead.MeasurementEffort:
    effort = overhead.QUICK if options.quick else overhead.FULL
    return effort if options.rounds is None else msgspec.structs.replace(effort, rounds=options.rounds)


async def _measure(
    console: Console, cases: Sequence[BenchmarkCase], effort: overhead.MeasurementEffort, *, against: Path | None
) -> BenchReport:
    if not GATEWAY_PYTHON.is_file():
        console.print(GATEWAY_MISSING)
    rounds = []
    for number, case in enumerate(cases):
        console.print(f"{number + 1} of {len(cases)}: {case.name}")
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            rounds.append(await overhead.measure(case, Path(directory), effort, against=against))
    return BenchReport([one for found in rounds for one in server_figures(found)], rounds)


def _print(console: Console, report: BenchReport) -> None:
    console.print(table(report.figures))
    for line in thread_cpu_lines(report.figures):
        console.print(line)


if __name__ == "__main__":
    sys.exit(main())
