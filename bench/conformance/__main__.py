# SPDX-License-Identifier: Apache-2.0
"""``make conformance``: run the suites and write the page that lists every case."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console

from bench.cluster.kubernetes_binaries import ROOT, AssetsMissing, pinned_versions
from bench.cluster.netns import NoNamespace, pod_range, run_in_namespace
from bench.conformance.results_page import PAGE, REPORTS, ReportMismatch, save_result, write_page
from bench.conformance.suites import Suite, SuiteOptions, choose_suites, list_suites, run_suite, suites_directory
from bench.stack.loopback_stack import EnvoyMissing
from bench.stack.processes import StartFailed
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUT: Final = ROOT / "bench" / "out" / "conformance"


def parser(prog: str = "bench.conformance") -> argparse.ArgumentParser:
    """The options of the command."""
    known = list_suites(pinned_versions())
    names = [*(one.name for one in known), *dict.fromkeys(one.kind for one in known)]
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Run the conformance suites of the Gateway API and the Inference Extension against our GatewayClass, on "
            "a cluster of their own in a network namespace."
        ),
        epilog="Exit status: 0 if no case failed, 1 if some did, 2 if a suite could not be run.",
    )
    add = made.add_argument
    add("--suite", action="append", choices=names, help="this suite; may be given again (default: all)")
    add(
        "--run",
        action="append",
        default=[],
        metavar="CASE",
        help="this case; may be given again (default: all); no page",
    )
    add(
        "--features",
        default="",
        metavar="LIST",
        help="test these features instead of those that the GatewayClass names",
    )
    add("--quick", action="store_true", help="wait a shorter time than the suite's own for what does not come; no page")
    add(
        "--out",
        type=Path,
        default=_OUT,
        metavar="DIR",
        help="outputs, reports and logs (default: bench/out/conformance)",
    )
    add(
        "--page",
        action="store_true",
        help=f"keep the reports under {REPORTS.relative_to(ROOT)} and write the page anew",
    )
    add("--rewrite", action="store_true", help="write the page from the kept reports, and run nothing")
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.conformance") -> int:
    """Exit status: 0 if no case failed, 1 if some did, 2 if a suite could not be run."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser(prog).parse_args(given)
    console = Console(highlight=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if options.rewrite:
        write_page([one.name for one in list_suites(pinned_versions())])
        return 0
    wished = choose_suites(options.suite or (), list_suites(pinned_versions()))
    try:
        missing = [one.program for one in wished if not (suites_directory(pinned_versions()) / one.program).is_file()]
        if missing:
            raise StartFailed(
                f"{', '.join(missing)} not built: run `python -m tools.conformance_suites`, which needs Go"
            )
        range_ = pod_range()
        if range_ is None:
            run_in_namespace([sys.executable, "-m", "bench.conformance", *given])
        assert range_ is not None
        return uvloop.run(_run(wished, range_, options, console))
    except (AssetsMissing, EnvoyMissing, StartFailed, ClusterError, NoNamespace, ReportMismatch) as error:
        console.print(f"NO CONFORMANCE RUN: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 2


async def _run(wished: Sequence[Suite], range_: str, options: argparse.Namespace, console: Console) -> int:
    wishes = SuiteOptions(run=tuple(options.run), features=options.features, quick=options.quick)
    failed = 0
    for suite in wished:
        result = await run_suite(suite, options.out / suite.name, range_, wishes)
        outcomes = [one.outcome for one in result.cases]
        counted = ", ".join(f"{outcomes.count(what)} {what}" for what in ("passed", "failed", "skipped"))
        console.print(f"{suite.name}: {counted} in {result.wall_s:.0f} s; {options.out / suite.name}", markup=False)
        for one in result.cases:
            if one.outcome == "failed":
                failed += 1
                console.print(f"  {one.name}: {one.why}", markup=False, soft_wrap=True)
        if options.page and wishes == SuiteOptions():
            await asyncio.to_thread(save_result, result)
    if options.page and wishes == SuiteOptions():
        await asyncio.to_thread(write_page, [one.name for one in list_suites(pinned_versions())])
        console.print(f"{PAGE.relative_to(ROOT)} is written anew", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
