# SPDX-License-Identifier: Apache-2.0
"""Appends lines to a log while writers that follow it are killed at random.

``python -m`` it with URL, LOG, SEED and KILLS. It forks writers, which have imported all that they need. The log is
rotated all the while.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from controller.usage.ingest import Ingest
from controller.usage.json_lines_store import JsonLinesStore
from controller.usage.log_follower import LogFollower, LogPosition, LogRotator
from controller.usage.store import SqlStore, UsageSink, open_engine
from tests.examples import IS_SLOW
from tests.usage_lines import NOON_S, line, text

KILLS: Final = 100 if IS_SLOW else 10
_LINES_A_STEP: Final = 7
_DAY_S: Final = 86_400.0
_CLOCK: Final = time.monotonic  # noqa: TID251 - a program's own clock


def main(url: str, log: Path, seed: int, most_kills: int) -> None:
    """Prints how many lines were written, and how often the log was rotated. The parent opens no database: what it
    forks has no connection and no thread of its.
    """
    chosen = random.Random(seed)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    written = kills = rotations = 0
    while kills < most_kills:
        kept, tells = os.pipe()
        pid = os.fork()
        if not pid:
            _write(url, log, tells)
        os.close(tells)
        # some die before they have kept anything
        further = chosen.randrange(8)
        has_kept = kills % 5 == 0
        while further or not has_kept:
            has_kept = has_kept or bool(select.select([kept], [], [], 0)[0])
            further -= int(has_kept and further > 0)
            lines = [text(line(f"r{written + index}")) for index in range(_LINES_A_STEP)]
            written += len(lines)
            whole = b"".join(lines)
            cut = chosen.randrange(len(whole))
            os.write(file, whole[:cut])
            time.sleep(0.003 if has_kept else 0.02)
            os.write(file, whole[cut:])
            # as Envoy does when it is asked
            if not log.exists():
                os.close(file)
                file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                rotations += 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(kept)
        kills += 1
    if not log.exists():
        log.touch()
    sys.stdout.write(f"{written} {rotations}\n")


def _write(url: str, log: Path, tells: int) -> None:
    """In a fork, until it is killed; tells when it has kept something."""
    sink: UsageSink
    if url.startswith("jsonl:"):
        sink = JsonLinesStore(Path(url.removeprefix("jsonl:")))
    else:
        sink = SqlStore(open_engine(url), "log")
    ingest = Ingest(
        LogFollower(log, LogPosition(), _CLOCK, most_bytes=20_000),
        lambda: sink,
        wall=lambda: NOON_S + 60.0,
        keep_requests_s=_DAY_S,
        keep_rollups_s=_DAY_S,
        rotation=LogRotator(log, 20_000, lambda: True),
    )
    while not ingest.counts.rows:
        time.sleep(min(0.01, ingest.step()))
    os.write(tells, b"kept")
    ingest.run(threading.Event())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
