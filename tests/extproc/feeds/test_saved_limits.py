# SPDX-License-Identifier: Apache-2.0
"""Levels of limits outlive the process, whatever becomes of their files."""

from __future__ import annotations

import errno
import os
import resource
import stat
from typing import TYPE_CHECKING

import pytest

from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import Charge, RequestUsage
from extproc.admission.token_buckets import Limit
from extproc.feeds.saved_limits import SavedLimits, write_state
from extproc.refusals import RateLimited

if TYPE_CHECKING:
    from pathlib import Path

ONE, OTHER = (Charge(key, Limit(1.0, 100.0), "output_tokens", 10.0) for key in ("one", "other"))


class Process:
    """One life of a process: ``now`` is the wall clock; its own clock begins anew."""

    def __init__(self, directory: Path, now: float, number: int = 0) -> None:
        self.began, self.now = now, now
        self.limits = LocalLimits()
        self.saved = SavedLimits(
            self.limits, directory, number=number, clock=lambda: self.now - self.began, wall_clock=lambda: self.now
        )
        self.saved.load()

    def granted(self, charge: Charge = ONE) -> int:
        """How often it is granted until it is not."""
        count = 0
        while True:
            try:
                self.limits.reserve([charge], self.now - self.began)
            except RateLimited:
                return count
            count += 1


def test_the_next_process_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = Process(tmp_path / "state", 1e9)
    assert first.granted() == 10
    first.saved.save()
    assert Process(tmp_path / "state", 1e9).granted() == 0
    # 40 have flown in since, and what was never used is full
    later = Process(tmp_path / "state", 1e9 + 40)
    assert later.granted() == 4
    assert later.granted(OTHER) == 10
    assert Process(tmp_path / "state", 1e9 + 1e6).granted() == 10


def test_a_wall_clock_that_is_set_back_gives_nothing(tmp_path: Path) -> None:
    first = Process(tmp_path, 1e9)
    first.granted()
    first.saved.save()
    assert Process(tmp_path, 1e9 - 1e6).granted() == 0


def test_a_hundred_crashes_grant_what_one_life_would(tmp_path: Path) -> None:
    granted = 0
    for number in range(100):
        process = Process(tmp_path, 1e9 + number)
        granted += process.granted()
        process.saved.save()
    # 100 at once and 99 since
    assert granted == 19


def test_workers_begin_with_the_lowest_level_that_any_of_them_saved(tmp_path: Path) -> None:
    for number, grants in enumerate((2, 7, 4)):
        worker = Process(tmp_path / "of" / str(number), 1e9, number)
        for _ in range(grants):
            worker.limits.reserve([ONE], 0.0)
        worker.saved.save()
        shared = tmp_path / "state"
        shared.mkdir(exist_ok=True)
        (tmp_path / "of" / str(number) / f"limits-{number}.json").rename(shared / f"limits-{number}.json")
    assert Process(tmp_path / "state", 1e9, 0).granted() == 3


def test_what_is_settled_is_saved_too(tmp_path: Path) -> None:
    first = Process(tmp_path, 1e9)
    grant = first.limits.reserve([ONE], 0.0)
    first.saved.save()
    first.limits.settle(grant, RequestUsage(0.0, 95.0), 0.0)
    first.saved.save()
    assert Process(tmp_path, 1e9).granted() == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"saved_at_s": "x", "levels": []}', b"\xff\x00" * 100])
def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "limits-0.json").write_bytes(content)
    process = Process(tmp_path, 1e9)
    assert process.granted() == 10
    assert "limits-0.json cannot be read" in caplog.text
    process.saved.save()
    assert Process(tmp_path, 1e9).granted() == 0


def test_files_are_for_their_owner_and_written_only_if_something_changed(tmp_path: Path) -> None:
    process = Process(tmp_path, 1e9)
    process.saved.save()
    assert list(tmp_path.iterdir()) == []
    process.granted()
    process.saved.save()
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.stat().st_ino
    process.saved.save()
    assert file.stat().st_ino == before


def test_a_disk_that_is_full_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = Process(tmp_path / "state", 1e9)
    (tmp_path / "state" / "limits-0.new").mkdir()
    process.granted()
    for _ in range(3):
        process.saved.save()
    assert caplog.text.count("cannot be saved") == 1
    (tmp_path / "state" / "limits-0.new").rmdir()
    process.saved.save()
    assert Process(tmp_path / "state", 1e9).granted() == 0


def test_half_a_file_does_not_stay_on_a_disk_that_is_full(tmp_path: Path) -> None:
    file = tmp_path / "limits-0.json"
    file.write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # beyond it the kernel writes a part and then fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            write_state(file, bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize("name", ["limits-0.json", "limits-0.new"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    process = Process(tmp_path, 1e9)
    assert process.granted() == 10
    process.saved.save()
    assert Process(tmp_path, 1e9).granted() == 0


def test_a_file_with_too_many_levels_of_brackets_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "limits-0.json").write_bytes(b'{"saved_at_s": ' + b"[" * 200_000)
    assert Process(tmp_path, 1e9).granted() == 10


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "limits-0.json").open("wb") as file:
        file.truncate(20 << 30)
    assert Process(tmp_path, 1e9).granted() == 10
    assert "has more than" in caplog.text
