# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.fairness``: what queues do for tenants, as tables and plots."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from bench.fairness.report import write_report
from bench.fairness.scenarios import FLOOD_POLICIES, FairnessReport, flood, locality, orders, service_gap, shares
from bench.fairness.tenant_workloads import FCFS, VTC, LengthRanges, TenantLoad
from bench.reporting.origin import made_by


def measure(seed: int) -> FairnessReport:
    """Play all scenarios; takes about two minutes."""
    small, short = LengthRanges((100, 2000), (10, 400)), LengthRanges((100, 2000), (10, 100))
    backlogged = [TenantLoad("many", 30, 20, lengths=small), TenantLoad("few", 3, 20, lengths=short)]
    return FairnessReport(
        busy=flood(rate=3.2, duration_s=40, engines=4, policies=FLOOD_POLICIES, seed=seed),
        quiet=flood(rate=2.9, duration_s=40, engines=8, policies=FLOOD_POLICIES, seed=seed),
        service_gap=service_gap(backlogged, policies={"FCFS": FCFS, "VTC": VTC}, seed=seed),
        orders=orders(rate=13, duration_s=40, engines=2, seed=seed),
        shares=shares(rate=45, duration_s=20, engines=2, seed=seed),
        locality=locality(rate=3, duration_s=30, engines=2, seed=seed),
    )


def main() -> None:
    """Print the tables; write the report and its numbers to the directory ``--out``."""

    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/out/fairness"))
    options = parser.parse_args()
    report = measure(options.seed)
    console = Console()
    for table in report.tables():
        console.print(table.on_terminal())
    command = shlex.join(["python", "-m", "bench.fairness", *sys.argv[1:]])
    page = write_report(report, options.out, made_by(command))
    console.print(f"report: {page}")


if __name__ == "__main__":
    main()
