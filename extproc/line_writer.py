# SPDX-License-Identifier: Apache-2.0
"""A file, or standard output, to which lines are appended by a thread of its own: whoever adds a line never waits.

A full disk, a pipe that nobody reads or a queue that is full costs lines, which are counted, and nothing else. A file
that is renamed or removed, as logrotate does, is opened anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Literal, Self

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable
    from pathlib import Path

LineResult = Literal["written", "dropped", "failed"]

log = logging.getLogger(__name__)
_MOST_LINES: Final = 4096
_MOST_BYTES: Final = 16 << 20
_BATCH_BYTES: Final = 1 << 20
_MODE: Final = 0o600


def make_threadsafe_callback(
    loop: AbstractEventLoop, counted: Callable[[LineResult, int], None]
) -> Callable[[LineResult, int], None]:
    """``counted``, called by ``loop``. Nothing is counted once the loop has ended: the thread outlives it if the file
    is a pipe that nobody reads.
    """

    def call(result: LineResult, number: int) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(counted, result, number)

    return call


class LineWriter:
    """``path``: None for standard output. ``counted``: called from any thread, with the result and number of lines;
    ``dropped`` if the queue was full, ``failed`` if the file could not be written.
    """

    def __init__(
        self,
        path: Path | None,
        counted: Callable[[LineResult, int], None],
        *,
        most_lines: int = _MOST_LINES,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._path = path
        self._counted = counted
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._descriptor = sys.stdout.fileno() if path is None else -1
        # a part of a line was written last
        self._is_torn = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(self, line: bytes) -> None:
        """Add a line, which ends with a newline and has no other."""
        with self._changed:
            if not self._is_closed and len(self._lines) < self._most_lines and self._fits(line):
                self._lines.append(line)
                self._bytes += len(line)
                self._changed.notify()
                return
        self._counted("dropped", 1)

    def close(self, wait_s: float = 5.0) -> None:
        """Write what waits, for ``wait_s`` at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(wait_s)
        with self._changed:
            left = len(self._lines)
            self._lines.clear()
        if left:
            self._counted("dropped", left)

    def _fits(self, line: bytes) -> bool:
        return self._bytes + len(line) <= self._most_bytes

    def _run(self) -> None:
        # the file is there, or what is wrong with it is in the log, before the first line
        self._save([])
        while lines := self._next():
            self._save(lines)
        if self._path is not None and self._descriptor >= 0:
            os.close(self._descriptor)

    def _next(self) -> list[bytes]:
        """The lines of one write; none at the end."""
        with self._changed:
            while not self._lines and not self._is_closed:
                self._changed.wait()
            lines, size = list[bytes](), 0
            while self._lines and (not lines or size + len(self._lines[0]) <= _BATCH_BYTES):
                lines.append(self._lines.popleft())
                size += len(lines[-1])
            self._bytes -= size
            return lines

    def _save(self, lines: list[bytes]) -> None:
        try:
            self._write(b"".join(lines))
        except OSError as error:
            if not self._is_failing:
                log.error("%s cannot be written, lines are lost: %s", self._path or "standard output", error)
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("%s can be written again", self._path or "standard output")
            self._is_failing = False
        if lines:
            self._counted("failed" if self._is_failing else "written", len(lines))

    def _write(self, text: bytes) -> None:
        self._open()
        # what was torn ends here: a reader loses that line alone
        rest = memoryview(b"\n" + text if self._is_torn else text)
        try:
            while rest:
                written = os.write(self._descriptor, rest)
                self._is_torn = written < len(rest)
                rest = rest[written:]
        finally:
            rest.release()

    def _open(self) -> None:
        if self._path is None:
            return
        if self._descriptor >= 0:
            try:
                now, ours = self._path.stat(), os.fstat(self._descriptor)
            except FileNotFoundError:
                is_same = False
            else:
                is_same = (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino)
            if is_same:
                return
            os.close(self._descriptor)
            self._descriptor, self._is_torn = -1, False
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
