# SPDX-License-Identifier: Apache-2.0
"""``attache usage serve`` as a process: how it ends, and where its store is by default."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from controller.commands.usage import main
from tests.usage_lines import line, text

if TYPE_CHECKING:
    from pathlib import Path

# A step that fails when the log is read: what is written until then is kept.
_RUN = """
import sys
from controller.commands.usage import main
from controller.usage.ingest import Ingest
from controller.usage.store import StoreError
step = Ingest.step
def steps(self):
    if step(self):
        raise {error}
    return 0.0
Ingest.step = steps
sys.exit(main(sys.argv[1:]))
"""


def serve(log: Path, error: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["serve", "--log", str(log), "--admin", "off", "--metrics", "off", *options]
    command = [sys.executable, "-c", _RUN.format(error=error), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        ("RuntimeError('never thought of')", 1, "RuntimeError: never thought of"),
        ("ValueError('never thought of')", 1, "ValueError: never thought of"),
        ("StoreError('the store is of tomorrow')", 2, "attache usage serve: the store is of tomorrow"),
    ],
)
def test_a_process_that_keeps_no_rows_any_more_ends_with_its_status(
    tmp_path: Path, error: str, status: int, told: str
) -> None:
    done = serve(tmp_path / "usage.log", error)
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].strip() == told


@pytest.mark.parametrize("name", ["plain", "a?b%20$HOME#c"])
def test_by_default_the_store_is_beside_the_log_whatever_its_path(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "usage.log").write_bytes(text(line("a")))
    assert serve(folder / "usage.log", "StoreError('enough')").returncode == 2
    assert sorted(one.name for one in tmp_path.rglob("usage.db")) == ["usage.db"]
    assert (folder / "usage.db").exists()


def test_a_report_of_a_store_that_is_not_there_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "usage.db"
    assert main(["report", "--store", f"sqlite:///{file}"]) == 2
    assert f"there is no file {file}" in capsys.readouterr().err
    assert not file.exists()
