# SPDX-License-Identifier: Apache-2.0
"""Processes that belong together: started, watched until ready, ended whatever happens; what they use, from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec

from bench.stack.orphan_reaper import ProcessGuard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from types import TracebackType

_READY_S: Final = 180.0
_END_S: Final = 10.0
# Below those that Linux gives to outgoing connections, one of which might take the port between the check and its use.
_PORTS: Final = range(10_000, 32_000)
# How long a port is kept for the program that is to listen there.
_RESERVED_S: Final = 60.0
# The file descriptors that keep them, the oldest first, and until when.
_RESERVED: Final = deque[tuple[float, int]]()


class MachineCpuTime(msgspec.Struct, frozen=True):
    """Seconds of all processors since the machine started."""

    busy_s: float
    total_s: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process: all its threads that are still alive."""
    return sum(thread_cpu_seconds(pid).values())


def thread_cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of a process by thread name.

    The first thread is called ``main``; the times of threads that share a name are added up.
    Reads schedstat, which counts nanoseconds; where the kernel has none, the whole process counts as ``main``, in
    clock ticks.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # a thread may end meanwhile
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            name = "main" if thread.name == str(pid) else (thread / "comm").read_text().strip()
            found[name] += int((thread / "schedstat").read_text().split()[0]) * 1e-9
    return dict(found) or {"main": _ticked_seconds(pid)}


def _ticked_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in {"Z", "X"}


def workers_of(supervisor: int) -> list[int]:
    """The processes of extproc that serve for it, by their number; of those with one number the newest last."""
    return [pid for name, pid in sorted(_children(supervisor)) if name.startswith("worker-")]


def has_spare_worker(supervisor: int) -> bool:
    """Whether a process has loaded everything, and would take the place of a worker at once."""
    return any(name == "spare" for name, _ in _children(supervisor))


def _children(pid: int) -> Iterator[tuple[str, int]]:
    """Names and ids."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield Path(f"/proc/{child}/comm").read_text().strip(), child


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has held at once."""
    return _memory_bytes(pid, "VmHWM")


def rss_bytes(pid: int) -> int:
    """The memory that a process holds now."""
    return _memory_bytes(pid, "VmRSS")


def _memory_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    msg = f"/proc/{pid}/status has no {field}"
    raise OSError(msg)


def read_machine_cpu_time() -> MachineCpuTime:
    """Processor time of everything that runs on the machine."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    return MachineCpuTime((sum(fields) - idle) / tick, sum(fields) / tick)


def busy_share(before: MachineCpuTime, after: MachineCpuTime) -> float:
    """Share of all processors that was at work between two moments, 0 to 1."""
    total = after.total_s - before.total_s
    return (after.busy_s - before.busy_s) / total if total else 0.0


class StartFailed(Exception):
    """A process did not come up; the message has the end of its log."""


class Process(Protocol):
    """What asyncio's processes are, as far as it is used here."""

    @property
    def pid(self) -> int:
        """It leads a process group of this number."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Raises ProcessLookupError if it has ended."""

    def kill(self) -> None:
        """SIGKILL."""

    async def wait(self) -> int:
        """Until it has ended."""


async def spawn(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Process:
    """Run ``command`` in a session of its own, with its output appended to ``log``.

    ``environment`` and ``directory``: those of this program if None. Raises OSError if there is no such program.
    """
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )


