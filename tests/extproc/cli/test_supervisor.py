# SPDX-License-Identifier: Apache-2.0
"""Child processes: started again when they end or hang, given up when started wrongly, replaced on request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.cli import supervisor
from extproc.cli.supervisor import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Process,
    Program,
    SpareProcess,
    SupervisedProgram,
    next_restart_pause,
    restart_one_by_one,
)
from extproc.sd_notify import NOTIFY_VARIABLE, READY, WATCHDOG_VARIABLE, notify, watchdog_s
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# appends its process id to a file
RECORDS = """
import os, signal, sys
from extproc.sd_notify import ALIVE, READY, STOPPING, notify
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: sys.exit(0))
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
"""
# is ready then, and waits for a signal
WAITS = f"""{RECORDS}
notify(READY, os.environ)
while True:
    signal.pause()
"""
# the same, and reports that it is alive, before it is ready and then all the time
REPORTS = WAITS.replace("notify(READY", "notify(ALIVE, os.environ)\nnotify(READY").replace(
    "    signal.pause()", "    notify(ALIVE, os.environ)\n    signal.sigtimedwait([], 0.1)"
)
# the same, and says that it stops when it is told to
DRAINS = REPORTS.replace("(signal.SIGTERM, signal.SIGUSR1)", "[signal.SIGTERM]").replace(
    "notify(ALIVE", "signal.signal(signal.SIGUSR1, lambda *_: notify(STOPPING, os.environ))\nnotify(ALIVE", 1
)
# until there is a file
HANGS = 'while not os.path.exists(sys.argv[1] + ".go"): signal.sigtimedwait([], 0.1)'
# the same as WAITS once it has read a line
WAITS_FOR_LINE = f"import sys\nsys.stdin.readline() or sys.exit(0)\n{WAITS}"


def program(tmp_path: Path, script: str = WAITS, name: str = "one") -> Program:
    return Program(name, (sys.executable, "-c", script, str(tmp_path / name)))


def watched(tmp_path: Path, second_does: str) -> Program:
    """Its processes report; the second does something else before its first report."""
    script = REPORTS.replace(
        "notify(ALIVE", f"if len(open(sys.argv[1]).readlines()) == 2:\n    {second_does}\nnotify(ALIVE", 1
    )
    return msgspec.structs.replace(program(tmp_path, script), is_watched=True)


def pids(tmp_path: Path, name: str = "one") -> list[int]:
    file = tmp_path / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@asynccontextmanager
async def running(child: SupervisedProgram) -> AsyncIterator[None]:
    run = asyncio.create_task(child.run())
    await child.ready.wait()
    try:
        yield
    finally:
        child.stop()
        assert await run == 0


@asynccontextmanager
async def standing_by(tmp_path: Path) -> AsyncIterator[SpareProcess]:
    spare = SpareProcess(program(tmp_path, WAITS_FOR_LINE), tmp_path)
    run = asyncio.create_task(spare.run())
    await eventually(lambda: spare.is_waiting)
    try:
        yield spare
    finally:
        spare.stop()
        await run


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("pause_s", "lived_s", "after_s"),
    [(0.0, 0.1, FIRST_PAUSE_S), (0.2, 0.1, 0.4), (8.0, 1.0, LONGEST_PAUSE_S), (8.0, 11.0, FIRST_PAUSE_S)],
)
def test_pauses_double_until_a_program_has_lived_for_a_while(pause_s: float, lived_s: float, after_s: float) -> None:
    assert next_restart_pause(pause_s, lived_s=lived_s) == after_s


async def test_a_program_that_is_killed_is_started_again_and_ready_again(tmp_path: Path) -> None:
    child = SupervisedProgram(program(tmp_path), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await child.ready.wait()
    assert len(pids(tmp_path)) == 2


async def test_a_program_that_cannot_start_at_all_is_given_up(tmp_path: Path) -> None:
    child = SupervisedProgram(program(tmp_path, "raise SystemExit(2)"), tmp_path)
    assert await child.run() == 2
    assert not child.ready.is_set()


async def test_a_program_that_is_not_needed_is_tried_again_though_it_cannot_start(tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    script = (
        f"import pathlib; one = pathlib.Path({str(marker)!r})\nif not one.exists(): one.touch(); raise SystemExit(2)"
    )
    child = SupervisedProgram(program(tmp_path, f"{script}\n{WAITS}"), tmp_path, is_needed=False)
    async with running(child):
        await child.ready.wait()
    assert marker.exists()


async def test_a_program_that_was_ready_once_is_tried_again_though_it_cannot_start(tmp_path: Path) -> None:
    ends = WAITS.replace("while True", "if len(open(sys.argv[1]).readlines()) < 3:\n    sys.exit(2)\nwhile True")
    child = SupervisedProgram(program(tmp_path, ends), tmp_path)
    run = asyncio.create_task(child.run())
    await eventually(lambda: len(pids(tmp_path)) == 3)
    await child.ready.wait()
    child.stop()
    await run


async def test_a_successor_is_ready_before_its_predecessor_is_told_to_leave(tmp_path: Path) -> None:
    # it leaves only when told
    stays = WAITS.replace("(signal.SIGTERM, signal.SIGUSR1)", "[signal.SIGUSR1]")
    first, second = (SupervisedProgram(program(tmp_path, stays, name), tmp_path) for name in ("one", "two"))
    runs = [asyncio.create_task(child.run()) for child in (first, second)]
    for child in (first, second):
        await child.ready.wait()
    await restart_one_by_one([first, second])
    for child, name in ((first, "one"), (second, "two")):
        assert child.ready.is_set()
        predecessor, successor = pids(tmp_path, name)
        await eventually(lambda pid=predecessor: not is_running(pid))
        assert is_running(successor)
        child.stop(signal.SIGKILL)
    await asyncio.gather(*runs)


async def test_a_successor_that_cannot_start_leaves_the_predecessor_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = WAITS.replace("notify(READY", "if len(open(sys.argv[1]).readlines()) > 1:\n    sys.exit(2)\nnotify(READY")
    child = SupervisedProgram(program(tmp_path, once), tmp_path)
    async with running(child):
        await child.restart()
        assert child.ready.is_set()
        assert is_running(pids(tmp_path)[0])
    assert "one goes on, its successor ended with status 2" in caplog.text


async def test_a_process_that_reports_that_it_stops_has_a_successor_while_it_runs(tmp_path: Path) -> None:
    drains = WAITS.replace(
        "for number", "signal.signal(signal.SIGHUP, lambda *_: notify(STOPPING, os.environ))\nfor number"
    )
    child = SupervisedProgram(program(tmp_path, drains), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGHUP)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await eventually(lambda: not is_running(pids(tmp_path)[0]))
        assert child.ready.is_set()


async def test_a_process_that_hangs_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = SupervisedProgram(program(tmp_path, REPORTS), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await child.ready.wait()
    assert "one has not reported for 3 s, and is killed" in caplog.text


async def test_a_process_may_take_its_time_to_stop_and_is_killed_if_it_hangs_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_SILENCE_S", 2.0)
    child = SupervisedProgram(program(tmp_path, DRAINS), tmp_path)
    async with running(child):
        (stopping,) = pids(tmp_path)
        os.kill(stopping, signal.SIGUSR1)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await child.ready.wait()
        await asyncio.sleep(3.0)
        assert is_running(stopping)
        os.kill(stopping, signal.SIGSTOP)
        await eventually(lambda: not is_running(stopping))
        assert is_running(pids(tmp_path)[1])
    assert caplog.text.count("one has not reported for 2 s, and is killed") == 1


@pytest.mark.parametrize("hangs", [HANGS, "while True: pass"])
async def test_a_process_that_hangs_before_its_first_report_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: str
) -> None:
    monkeypatch.setattr(supervisor, "_START_S", 2.0)
    monkeypatch.setattr(supervisor, "_COMPUTING_COUNTS", 0.5)
    child = SupervisedProgram(watched(tmp_path, hangs), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await eventually(lambda: len(pids(tmp_path)) == 3)
        await child.ready.wait()
    assert caplog.text.count("one has not reported since its start, and is killed") == 1
    assert "one ended by SIGKILL; it is started again in " in caplog.text


async def test_a_process_may_compute_for_longer_before_its_first_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that loads a large configuration."""
    monkeypatch.setattr(supervisor, "_START_S", 2.0)
    computes = "import time\n    while time.process_time() < 3.0: pass"
    child = SupervisedProgram(watched(tmp_path, computes), tmp_path)
    async with running(child):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        await child.ready.wait()
        assert len(pids(tmp_path)) == 2
    assert "has not reported" not in caplog.text


