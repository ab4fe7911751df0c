# SPDX-License-Identifier: Apache-2.0
"""Tests that fail are run once more, alone, and what cannot be mended so fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rerun_failed import MOST_RERUN, Outcomes, rerun

ROOT = Path(__file__).resolve().parent.parent.parent

# Fails when it is run for the first time.
FLAKY = """
from pathlib import Path

def test_flaky():
    mark = Path(__file__).with_suffix(".mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""


def run(directory: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the program says of a module of tests."""
    (directory / "pytest.ini").write_text("[pytest]\naddopts = -p xdist.plugin -p no:cacheprovider\n")
    (directory / "test_some.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # how these tests were started is none of their business
    for name in [name for name in environment if name.startswith(("PYTEST_", "COVERAGE_"))]:
        del environment[name]
    # they only take time
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "tools.rerun_failed", *arguments, "test_some.py"]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_fails_once_and_passes_alone_has_passed_and_is_named(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, FLAKY + "def test_good(): pass\n", "-n", workers, "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED ONCE, PASSED ALONE: test_some.py::test_flaky"


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY + "def test_bad(): assert False\n")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "FAILED ONCE, PASSED ALONE: test_some.py::test_flaky",
        "FAILED TWICE: test_some.py::test_bad",
    ]


def test_what_is_skipped_alone_has_not_passed(tmp_path: Path) -> None:
    skips_later = FLAKY.replace("assert was_there", "assert was_there; __import__('pytest').skip()")
    done = run(tmp_path, skips_later)
    assert done.returncode == 1
    assert "FAILED TWICE: test_some.py::test_flaky" in done.stdout


def test_a_worker_that_crashes_is_no_test_that_fails(tmp_path: Path) -> None:
    code = FLAKY.replace("assert was_there", "was_there or __import__('os')._exit(1)")
    done = run(tmp_path, code, "-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")
    assert done.returncode in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}
    assert "crashed" in done.stdout
    assert "once more" not in done.stdout


def test_what_cannot_be_collected_is_no_test_that_fails(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY + "import nothing_of_this_name\n", "--continue-on-collection-errors")
    assert done.returncode == 1
    assert "once more" not in done.stdout


def test_an_interruption_is_no_test_that_fails(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY + "def test_stop(): raise KeyboardInterrupt\n")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "once more" not in done.stdout


@pytest.mark.parametrize(("failures", "rerun"), [(0, 0), (1, 1), (MOST_RERUN, MOST_RERUN), (MOST_RERUN + 1, 0)])
def test_many_that_fail_have_a_cause(failures: int, rerun: int) -> None:
    outcomes = Outcomes()
    outcomes.failed = {str(number): None for number in range(failures)}
    assert len(outcomes.to_rerun(pytest.ExitCode.TESTS_FAILED)) == rerun
    assert outcomes.to_rerun(pytest.ExitCode.INTERNAL_ERROR) == []


def test_all_are_run_again_though_one_fails_again() -> None:
    assert rerun(["a", "b"], lambda test: test == "b") == (1, ["FAILED TWICE: a", "FAILED ONCE, PASSED ALONE: b"])
