# SPDX-License-Identifier: Apache-2.0
"""Ends process groups once the program that started them is gone, however it went: SIGKILL leaves no other chance.

The program holds the write end of a pipe and writes a line for each group: ``+PID`` when it starts one, ``-PID`` when
it has ended it. The guard reads the other end. When the program dies, the kernel closes the pipe, and the guard ends
what is left, politely first. It lives in a session of its own, so that a signal to the program's group or terminal
spares it.

Unlike ``prctl(PR_SET_PDEATHSIG)`` this reaches what the processes started themselves, ends those that are stopped or
ignore SIGTERM, and does not depend on the thread that started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

_GRACE_S: Final = 2.0
_PAUSE_S: Final = 0.05


class ProcessGuard:
    """A guard process and our end of its pipe. Only for leaders of process groups (``start_new_session=True``)."""

    def __init__(self) -> None:
        # isolated and without site-packages: it starts in 10 ms
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    @property
    def pid(self) -> int:
        """The guard's own process id."""
        return self._process.pid

    def add(self, pid: int) -> None:
        """From now on the group of ``pid`` ends with this program."""
        self._write_line(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """The group of ``pid`` has ended: its number may soon be another's."""
        self._write_line(f"-{pid}\n")

    def close(self) -> None:
        """End the guard, and all groups that were not removed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed: the processes continue without one
            self._process.stdin.write(line.encode())


def _end(groups: Iterable[int]) -> None:
    """SIGTERM, and after a while SIGKILL. SIGCONT, because a stopped process does not handle signals."""
    left = set(groups)
    for group in left:
        _send(group, signal.SIGTERM)
        _send(group, signal.SIGCONT)
    for _ in range(round(_GRACE_S / _PAUSE_S)):
        left = {group for group in left if _send(group, 0)}
        if not left:
            return
        time.sleep(_PAUSE_S)
    for group in left:
        _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    """Whether a process of the group is left to receive the signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    _end(groups)


if __name__ == "__main__":
    _main()
