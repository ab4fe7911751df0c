# SPDX-License-Identifier: Apache-2.0
"""The hours of objectives outlive the process, whatever becomes of their file."""

from __future__ import annotations

import errno
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.admission.slo_classes import ObjectiveClass
from extproc.core.effects import RequestSloJudged
from extproc.core.slo_verdicts import SloVerdict
from extproc.feeds.saved_slo_counts import SavedSloCounts
from extproc.feeds.state_lock import StateLock
from extproc.metrics.exposition import Registry
from extproc.metrics.slo_metrics import ObjectiveSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REPLACE, READ = (f"extproc.feeds.saved_slo_counts.{name}" for name in ("write_state", "read_state"))
CHAT = ObjectiveClass("default/chat", "chat", 0, {"e2e": 1.0}, 0.99, 86400.0)


class Process:
    """One life of a worker, in the hour 1000 or a later one."""

    def __init__(
        self, directory: Path, hour: int = 1000, number: int = 0, owns: Callable[[], bool] = lambda: True
    ) -> None:
        self.series = ObjectiveSeries(Registry(), lambda: hour * 3600.0)
        self.series.set_source(lambda: [CHAT])
        self.saved = SavedSloCounts(self.series, directory, number=number, owns=owns)
        self.saved.load()

    def count(self, *met: bool) -> None:
        for one in met:
            self.series.count(RequestSloJudged(CHAT, (SloVerdict("e2e", one),)))

    def hours(self) -> list[tuple[int, int, int]]:
        (found,) = self.series.report()
        return found.hours


def test_a_worker_goes_on_where_its_last_life_ended(tmp_path: Path) -> None:
    for number in (0, 1):
        first = Process(tmp_path, number=number)
        first.count(True, False, *[True] * number)
        first.saved.save()
    second = Process(tmp_path, 1001)
    second.count(True)
    assert second.hours() == [(1000, 1, 1), (1001, 1, 0)]
    assert Process(tmp_path, number=1).hours() == [(1000, 2, 1)]
    assert Process(tmp_path, 1100).hours() == []
    assert stat.S_IMODE((tmp_path / "objectives-0.json").stat().st_mode) == 0o600


def test_nothing_is_written_while_nothing_is_counted(tmp_path: Path) -> None:
    Process(tmp_path).saved.save()
    assert list(tmp_path.iterdir()) == []


def test_a_successor_goes_on_with_what_its_predecessor_hands_over_and_leaves(tmp_path: Path) -> None:
    owners = [StateLock(tmp_path, 0) for _ in range(2)]
    first, second = (Process(tmp_path, owns=owner.try_acquire) for owner in owners)
    first.count(True)
    second.count(True)
    second.saved.adopt_predecessor_counts()
    assert second.hours() == [(1000, 1, 0)]
    first.saved.hand_over()
    owners[0].release()
    second.saved.adopt_predecessor_counts()
    assert second.hours() == [(1000, 2, 0)]
    # a request that ends late
    first.count(False)
    first.saved.save()
    second.saved.adopt_predecessor_counts()
    assert second.hours() == [(1000, 2, 1)]
    owners[1].release()
    assert Process(tmp_path).hours() == [(1000, 2, 1)]
    assert not list(tmp_path.glob("*.rest"))


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def failing(call: str, error: BaseException) -> Iterator[None]:
    """Meanwhile the function ``call`` does nothing but raise."""

    def fails(*_: object, **__: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, fails)
        yield


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def remainders(directory: Path) -> list[Path]:
    return list(directory.glob("*.rest"))


def leave(directory: Path, *met: bool) -> None:
    """A predecessor has handed over, and counts afterwards."""
    process = Process(directory)
    process.saved.hand_over()
    process.count(*met)
    process.saved.save()


