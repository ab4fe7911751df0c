"""Processor time of processes and of the machine, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class MachineTime(msgspec.Struct, frozen=True):
    """Seconds of all processors since the machine started."""

    busy_s: float
    total_s: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads. From schedstat where there is one: it counts nanoseconds."""
    threads = Path(f"/proc/{pid}/task")
    try:
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads.iterdir()) * 1e-9
    except FileNotFoundError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_time() -> MachineTime:
    """Of the machine, all that runs on it included."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    return MachineTime((sum(fields) - idle) / tick, sum(fields) / tick)


def busy_share(before: MachineTime, after: MachineTime) -> float:
    """0 to 1 of all processors."""
    total = after.total_s - before.total_s
    return (after.busy_s - before.busy_s) / total if total else 0.0
