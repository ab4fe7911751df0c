# SPDX-License-Identifier: Apache-2.0
"""Processes end with the block that started them, in every way in which it can end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.stack.processes import Processes, StartFailed, free_ports
from tests.waiting import eventually

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# ignores SIGTERM, and says when it does
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]
# starts a process of its own and prints its id
PARENT = [
    sys.executable,
    "-c",
    f"import subprocess, time; print(subprocess.Popen({SLEEP!r}).pid, flush=True); time.sleep(60)",
]


def is_running(pid: int) -> bool:
    """Not if it has ended and waits for a parent to ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    outer, pids = await start_runner(tmp_path, SLEEP)
    assert all(map(is_running, pids))
    outer.terminate()
    await asyncio.wait_for(outer.wait(), 120)
    assert not any(map(is_running, pids))


async def test_they_end_when_the_program_that_started_them_is_killed(tmp_path: Path) -> None:
    outer, pids = await start_runner(tmp_path, SLEEP, STUBBORN, PARENT)
    log = tmp_path / "2.log"
    await eventually(lambda: log.read_text().endswith("\n"))
    pids.append(int(log.read_text()))
    os.kill(pids[0], signal.SIGSTOP)
    await eventually(lambda: "deaf" in (tmp_path / "1.log").read_text())
    assert len(pids) == 4
    assert all(map(is_running, pids))
    outer.kill()
    await outer.wait()
    await eventually(lambda: not any(map(is_running, pids)))


async def start_runner(logs: Path, *commands: list[str]) -> tuple[asyncio.subprocess.Process, list[int]]:
    """A program that starts these processes and sleeps, and their process ids."""
    script = (
        "import asyncio, pathlib\n"
        "from bench.stack.processes import Processes\n"
        "async def main():\n"
        f"    async with Processes(pathlib.Path({str(logs)!r})) as processes:\n"
        f"        for number, command in enumerate({commands!r}):\n"
        "            print(await processes.start(str(number), command), flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    outer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert outer.stdout is not None
    return outer, [int(await outer.stdout.readline()) for _ in commands]


async def test_one_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.stack.processes._END_S", 0.3)
    async with Processes(tmp_path) as processes:
        pid = await processes.start("deaf", STUBBORN)

        async def is_deaf() -> bool:
            return b"deaf" in (tmp_path / "deaf.log").read_bytes()

        await processes.wait_ready("deaf", is_deaf)
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_one_has_started_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "parent.log"
    async with Processes(tmp_path) as processes:
        parent = await processes.start("parent", PARENT)
        await eventually(lambda: log.exists() and log.read_text().endswith("\n"))
        child = int(log.read_text())
        assert is_running(child)
        await processes.end("parent", number)
        assert not is_running(parent)
        await eventually(lambda: not is_running(child))


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


def test_a_port_is_given_once_even_while_nothing_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    (second,) = free_ports(1)
    monkeypatch.setattr("bench.stack.processes._CANDIDATES", iter([first, second, *range(20_000, 21_000)]))
    assert {first, second}.isdisjoint(free_ports(1))