async def test_a_successor_that_hangs_before_its_first_report_leaves_the_predecessor_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_START_S", 2.0)
    child = SupervisedProgram(watched(tmp_path, HANGS), tmp_path)
    async with running(child):
        await child.restart()
        assert child.ready.is_set()
        assert is_running(pids(tmp_path)[0])
        assert not is_running(pids(tmp_path)[1])
    assert "one goes on, its successor ended by SIGKILL" in caplog.text


async def test_a_predecessor_that_hangs_while_its_successor_starts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_SILENCE_S", 2.0)
    child = SupervisedProgram(watched(tmp_path, HANGS), tmp_path)
    async with running(child):
        restart = asyncio.create_task(child.restart())
        await eventually(lambda: len(pids(tmp_path)) == 2)
        predecessor, successor = pids(tmp_path)
        os.kill(predecessor, signal.SIGSTOP)
        await eventually(lambda: not child.ready.is_set())
        assert not is_running(predecessor)
        (tmp_path / "one.go").touch()
        await child.ready.wait()
        await restart
        assert pids(tmp_path) == [predecessor, successor]
    assert "one ended by SIGKILL; its successor is not ready yet" in caplog.text


async def test_a_spare_process_that_hangs_before_it_is_taken_is_killed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_START_S", 2.0)
    first = msgspec.structs.replace(program(tmp_path, REPORTS), spare_input="one", is_watched=True)
    waits = f"{RECORDS}\nsys.stdin.readline() or sys.exit(0)\n{REPORTS}"
    spare = SpareProcess(program(tmp_path, waits, "spare"), tmp_path)
    run = asyncio.create_task(spare.run())
    await eventually(lambda: spare.is_waiting and len(pids(tmp_path, "spare")) == 1)
    child = SupervisedProgram(first, tmp_path, spare=spare)
    hung = pids(tmp_path, "spare")[0]
    os.kill(hung, signal.SIGSTOP)

    async def be_patient() -> None:
        # on a busy machine, a process that does not hang may take longer than one that does gets here
        await eventually(lambda: not is_running(hung))
        monkeypatch.setattr(supervisor, "_START_S", 120.0)

    patience = asyncio.create_task(be_patient())
    async with running(child):
        assert not is_running(hung)
    await patience
    spare.stop()
    await run
    assert "one has not reported since its start, and is killed" in caplog.text


