# SPDX-License-Identifier: Apache-2.0
"""``python -m bench autoscale``: run trials in several processes, keep them as JSON lines, and write the report."""

from __future__ import annotations

import hashlib
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.load_profiles import LOADS, DataSplit
from bench.autoscale.policies import POLICIES, policy_named
from bench.autoscale.report import write_report
from bench.autoscale.trial import ComparisonPlan, Trial, TrialResult, run_trial
from bench.lab.lab_command import TRACES
from bench.lab.trial_runner import worker_pool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console


_ROOT: Final = Path(__file__).resolve().parents[2]
# What decides, what is decided about, and what turns runs into numbers.
_SOURCES: Final = (
    "controller/autoscaler/decision",
    "controller/api",
    "bench/autoscale",
    "bench/engine",
    "bench/virtual",
    "bench/workload",
    "extproc",
)
# Modules that only choose trials and format the output; the fingerprint leaves them out.
_WITHOUT_EFFECT: Final = frozenset(f"bench/autoscale/{name}.py" for name in ("command", "page", "report"))
# The level doubles 20 s after decisions of scalers are first applied.
_QUICK_LOADS: Final = ("quick", "quick-kinds")
_QUICK_S: Final = 130.0
_QUICK_START_S: Final = 20.0


def code_fingerprint(root: Path = _ROOT) -> str:
    """Twelve hexadecimal digits of a digest of the code. A comment changes them as much as a strategy does."""
    found = hashlib.sha256()
    for file in _files(root):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _files(root: Path) -> Iterator[Path]:
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            if file.relative_to(root).as_posix() not in _WITHOUT_EFFECT:
                yield file


def read_kept_results(file: Path) -> dict[Trial, TrialResult]:
    """What earlier runs have left; a last line that was cut short is left out."""
    if not file.exists():
        return {}
    found = {}
    for line in file.read_bytes().splitlines():
        try:
            one = msgspec.json.decode(line, type=TrialResult)
        except msgspec.DecodeError:
            continue  # the run was stopped while it wrote, and the trial is run again
        found[one.trial] = one
    return found


def run_grid(
    trials: Sequence[Trial], file: Path, traces: Path, console: Console, *, jobs: int = 2
) -> dict[Trial, TrialResult]:
    """All results by trial. Raises what the first trial that fails raises; those that ended before are kept.

    ``file``: of kept results. Results of other versions of the code are used unchanged; the console and the report
    mention it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    found = read_kept_results(file)
    missing = [one for one in dict.fromkeys(trials) if one not in found]
    code = code_fingerprint()
    if others := sum(found[one].code != code for one in dict.fromkeys(trials) if one in found):
        console.print(f"{others} kept trials of {file} were made by other code; another --out runs all anew")
    if missing:
        console.print(_ahead(len(missing), found.values()), highlight=False)
        with worker_pool(max(1, min(jobs, len(missing)))) as pool, file.open("ab") as out:
            out.write(b"\n")  # a line that was cut short stays alone
            pending = [pool.submit(run_trial, one, traces) for one in missing]
            for number, one in enumerate(as_completed(pending), 1):
                result = msgspec.structs.replace(one.result(), code=code)
                out.write(msgspec.json.encode(result) + b"\n")
                out.flush()
                found[result.trial] = result
                console.print(f"{number}/{len(missing)} {format_result(result)}", highlight=False)
    return {one: found[one] for one in trials}


def _ahead(count: int, kept: Iterable[TrialResult]) -> str:
    """A line for the console before the first result."""
    took_s = [one.cpu_s for one in kept]
    each = f"{sum(took_s) / len(took_s):.0f} s of processor time, as those before" if took_s else "seconds to minutes"
    return f"{count} {'trial' if count == 1 else 'trials'} to run, a line for each when it has ended: {each}"


def format_result(result: TrialResult) -> str:
    """A trial in a line, for the terminal."""
    trial = result.trial
    return (
        f"{trial.load}/{trial.half} {trial.policy} at {trial.knob:g}, seed {trial.seed}: "
        f"{result.attainment:.1%} in target, {result.bill.cost / result.hours:.2f} engines' cost, {result.cpu_s:.0f} s"
    )


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
    add("--traces", type=Path, metavar="DIR", help=f"directory of traces (default: {TRACES} if it is there)")
    add("--out", type=Path, default=Path("bench/out/autoscale"), metavar="DIR", help="default: %(default)s")
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add("--quick", action="store_true", help="short trials for each policy, to see that all of them run")
    add("--report", type=Path, metavar="FILE", help="run nothing: write the report from trials that were kept in FILE")


def autoscale(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid, PolicyUnknown or NothingToReport."""
    policies = options.policies.split(",")
    for name in policies:
        policy_named(name)
    if options.traces is not None and not options.traces.is_dir():
        msg = f"{options.traces} is not a directory; --traces takes the one with the traces of --loads"
        raise ValueError(msg)
    loads = options.loads.split(",")
    unknown = [one for one in loads if one not in LOADS]
    if unknown:
        msg = f"there is no load {', '.join(unknown)}; there are {', '.join(LOADS)}"
        raise ValueError(msg)
    if options.report:
        return _report(options, loads, policies, console)
    if options.quick:
        return _quick(options, policies, console)
    plan = ComparisonPlan(loads, policies, options.seeds, options.period, options.start)
    trials = [*plan.trials(DataSplit.TUNING), *plan.trials(DataSplit.HELD)]
    found = run_grid(trials, options.out / "trials.jsonl", options.traces or TRACES, console, jobs=options.jobs)
    _print_report(found.values(), options.out, console)
    return 0


