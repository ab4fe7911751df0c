# SPDX-License-Identifier: Apache-2.0
"""Child processes of one command: started again when they end, reported when all are ready, replaced one by one.

A child reports to the socket of ``NOTIFY_SOCKET``, as systemd's services do. ``READY=1``: it serves. ``STOPPING=1``: a
successor is to take over. ``WATCHDOG=1``: it is alive. A child hangs, and is killed, if it sends this too late after
its start, or has sent it and goes silent before its end. A successor starts beside its predecessor. Once it is ready,
SIGUSR1 tells the predecessor to finish what it has begun. The kernel ends children whose supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.sd_notify import ALIVE, NOTIFY_VARIABLE, READY, STOPPING, WATCHDOG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)
# Mistakes of configuration or arguments, and ports that are in use: at the first start, starting again does not help.
_USAGE: Final = 2
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
# Loads of large configurations stall a child for half a second. Envoy closes the connections of a process that answers
# no ping for 3 s, and counts it as unhealthy after 5 s.
_SILENCE_S: Final = 3.0
_CHECK_S: Final = 0.5
# Before its first report a child loads code and the configuration: with 88,200 endpoints it computes for 23 s, with
# four times as many for 150 s. So the time in which it computes counts a tenth.
_START_S: Final = 60.0
_COMPUTING_COUNTS: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)
_serials: Final = itertools.count()


def next_restart_pause(pause_s: float, *, lived_s: float) -> float:
    """How long to wait before another start of a program that lived for ``lived_s``; ``pause_s`` was the pause before
    its last start.
    """
    return FIRST_PAUSE_S if lived_s > LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))


class Program(msgspec.Struct, frozen=True):
    """``name``: in the log. ``descriptors``: of listening sockets, which its processes inherit. ``spare_input``:
    the line on standard input that makes a spare process one of this program. ``orphaned``: the signal to a process
    whose supervisor has died. ``is_watched``: its processes report that they are alive; others are watched if they do.
    """

    name: str
    command: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    spare_input: str = ""
    orphaned: signal.Signals = signal.SIGTERM
    is_watched: bool = False


class Process:
    """One process: its reports, and its end."""

    def __init__(self, program: Program, process: asyncio.subprocess.Process, reports: socket.socket) -> None:
        self.name = program.name
        self.is_ready = self.is_stopping = False
        # called when it is ready, stopping, or has ended
        self.changed: Callable[[], None] = _ignore
        # it is ready, or has ended
        self.settled = asyncio.Event()
        self._process = process
        self._reports = reports
        self._began_s = asyncio.get_running_loop().time()
        # checks since its start, or since it has reported that it is alive; None: it need not report
        self._missed = 0 if program.is_watched else None
        self._has_reported = False
        # what did not count by the first of these checks
        self._excused_s = 0.0

    @classmethod
    async def start(cls, program: Program, folder: Path, stdin: int | None = None) -> Process:
        """Start one. ``folder``: of the sockets for reports."""
        address = str(folder / f"{next(_serials)}.notify")
        with contextlib.ExitStack() as opened:
            reports = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
            reports.bind(address)
            process = await asyncio.create_subprocess_exec(
                # Ctrl-C reaches the supervisor alone, which says in which order they end
                *program.command,
                env={**os.environ, NOTIFY_VARIABLE: address, WATCHDOG_VARIABLE: f"{_SILENCE_S * 1e6:.0f}"},
                stdin=stdin,
                pass_fds=program.descriptors,
                start_new_session=True,
                preexec_fn=partial(_end_with_parent, program.orphaned),
            )
            opened.pop_all()
        return cls(program, process, reports)

    @property
    def status(self) -> int | None:
        """Of its exit; None while it runs."""
        return self._process.returncode

    @property
    def lived_s(self) -> float:
        """Since its start."""
        return asyncio.get_running_loop().time() - self._began_s

    async def receive_reports(self) -> None:
        """Receive its reports until it ends."""
        loop, ended = asyncio.get_running_loop(), asyncio.create_task(self._process.wait())
        loop.add_reader(self._reports, self._receive)
        try:
            while not (await asyncio.wait({ended}, timeout=_CHECK_S))[0]:
                self._check()
        finally:
            ended.cancel()
            loop.remove_reader(self._reports)
            self._reports.close()
        self._change()

    def on_report(self, *reports: bytes) -> None:
        """It reports by its socket, or somebody has asked it."""
        if ALIVE in reports:
            self._missed, self._has_reported = 0, True
        if STOPPING in reports:
            self.is_stopping = True
        if READY in reports:
            self.is_ready = True
        if STOPPING in reports or READY in reports:
            self._change()

    def send_signal(self, number: signal.Signals) -> None:
        """Pass a signal on, if it runs."""
        if self.status is None:
            self._process.send_signal(number)

    def assign_program(self, program: Program) -> None:
        """Tell a spare process what it is to be: it lives from now on."""
        self.name, self._missed = program.name, 0 if program.is_watched else None
        self._began_s = asyncio.get_running_loop().time()
        if self._process.stdin is not None:
            self._process.stdin.write(f"{program.spare_input}\n".encode())
            self._process.stdin.close()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.on_report(*self._reports.recv(4096).splitlines())

    def _check(self) -> None:
        """Count checks, not seconds: while the machine sleeps, or is too busy for the supervisor, there are none. Nor
        does it count that the process waits for a processor, or most of what it computes before its first report.
        """
        if self._missed is None:
            return
        ran_s, waited_s = _scheduled_s(self._process.pid)
        excused_s = waited_s if self._has_reported else waited_s + ran_s * (1.0 - _COMPUTING_COUNTS)
        if not self._missed:
            self._excused_s = excused_s
        self._missed += 1
        most_s = _SILENCE_S if self._has_reported else _START_S
        if self._missed * _CHECK_S - (excused_s - self._excused_s) >= most_s:
            since = f"for {most_s:g} s" if self._has_reported else "since its start"
            log.warning("%s has not reported %s, and is killed", self.name, since)
            self._missed = None
            self.send_signal(signal.SIGKILL)

    def _change(self) -> None:
        if self.is_ready or self.status is not None:
            self.settled.set()
        self.changed()


class SpareProcess:
    """A process that has loaded everything, and waits for a line on its standard input. One for all children; another
    is started once the one that was taken is ready.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        """``program``: becomes any of those with a ``spare_input``."""
        self._program = program
        self._folder = folder
        self._waiting: Process | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Keep one ready until ``stop``, and follow those that were taken until they end."""
        pause_s = 0.0
        async with asyncio.TaskGroup() as group:
            while not self._stopped.is_set():
                try:
                    process = await Process.start(self._program, self._folder, subprocess.PIPE)
                except OSError as error:
                    # nobody needs it as long as nothing ends
                    log.warning("there is no spare process: %s", error)
                    await _is_set_within(self._stopped, LONGEST_PAUSE_S)
                    continue
                self._waiting = process
                group.create_task(process.receive_reports())
                if self._stopped.is_set():
                    self.stop()
                await process.settled.wait()
                if process is self._waiting:
                    # nobody has taken it
                    pause_s = next_restart_pause(pause_s, lived_s=process.lived_s)
                    await _is_set_within(self._stopped, pause_s)

    @property
    def is_waiting(self) -> bool:
        """Whether there is one to take."""
        return self._waiting is not None and self._waiting.status is None

    def pop_process(self, program: Program) -> Process | None:
        """The process that waits, which is to be one of ``program``; None if there is none."""
        process, self._waiting = self._waiting, None
        if process is None or process.status is not None:
            return None
        process.assign_program(program)
        return process

    def replace(self) -> None:
        """Start another in place of the one that waits: the code may have changed since it was loaded."""
        process, self._waiting = self._waiting, None
        if process is not None:
            # it has nothing to end, and may hang
            process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """End the one that waits, and start no other."""
        self._stopped.set()
        self.replace()


class SupervisedProgram:
    """A program's process and its successors. ``ready``: set while one of them serves."""

    def __init__(
        self, program: Program, folder: Path, *, spare: SpareProcess | None = None, is_needed: bool = True
    ) -> None:
        """``folder``: of the sockets for reports. ``is_needed``: a mistake of usage at the first start is the end."""
        self.ready = asyncio.Event()
        self.program = program
        self._folder = folder
        self._spare = spare
        self._is_needed = is_needed
        # those that run: the last is the newest
        self._processes: list[Process] = []
        self._changed = asyncio.Event()
        self._starts = 0
        self._stopped = asyncio.Event()
        self._is_restarting = False

    async def run(self) -> int:
        """Run until ``stop``, and start again what ends before; returns the last exit status, also of a first process
        that ends with a mistake of usage.
        """
        async with asyncio.TaskGroup() as group:
            return await self._run(group)

    async def _run(self, group: asyncio.TaskGroup) -> int:
        pause_s = 0.0
        serving: Process | None = None
        while True:
            try:
                process = await self._start(group)
            except OSError as error:
                self._is_restarting = False
                self._changed.set()
                pause_s = next_restart_pause(pause_s, lived_s=0.0)
                log.warning("%s cannot be started, and is tried again in %g s: %s", self.program.name, pause_s, error)
                if await _is_set_within(self._stopped, pause_s):
                    return 0
                continue
            await self._until_settled(process, serving)
            self._is_restarting = False
            self._changed.set()
            if process.is_ready:
                self._on_ready(serving)
                serving = process
            elif serving is not None and not self._needs_successor(serving):
                log.warning("%s goes on, its successor ended %s", self.program.name, _how_it_ended(process))
                process = serving
            await self._until(partial(self._needs_successor, process))
            if process.status is None:
                continue
            self.ready.clear()
            if self._stopped.is_set() or (process.status == _USAGE and self._is_needed and serving is None):
                return max(process.status, 0)
            pause_s = next_restart_pause(pause_s, lived_s=process.lived_s)
            if await _is_set_within(self._stopped, self._pause_after(process, pause_s)):
                return 0

    async def _start(self, group: asyncio.TaskGroup) -> Process:
        process = None if self._spare is None else self._spare.pop_process(self.program)
        if process is None:
            process = await Process.start(self.program, self._folder)
            group.create_task(process.receive_reports())
        process.changed = self._changed.set
        self._starts += 1
        self._processes = [*(one for one in self._processes if one.status is None), process]
        if self._stopped.is_set():
            process.send_signal(signal.SIGTERM)
        return process

    async def _until_settled(self, process: Process, predecessor: Process | None) -> None:
        """Until the newest process is ready or has ended; its predecessor may end before."""
        if predecessor is not None and predecessor.status is None:
            await self._until(lambda: process.settled.is_set() or predecessor.status is not None)
            if not process.settled.is_set():
                self.ready.clear()
                log.warning(
                    "%s ended %s; its successor is not ready yet", self.program.name, _how_it_ended(predecessor)
                )
        await process.settled.wait()

    def _on_ready(self, predecessor: Process | None) -> None:
        """The newest process is ready, and its predecessor may run."""
        if predecessor is not None:
            predecessor.send_signal(signal.SIGUSR1)
        if self._starts > 1:
            log.info("%s is ready again", self.program.name)
        self.ready.set()

    def _needs_successor(self, process: Process) -> bool:
        is_leaving = process.is_stopping or self._is_restarting
        return process.status is not None or (is_leaving and not self._stopped.is_set())

    def _pause_after(self, process: Process, pause_s: float) -> float:
        """Before another start: none where a spare process takes over, unless the program keeps ending."""
        how = _how_it_ended(process)
        if pause_s == FIRST_PAUSE_S and self._spare is not None and self._spare.is_waiting:
            log.warning("%s ended %s; the spare process takes over", self.program.name, how)
            return 0.0
        log.warning("%s ended %s; it is started again in %g s", self.program.name, how, pause_s)
        return pause_s

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Pass a signal on; nothing is started again."""
        self._stopped.set()
        self._changed.set()
        self.send_signal(number)

    def send_signal(self, number: signal.Signals) -> None:
        """Pass a signal on to what runs."""
        for process in self._processes:
            process.send_signal(number)

    def mark_ready(self) -> None:
        """For a process that reports nothing by itself: whoever has asked it."""
        for process in self._processes[-1:]:
            process.on_report(READY)

    async def restart(self) -> None:
        """Have a successor take over; returns once it has, or has ended at its start."""
        self._is_restarting = True
        self._changed.set()
        await self._until(lambda: not self._is_restarting)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _scheduled_s(pid: int) -> tuple[float, float]:
    """How long the main thread of a process has run, and has waited for a processor; 0 where the kernel does not count
    it.
    """
    try:
        ran, waited = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def _ignore() -> None:
    """Nobody waits for a change yet."""


def _how_it_ended(process: Process) -> str:
    status = process.status or 0
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _end_with_parent(number: signal.Signals) -> None:
    """In the new process: a supervisor that is killed leaves none behind that holds its ports."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


async def restart_one_by_one(children: Sequence[SupervisedProgram]) -> None:
    """Replace each when the one before is ready."""
    for child in children:
        await child.restart()
