# SPDX-License-Identifier: Apache-2.0
"""A file of lines: whoever adds one never waits, and what is lost is counted."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.line_writer import LineWriter
from tests.waiting import eventually

if TYPE_CHECKING:
    import pytest


class Counts:
    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, result: str, number: int) -> None:
        with self._lock:
            self.found[result] += number


def test_lines_are_appended_in_their_order(tmp_path: Path) -> None:
    file, counts = tmp_path / "lines", Counts()
    file.write_bytes(b"0\n")
    with LineWriter(file, counts) as lines:
        for number in range(1, 1000):
            lines.enqueue(b"%d\n" % number)
    assert file.read_bytes() == b"".join(b"%d\n" % number for number in range(1000))
    assert counts.found == {"written": 999}


async def test_the_file_is_there_before_the_first_line_or_the_log_says_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LineWriter(tmp_path / "lines", Counts()):
        await eventually((tmp_path / "lines").exists)
    counts = Counts()
    with LineWriter(tmp_path / "none" / "lines", counts):
        await eventually(lambda: f"{tmp_path / 'none' / 'lines'} cannot be written, lines are lost" in caplog.text)
    assert counts.found == {}


async def test_a_file_that_is_renamed_is_opened_anew(tmp_path: Path) -> None:
    file, counts = tmp_path / "lines", Counts()
    with LineWriter(file, counts) as lines:
        lines.enqueue(b"1\n")
        await eventually(lambda: counts.found["written"] == 1)
        file.rename(tmp_path / "lines.1")
        lines.enqueue(b"2\n")
    assert (tmp_path / "lines.1").read_bytes() == b"1\n"
    assert file.read_bytes() == b"2\n"
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_file_that_cannot_be_written_costs_lines_and_comes_back(tmp_path: Path) -> None:
    folder, counts = tmp_path / "later", Counts()
    with LineWriter(folder / "lines", counts) as lines:
        lines.enqueue(b"1\n")
        await eventually(lambda: counts.found["failed"] == 1)
        folder.mkdir()
        lines.enqueue(b"2\n")
    assert (folder / "lines").read_bytes() == b"2\n"
    assert counts.found == {"failed": 1, "written": 1}


def test_a_full_disk_costs_lines() -> None:
    counts = Counts()
    with LineWriter(Path("/dev/full"), counts) as lines:
        lines.enqueue(b"1\n")
    assert counts.found == {"failed": 1}


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_memory_is_bounded(tmp_path: Path) -> None:
    pipe, counts = tmp_path / "pipe", Counts()
    os.mkfifo(pipe)
    lines = LineWriter(pipe, counts, most_lines=10, most_bytes=1000)
    for _ in range(100):
        lines.enqueue(b"x" * 99 + b"\n")
    # ten are in the queue, and perhaps ten in the hands of the thread, which waits for a reader
    assert 80 <= counts.found["dropped"] <= 90
    lines.close(wait_s=0.01)
    assert 90 <= counts.found["dropped"] <= 100
    # the thread ends once there is a reader
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    lines._thread.join(60)
    os.close(reader)
    assert not lines._thread.is_alive()


def test_lines_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    counts = Counts()
    with LineWriter(tmp_path / "lines", counts, most_bytes=10) as lines:
        lines.enqueue(b"x" * 11)
    assert counts.found == {"dropped": 1}


async def test_a_line_that_was_torn_costs_no_other(tmp_path: Path) -> None:
    file, counts = tmp_path / "lines", Counts()
    with LineWriter(file, counts) as lines:
        lines.enqueue(b"1\n")
        await eventually(lambda: counts.found["written"] == 1)
        lines._is_torn = True
        lines.enqueue(b"2\n")
    assert file.read_bytes() == b"1\n\n2\n"
