# SPDX-License-Identifier: Apache-2.0
"""Instructions that a process executes, counted by ``perf stat``.

The counter is hardware; most virtual machines do not show it.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import Final

NOT_AVAILABLE: Final = (
    "NOT MEASURED: instructions per request; needs `perf` and a machine that shows its hardware counters"
)
_EVENT: Final = "instructions"


async def available(event: str = _EVENT) -> bool:
    """Whether this machine counts ``event``."""
    if shutil.which("perf") is None:
        return False
    counting = await asyncio.create_subprocess_exec(*_command(event), "true", stderr=-1, stdout=-3)
    _, said = await counting.communicate()
    return read_count(said.decode()) is not None


async def count(pid: int, seconds: float, event: str = _EVENT) -> float | None:
    """Events of a process and all its threads within ``seconds``; None if they cannot be counted."""
    sleep = ["-p", str(pid), "--", "sleep", f"{seconds:g}"]
    counting = await asyncio.create_subprocess_exec(*_command(event), *sleep, stderr=-1, stdout=-3)
    _, said = await counting.communicate()
    return read_count(said.decode())


def _command(event: str) -> list[str]:
    return ["perf", "stat", "-x", ",", "-e", event]


def read_count(said: str) -> float | None:
    """The figure in ``perf stat -x ,``'s output: ``COUNT,UNIT,EVENT,...``; None where it says ``<not supported>``."""
    for line in said.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[0].replace(".", "", 1).isdigit():
            return float(fields[0])
    return None