async def test_a_spare_process_that_hangs_delays_no_end(tmp_path: Path) -> None:
    spare = SpareProcess(program(tmp_path, f"{RECORDS}\nsys.stdin.readline()"), tmp_path)
    run = asyncio.create_task(spare.run())
    await eventually(lambda: len(pids(tmp_path)) == 1)
    os.kill(pids(tmp_path)[0], signal.SIGSTOP)
    spare.stop()
    await eventually(run.done)


async def test_a_spare_process_takes_the_place_of_one_that_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with standing_by(tmp_path) as spare:
        child = SupervisedProgram(
            msgspec.structs.replace(program(tmp_path, "raise SystemExit(2)"), spare_input="one"), tmp_path, spare=spare
        )
        async with running(child):
            (first,) = pids(tmp_path)
            await eventually(lambda: spare.is_waiting)
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: len(pids(tmp_path)) == 2)
            await child.ready.wait()
    assert "one ended by SIGKILL; the spare process takes over" in caplog.text


async def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There may be no memory, or no process, for a moment."""
    child, start, failures = (
        SupervisedProgram(program(tmp_path), tmp_path),
        Process.start,
        [OSError("full"), OSError("full")],
    )

    async def fails_twice(one: Program, folder: Path) -> Process:
        if failures:
            raise failures.pop()
        return await start(one, folder)

    monkeypatch.setattr(Process, "start", fails_twice)
    async with running(child):
        assert len(pids(tmp_path)) == 1
    assert caplog.text.count("one cannot be started, and is tried again in 0.") == 2


async def test_the_life_of_a_spare_process_begins_when_it_is_taken(tmp_path: Path) -> None:
    """So a program that keeps ending is started after longer and longer pauses."""
    async with standing_by(tmp_path) as spare:
        await asyncio.sleep(1.0)
        taken = spare.pop_process(msgspec.structs.replace(program(tmp_path), spare_input="one"))
        assert taken is not None
        assert taken.lived_s < 1.0
        taken.send_signal(signal.SIGTERM)


async def test_a_spare_process_that_ends_is_replaced(tmp_path: Path) -> None:
    spare = SpareProcess(program(tmp_path, f"{RECORDS}\nsys.stdin.readline()"), tmp_path)
    run = asyncio.create_task(spare.run())
    for count in (1, 2):
        await eventually(lambda count=count: len(pids(tmp_path)) == count)
        os.kill(pids(tmp_path)[-1], signal.SIGKILL)
    spare.stop()
    await run


def test_without_a_socket_nothing_is_reported(tmp_path: Path) -> None:
    notify(READY, {})
    notify(READY, {NOTIFY_VARIABLE: str(tmp_path / "nobody")})


@pytest.mark.parametrize(
    ("environment", "due_s"), [({}, None), ({WATCHDOG_VARIABLE: "4500000"}, 4.5), ({WATCHDOG_VARIABLE: "x"}, None)]
)
def test_reports_are_due_as_the_environment_says(environment: dict[str, str], due_s: float | None) -> None:
    assert watchdog_s(environment) == due_s
