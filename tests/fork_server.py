# SPDX-License-Identifier: Apache-2.0
"""Starts our programs by forking a process that has imported what they need.

``python -m NAME`` spends a second of processor time on imports, and tests start hundreds of programs. The server reads
a line of JSON for each: arguments, environment, directory and log. The fork answers with its process id, leaves the
server's loop and runs the program as ``python -m`` would, in a session of its own. Once it has ended, a line with its
process id is answered by its exit status.

Where coverage is measured, it begins in the fork, so that imports are not counted; tests import the same modules.
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
from uuid import uuid4

import coverage

from bench.stack import processes
from controller.bundle.envoy.bundle import build_bundle
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# What the programs import; never a __main__, which each of them runs anew.
_PRELOADED: Final = (
    "attache.commands",
    "bench.engine.server",
    "controller.agents.runtime.agent",
    "controller.bundle.sync",
    "controller.commands.bundle",
    "controller.commands.gateway",
    "controller.commands.manager",
    "extproc.cli.serve",
    "extproc.runtime.app",
    "uvloop",
)
_PROGRAMS: Final = frozenset({"attache", "bench.engine", "bench.engine.vllm_command_line", "controller", "extproc"})
# By these coverage tells processes to measure themselves.
_MEASURED: Final = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
REAL_SPAWN: Final = processes.spawn


class Forked:
    """A process that is not our child, as ``bench.stack.processes`` needs it."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
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
        """Until it has ended; its exit status, or the negative number of the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self.returncode = self._server.status_of(self.pid)
        self._ended.set()


class ForkServer:
    """Ends with the program that started it: its standard input is then at its end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fork_server"]
        environment = {name: value for name, value in os.environ.items() if name not in _MEASURED}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @staticmethod
    def can_start(command: Sequence[str]) -> bool:
        """Whether it is one of our programs."""
        return list(command[:2]) == [sys.executable, "-m"] and command[2] in _PROGRAMS

    async def start(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Forked:
        """Run ``command``, with its output appended to ``log``; ``environment`` and ``directory`` are ours if None."""
        wanted = {
            "words": list(command[2:]),
            "environment": dict(os.environ if environment is None else environment),
            "directory": str(directory or ""),
            "log": str(log),
        }
        return Forked(self._ask(wanted), self)

    def status_of(self, pid: int) -> int:
        """The exit status of a process that has ended. The server forgets it."""
        return self._ask(pid)

    def _ask(self, question: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Inside, ``bench.stack.processes.spawn`` forks our programs and starts others as ever."""
    with ForkServer() as server:

        async def spawn(
            command: Sequence[str],
            log: Path,
            *,
            environment: Mapping[str, str] | None = None,
            directory: Path | None = None,
        ) -> processes.Process:
            start = server.start if server.can_start(command) else REAL_SPAWN
            return await start(command, log, environment=environment, directory=directory)

        processes.spawn = spawn
        try:
            yield
        finally:
            processes.spawn = REAL_SPAWN


async def output_of(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """The exit status and the output of a command that ends. ``directory``: for its log."""
    log = directory / f"{uuid4().hex}.log"
    process = await processes.spawn(command, log)
    return await process.wait(), log.read_text()


def _become(wanted: dict[str, object]) -> None:
    """Be the program: its streams, its environment, its directory, its arguments."""
    os.setsid()
    # whoever reads it may signal the group, which is there now
    os.write(1, b"%d\n" % os.getpid())
    log = os.open(str(wanted["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.clear()
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    if wanted["directory"]:
        os.chdir(str(wanted["directory"]))
    sys.argv = list(wanted["words"])  # type: ignore[call-overload]
    coverage.process_startup()


def _main() -> str:
    """The name of the program to run; in the server itself, at the end, an empty one."""
    for name in _PRELOADED:
        import_module(name)
    # builds the classes of Envoy's schema, which takes as long as their import
    build_bundle(load_snapshot({}), "/nowhere")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, int):
            os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(question, 0)[1]))
        elif not os.fork():
            _become(question)
            return str(question["words"][0])
    return ""


if __name__ == "__main__" and (program := _main()):
    runpy.run_module(program, run_name="__main__", alter_sys=True)