def _report(options: argparse.Namespace, loads: list[str], policies: list[str], console: Console) -> int:
    """Report the trials with this period and start; others in the file are counted and left out.

    A file from ``--quick`` is taken whole: its trials have a period and a start of their own.
    """
    kept = read_kept_results(options.report)
    wanted = {one.removesuffix("-second") for one in policies}
    is_quick = all(trial.load in _QUICK_LOADS for trial in kept)
    mine = [
        one
        for trial, one in kept.items()
        if (is_quick or _is_as_asked(trial, options, loads)) and trial.policy.removesuffix("-second") in wanted
    ]
    if len(mine) < len(kept):
        console.print(f"{len(kept) - len(mine)} of {len(kept)} trials are of other loads, policies, periods or starts")
    _print_report(mine, options.out, console)
    return 0


def _is_as_asked(trial: Trial, options: argparse.Namespace, loads: list[str]) -> bool:
    return trial.load in loads and (trial.period_s, trial.start_s, trial.duration_s) == (
        options.period,
        options.start,
        0.0,
    )


def _quick(options: argparse.Namespace, policies: list[str], console: Console) -> int:
    """The middle setting of each policy. The report warns that so short a run compares nothing."""
    plan = ComparisonPlan(_QUICK_LOADS, policies, 1, options.period, _QUICK_START_S, _QUICK_S)
    trials = [
        one
        for one in plan.trials(DataSplit.HELD)
        if one.knob == policy_named(one.policy).grid[len(policy_named(one.policy).grid) // 2]
    ]
    file = options.out / "quick.jsonl"
    file.unlink(missing_ok=True)
    found = run_grid(trials, file, options.traces or TRACES, console, jobs=options.jobs)
    _print_report(found.values(), options.out, console)
    return 1 if any(one.lost or one.refused for one in found.values()) else 0


def _print_report(results: Iterable[TrialResult], out: Path, console: Console) -> None:
    report = write_report(results, out)
    for table in report.tables:
        console.print(table.as_rich_table())
    for one in report.said:
        console.print(f"- {one}", highlight=False)
    console.print(f"written: {out}/autoscale.md, autoscale.png, tuned.json", highlight=False)
