# SPDX-License-Identifier: Apache-2.0
"""Follows the usage log over rotation, truncation and replacement: whole lines in batches, and where each ends.

Nothing here remembers what was read for good: the store keeps a ``LogPosition`` beside the rows, in one transaction.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Bytes hashed to detect that an inode number was reused.
_HEAD_BYTES: Final = 1024
# A file that was renamed is left when nothing was written to it for so long.
SETTLE_S: Final = 2.0
# Where our own rotation puts the log until it is read.
ROTATED: Final = ".rotated"
# Where lines of extproc's are put to be read.
TAKEN: Final = ".taken"
# What the rotations of others append to its name; compressed files are not read.
_SUFFIX: Final = re.compile(r"\.rotated|\.\d+|[.-]\d{8}[\d.T-]*")


class LogPosition(msgspec.Struct, frozen=True):
    """How far a log is read: ``offset`` bytes of the file with ``inode``. ``head``: a digest of its first bytes."""

    inode: int = 0
    offset: int = 0
    head: str = ""


class LogBatch(msgspec.Struct, frozen=True):
    """Lines without their ends, and the position behind each of them. ``after``: behind all, perhaps in another file.

    ``torn``: how many pieces were passed over that are no lines: longer than a batch, or without an end in a file to
    which nobody writes any more.
    """

    lines: tuple[bytes, ...]
    ends: tuple[LogPosition, ...]
    after: LogPosition
    torn: int = 0


class LogFollower:
    """Reads one log. Not for threads. ``most_bytes``: of a batch, and the longest line; memory is a small multiple.

    Methods raise OSError; the next call tries again.
    """

    def __init__(
        self, path: Path, position: LogPosition, clock: Callable[[], float], *, most_bytes: int = 2**20
    ) -> None:
        """``clock``: seconds, as ``time.monotonic``."""
        self._path = path
        self._clock = clock
        self._most_bytes = most_bytes
        self.position = position
        self._file: int | None = None
        # of a line that is longer than a batch: how far its end was looked for
        self._searched = 0
        # what was found when a read came to the end, and when it was the log or grew
        self._size = 0
        self._grew_at_s = clock()
        self._head = b""

    def close(self) -> None:
        """Close the file that is read."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def rewind(self, position: LogPosition) -> None:
        """Read again from ``position``: what came after it was not kept."""
        if position.inode != self.position.inode:
            self.close()
        self.position = position
        self._searched = 0

    def read(self) -> LogBatch | None:
        """The next lines, or a step to another file; None if there is nothing new."""
        if self._file is None and not self._open():
            return None
        file = self._file
        assert file is not None  # noqa: S101 - of _open
        if not self._is_same(file):
            # truncated, and perhaps written anew: what is there now is another log
            self.position = LogPosition(self.position.inode)
            self._searched = 0
        start = self.position.offset + self._searched
        data = os.pread(file, self._most_bytes, start)
        if data:
            end = data.rfind(b"\n") + 1
            if end:
                return self._batch(data[:end], start)
            if len(data) == self._most_bytes:
                self._searched += len(data)
                return LogBatch((), (), self.position)
        return self._next_file(torn=bool(data or self._searched), size=start + len(data))

    def bytes_behind(self) -> int:
        """Bytes that wait to be read, as far as it is known."""
        behind = 0
        if self._file is not None:
            behind = max(0, os.fstat(self._file).st_size - self.position.offset)
        with contextlib.suppress(FileNotFoundError):
            current = self._path.stat()
            if _inode(current) != self.position.inode:
                behind += current.st_size
            elif self._file is None:
                behind = max(0, current.st_size - self.position.offset)
        return behind

    def is_reading_file(self, path: Path) -> bool:
        """Whether the position is in the file that has this name now."""
        try:
            return self.position.inode == _inode(path.stat())
        except FileNotFoundError:
            return False

    def _batch(self, data: bytes, start: int) -> LogBatch:
        lines = data.split(b"\n")[:-1]
        torn = 0
        at = start
        if self._searched:
            # the end of a line that began in another batch
            at += len(lines[0]) + 1
            lines = lines[1:]
            torn = 1
            self._searched = 0
        ends = []
        for line in lines:
            at += len(line) + 1
            ends.append(self._position(at))
        after = ends[-1] if ends else self._position(at)
        self.position = after
        # empty lines are nothing
        kept = [(line, end) for line, end in zip(lines, ends, strict=True) if line.strip()]
        return LogBatch(tuple(line for line, _ in kept), tuple(end for _, end in kept), after, torn)

    def _position(self, offset: int) -> LogPosition:
        if len(self._head) < min(offset, _HEAD_BYTES):
            assert self._file is not None  # noqa: S101 - it is read from
            self._head = os.pread(self._file, _HEAD_BYTES, 0)
        return LogPosition(self.position.inode, offset, _digest(self._head[:offset]))

    def _is_same(self, file: int) -> bool:
        """Whether what was read is still there."""
        offset = self.position.offset
        head = os.pread(file, min(offset, _HEAD_BYTES), 0)
        is_same = _digest(head) == self.position.head if offset else True
        if not is_same or os.fstat(file).st_size < offset:
            self._head = b""
            return False
        return True

    def _next_file(self, *, torn: bool, size: int) -> LogBatch | None:
        """A step to the next file, if this one has another name now and nobody writes to it."""
        now_s = self._clock()
        if size != self._size or self.is_reading_file(self._path):
            self._size, self._grew_at_s = size, now_s
        if now_s - self._grew_at_s < SETTLE_S:
            return None
        following = self._following()
        if following is None:
            return None
        self.close()
        self._head = b""
        self._searched = 0
        self.position = LogPosition(_inode(following.stat()))
        return LogBatch((), (), self.position, int(torn))

    def _open(self) -> bool:
        """Open the file of the position; without one, or if it is gone, the oldest that may not have been read."""
        for path in self._files():
            if self.position.inode and _inode(path.stat()) == self.position.inode and self._try(path):
                assert self._file is not None  # noqa: S101 - of _try
                if self._is_same(self._file):
                    return True
                self.close()
        rotated = self._path.with_name(self._path.name + ROTATED)
        for path in (rotated, self._path):
            if self._try(path):
                assert self._file is not None  # noqa: S101 - of _try
                self.position = LogPosition(_inode(os.fstat(self._file)))
                return True
        return False

    def _try(self, path: Path) -> bool:
        try:
            # a pipe must not stop us for ever
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{path} is no regular file; name the file of spec.usageLog.path")
        self._file = file
        self._head = b""
        self._searched = 0
        self._grew_at_s = self._clock()
        return True

    def _files(self) -> list[Path]:
        """The log and what it was renamed to, the oldest first."""
        name = self._path.name
        found = []
        for path in self._path.parent.iterdir() if self._path.parent.is_dir() else ():
            if path.name.startswith(name) and _SUFFIX.fullmatch(path.name[len(name) :]):
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, path))
        ordered = [path for _, path in sorted(found)]
        return [*ordered, self._path] if self._path.exists() else ordered

    def _following(self) -> Path | None:
        """The file after the one that is read."""
        files = self._files()
        inodes = [_inode(path.stat()) for path in files]
        if self.position.inode in inodes:
            after = files[inodes.index(self.position.inode) + 1 :]
            return after[0] if after else None
        return self._path if self._path.exists() else None


