# SPDX-License-Identifier: Apache-2.0
"""Run the stages of the tests, run once more what did not pass, and report: ``python -m tools.stages STAGE...``

A stage is a target of the Makefile. All of them run, whatever became of the one before. Then tests that failed, or that
never ran because a worker crashed, run once more, alone and in one process: a test of real processes may fail because
the machine was busy. What passes then is reported as FLAKY: its cause is to be found all the same. What fails twice
fails the run. So does what no second run mends: another program of a stage, a file that cannot be collected, a stage
that does not end, or more tests than come from a few files.

The last lines of the output name every test that did not pass at once, the slowest tests, and the counts. As a plugin
of pytest (``-p tools.stages``) this module records what becomes of each test in the file that ATTACHE_TEST_RECORDS
names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec
import pytest

from tools import preflight

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).resolve().parent.parent
# More tests that fail together have a cause in the change.
MOST_FILES: Final = 3
_AGAIN_S: Final = 90.0
# A stage takes five minutes on two processors.
_STAGE_S: Final = 2400.0
_SLOWEST: Final = 15
_MOST_NAMED: Final = 20
_WORST: Final = ("uncollected", "failed", "pending")
_RECORDS: Final = "ATTACHE_TEST_RECORDS"
_AGAIN: Final = "again"


class Record(msgspec.Struct, frozen=True):
    """What pytest reports of a test or of a file of tests."""

    name: str
    # passed, failed, skipped; pending: it will go on; uncollected: a file that pytest cannot read
    event: str
    seconds: float = 0.0
    error: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a test, or of a file that could not be collected. ``error``: the first line of the first one."""

    # the last event; pending: the test never ran, or never ended
    kind: str = "pending"
    seconds: float = 0.0
    error: str = ""


class Stage(msgspec.Struct, frozen=True):
    """A stage that has ended. ``error``: why it failed, if no test did; ``tail``: its last lines."""

    name: str
    status: int
    seconds: float
    outcomes: Mapping[str, Outcome]
    error: str = ""
    tail: Sequence[str] = ()

    def rank(self, name: str) -> int:
        """A cause stands before what it kept from running."""
        return _WORST.index(self.outcomes[name].kind)


def outcomes(records: Iterable[Record]) -> dict[str, Outcome]:
    """By test, in the order of collection. A test that has passed may still fail as it is torn down."""
    found: dict[str, Outcome] = {}
    for one in records:
        before = found.get(one.name, Outcome())
        kind = before.kind if one.event == "pending" or before.kind == "failed" else one.event
        found[one.name] = Outcome(kind, before.seconds + one.seconds, before.error or one.error)
    return found


def to_rerun(stages: Iterable[Stage]) -> list[str]:
    """The tests that may run once more: none of them if some cannot, or if they are of too many files."""
    found = {name: one.kind for stage in stages for name, one in stage.outcomes.items()}
    wanted = [name for name, kind in found.items() if kind in {"failed", "pending"}]
    files = {name.partition("::")[0] for name in wanted}
    return wanted if len(files) <= MOST_FILES and "uncollected" not in found.values() else []


