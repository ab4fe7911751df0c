"""``make bench``: prints what the request path costs, and writes it to ``bench/out/overhead.json``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.micro import limits, overhead, scraping, streams
from bench.processes import StartFailed
from bench.stack import EnvoyMissing


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    overhead: list[overhead.Overhead]
    streams: streams.Streams
    limits: list[limits.Latency]


def parser(prog: str = "bench.micro") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Measure what extproc costs a request: its rate and CPU time behind Envoy, against an ext_proc server "
        "that does nothing.",
        epilog="Exit status: 0; 2 if something could not be started; 130 after Ctrl-C or SIGTERM.",
    )
    made.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("bench/out"), help="for overhead.json (default: %(default)s)"
    )
    made.add_argument(
        "--only", metavar="TEXT", default="", help="only cases whose name contains TEXT, such as 'pieces'"
    )
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.micro") -> int:
    """Exit status: 0, 2 if something could not be started, 130 after Ctrl-C or SIGTERM."""
    options = parser(prog).parse_args(arguments)
    out = options.out
    console = Console()
    try:
        report = uvloop.run(_measure(console, options.only))
    except (StartFailed, EnvoyMissing) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; all processes are ended")
        return 130
    console.print(_table(report.overhead))
    found = report.streams
    console.print(
        f"extproc's processor time for an answer of 1 token {found.one_token_us:.0f} µs, for a streamed one of 1,000 "
        f"{found.thousand_tokens_us:.0f} µs: ratio {found.ratio:.2f} (at most 1.1)"
    )
    console.print(limits.describe(report.limits), highlight=False)
    if not options.only:
        for name, cost in scraping.measure().items():
            console.print(
                f"asking {scraping.ENGINES} engines {scraping.HERTZ} times a second, {name}: {cost.pages_per_s:.0f} pages/s, "
                f"{cost.core_share:.1%} of one core",
                highlight=False,
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / "overhead.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    console.print(f"written: {out / 'overhead.json'}", highlight=False)
    return 0


async def _measure(console: Console, only: str) -> Report:
    found = []
    cases = [case for case in overhead.CASES if only in _describe(case)]
    for number, case in enumerate(cases):
        console.print(f"{number + 1} of {len(cases)}: {_describe(case)}", highlight=False)
        with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
            found.append(await overhead.measure(case, Path(directory)))
    console.print("answers of 1 and of 1,000 tokens")
    with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
        answers = await streams.measure(Path(directory))
    with tempfile.TemporaryDirectory(prefix="attache-bench-") as directory:
        return Report(found, answers, await limits.measure(Path(directory)))


def _describe(case: overhead.Case) -> str:
    return f"{case.prompt_bytes // 1000} KB, {case.endpoints}{', renamed' if case.renamed else ''}{', in pieces' if case.duplex else ''}"


def _table(found: list[overhead.Overhead]) -> Table:
    table = Table(
        title="one extproc process against an ext_proc server that does nothing, behind Envoy, alternating",
        caption="goals: rate at least 0.6 of the no-op's at 2 KB, CPU at most 2.5 times the no-op's at 400 KB",
    )
    for column in ("prompt, endpoints", "req/s", "no-op's", "ratio", "CPU, µs", "no-op's", "ratio", "busy"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            _describe(one.case),
            f"{one.extproc.requests_per_s:,.0f}",
            f"{one.noop.requests_per_s:,.0f}",
            f"{one.rate_ratio:.2f}",
            f"{one.extproc.cpu_us_per_request:,.0f}",
            f"{one.noop.cpu_us_per_request:,.0f}",
            f"{one.cpu_ratio:.2f}",
            f"{one.extproc.busy:.0%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