class ExtprocLogReader:
    """Reads the lines that extproc writes: renames their file, waits until nobody writes to it, reads it, unlinks it.

    No position is stored: if the process dies before it unlinks the file, its lines are read again, and their rows are
    there already.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, most_bytes: int = 2**20) -> None:
        """``clock``, ``most_bytes``: as of LogFollower, whose errors methods raise."""
        self._path = path
        self._taken = path.with_name(path.name + TAKEN)
        self._clock = clock
        self._most_bytes = most_bytes
        self._follower: LogFollower | None = None
        self._taken_at_s = 0.0
        self._kept = LogPosition()

    def read(self) -> LogBatch | None:
        """The next lines, the same until ``keep`` is called; None if there are none yet."""
        if self._follower is None and not self._take():
            return None
        if self._clock() - self._taken_at_s < SETTLE_S:
            return None
        assert self._follower is not None  # noqa: S101 - of _take
        self._follower.rewind(self._kept)
        batch = self._follower.read()
        if batch is None:
            self.close()
            self._taken.unlink()
        return batch

    @property
    def has_unread_lines(self) -> bool:
        """Whether there are lines that ``read`` has not given."""
        return self._follower is not None

    def mark_stored(self, batch: LogBatch) -> None:
        """The rows of its lines are stored."""
        self._kept = batch.after

    def close(self) -> None:
        """Close the file that is read."""
        if self._follower is not None:
            self._follower.close()
            self._follower, self._kept = None, LogPosition()

    def _take(self) -> bool:
        """Whether there is a file to read."""
        if not self._taken.exists():
            try:
                self._path.rename(self._taken)
            except FileNotFoundError:
                return False
        self._taken_at_s = self._clock()
        self._follower = LogFollower(self._taken, LogPosition(), self._clock, most_bytes=self._most_bytes)
        return True


class LogRotator:
    """Rotates the log by Envoy's help: rename, have Envoy open its logs again, read the rest, unlink.

    Nothing is remembered between two calls: what to do is seen from which files there are. So a process that dies at
    any point goes on where it stopped.
    """

    def __init__(self, path: Path, most_bytes: int, reopen: Callable[[], bool]) -> None:
        """``most_bytes``: a longer log is rotated. ``reopen``: asks Envoy to open its logs; whether it answered."""
        self._path = path
        self._rotated = path.with_name(path.name + ROTATED)
        self._most_bytes = most_bytes
        self._reopen = reopen
        self.is_refused = False

    def step(self, follower: LogFollower) -> None:
        """One step, if one is due; raises OSError. All that ``follower`` has read is kept by now."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            if self._rotated.exists():
                self.is_refused = not self._reopen()
            return
        self.is_refused = False
        if self._rotated.exists():
            if follower.is_reading_file(self._path):
                self._rotated.unlink()
        elif size > self._most_bytes and follower.is_reading_file(self._path):
            self._path.rename(self._rotated)
            self.is_refused = not self._reopen()


def _inode(found: os.stat_result) -> int:
    """As databases keep numbers: some file systems use all 64 bits."""
    return found.st_ino & (2**63 - 1)


def _digest(head: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(head) if head else ""