def test_what_a_predecessor_counts_is_added_once_however_often_it_saves(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.saved.hand_over()
    second = Process(tmp_path)
    for met in (True, False, True):
        first.count(met)
        first.saved.adopt_predecessor_counts()
        second.saved.adopt_predecessor_counts()
    assert second.hours() == [(1000, 2, 1)]


@pytest.mark.parametrize("has_saved_before", [True, False])
def test_a_disk_that_is_full_at_the_handover_costs_no_counts(tmp_path: Path, *, has_saved_before: bool) -> None:
    first = Process(tmp_path)
    first.count(True)
    if has_saved_before:
        first.saved.save()
    first.count(False)
    with failing(REPLACE, full_disk()):
        first.saved.hand_over()
        second = Process(tmp_path)
        second.count(True)
        second.saved.adopt_predecessor_counts()
    first.count(False)
    first.saved.save()
    second.saved.adopt_predecessor_counts()
    assert second.hours() == [(1000, 2, 2)]
    assert Process(tmp_path).hours() == [(1000, 2, 2)]


def test_a_remainder_stays_until_its_counts_are_saved(tmp_path: Path) -> None:
    leave(tmp_path, True, False)
    process = Process(tmp_path)
    with failing(REPLACE, full_disk()):
        for _ in range(3):
            process.saved.adopt_predecessor_counts()
    assert len(remainders(tmp_path)) == 1
    process.saved.adopt_predecessor_counts()
    assert remainders(tmp_path) == []
    assert process.hours() == Process(tmp_path).hours() == [(1000, 1, 1)]


@pytest.mark.parametrize("dies_in", [REPLACE, "pathlib.Path.unlink"])
def test_a_process_that_is_killed_while_it_adds_a_remainder_neither_loses_nor_doubles_it(
    tmp_path: Path, dies_in: str
) -> None:
    leave(tmp_path, True, False)
    with failing(dies_in, Killed()), pytest.raises(Killed):
        Process(tmp_path).saved.adopt_predecessor_counts()
    for _ in range(2):
        process = Process(tmp_path)
        process.saved.adopt_predecessor_counts()
        assert process.hours() == [(1000, 1, 1)]
    assert remainders(tmp_path) == []


def test_a_remainder_that_cannot_be_read_stays_and_is_added_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, True, False)
    (file,) = remainders(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:20])
    process = Process(tmp_path)
    process.count(True)
    for _ in range(3):
        process.saved.adopt_predecessor_counts()
    assert caplog.text.count("cannot be read") == 1
    assert Process(tmp_path).hours() == [(1000, 1, 0)]
    file.write_bytes(content)
    with failing(READ, OSError(errno.EIO, "Input/output error")):
        process.saved.adopt_predecessor_counts()
    process.saved.adopt_predecessor_counts()
    assert process.hours() == Process(tmp_path).hours() == [(1000, 2, 1)]
    assert remainders(tmp_path) == []


def test_a_file_that_cannot_be_read_for_a_moment_is_not_replaced(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.count(True)
    first.saved.save()
    with failing(READ, OSError(errno.EMFILE, "Too many open files")):
        second = Process(tmp_path)
        second.count(False)
        second.saved.adopt_predecessor_counts()
    second.saved.adopt_predecessor_counts()
    assert second.hours() == Process(tmp_path).hours() == [(1000, 1, 1)]


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b"null",
    b"{}",
    b'{"objectives": [{"route": "default/chat"}]}',
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "objectives-0.json").write_bytes(content)
    process = Process(tmp_path)
    assert "cannot be read, objectives are counted without it" in caplog.text
    process.count(True)
    process.saved.save()
    assert Process(tmp_path).hours() == [(1000, 1, 0)]


def test_numbers_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.count(True)
    first.saved.save()
    file = tmp_path / "objectives-0.json"
    for hours in ([[1000, -1, 5]], [[1000, 2**40, 5]], [[-(2**60), 1, 1]], [[2**60, 1, 1]]):
        (saved,) = msgspec.json.decode(file.read_bytes())["objectives"]
        file.write_bytes(msgspec.json.encode({"objectives": [{**saved, "hours": hours}]}))
        assert Process(tmp_path).hours() == []


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = Process(tmp_path)
    (tmp_path / "objectives-0.new").mkdir()
    for _ in range(3):
        process.count(True)
        process.saved.save()
    assert caplog.text.count("objectives cannot be saved") == 1
    (tmp_path / "objectives-0.new").rmdir()
    process.saved.save()
    assert Process(tmp_path).hours() == [(1000, 3, 0)]
