# SPDX-License-Identifier: Apache-2.0
"""The stages of the tests: all run, what did not pass runs once more, and the last lines name what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import program
from tools import stages
from tools.stages import MOST_FILES, Outcome, Record, Stage, main, outcomes, report, to_rerun

ROOT = Path(__file__).resolve().parents[2]

# Fails when it runs for the first time.
FLAKY = """
from pathlib import Path

def test_flaky():
    mark = Path(__file__).with_suffix(".mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert 1 == 2\n"
CRASHES = "import os\n\ndef test_crashes(): os._exit(1)\n"
HANGS = "import time\n\ndef test_hangs(): time.sleep(60)\n"

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs stages that are given as shell commands; the exit status and the lines of the summary."""
    # how these tests were started is none of their business
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # other plugins only take time
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p xdist.plugin -p pytest_timeout -p no:cacheprovider\n")
    program("make")

    def run_stages(*words: str, **commands: str) -> tuple[int, list[str]]:
        (tmp_path / "Makefile").write_text("".join(f"{name}:\n\t@{command}\n" for name, command in commands.items()))
        status = main([*words, *commands], root=tmp_path)
        lines = capfd.readouterr().out.splitlines()
        return status, lines[len(lines) - lines[::-1].index("") :]

    return run_stages


def pytest_on(directory: Path, *words: str, **files: str) -> str:
    """A stage that runs these files of tests."""
    for name, code in files.items():
        (directory / f"{name}.py").write_text(code)
    names = " ".join(f"{name}.py" for name in files)
    return " ".join([sys.executable, "-m pytest -p tools.stages", *words, names])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fails_once_and_passes_alone_has_passed_and_is_named(tmp_path: Path, run: Run, workers: str) -> None:
    status, lines = run(unit=pytest_on(tmp_path, "-n", workers, test_a=FLAKY + GOOD))
    assert status == 0, lines
    assert "FLAKY test_a.py::test_flaky (first: assert False)" in lines
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"


def test_every_stage_runs_and_the_tests_that_fail_twice_are_named_at_the_end(tmp_path: Path, run: Run) -> None:
    first = pytest_on(tmp_path, test_a=BAD + GOOD)
    second = pytest_on(tmp_path, test_b=FLAKY)
    status, lines = run(first=first, second=second)
    assert status == 1
    assert lines[0].startswith("=== first ")
    assert lines[0].endswith("1 failed, 1 passed")
    assert lines[-4:-2] == [
        "FAILED test_a.py::test_bad - twice: assert 1 == 2; then: assert 1 == 2",
        "FLAKY test_b.py::test_flaky (first: assert False)",
    ]
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"


def test_nothing_runs_twice_if_all_tests_are_asked_for_once(tmp_path: Path, run: Run) -> None:
    status, lines = run("--once", unit=pytest_on(tmp_path, test_a=FLAKY))
    assert status == 1
    assert "FAILED test_a.py::test_flaky - assert False" in lines


def test_a_worker_that_crashes_names_its_test_and_what_never_ran_runs_alone(tmp_path: Path, run: Run) -> None:
    words = ("-n", "1", "--dist", "loadfile", "--max-worker-restart", "0")
    status, lines = run(unit=pytest_on(tmp_path, *words, test_a=CRASHES, test_b=GOOD))
    assert status == 1
    (named,) = [line for line in lines if line.startswith("FAILED test_a.py::test_crashes")]
    assert "crashed" in named
    # alone the test ends its only process, so the test behind it has not run alone either
    assert any(line.startswith("FAILED test_b.py::test_good") for line in lines)


def test_a_test_that_hangs_fails_by_its_name(tmp_path: Path, run: Run) -> None:
    status, lines = run("--once", unit=pytest_on(tmp_path, "--timeout", "1", test_a=HANGS + GOOD))
    assert status == 1
    assert any(line.startswith("FAILED test_a.py::test_hangs - Failed: Timeout") for line in lines)
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


def test_what_cannot_be_collected_is_an_error_and_nothing_runs_again(tmp_path: Path, run: Run) -> None:
    stage = pytest_on(tmp_path, "--continue-on-collection-errors", test_a="import nothing_of_this_name", test_b=FLAKY)
    status, lines = run(unit=stage)
    assert status == 1
    assert "ERROR test_a.py - ModuleNotFoundError: No module named 'nothing_of_this_name'" in lines
    assert "FAILED test_b.py::test_flaky - assert False" in lines


def test_another_program_that_fails_shows_its_last_lines(run: Run) -> None:
    status, lines = run(check="echo 'a.py:1: error: no such thing'; exit 1", unit="true")
    assert status == 1
    assert "a.py:1: error: no such thing" in lines
    assert "FAILED check: exit status 2" in lines


def test_a_stage_that_does_not_end_fails_and_leaves_nothing(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_STAGE_S", 2.0)
    status, lines = run(
        unit=f"{sys.executable} -c \"import time; open('begun', 'w'); time.sleep(60); open('over', 'w')\""
    )
    assert (tmp_path / "begun").exists()
    assert status == 1
    assert "FAILED unit: it did not end within 2 s" in lines


def test_a_stage_that_cannot_begin_here_is_not_tested_and_says_why(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(stages.preflight.TARGETS, "real", ("kube",))
    monkeypatch.setattr(stages.preflight, "main", lambda _: 2)
    status, lines = run(unit=pytest_on(tmp_path, test_a=GOOD), real="exit 1")
    assert status == 0
    assert "=== real is NOT TESTED: what it needs is named above" in lines


def stage_of(kinds: dict[str, str], status: int = 2) -> Stage:
    return Stage("unit", status, 1.0, {name: Outcome(kind) for name, kind in kinds.items()})


def test_a_test_fails_if_any_of_its_phases_does_and_takes_as_long_as_all_of_them() -> None:
    records = [
        Record("a", "pending"),
        Record("a", "pending", 1.0),
        Record("a", "passed", 2.0),
        Record("a", "failed", 0.5, "left open"),
        Record("b", "pending"),
        Record("c", "pending"),
        Record("c", "skipped"),
        Record("c", "pending"),
    ]
    assert outcomes(records) == {
        "a": Outcome("failed", 3.5, "left open"),
        "b": Outcome("pending"),
        "c": Outcome("skipped"),
    }


@pytest.mark.parametrize(("files", "is_rerun"), [(1, True), (MOST_FILES, True), (MOST_FILES + 1, False)])
def test_tests_of_many_files_that_fail_have_a_cause(files: int, is_rerun: bool) -> None:
    failed = {f"test_{number % files}.py::test_{number}": "failed" for number in range(40)}
    assert to_rerun([stage_of({"test_x.py::test_good": "passed", **failed})]) == (list(failed) if is_rerun else [])


def test_of_many_tests_that_did_not_pass_the_first_are_named_causes_before_consequences() -> None:
    kinds = {f"test_{number}.py::test": "pending" for number in range(100)} | {"test_z.py::test": "failed"}
    status, lines = report([stage_of(kinds)], None)
    named = [line for line in lines if line.startswith("FAILED")]
    assert status == 1
    assert named[0].startswith("FAILED test_z.py::test")
    assert named[-1] == "FAILED unit: 81 more tests"
    assert len(named) == 21


def test_a_test_that_is_skipped_alone_has_not_passed() -> None:
    status, lines = report([stage_of({"a.py::test": "failed"})], stage_of({"a.py::test": "skipped"}, 0))
    assert status == 1
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
