"""Processes end with the block that started them, in every way in which it can end."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from bench.processes import Processes, StartFailed, free_ports

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# ignores SIGTERM, and says when it does
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def never() -> bool:
    return False


async def test_they_end_when_the_block_ends_and_when_it_fails(tmp_path: Path) -> None:
    pids: list[int] = []

    async def work() -> None:
        async with Processes(tmp_path) as processes:
            pids.extend([await processes.start(f"one-{number}", SLEEP) for number in range(3)])
            assert all(map(is_running, pids))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await work()
    assert len(pids) == 3
    assert not any(map(is_running, pids))


async def test_they_end_when_the_task_is_cancelled(tmp_path: Path) -> None:
    pids: list[int] = []
    started = asyncio.Event()

    async def work() -> None:
        async with Processes(tmp_path) as processes:
            pids.append(await processes.start("one", SLEEP))
            started.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        await started.wait()
        task.cancel()
    assert not is_running(pids[0])


async def test_sigterm_ends_them_too(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from bench.processes import Processes\n"
        "async def main():\n"
        f"    async with Processes(pathlib.Path({str(tmp_path)!r})) as processes:\n"
        "        print(await processes.start('one', [sys.executable, '-c', 'import time; time.sleep(60)']), flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    outer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert outer.stdout is not None
    pid = int(await outer.stdout.readline())
    assert is_running(pid)
    outer.terminate()
    await asyncio.wait_for(outer.wait(), 20)
    assert not is_running(pid)


async def test_one_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.processes._END_S", 0.3)
    async with Processes(tmp_path) as processes:
        pid = await processes.start("deaf", STUBBORN)

        async def is_deaf() -> bool:
            return b"deaf" in (tmp_path / "deaf.log").read_bytes()

        await processes.wait_ready("deaf", is_deaf)
    assert not is_running(pid)


async def test_one_that_fails_to_start_is_reported_with_its_last_words_and_takes_the_others_along(
    tmp_path: Path,
) -> None:
    pids: list[int] = []

    async def work() -> None:
        async with Processes(tmp_path) as processes:
            pids.append(await processes.start("one", SLEEP))
            await processes.start("two", [sys.executable, "-c", "print('no such luck'); raise SystemExit(3)"])
            await processes.wait_ready("two", never)

    with pytest.raises(StartFailed, match=r"two ended with status 3(.|\n)*no such luck"):
        await work()
    assert not is_running(pids[0])


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
