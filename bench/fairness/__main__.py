"""``python -m bench.fairness``: what the queues do for whom, as tables and plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.fairness.report import write_report
from bench.fairness.scenarios import FLOOD_POLICIES, Report, apart, flood, locality, orders, shares
from bench.fairness.scenes import FCFS, VTC, Asking, Lengths


def measure(seed: int) -> Report:
    """All scenarios; some two minutes."""
    small, short = Lengths((100, 2000), (10, 400)), Lengths((100, 2000), (10, 100))
    backlogged = [Asking("many", 30, 20, lengths=small), Asking("few", 3, 20, lengths=short)]
    return Report(
        busy=flood(rate=3.2, seconds=40, engines=4, policies=FLOOD_POLICIES, seed=seed),
        quiet=flood(rate=2.9, seconds=40, engines=8, policies=FLOOD_POLICIES, seed=seed),
        apart=apart(backlogged, policies={"FCFS": FCFS, "VTC": VTC}, seed=seed),
        orders=orders(rate=13, seconds=40, engines=2, seed=seed),
        shares=shares(rate=45, seconds=20, engines=2, seed=seed),
        locality=locality(rate=3, seconds=30, engines=2, seed=seed),
    )


def main() -> None:
    """Tables to the terminal; the report and its numbers below ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/out/fairness"))
    options = parser.parse_args()
    report = measure(options.seed)
    console = Console()
    for title, heads, rows in report.tables():
        table = Table(title=title)
        for head in heads:
            table.add_column(head, justify="left" if head == heads[0] else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    page = write_report(report, options.out)
    console.print(f"report: {page}")


if __name__ == "__main__":
    main()
