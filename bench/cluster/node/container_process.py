# SPDX-License-Identifier: Apache-2.0
"""One run of a container as a process group of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from bench.guard import Guard

_TAIL_BYTES: Final = 2_000


class Launch(msgspec.Struct, frozen=True):
    """What to run and where its output goes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log: Path


class ContainerProcess:
    """A process in a group of its own. When it ends, what it has left in its group ends too, as in a container."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, guard: Guard) -> None:
        self._process = process
        self._launch = launch
        self._guard = guard

    @classmethod
    async def start(cls, launch: Launch, guard: Guard) -> ContainerProcess:
        """Start it; raises OSError if there is no such program."""
        with launch.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(launch.environment),
                cwd=launch.directory,
                start_new_session=True,
            )
        guard.add(process.pid)
        return cls(process, launch, guard)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> tuple[int, int]:
        """Wait for its end; the exit code as a shell has it, and the signal that ended it or 0."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._guard.remove(self._process.pid)
        return (code, 0) if code >= 0 else (128 - code, -code)

    def send(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL goes to its whole group."""
        if self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._signal_group(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def tail(self) -> str:
        """The end of its output."""
        try:
            with self._launch.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(self._process.pid, number)
