# SPDX-License-Identifier: Apache-2.0
"""Runs trials on all processors, keeps finished ones, continues after a stop."""

from __future__ import annotations

import gzip
import os
import time
import traceback
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.lab.engine_kinds import HardwareUnknown
from bench.lab.inputs import OpenedFiles, digests, key_of
from bench.lab.trial import TrialReport, run
from bench.policies.own_file import PolicyFailed
from bench.workers import worker_pool
from bench.workload.traces import TraceInvalid
from extproc.api.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from bench.lab.trial import Trial

# What the user can mend; the message is enough.
_SAID: Final = (ConfigInvalid, HardwareUnknown, PolicyFailed, TraceInvalid)


class TrialFailed(Exception):
    """A trial that ended with a mistake of the lab's own, or with its process; the message has the traceback."""


class _Kept(msgspec.Struct, frozen=True):
    """A finished trial. ``opened``: digests of the files that it read by itself, which make it stale if they change."""

    report: TrialReport
    opened: dict[str, str]


def run_all(
    trials: Sequence[Trial], kept: Path, console: Console, *, jobs: int = 0, fresh: bool = False
) -> list[TrialReport]:
    """The reports, in the order of ``trials``. Raises the exception of the first trial that fails.

    ``kept``: the directory of finished reports; a trial that was made of the same things (``bench.lab.inputs``) is read
    from there, unless ``fresh``. ``jobs``: processes; 0: one for each processor.
    """
    kept.mkdir(parents=True, exist_ok=True)
    files = [kept / f"{key_of(trial)}.json.gz" for trial in trials]
    reports = [None if fresh else _read(file) for file in files]
    missing = [number for number, report in enumerate(reports) if report is None]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if missing and not console.is_terminal:  # where the bar is drawn at the end alone
        console.print(f"{len(missing)} trials to run, {len(trials) - len(missing)} kept from before", highlight=False)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("trials", total=len(trials), completed=len(trials) - len(missing))
        workers = min(jobs or os.cpu_count() or 1, max(1, len(missing)))
        with worker_pool(workers) as pool:
            pending = {pool.submit(_run_and_keep, trials[number], files[number]): number for number in missing}
            try:
                for one in as_completed(pending):
                    number = pending[one]
                    reports[number] = one.result()
                    progress.update(bar, advance=1, description=_title(trials[number]))
            except BrokenProcessPool:
                msg = "a process of the lab ended: for want of memory, or by a policy; try again with --jobs 1"
                raise TrialFailed(msg) from None
            progress.update(bar, description="trials")
    return [report for report in reports if report is not None]


def _title(trial: Trial) -> str:
    return f"{trial.policy}, rate x{trial.conditions.rate_scale:g}"


def _run_and_keep(trial: Trial, file: Path) -> TrialReport:
    try:
        with _opened_files().during() as opened:
            report = run(trial, time.perf_counter)
    except _SAID:
        raise
    except Exception as error:  # noqa: BLE001 - not all exceptions can be sent to another process
        msg = f"{_title(trial)}: a mistake of the lab:\n{''.join(traceback.format_exception(error))}"
        raise TrialFailed(msg.rstrip()) from None
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_bytes(gzip.compress(msgspec.json.encode(_Kept(report, opened)), compresslevel=1))
    beside.replace(file)
    return report


@cache
def _opened_files() -> OpenedFiles:
    """One for each process: its hook cannot be taken away."""
    return OpenedFiles()


def _read(file: Path) -> TrialReport | None:
    """None if it is not there, or if a file that it was made of has changed."""
    if not file.exists():
        return None
    found = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=_Kept)
    return found.report if digests(found.opened) == found.opened else None
