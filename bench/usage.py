# SPDX-License-Identifier: Apache-2.0
"""Processor time of processes, threads and the machine, and peak memory, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

import msgspec


class MachineTime(msgspec.Struct, frozen=True):
    """Seconds of all processors since the machine started."""

    busy_s: float
    total_s: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process: all its threads that are still alive."""
    return sum(thread_seconds(pid).values())


def thread_seconds(pid: int) -> dict[str, float]:
    """User and system time of a process by thread name.

    The first thread is called ``main``; the times of threads that share a name are added up.
    Reads schedstat, which counts nanoseconds; where the kernel has none, the whole process counts as ``main``, in
    clock ticks.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # a thread may end while we look
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


def machine_time() -> MachineTime:
    """Processor time of everything that runs on the machine."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    return MachineTime((sum(fields) - idle) / tick, sum(fields) / tick)


def busy_share(before: MachineTime, after: MachineTime) -> float:
    """Share of all processors that was at work between two moments, 0 to 1."""
    total = after.total_s - before.total_s
    return (after.busy_s - before.busy_s) / total if total else 0.0
