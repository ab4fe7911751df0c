# SPDX-License-Identifier: Apache-2.0
"""Child processes: started again when they end, given up when they were started wrongly, restarted when asked."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from extproc.cli.supervisor import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NOTIFY_VARIABLE,
    Child,
    Program,
    next_pause,
    notify_ready,
    restart_one_by_one,
)
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# appends its process id to a file, is ready, and waits for a signal
WAITS = """
import os, signal, sys
from extproc.cli.supervisor import notify_ready
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
notify_ready(os.environ)
while True:
    signal.pause()
"""


def program(tmp_path: Path, script: str = WAITS, name: str = "one") -> Program:
    return Program(name, (sys.executable, "-c", script, str(tmp_path / name)))


def pids(tmp_path: Path, name: str = "one") -> list[int]:
    file = tmp_path / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@asynccontextmanager
async def running(child: Child) -> AsyncIterator[None]:
    run = asyncio.create_task(child.run())
    await child.ready.wait()
    try:
        yield
    finally:
        child.stop()
        assert await run == 0


@pytest.mark.parametrize(
    ("pause_s", "lived_s", "after_s"),
    [(0.0, 0.1, FIRST_PAUSE_S), (0.2, 0.1, 0.4), (8.0, 1.0, LONGEST_PAUSE_S), (8.0, 11.0, FIRST_PAUSE_S)],
)
def test_pauses_double_until_a_program_has_lived_for_a_while(pause_s: float, lived_s: float, after_s: float) -> None:
    assert next_pause(pause_s, lived_s=lived_s) == after_s


async def test_a_program_that_is_killed_is_started_again_and_ready_again(tmp_path: Path) -> None:
    child = Child(program(tmp_path), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await child.ready.wait()
    assert len(pids(tmp_path)) == 2


async def test_a_program_that_cannot_start_at_all_is_given_up(tmp_path: Path) -> None:
    child = Child(program(tmp_path, "raise SystemExit(2)"), tmp_path)
    assert await child.run() == 2
    assert not child.ready.is_set()


async def test_a_program_that_is_not_needed_is_tried_again_though_it_cannot_start(tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    script = (
        f"import pathlib; one = pathlib.Path({str(marker)!r})\nif not one.exists(): one.touch(); raise SystemExit(2)"
    )
    child = Child(program(tmp_path, f"{script}\n{WAITS}"), tmp_path, is_needed=False)
    async with running(child):
        await child.ready.wait()
    assert marker.exists()


async def test_a_program_that_was_ready_once_is_tried_again_though_it_cannot_start(tmp_path: Path) -> None:
    ends = WAITS.replace("while True", "if len(open(sys.argv[1]).readlines()) < 3:\n    sys.exit(2)\nwhile True")
    child = Child(program(tmp_path, ends), tmp_path)
    run = asyncio.create_task(child.run())
    await eventually(lambda: len(pids(tmp_path)) == 3)
    await child.ready.wait()
    child.stop()
    await run


async def test_programs_are_restarted_one_after_the_other(tmp_path: Path) -> None:
    first, second = (Child(program(tmp_path, name=name), tmp_path) for name in ("one", "two"))
    async with running(first), running(second):
        await restart_one_by_one([first, second], settle_s=0.0)
        assert [len(pids(tmp_path, name)) for name in ("one", "two")] == [2, 2]
        assert first.ready.is_set()
        assert second.ready.is_set()


def test_without_a_socket_nothing_is_reported(tmp_path: Path) -> None:
    notify_ready({})
    notify_ready({NOTIFY_VARIABLE: str(tmp_path / "nobody")})
