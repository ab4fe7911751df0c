# SPDX-License-Identifier: Apache-2.0
"""``python -m bench workload``: lengths and reusable prefixes of a workload."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rich.table import Table

from bench.lab.trial import Conditions
from bench.workload.statistics import statistics

if TYPE_CHECKING:
    import argparse

    from rich.console import Console


def describe(options: argparse.Namespace, console: Console) -> int:
    """Print them. Raises TraceInvalid."""

    conditions = Conditions(
        options.trace, trace_format=options.format, skip=options.skip, limit=options.limit, seed=options.seed
    )
    workload = conditions.workload()
    found = statistics(workload, random.Random(options.seed))
    made = Table(title=workload.name, show_header=False)
    made.add_row("sessions", f"{len(workload.sessions):,}")
    made.add_row("requests", f"{found.requests:,}")
    made.add_row("sessions begin within", f"{found.span_s:,.0f} s")
    made.add_row("prompt, mean and longest", f"{found.mean_prompt:,.0f}, {found.longest_prompt:,} tokens")
    made.add_row("answer, mean", f"{found.mean_output:,.0f} tokens")
    for one in found.reuse:
        of = "without a bound" if one.capacity is None else f"of {one.capacity:,} tokens"
        made.add_row(f"reusable with one cache {of}", f"{one.reusable:.1%}")
    console.print(made)
    return 0
