# SPDX-License-Identifier: Apache-2.0
"""``python -m bench autoscale``: autoscalers on the same loads, in virtual time, with a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.experiment import GOAL, Plan, tuned
from bench.autoscale.loads import LOADS, Half
from bench.autoscale.plot import write_plot
from bench.autoscale.policies import OURS, POLICIES, policy_named
from bench.autoscale.report import (
    chosen,
    dominators,
    equal_attainment,
    equal_table,
    lines_of,
    load_table,
    verdict,
)
from bench.autoscale.runner import run_cells
from bench.lab.lab_command import TRACES
from bench.reporting.tables import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from rich.console import Console

    from bench.autoscale.cell import Cell, CellResult
    from bench.autoscale.experiment import Tuned

_QUICK_LOAD: Final = "sines"
_QUICK_S: Final = 130.0
_QUICK_START_S: Final = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Loads, policies, seeds and the period."""
    add = parser.add_argument
    add("--loads", default=",".join(LOADS), help="default: %(default)s")
    add("--policies", default=",".join(POLICIES), help="default: %(default)s")
    add("--seeds", type=int, default=2, metavar="N", help="of the held-back halves (default: %(default)s)")
    add(
        "--period",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between two decisions, of every policy; 0: each has its own (default: %(default)s)",
    )
    add("--start", type=float, default=0.0, metavar="S", help="how long engines take to start (default: by the load)")
    add("--traces", type=Path, default=TRACES, metavar="DIR", help="directory of traces (default: %(default)s)")
    add("--out", type=Path, default=Path("bench/out/autoscale"), metavar="DIR", help="default: %(default)s")
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add("--quick", action="store_true", help="one short cell for each policy, to see that all of them run")


def autoscale(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid or PolicyUnknown."""
    policies = options.policies.split(",")
    for name in policies:
        policy_named(name)
    unknown = [one for one in options.loads.split(",") if one not in LOADS]
    if unknown:
        msg = f"there is no load {', '.join(unknown)}; there are {', '.join(LOADS)}"
        raise ValueError(msg)
    if options.quick:
        return _quick(options, policies, console)
    plan = Plan(options.loads.split(","), policies, options.seeds, options.period, options.start)
    file = options.out / "cells.jsonl"
    tuning = run_cells(plan.cells(Half.TUNING), file, options.traces, console, jobs=options.jobs)
    settings = tuned(tuning.values())
    held = run_cells(plan.cells(Half.HELD), file, options.traces, console, jobs=options.jobs)
    _write(options, settings, held, console)
    return 0


def _quick(options: argparse.Namespace, policies: list[str], console: Console) -> int:
    """The middle setting of each policy; no table, because so short a run compares nothing."""
    plan = Plan([_QUICK_LOAD], policies, 1, options.period, _QUICK_START_S, _QUICK_S)
    cells = [
        one
        for one in plan.cells(Half.TUNING)
        if one.knob == policy_named(one.policy).grid[len(policy_named(one.policy).grid) // 2]
    ]
    file = options.out / "quick.jsonl"
    file.unlink(missing_ok=True)
    found = run_cells(cells, file, options.traces, console, jobs=options.jobs)
    return 1 if any(one.lost or one.refused for one in found.values()) else 0


def _write(
    options: argparse.Namespace, settings: Mapping[str, Tuned], held: Mapping[Cell, CellResult], console: Console
) -> None:
    loads = lines_of(held.values())
    mine = {load: chosen(policies, settings) for load, policies in loads.items()}
    page = ["# Autoscalers in the lab", "", *_preface(options), ""]
    tables = [_tuning_table(settings), *(load_table(load, lines) for load, lines in mine.items())]
    if OURS in settings:
        equals = [equal_attainment(load, lines[OURS], loads[load]) for load, lines in mine.items()]
        said = verdict(equals, {load: dominators(lines) for load, lines in mine.items()})
        page += ["## What holds", "", *(f"- {one}" for one in said), ""]
        tables.insert(0, equal_table(equals))
    for table in tables:
        console.print(table.on_terminal())
        page += [f"## {table.title}", "", *table.as_markdown(), ""]
    (options.out / "autoscale.md").write_text("\n".join(page))
    (options.out / "tuned.json").write_bytes(msgspec.json.format(msgspec.json.encode(settings)))
    write_plot(loads, mine, options.out / "autoscale.png")
    console.print(f"written: {options.out}/autoscale.md, autoscale.png, tuned.json, cells.jsonl", highlight=False)


def _preface(options: argparse.Namespace) -> list[str]:
    period = (
        f"Every policy decides each {options.period:g} s"
        if options.period
        else "Each policy decides as often as it does by itself"
    )
    return [
        f"{period}. {options.seeds} seeds of the held-back halves. Each policy has the setting that was cheapest on the "
        f"tuning halves among those with {GOAL:.0%} of requests in target, or that attained most; all had as many "
        "settings to choose from. The first minute, in which nobody is obeyed, does not count. Intervals: 95%, bootstrap over windows of the runs and seeds. Refused and lost requests "
        "count as missed. To order: from when more engines were needed than ordered to the next larger order.",
    ]


def _tuning_table(settings: Mapping[str, Tuned]) -> Table:
    rows = [
        [
            one.policy,
            policy_named(one.policy).knob,
            f"{one.knob:g}",
            str(one.trials),
            f"{one.attainment:.1%}",
            f"{one.cost:.2f}",
        ]
        for one in settings.values()
    ]
    return Table("Tuning", ["policy", "what is set", "to", "of settings", "in target", "cost an hour"], rows)
