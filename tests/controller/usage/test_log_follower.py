# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.usage.log_follower import SETTLE_S, LogBatch, LogFollower, LogPosition, LogRotator


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Log:
    """A log as Envoy writes it: its file stays open until it is asked to open it again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "usage.log"
        self.reopen()

    def reopen(self) -> bool:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        weakref.finalize(self, os.close, self._file)
        return True

    def write(self, *lines: str) -> None:
        self.write_raw("".join(f"{one}\n" for one in lines).encode())

    def write_raw(self, data: bytes) -> None:
        os.write(self._file, data)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def drained(follower: LogFollower, clock: Clock) -> list[str]:
    """All that can be read, with time for files that nobody writes to any more."""
    found: list[str] = []
    idle = 0
    while idle < 2:
        batch = follower.read()
        if batch is None:
            idle += 1
            clock.now_s += SETTLE_S
        else:
            idle = 0
            found += [one.decode() for one in batch.lines]
    return found


def read(follower: LogFollower) -> LogBatch:
    batch = follower.read()
    assert batch is not None
    return batch


def test_lines_come_once_and_half_a_line_waits_for_its_rest(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("a", "b")
    log.write_raw(b"half")
    assert drained(follower, clock) == ["a", "b"]
    log.write_raw(b" whole\n")
    assert drained(follower, clock) == ["half whole"]
    assert follower.bytes_behind() == 0


def test_a_process_that_starts_again_goes_on_where_its_store_says(log: Log, clock: Clock) -> None:
    log.write("a", "b", "c")
    batch = read(LogFollower(log.path, LogPosition(), clock))
    again = LogFollower(log.path, batch.ends[0], clock)
    assert again.bytes_behind() == 4
    assert drained(again, clock) == ["b", "c"]


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    follower = LogFollower(tmp_path / "later" / "usage.log", LogPosition(), clock)
    assert follower.read() is None
    assert follower.bytes_behind() == 0
    (tmp_path / "later").mkdir()
    Log(tmp_path / "later").write("a")
    assert drained(follower, clock) == ["a"]


def test_the_rest_of_a_file_that_was_renamed_is_read_before_the_next(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("a")
    assert drained(follower, clock) == ["a"]
    log.path.rename(f"{log.path}.1")
    log.write("b")
    Log(log.path.parent).write("c")
    log.write("late")
    assert drained(follower, clock) == ["b", "late", "c"]


def test_a_file_that_was_renamed_is_not_left_while_it_may_grow(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("a")
    assert read(follower).lines == (b"a",)
    assert follower.read() is None
    log.path.rename(f"{log.path}.1")
    Log(log.path.parent).write("c")
    assert follower.read() is None
    log.write("b")
    assert read(follower).lines == (b"b",)
    assert drained(follower, clock) == ["c"]


def test_rotations_while_nobody_followed_are_made_up_for(log: Log, clock: Clock) -> None:
    log.write("a", "b")
    position = read(LogFollower(log.path, LogPosition(), clock)).ends[0]
    for number, name in ((2, "c"), (1, "d")):
        log.path.rename(f"{log.path}.{number}")
        os.utime(f"{log.path}.{number}", (1_000 - number, 1_000 - number))
        log = Log(log.path.parent)
        log.write(name)
    (log.path.parent / "usage.log.3.gz").write_bytes(b"compressed\n")
    assert drained(LogFollower(log.path, position, clock), clock) == ["b", "c", "d"]


def test_a_file_that_was_truncated_and_written_anew_is_read_from_its_beginning(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("a" * 20)
    assert drained(follower, clock) == ["a" * 20]
    os.truncate(log.path, 0)
    log.write("b")
    assert drained(follower, clock) == ["b"]
    os.truncate(log.path, 0)
    # longer than before: only its beginning tells
    log.write("c", "d" * 100)
    assert drained(follower, clock) == ["c", "d" * 100]


def test_another_file_with_the_same_inode_number_is_another_file(log: Log, clock: Clock) -> None:
    log.write("new line", "second")
    position = LogPosition(log.path.stat().st_ino, 9, "digest of another file")
    assert drained(LogFollower(log.path, position, clock), clock) == ["new line", "second"]


def test_a_line_without_end_costs_only_itself_and_no_memory(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock, most_bytes=1_000)
    log.write("a", "x" * 10_000_000, "b", "c" * 900)
    torn = 0
    found: list[bytes] = []
    while (batch := follower.read()) is not None:
        torn += batch.torn
        found += batch.lines
        assert sum(map(len, batch.lines)) <= 1_000
    assert (found, torn) == ([b"a", b"b", b"c" * 900], 1)


def test_half_a_line_at_the_end_of_a_file_that_was_left_is_counted(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("a")
    log.write_raw(b"half")
    assert drained(follower, clock) == ["a"]
    log.path.rename(f"{log.path}.1")
    Log(log.path.parent).write("b")
    batches = []
    while (batch := follower.read()) is not None:
        batches.append(batch)
    assert [(one.lines, one.torn) for one in batches] == [((), 1), ((b"b",), 0)]


def test_a_pipe_is_refused(tmp_path: Path, clock: Clock) -> None:
    os.mkfifo(tmp_path / "usage.log")
    with pytest.raises(OSError, match="no regular file"):
        LogFollower(tmp_path / "usage.log", LogPosition(), clock).read()


def test_rotation_by_envoys_help(log: Log, clock: Clock) -> None:
    follower = LogFollower(log.path, LogPosition(), clock)
    rotation = LogRotator(log.path, 10, log.reopen)
    log.write("a")
    assert drained(follower, clock) == ["a"]
    rotation.step(follower)
    log.write("b" * 20)
    assert drained(follower, clock) == ["b" * 20]
    rotation.step(follower)
    rotated = Path(f"{log.path}.rotated")
    assert rotated.exists()
    log.write("c")
    rotation.step(follower)
    # not before all of it is read
    assert rotated.exists()
    assert drained(follower, clock) == ["c"]
    rotation.step(follower)
    assert not rotated.exists()


def test_rotation_while_envoy_is_away_asks_until_it_answers(log: Log, clock: Clock) -> None:
    answers = [False, False, True]
    rotation = LogRotator(log.path, 1, lambda: answers.pop(0) and log.reopen())
    follower = LogFollower(log.path, LogPosition(), clock)
    log.write("first")
    assert drained(follower, clock) == ["first"]
    for is_refused in (True, True, False):
        rotation.step(follower)
        assert rotation.is_refused is is_refused
        log.write("more")
    assert answers == []
    assert drained(follower, clock) == ["more", "more", "more"]
    rotation.step(follower)
    assert list(log.path.parent.iterdir()) == [log.path]


_STEPS = st.lists(
    st.sampled_from(["write", "half", "read", "settle", "restart", "rename", "rotate"]), min_size=1, max_size=60
)


@settings(deadline=None)
@given(steps=_STEPS)
def test_lines_come_once_and_in_order_whatever_happens(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock, log = Clock(), Log(tmp_path_factory.mktemp("log"))
    follower = LogFollower(log.path, LogPosition(), clock, most_bytes=64)
    rotation = LogRotator(log.path, 30, log.reopen)
    # where a log begins that was never read, nobody can know
    log.write("begin")
    kept = read(follower).after
    written: list[str] = []
    found: list[str] = []
    is_half = False
    renamed = 0
    for number, step in enumerate(steps):
        match step:
            case "write":
                log.write(f"line {number}")
                written.append(f"{'half ' if is_half else ''}line {number}")
                is_half = False
            case "half" if not is_half:
                log.write_raw(b"half ")
                is_half = True
            case "read":
                if (batch := follower.read()) is not None:
                    found += [one.decode() for one in batch.lines]
                    kept = batch.after
            case "settle":
                clock.now_s += SETTLE_S
            case "restart":
                follower.close()
                follower = LogFollower(log.path, kept, clock, most_bytes=64)
            case "rename" if not is_half and not renamed:
                # one at a time, as the tool does whose files have times of whole seconds
                renamed += 1
                log.path.rename(f"{log.path}.1")
                log.reopen()
            case "rotate" if not is_half:
                rotation.step(follower)
    log.write("end")
    written.append(f"{'half ' if is_half else ''}end")
    found += drained(follower, clock)
    assert found == written
    follower.close()
