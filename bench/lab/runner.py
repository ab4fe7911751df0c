# SPDX-License-Identifier: Apache-2.0
"""Runs trials on all processors, keeps finished ones, continues after a stop."""

from __future__ import annotations

import gzip
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.lab.trial import TrialReport, run, source_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from bench.lab.trial import Trial


def run_all(
    trials: Sequence[Trial], kept: Path, console: Console, *, jobs: int = 0, fresh: bool = False
) -> list[TrialReport]:
    """The reports, in the order of ``trials``. Raises the exception of the first trial that fails.

    ``kept``: the directory of finished reports; a trial whose code, trace and conditions are the same is read from
    there, unless ``fresh``. ``jobs``: processes; 0: one for each processor.
    """
    kept.mkdir(parents=True, exist_ok=True)
    code = _fingerprint()
    files = [kept / f"{_key(trial, code)}.json.gz" for trial in trials]
    missing = [number for number, file in enumerate(files) if fresh or not file.exists()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("trials", total=len(trials), completed=len(trials) - len(missing))
        workers = min(jobs or os.cpu_count() or 1, max(1, len(missing)))
        with ProcessPoolExecutor(workers) as pool:
            pending = {pool.submit(_run_and_keep, trials[number], files[number]): number for number in missing}
            try:
                for one in as_completed(pending):
                    one.result()
                    trial = trials[pending[one]]
                    progress.update(
                        bar, advance=1, description=f"{trial.policy}, rate x{trial.conditions.rate_scale:g}"
                    )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            progress.update(bar, description="trials")
    return [_read(file) for file in files]


def _run_and_keep(trial: Trial, file: Path) -> None:
    report = run(trial, time.perf_counter)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_bytes(gzip.compress(msgspec.json.encode(report), compresslevel=1))
    beside.replace(file)


def _read(file: Path) -> TrialReport:
    return msgspec.json.decode(gzip.decompress(file.read_bytes()), type=TrialReport)


def _key(trial: Trial, code: int) -> str:
    """The same for the same trial, code and trace; a trace is identified by its size and time of change."""
    said = msgspec.json.encode(trial)
    try:
        known = Path(trial.conditions.trace).stat()
        said += f"{known.st_size} {known.st_mtime_ns}".encode()
    except OSError:
        pass  # a generator's name, or a missing file, which reading the trace will report

    return f"{xxhash.xxh3_128_intdigest(said, seed=code):032x}"


def _fingerprint() -> int:
    digest = xxhash.xxh3_64()
    for file in source_files():
        if file.suffix in {".py", ".yaml"}:
            digest.update(file.read_bytes())
    return digest.intdigest()
