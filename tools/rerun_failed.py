# SPDX-License-Identifier: Apache-2.0
"""Run pytest, and tests that fail once more, each alone: ``python -m tools.rerun_failed PYTEST_ARGUMENTS...``

For tests with real processes, where one of thousands may fail because the machine was busy. A test that passes alone
counts as passed, and is named loudly: its cause is to be found all the same. Nothing is run again, and the run fails,
if more than MOST_RERUN tests fail, or if anything but tests fails: collecting them, a worker that crashes, an
interruption.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# More that fail together have a cause in the change.
MOST_RERUN: Final = 5
_ALONE: Final = "--alone"
# As the report of a test is called that a worker of pytest-xdist has crashed in.
_CRASHED: Final = "???"


class Outcomes:
    """A pytest plugin that notes what becomes of each test; in the process that the workers report to."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.passed: set[str] = set()
        # what no second run mends
        self.is_broken = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test has ended, or its worker."""
        self.is_broken |= str(report.when) == _CRASHED
        if report.failed:
            self.failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module or a directory has been collected."""
        self.is_broken |= report.failed

    def to_rerun(self, status: int) -> list[str]:
        """The tests that may be run once more, after a run with that exit status."""
        is_plain = status == pytest.ExitCode.TESTS_FAILED and not self.is_broken
        return list(self.failed) if is_plain and len(self.failed) <= MOST_RERUN else []


def rerun(tests: Sequence[str], passes_alone: Callable[[str], bool]) -> tuple[int, list[str]]:
    """The exit status, and a line for each test; all are run, one after the other."""
    lines = [f"FAILED ONCE, PASSED ALONE: {test}" if passes_alone(test) else f"FAILED TWICE: {test}" for test in tests]
    return int(any(line.startswith("FAILED TWICE") for line in lines)), lines


def _passes_alone(test: str) -> bool:
    """In a process of its own, without workers; coverage measures it as part of this run."""
    print(f"=== once more, alone: {test}", flush=True)
    return subprocess.run([sys.executable, "-m", "tools.rerun_failed", _ALONE, test], check=False).returncode == 0  # noqa: S603 - this program


def _run_alone(test: str) -> int:
    """Exit status 0 only if the test has run and passed: not if it was skipped."""
    outcomes = Outcomes()
    status = pytest.main(["-n", "0", test], plugins=[outcomes])
    return int(status) or int(test not in outcomes.passed)


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status, or 0 if all that failed has passed alone."""
    if arguments[:1] == [_ALONE]:
        return _run_alone(arguments[1])
    outcomes = Outcomes()
    status = int(pytest.main(list(arguments), plugins=[outcomes]))
    tests = outcomes.to_rerun(status)
    if not tests:
        return status
    status, lines = rerun(tests, _passes_alone)
    print("", *lines, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