def report(stages: Sequence[Stage], again: Stage | None) -> tuple[int, list[str]]:
    """The exit status of the whole run, and what its last lines say. ``again``: the run of what did not pass."""
    second = {} if again is None else again.outcomes
    lines = [_summary(stage) for stage in stages]
    tests = {name: one for stage in stages for name, one in stage.outcomes.items()}
    slowest = sorted(tests, key=lambda name: -tests[name].seconds)[:_SLOWEST]
    lines += ["=== slowest", *(f"{tests[name].seconds:7.1f} s  {name}" for name in slowest)] if slowest else []
    counts = Counter(passed=0, failed=0, skipped=0)
    for stage in stages:
        bad = sorted((one for one in stage.outcomes if stage.outcomes[one].kind in _WORST), key=stage.rank)
        mended = [name for name in bad if second.get(name, Outcome()).kind == "passed"]
        counts.update(one.kind for one in stage.outcomes.values() if one.kind not in _WORST)
        counts.update(passed=len(mended), flaky=len(mended), failed=len(bad) - len(mended))
        lines += [_verdict(name, stage.outcomes[name], second.get(name)) for name in bad[:_MOST_NAMED]]
        lines += [f"FAILED {stage.name}: {len(bad) - _MOST_NAMED} more tests"] if bad[_MOST_NAMED:] else []
        if stage.status and not bad:
            lines += [f"=== {stage.name} ended so:", *stage.tail, f"FAILED {stage.name}: {stage.error}"]
            counts["failed"] += 1
    if counts["flaky"]:
        lines.append(f"FLAKY tests: {counts['flaky']}; each is a defect of the test or of the product: mend it next")
    lines.append(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return int(counts["failed"] > 0), lines


def _summary(stage: Stage) -> str:
    counts = Counter(one.kind for one in stage.outcomes.values())
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or (stage.error or "passed")
    return f"=== {stage.name:<18} {stage.seconds:6.0f} s  {told}"


def _verdict(name: str, first: Outcome, second: Outcome | None) -> str:
    if first.kind == "uncollected":
        return f"ERROR {name} - {first.error}"
    error = first.error or "it never ran to its end"
    if second is None:
        return f"FAILED {name} - {error}"
    if second.kind == "passed":
        return f"FLAKY {name} (first: {error})"
    then = second.error or f"{second.kind}, alone, within {_AGAIN_S:g} s"
    return f"FAILED {name} - twice: {error}; then: {then}"


class Recorder:
    """The plugin: writes a record of each event, in the process that the workers report to."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)
        self._is_collected = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Where there are no workers."""
        self._collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:  # noqa: ARG002
        """Each worker collects the same tests."""
        self._collected(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A directory, file or class was collected."""
        if report.failed:
            self._write(Record(report.nodeid, "uncollected", error=_first_line(report)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or tear-down of a test has ended; or the worker that ran it."""
        is_over = report.when == "call" or not report.passed
        event = report.outcome if is_over else "pending"
        self._write(Record(report.nodeid, event, report.duration, _first_line(report) if report.failed else ""))

    def _collected(self, names: Iterable[str]) -> None:
        if not self._is_collected:
            for name in names:
                self._write(Record(name, "pending"))
                self._is_collected = True

    def _write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record, if somebody asks for it, but not in a worker."""
    file = os.environ.get(_RECORDS)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(file)))


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines() or [""]
    # what cannot be collected ends with its cause
    return (lines[-1] if report.when == "collect" else lines[0]).removeprefix("E").strip()[:200]


def run_stage(name: str, command: Sequence[str], *, limit_s: float | None, root: Path = ROOT) -> Stage:
    """Run a command with its output here, too. ``limit_s``: it is ended after so long."""
    file = root / f".cache/tests/{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    print(f"=== {name}", flush=True)
    began_s = time.perf_counter()
    tail: deque[str] = deque(maxlen=15)
    with subprocess.Popen(  # noqa: S603 - targets of the Makefile, and pytest
        command,
        cwd=root,
        env={**os.environ, _RECORDS: str(file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        reader = threading.Thread(target=_copy, args=(process.stdout, tail), daemon=True)
        reader.start()
        try:
            status = process.wait(limit_s)
            error = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, error = -1, f"it did not end within {limit_s:g} s"
        finally:
            _end(process)
        reader.join(5)
    took_s = time.perf_counter() - began_s
    print(f"=== {name} {f'FAILED after {took_s:.0f} s: {error}' if status else f'took {took_s:.0f} s'}", flush=True)
    lines = file.read_bytes().splitlines() if file.exists() else []
    found = outcomes(msgspec.json.decode(line, type=Record) for line in lines)
    return Stage(name, status, took_s, found, error if status else "", tuple(tail))


def _copy(stream: IO[str] | None, tail: deque[str]) -> None:
    for line in stream or ():
        print(line, end="", flush=True)
        tail.append(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """The whole group, if it still runs: pytest's workers, and make above them."""
    for number in (15, 9):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main(arguments: Sequence[str], *, root: Path = ROOT) -> int:
    """Exit status 0 if all stages passed, with or without a second run; 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tools.stages", description="Run targets of the Makefile that test.")
    parser.add_argument(
        "--once", action="store_true", help="run no test again, and let a stage take as long as it does"
    )
    parser.add_argument("stages", nargs="+", metavar="STAGE")
    given = parser.parse_args(arguments)
    limit_s = None if given.once else _STAGE_S
    untested = [name for name in given.stages if name in preflight.TARGETS and preflight.main([name])]
    wanted = (name for name in given.stages if name not in untested)
    done = [run_stage(name, ["make", name], limit_s=limit_s, root=root) for name in wanted]
    names = [] if given.once else to_rerun(done)
    again = None
    if names:
        command = [sys.executable, "-m", "pytest", "-p", "tools.stages", "-n", "0", *names]
        again = run_stage(_AGAIN, command, limit_s=_AGAIN_S, root=root)
    status, lines = report(done, again)
    lines[:0] = [f"=== {name} is NOT TESTED: what it needs is named above" for name in untested]
    print("", *lines, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
