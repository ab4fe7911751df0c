# SPDX-License-Identifier: Apache-2.0
"""Runs cells in several processes; finished ones are kept as JSON lines and not run again."""

from __future__ import annotations

from concurrent.futures import as_completed
from typing import TYPE_CHECKING

import msgspec

from bench.autoscale.cell import Cell, CellResult, run_cell
from bench.autoscale.fingerprint import code_fingerprint
from bench.workers import worker_pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import Console


def kept_results(file: Path) -> dict[Cell, CellResult]:
    """What earlier runs have left; a last line that was cut short is left out."""
    if not file.exists():
        return {}
    found = {}
    for line in file.read_bytes().splitlines():
        try:
            one = msgspec.json.decode(line, type=CellResult)
        except msgspec.DecodeError:
            continue  # the run was stopped while it wrote, and the cell is run again
        found[one.cell] = one
    return found


def run_cells(
    cells: Sequence[Cell], file: Path, traces: Path, console: Console, *, jobs: int = 2
) -> dict[Cell, CellResult]:
    """All results by cell. Raises what the first cell that fails raises; those that ended before are kept.

    ``file``: of kept results. Those that other code made are taken as they are; the console and the report say so.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    found = kept_results(file)
    missing = [one for one in dict.fromkeys(cells) if one not in found]
    code = code_fingerprint()
    if others := sum(found[one].code != code for one in dict.fromkeys(cells) if one in found):
        console.print(f"{others} kept cells of {file} were made by other code; another --out runs all anew")
    if missing:
        console.print(_ahead(len(missing), found.values()), highlight=False)
        with worker_pool(max(1, min(jobs, len(missing)))) as pool, file.open("ab") as out:
            out.write(b"\n")  # a line that was cut short stays alone
            pending = [pool.submit(run_cell, one, traces) for one in missing]
            for number, one in enumerate(as_completed(pending), 1):
                result = msgspec.structs.replace(one.result(), code=code)
                out.write(msgspec.json.encode(result) + b"\n")
                out.flush()
                found[result.cell] = result
                console.print(f"{number}/{len(missing)} {line_of(result)}", highlight=False)
    return {one: found[one] for one in cells}


def _ahead(count: int, kept: Iterable[CellResult]) -> str:
    """For people who wait for the first line."""
    took_s = [one.cpu_s for one in kept]
    each = f"{sum(took_s) / len(took_s):.0f} s of processor time, as those before" if took_s else "seconds to minutes"
    return f"{count} {'cell' if count == 1 else 'cells'} to run, a line for each when it has ended: {each}"


def line_of(result: CellResult) -> str:
    """A cell in a line, for people who wait."""
    cell = result.cell
    return (
        f"{cell.load}/{cell.half} {cell.policy} at {cell.knob:g}, seed {cell.seed}: {result.attainment:.1%} in target, "
        f"{result.bill.cost / result.hours:.2f} engines' cost, {result.cpu_s:.0f} s"
    )
