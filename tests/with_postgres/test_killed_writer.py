# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed at random, and databases that go away, lose no row and write none twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from controller.usage.ingest import Ingest
from controller.usage.json_lines_store import JsonLinesStore
from controller.usage.log_follower import SETTLE_S, LogFollower, LogPosition, LogRotator
from controller.usage.store import SqlStore, open_engine, requests, rollups_day, rollups_hour
from tests.usage_lines import NOON_S, line, text
from tests.waiting import eventually
from tests.with_postgres.killed_writer import KILLS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from controller.usage.store import UsageSink
    from tests.postgres_server import Postgres

DAY_S = 86_400.0


def ingest_of(sink: UsageSink, log: Path, rotation: LogRotator | None = None) -> Ingest:
    now_s = [0.0]

    def clock() -> float:
        # no waiting for files that nobody writes to any more
        now_s[0] += SETTLE_S
        return now_s[0]

    return Ingest(
        LogFollower(log, LogPosition(), clock),
        lambda: sink,
        wall=lambda: NOON_S + 60.0,
        keep_requests_s=DAY_S,
        keep_rollups_s=DAY_S,
        rotation=rotation,
        first_pause_s=0.05,
    )


def drain(ingest: Ingest) -> None:
    """All that is there; files that nobody writes to any more are left after some looks."""
    idle = 0
    while idle < 5:
        idle = idle + 1 if ingest.step() else 0
        assert not ingest.counts.error


def kill_writers(url: str, log: Path, kills: int = KILLS) -> int:
    """How many lines were written meanwhile; the log was rotated."""
    command = [sys.executable, "-m", "tests.with_postgres.killed_writer", url, str(log), "11", str(kills)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    written, rotations = map(int, done.stdout.split())
    assert rotations
    return written


def test_rows_of_killed_writers_equal_the_lines(store_url: str, tmp_path: Path) -> None:
    log = tmp_path / "usage.log"
    store = SqlStore(open_engine(store_url), "log")
    store.prepare()
    written = kill_writers(store_url, log)
    drain(ingest_of(store, log))
    assert ids_of(store) == {f"r{index}" for index in range(written)}
    with store.engine.connect() as connection:
        for table in (rollups_day, rollups_hour):
            sums = connection.execute(sa.select(sa.func.sum(table.c.requests), sa.func.sum(table.c.cost_micros))).one()
            assert tuple(map(int, sums)) == (written, written * 104)
    store.close()


def test_json_lines_of_killed_writers_equal_the_lines(tmp_path: Path) -> None:
    log, folder = tmp_path / "usage.log", tmp_path / "rows"
    written = kill_writers(f"jsonl:{folder}", log, min(KILLS, 30))
    sink = JsonLinesStore(folder)
    drain(ingest_of(sink, log))
    sink.close()
    rows = [msgspec.json.decode(one) for file in folder.glob("*.jsonl") for one in file.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == [f"r{index}" for index in range(written)]


def ids_of(store: SqlStore) -> set[str]:
    with store.engine.connect() as connection:
        return set(connection.execute(sa.select(requests.c.id)).scalars())


async def test_a_database_that_goes_away_gets_all_rows_when_it_is_back(
    own_postgres: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    postgres = own_postgres
    caplog.set_level("INFO")
    log = tmp_path / "usage.log"
    store = SqlStore(open_engine(postgres.make_database("away"), timeout_s=2.0), "log")
    store.prepare()
    ingest = ingest_of(store, log)
    stop = threading.Event()
    thread = threading.Thread(target=ingest.run, args=(stop,))
    thread.start()
    written = 0
    try:
        with log.open("ab", buffering=0) as file:

            def write() -> None:
                nonlocal written
                file.write(text(line(f"r{written}")))
                written += 1

            for _ in range(2):
                write()
                await eventually(lambda: ingest.counts.rows == written)
                postgres.stop()
                write()
                await eventually(lambda: bool(ingest.counts.error) and ingest.counts.bytes_behind > 0)
                failures = ingest.counts.failures
                await eventually(lambda before=failures: ingest.counts.failures > before + 1)  # type: ignore[misc]
                postgres.start()
                await eventually(lambda: ingest.counts.rows == written and not ingest.counts.error)
    finally:
        stop.set()
        thread.join()
    assert ids_of(store) == {f"r{index}" for index in range(written)}
    messages = [one.message for one in caplog.records if "rows are kept" in one.message or one.levelname == "ERROR"]
    assert sum("rows are kept again" in one for one in messages) == 2
    # one line a cause, not one a try
    assert all(one != following for one, following in pairwise(messages))
    store.close()


def test_rotation_under_load_loses_nothing(store_url: str, tmp_path: Path) -> None:
    """With a double of Envoy: it writes all the time, and opens its log again some time after it was asked."""
    log = tmp_path / "usage.log"
    store = SqlStore(open_engine(store_url), "log")
    store.prepare()
    asked: list[int] = []

    def ask() -> bool:
        asked.append(written)
        return len(asked) % 2 == 0

    ingest = ingest_of(store, log, LogRotator(log, 20_000, ask))
    written = reopened = 0
    file = log.open("ab", buffering=0)
    while reopened < 4 or asked:
        if written < 2_000:
            file.write(b"".join(text(line(f"r{written + index}")) for index in range(20)))
            written += 20
        if asked and (written > asked[0] + 60 or written >= 2_000):
            asked.clear()
            reopened += 1
            file.close()
            file = log.open("ab", buffering=0)
        ingest.step()
    file.close()
    drain(ingest)
    ingest.step()
    assert ids_of(store) == {f"r{index}" for index in range(written)}
    assert list(tmp_path.glob("usage.log*")) == [log]
    store.close()
