# SPDX-License-Identifier: Apache-2.0
"""Starts our programs by forking a process that has imported what they need.

``python -m NAME`` spends half a second of processor time on imports, and tests with Envoy start 130 programs. The
server reads a line of JSON for each: arguments, environment and log. It answers with the process id. The fork leaves
the server's loop and runs the program as ``python -m`` would, in a session of its own.

Where coverage is measured every program starts in full, and this server is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final, Self

from controller.bundle.envoy.bundle import build
from extproc.api.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# What the programs import; never a __main__, which each of them runs anew.
_PRELOADED: Final = (
    "bench.engine.server",
    "controller.bundle.sync",
    "controller.commands.bundle",
    "extproc.cli.serve",
    "extproc.runtime.app",
    "uvloop",
)
_PROGRAMS: Final = frozenset({"bench.engine", "controller", "extproc"})


class Forked:
    """A process that is not our child, as ``bench.stack.processes`` needs it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._file = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._file, self._has_ended)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._file, number)

    def kill(self) -> None:
        """Raises ProcessLookupError if it has ended."""
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended. The status is always -1: only a parent learns more, and its log says it."""
        await self._ended.wait()
        return -1

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self.returncode = -1
        self._ended.set()


class ForkServer:
    """Ends with the program that started it: its standard input is then at its end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fork_server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @staticmethod
    def can_start(command: Sequence[str]) -> bool:
        """Whether it is one of our programs."""
        return list(command[:2]) == [sys.executable, "-m"] and command[2] in _PROGRAMS

    async def start(self, command: Sequence[str], log: Path) -> Forked:
        """Run ``command``, with its output appended to ``log``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"words": list(command[2:]), "environment": dict(os.environ), "log": str(log)}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()))


def _become(wanted: dict[str, object]) -> None:
    """Be the program: its streams, its environment, its arguments."""
    os.setsid()
    log = os.open(str(wanted["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.clear()
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    sys.argv = list(wanted["words"])  # type: ignore[call-overload]


def _main() -> str:
    """The name of the program to run; in the server itself, at the end, an empty one."""
    for name in _PRELOADED:
        import_module(name)
    # builds the classes of Envoy's schema, which takes as long as their import
    build(load({}), "/nowhere")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        _reap()
        pid = os.fork()
        if not pid:
            wanted = json.loads(line)
            _become(wanted)
            return str(wanted["words"][0])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    return ""


def _reap() -> None:
    """Forget those that have ended. Until the next request they keep their numbers, which its sender may look up."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__" and (program := _main()):
    runpy.run_module(program, run_name="__main__", alter_sys=True)
