# SPDX-License-Identifier: Apache-2.0
"""Child processes of one command: started again when they end, reported when all are ready, restarted one by one.

A child reports that it is ready as systemd's services do, by ``READY=1`` to the socket of ``NOTIFY_SOCKET``. The kernel
ends children whose supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)
NOTIFY_VARIABLE: Final = "NOTIFY_SOCKET"
_READY: Final = b"READY=1"
# Mistakes of configuration or arguments, and ports that are in use: at the first start, starting again does not help.
_USAGE: Final = 2
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


def next_pause(pause_s: float, *, lived_s: float) -> float:
    """How long to wait before another start of a program that lived for ``lived_s``; ``pause_s`` was the pause before
    its last start.
    """
    return FIRST_PAUSE_S if lived_s > LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))


def notify_ready(environment: Mapping[str, str]) -> None:
    """Report readiness to whoever started this process, if it asks for that: a supervisor, or systemd."""
    address = environment.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        # @ stands for the zero of an abstract address
        one.sendto(_READY, "\0" + address[1:] if address.startswith("@") else address)


class Program(msgspec.Struct, frozen=True):
    """``name``: in the log."""

    name: str
    command: tuple[str, ...]


class Child:
    """A program's process and its successors. ``ready``: set while the one that runs has reported readiness."""

    def __init__(self, program: Program, folder: Path, *, is_needed: bool = True) -> None:
        """``folder``: of the socket for reports. ``is_needed``: a mistake of usage at the first start is the end."""
        self.ready = asyncio.Event()
        self.program = program
        self._is_needed = is_needed
        self._address = folder / f"{program.name}.notify"
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._starts = 0
        self._is_stopping = self._is_restarting = False

    async def run(self) -> int:
        """Run until ``stop``, and start again what ends before; returns the last exit status, also of a first process
        that ends with a mistake of usage.
        """
        clock = asyncio.get_running_loop().time
        pause_s, was_ready = 0.0, False
        with self._reports():
            while True:
                began_s = clock()
                status = await self._run_once()
                was_ready = was_ready or self.ready.is_set()
                self.ready.clear()
                if self._is_stopping or (status == _USAGE and self._is_needed and not was_ready):
                    return max(status, 0)
                if self._is_restarting:
                    self._is_restarting, pause_s = False, 0.0
                    continue
                pause_s = next_pause(pause_s, lived_s=clock() - began_s)
                log.warning(
                    "%s ended %s; it is started again in %g s", self.program.name, _how_it_ended(status), pause_s
                )
                if await self._stopped_within(pause_s):
                    return 0

    async def _run_once(self) -> int:
        environment = {**os.environ, NOTIFY_VARIABLE: str(self._address)}
        self._starts += 1
        self._process = await asyncio.create_subprocess_exec(
            # Ctrl-C reaches the supervisor alone, which says in which order they end
            *self.program.command,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        if self._is_stopping:
            self.send(signal.SIGTERM)
        return await self._process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Pass a signal on; the process is not started again."""
        self._is_stopping = True
        self._ended.set()
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on, if the process runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def report_ready(self) -> None:
        """The process is ready; it calls this by its socket, or whoever has asked it."""
        if self._starts > 1:
            log.info("%s is ready again", self.program.name)
        self.ready.set()

    async def restart(self) -> None:
        """End the process with SIGTERM, if it runs, start it again and wait until it is ready."""
        if self._process is not None and self._process.returncode is None:
            self._is_restarting = True
            self.ready.clear()
            self.send(signal.SIGTERM)
        await self.ready.wait()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def _reports(self) -> Iterator[None]:
        """Receive the reports of readiness."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as one:
            one.bind(str(self._address))
            loop.add_reader(one, self._receive, one)
            try:
                yield
            finally:
                loop.remove_reader(one)

    def _receive(self, one: socket.socket) -> None:
        if _READY in one.recv(4096).splitlines():
            self.report_ready()


def _how_it_ended(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _end_with_parent() -> None:
    """In the new process: a supervisor that is killed leaves none behind that holds its ports."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def restart_one_by_one(children: Sequence[Child], settle_s: float) -> None:
    """Restart each when the one before is ready and has been for ``settle_s``: its callers must have noticed."""
    for child in children:
        await child.restart()
        await asyncio.sleep(settle_s)
