# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from controller.usage import ingest
from controller.usage.ingest import Ingest
from controller.usage.json_lines_store import JsonLinesStore
from controller.usage.log_follower import TAKEN, ExtprocLogReader, LogFollower, LogPosition
from controller.usage.store import BadBatch, SqlStore, StoreError, StoreUnavailable, UsageSink, open_engine
from extproc.api.usage_log import LEFT_SUFFIX
from tests.usage_lines import NOON_S, context, line, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from controller.usage.rows import UsageRow

DAY_S = 86_400.0


class MemorySink:
    """Keeps rows in a list; fails as it is told."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []
        self.at = LogPosition()
        self.until_s: float | None = None
        self.kept_since_s: float | None = None
        self.is_away = False
        self.refuses = ""
        self.pruned: list[tuple[float, float]] = []

    def read_position(self) -> LogPosition:
        return self.at

    def write(
        self, rows: Sequence[UsageRow], before: LogPosition, after: LogPosition, until_s: float | None = None
    ) -> Sequence[UsageRow]:
        assert before == self.at
        if self.is_away:
            raise StoreUnavailable("the store is away")
        if any(row.id == self.refuses for row in rows):
            raise BadBatch("a value is too strange")
        self.rows += rows
        self.at = after
        self.until_s = self.until_s if until_s is None else until_s
        return rows

    def prune(self, now_s: float, keep_requests_s: float, keep_rollups_s: float) -> float | None:
        self.pruned.append((now_s - keep_requests_s, now_s - keep_rollups_s))
        return self.kept_since_s

    def close(self) -> None:
        pass


class Scene:
    """A log that is followed into ``sink``, at a time that the test sets."""

    def __init__(self, log: Path, sink: UsageSink, open_sink: Callable[[], UsageSink] | None = None) -> None:
        self.now_s = NOON_S + 60.0
        self.log = log
        self.left = log.with_name(log.name + LEFT_SUFFIX)
        self.follower = LogFollower(log, LogPosition(), lambda: self.now_s)
        self.ingest = Ingest(
            self.follower,
            open_sink or (lambda: sink),
            wall=lambda: self.now_s,
            keep_requests_s=90 * DAY_S,
            keep_rollups_s=730 * DAY_S,
            left=ExtprocLogReader(self.left, lambda: self.now_s),
        )
        self.counts = self.ingest.counts

    def write(self, *lines: bytes) -> None:
        with self.log.open("ab") as file:
            file.write(b"".join(lines))

    def drain(self) -> None:
        while not self.ingest.step():
            pass


def test_rows_are_kept_and_counted(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.write(text(line("a")), b"garbage\n", text(line("b", of=context(price=None))), b"\xff\xfe{\n")
    scene.drain()
    counts = scene.counts
    assert [row.id for row in sink.rows] == ["a", "b"]
    assert (counts.lines, counts.rows, counts.bad_lines, counts.bytes_behind) == (4, 2, 2, 0)


def test_lines_that_extproc_writes_have_rows_and_their_file_goes(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.write(text(line("a")))
    scene.left.write_bytes(text(line("b", status=0, flags="DC")) + b"garbage\n")
    scene.drain()
    # whoever has opened the file may still write
    assert [row.id for row in sink.rows] == ["a"]
    taken = scene.left.with_name(scene.left.name + TAKEN)
    with taken.open("ab") as file:
        file.write(text(line("c")))
    at = sink.at
    scene.now_s += 3
    scene.drain()
    assert [(row.id, row.ended) for row in sink.rows] == [("a", "whole"), ("b", "client"), ("c", "whole")]
    assert sink.at == at
    assert not taken.exists()
    # and the next ones
    scene.left.write_bytes(text(line("d")))
    scene.drain()
    scene.now_s += 3
    scene.drain()
    assert [row.id for row in sink.rows] == ["a", "b", "c", "d"]
    assert (scene.counts.lines, scene.counts.bad_lines) == (5, 1)
    assert sorted(tmp_path.iterdir()) == [scene.log]


@pytest.mark.parametrize("is_away", [False, True])
def test_the_last_lines_of_extproc_are_kept_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_away: bool
) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)

    def sleep(seconds: float) -> None:
        scene.now_s += seconds

    monkeypatch.setattr(ingest.time, "sleep", sleep)
    scene.left.write_bytes(text(line("a")))
    sink.is_away = is_away
    stop = threading.Event()
    stop.set()
    began_s = scene.now_s
    scene.ingest.run(stop)
    assert [row.id for row in sink.rows] == ([] if is_away else ["a"])
    # a store that is away does not hold up the end
    assert scene.now_s - began_s <= 3.0


def test_lines_of_extproc_wait_for_a_store_that_is_away(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.left.write_bytes(b"".join(text(line(f"r{number}")) for number in range(3)))
    scene.drain()
    sink.is_away = True
    scene.now_s += 3
    assert scene.ingest.step() > 0
    assert scene.counts.error == "the store is away"
    sink.is_away = False
    scene.drain()
    assert [row.id for row in sink.rows] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("dies", ["before the row", "before the unlink"])
def test_a_process_that_dies_keeps_lines_of_extproc_once(tmp_path: Path, dies: str) -> None:
    def open_store() -> SqlStore:
        store = SqlStore(open_engine(f"sqlite:///{tmp_path / 'usage.db'}"), "log")
        store.prepare()
        return store

    first = Scene(tmp_path / "log", open_store())
    first.left.write_bytes(text(line("a")) + text(line("b")))
    first.drain()
    if dies == "before the unlink":
        first.now_s += 3
        # the batch is kept, and its file is still there
        assert first.ingest.step() == 0
        assert first.counts.rows == 2
    first.ingest.close()
    second = Scene(tmp_path / "log", open_store())
    second.drain()
    second.now_s += 3
    second.drain()
    assert (second.counts.rows, second.counts.duplicates) == ((0, 2) if dies == "before the unlink" else (2, 0))
    second.ingest.close()
    with open_engine(f"sqlite:///{tmp_path / 'usage.db'}").connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM requests").scalar() == 2
        assert connection.exec_driver_sql("SELECT sum(requests) FROM rollups_day").scalar() == 2


def test_until_when_all_that_ended_is_stored(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    assert scene.counts.stored_until_s is None
    scene.write(*(text(line(f"r{index}", at=NOON_S + index, duration_us=500_000)) for index in range(3)))
    scene.ingest.step()
    # the end of the last one, but for what Envoy may hold
    assert sink.until_s == NOON_S - 1.5
    scene.drain()
    # nothing waits; that is stored now and then
    assert scene.counts.stored_until_s == scene.now_s - 4
    scene.now_s += 61
    scene.drain()
    assert sink.until_s == scene.now_s - 4
    # a store that is away, and lines that wait
    sink.is_away = True
    before_s = scene.now_s
    scene.now_s += 10
    scene.write(text(line("later", at=before_s, duration_us=5_000_000)))
    scene.ingest.step()
    assert scene.counts.stored_until_s == before_s - 4


def test_bad_lines_are_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path / "log", MemorySink())
    scene.write(b"garbage\n" * 500)
    scene.drain()
    scene.write(b"more\n")
    scene.drain()
    assert [one.getMessage().partition(";")[0] for one in caplog.records] == [
        "500 lines cannot be read and are left out"
    ]


def test_while_the_store_is_away_nothing_is_lost_and_tries_come_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.drain()
    sink.is_away = True
    scene.write(text(line("a")), text(line("b")))
    pauses = [scene.ingest.step() for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    scene.now_s += 100
    assert scene.counts.lag_s(scene.now_s) == 100
    assert scene.counts.bytes_behind == scene.log.stat().st_size
    sink.is_away = False
    scene.drain()
    assert [row.id for row in sink.rows] == ["a", "b"]
    assert (scene.counts.error, scene.counts.lag_s(scene.now_s), scene.counts.failures) == ("", 0, 9)
    assert [one.levelname for one in caplog.records] == ["ERROR", "INFO"]


def test_a_row_that_the_store_refuses_costs_only_itself(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.refuses = "r5"
    scene = Scene(tmp_path / "log", sink)
    scene.write(*(text(line(f"r{index}")) for index in range(9)))
    scene.drain()
    assert [row.id for row in sink.rows] == [f"r{index}" for index in range(9) if index != 5]
    assert (scene.counts.bad_lines, scene.counts.rows) == (1, 8)
    assert sink.at.offset == scene.log.stat().st_size


def test_lines_older_than_rows_are_kept_are_left_out(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.write(text(line("old", at=NOON_S - 91 * DAY_S)), text(line("new", at=NOON_S - 89 * DAY_S)))
    scene.drain()
    assert [row.id for row in sink.rows] == ["new"]
    assert scene.counts.late == 1
    assert sink.pruned == [(scene.now_s - 90 * DAY_S, scene.now_s - 730 * DAY_S)]


def test_while_a_clock_is_ahead_lines_are_not_late(tmp_path: Path) -> None:
    """What is deleted moves by a day at a time, and what is not deleted is not late."""
    sink = MemorySink()
    sink.kept_since_s = NOON_S - 89 * DAY_S
    scene = Scene(tmp_path / "log", sink)
    scene.drain()
    scene.now_s += 3_000 * DAY_S
    scene.write(text(line("a")), text(line("deleted", at=NOON_S - 90 * DAY_S)))
    scene.drain()
    assert ([row.id for row in sink.rows], scene.counts.late) == (["a"], 1)


def test_the_store_is_opened_with_the_back_off_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what a log has is read from the position in it, once it is open."""
    sink, tries = MemorySink(), 0

    def open_sink() -> UsageSink:
        nonlocal tries
        tries += 1
        if tries < 5:
            raise StoreUnavailable("the store is away")
        return sink

    scene = Scene(tmp_path / "log", sink, open_sink)
    scene.write(text(line("before")), text(line("a")))
    sink.at = first_end(scene.log)
    assert scene.counts.error == "the store is not open yet"
    assert [scene.ingest.step() for _ in range(4)] == [0.5, 1, 2, 4]
    assert scene.counts.error == "the store is away"
    scene.drain()
    assert ([row.id for row in sink.rows], tries, scene.counts.error) == (["a"], 5, "")
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1