class Processes:
    """An async context that ends the processes started in it: SIGTERM to all, the last one first, then SIGKILL, also to
    what they have started and left behind.

    SIGTERM cancels the task that entered it, as Ctrl-C does. If this program itself is killed, a guard ends the
    processes.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[tuple[str, Process]] = []
        self._commands: dict[str, Sequence[str]] = {}

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        self._guard = ProcessGuard()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a second Ctrl-C must not leave processes behind
        await asyncio.shield(self._end_all())
        self._guard.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    async def start(self, name: str, command: Sequence[str]) -> int:
        """Run ``command`` with its output in ``NAME.log``; its process id. Ctrl-C in the terminal does not reach it."""
        process = await spawn(command, self._logs / f"{name}.log")
        self._guard.add(process.pid)
        self._running.append((name, process))
        self._commands[name] = command
        return process.pid

    async def wait_ready(
        self, name: str, is_ready: Callable[[], Awaitable[bool]], *, timeout_s: float = _READY_S
    ) -> None:
        """Until ``name`` is ready; StartFailed if it ends or takes longer."""
        process = self._named(name)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await is_ready():
            if process.returncode is not None:
                raise StartFailed(
                    f"{name} ended with status {process.returncode}; its log ends so:\n{self._tail(name)}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailed(f"{name} is not ready after {timeout_s:g} s; its log ends so:\n{self._tail(name)}")
            await asyncio.sleep(0.05)

    async def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one process and wait for it."""
        entry = next(entry for entry in self._running if entry[0] == name)
        self._running.remove(entry)
        await self._end(entry[1], number)

    async def restart(self, name: str, number: signal.Signals) -> int:
        """End one process with a signal and start it again; its new process id."""
        await self.end(name, number)
        return await self.start_again(name)

    async def start_again(self, name: str) -> int:
        """Start one that has been ended with the command that it had; its new process id."""
        return await self.start(name, self._commands[name])

    def is_running(self, name: str) -> bool:
        """Whether it was started and has not ended since."""
        return any(known == name and process.returncode is None for known, process in self._running)

    def has_ended(self, name: str) -> bool:
        """Whether it has ended by itself, and was not started again."""
        return any(known == name and process.returncode is not None for known, process in self._running)

    async def wait_for_exit(self, name: str) -> int:
        """Wait until it has ended by itself; its exit status."""
        return await self._named(name).wait()

    def pid(self, name: str) -> int:
        """The process id of one that runs."""
        return self._named(name).pid

    def _named(self, name: str) -> Process:
        return next(process for known, process in self._running if known == name)

    async def _end_all(self) -> None:
        running, self._running = self._running[::-1], []
        # each is sent its signal before any is waited for
        await asyncio.gather(*(self._end(process, signal.SIGTERM) for _, process in running))

    async def _end(self, process: Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            process.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        with contextlib.suppress(ProcessLookupError):  # it has left nothing
            os.killpg(process.pid, signal.SIGKILL)
        self._guard.remove(process.pid)

    def _tail(self, name: str) -> str:
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(line[:500] for line in lines[-15:]) or "(empty)"


def _candidates() -> Iterator[int]:
    """All ports in turn. Each process begins elsewhere, so that two which search at once seldom find the same."""
    begin = random.randrange(len(_PORTS))
    return itertools.cycle([*_PORTS[begin:], *_PORTS[:begin]])


_CANDIDATES: Final = _candidates()


def free_ports(count: int) -> list[int]:
    """Distinct free loopback ports, which no other process is given for a minute."""
    now, ports = time.monotonic(), list[int]()  # noqa: TID251 - an edge
    while _RESERVED and _RESERVED[0][0] < now:
        os.close(_RESERVED.popleft()[1])
    while len(ports) < count:
        port = next(_CANDIDATES)
        with socket.socket() as one, contextlib.suppress(OSError):  # in use by another process, or reserved
            one.bind(("127.0.0.1", port))
            _reserve(port, until_s=now + _RESERVED_S)
            ports.append(port)
    return ports


def _reserve(port: int, *, until_s: float) -> None:
    """An abstract address is a lock that ends with its process, where there are such (Linux); raises OSError."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_UNIX) as lock:
        lock.bind(f"\0attache-port-{port}")
        _RESERVED.append((until_s, lock.detach()))


def ports_in_a_row(count: int) -> int:
    """The first of ``count`` consecutive free loopback ports."""
    while True:
        ports = free_ports(count)
        if ports[-1] - ports[0] == count - 1:
            return ports[0]