def first_end(log: Path) -> LogPosition:
    """Behind the first line."""
    batch = LogFollower(log, LogPosition(), lambda: 0.0).read()
    assert batch is not None
    return batch.ends[0]


def test_a_store_of_a_newer_version_ends_the_process(tmp_path: Path) -> None:
    def open_sink() -> UsageSink:
        raise StoreError("run a newer attache")

    with pytest.raises(StoreError, match="newer"):
        Scene(tmp_path / "log", MemorySink(), open_sink).ingest.run(threading.Event())


def test_the_end_with_a_store_that_is_away_is_an_end(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.drain()
    sink.is_away = True
    scene.write(text(line("a")))
    stop = threading.Event()
    stop.set()
    scene.ingest.run(stop)
    assert (sink.rows, scene.counts.error) == ([], "the store is away")


def test_what_is_there_at_the_end_is_kept(tmp_path: Path) -> None:
    sink = MemorySink()
    scene = Scene(tmp_path / "log", sink)
    scene.write(text(line("a")))
    stop = threading.Event()
    stop.set()
    scene.ingest.run(stop)
    assert [row.id for row in sink.rows] == ["a"]


def test_json_lines_are_files_of_days_of_which_the_old_ones_go(tmp_path: Path) -> None:
    sink = JsonLinesStore(tmp_path / "rows")
    scene = Scene(tmp_path / "log", sink)
    scene.write(text(line("a", at=NOON_S - DAY_S)), text(line("b")))
    scene.drain()
    assert sorted(one.name for one in (tmp_path / "rows").glob("*.jsonl")) == [
        "requests-2026-11-22.jsonl",
        "requests-2026-11-23.jsonl",
    ]
    # one at a time, however far a clock is ahead
    sink.prune(NOON_S + 1_000 * DAY_S, 0, 0)
    assert [one.name for one in (tmp_path / "rows").glob("*.jsonl")] == ["requests-2026-11-23.jsonl"]
    with pytest.raises(StoreError, match="another process"):
        JsonLinesStore(tmp_path / "rows")
    sink.close()
    again = JsonLinesStore(tmp_path / "rows")
    assert again.read_position() == scene.follower.position
    again.close()


# In a process of its own: a limit holds for all threads.
_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from controller.usage.ingest import Ingest
from controller.usage.json_lines_store import JsonLinesStore
from controller.usage.store import SqlStore, open_engine
from tests.controller.usage.test_ingest import Scene
url, log, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if url.startswith("jsonl:"):
    sink = JsonLinesStore(Path(url.removeprefix("jsonl:")))
else:
    sink = SqlStore(open_engine(url), "log")
    sink.prepare()
scene = Scene(log, sink)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
while not scene.counts.failures:
    scene.ingest.step()
failed = scene.counts.failures
scene.ingest.step()
assert scene.counts.failures > failed
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
while scene.counts.bytes_behind:
    scene.ingest.step()
print(scene.counts.rows, scene.counts.error)
sink.close()
"""


@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
def test_a_full_disk_stops_nothing_for_good(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(text(line(f"r{index}")) for index in range(3_000)))
    url = f"sqlite:///{tmp_path}/usage.db" if kind == "sqlite" else f"jsonl:{tmp_path}/rows"
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, url, str(log), "500000"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "3000 \n", done.stderr
    assert "rows cannot be kept" in done.stderr


@pytest.mark.parametrize("url", ["mysql://u:secret@h/db", "sqlite://", "sqlite:///:memory:", "nonsense", "oracle:x"])
def test_a_store_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="write sqlite:///") as raised:
        open_engine(url)
    assert "secret" not in str(raised.value)


def test_a_store_that_needs_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    store = SqlStore(open_engine(f"sqlite:///{tmp_path}/none/usage.db"), "log")
    with pytest.raises(StoreUnavailable, match="unable to open database file"):
        store.prepare()
