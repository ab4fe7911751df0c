# SPDX-License-Identifier: Apache-2.0
"""Grants of the workers of one machine that others may not have been told of yet, in a file that all of them map.

Workers tell each other what they spend of local limits, some 10 ms later. Requests that come at the same time would be
granted by each of them. So a worker takes a lock before it grants, reads what the others have granted since, and writes
what it grants. The kernel releases the lock of a process that ends. What a worker was told of since counts no more
here: it is in the levels of its buckets.

The file has a counter, and a ring of records of one size. A record counts once the counter says so, so none is read
that a killed worker has half written. A worker that waits too long for the lock, because one that holds it hangs, goes
on without it for a while, and knows what it was told.

A worker that is alone takes no lock and reads nothing, but writes all the same, for whoever comes after it. Each worker
holds a shared lock on a byte of the file for as long as it lives. Once it has that, it writes a mark that nobody had
before. So a worker that reads the mark, and then finds no such lock of another one, is alone until the mark changes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import mmap
import os
import struct
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.token_buckets import at_least_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from extproc.admission.rate_limits import Charge

log = logging.getLogger(__name__)

_COUNT: Final = struct.Struct("<Q")
# Behind the counter: of who has opened the file last.
_MARK: Final = slice(_COUNT.size, _COUNT.size + 8)
# The process, the number of its grant, the bucket, the amount, and the time by the machine's monotonic clock.
_RECORD: Final = struct.Struct("<8sQ16sdd")
# 3 MB, for some seconds at thousands of grants a second.
_MOST_RECORDS: Final = 1 << 16
# Longest wait for the lock, and between two looks. A grant takes some 50 µs, unless its worker loses the processor.
_LONGEST_S: Final = 0.25
_LOOK_S: Final = 0.0001
# After it, the lock is not asked for this long: all requests of a process wait meanwhile.
_PAUSE_S: Final = 5.0
# How often one that is not alone sees whether it is by now.
_FIND_EACH_S: Final = 1.0
# ``struct flock``: the kind, whence, where, how many bytes, and whose it is.
_FILE_LOCK: Final = struct.Struct("hhqqi0q")
# What a worker was not told of in this time it will not be told: the message is lost, or its sender is dead.
_KEPT_S: Final = 10.0
_ROUNDING: Final = 1e-6
# Most processes whose last grant is known, those that have ended included; the oldest are forgotten first.
_MOST_PROCESSES: Final = 1_000


class _Granted(msgspec.Struct, frozen=True):
    number: int
    key: bytes
    amount: float
    at_s: float


class MmapGrantLedger:
    """Those of the processes with the same ``directory``. ``process``: names this one among them. ``clock``: the same
    for all of them.
    """

    def __init__(self, directory: Path, process: str, clock: Callable[[], float]) -> None:
        """Raises OSError."""
        self._clock = clock
        self._process = _digest(process, 8)
        size = _MARK.stop + _MOST_RECORDS * _RECORD.size
        # while it is open, nobody else can have this number
        self._file = os.open(directory / "grants", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._find_at_s = 0.0 if self._show_presence() else math.inf
        # a full disk is an error here, and would be a signal later
        os.posix_fallocate(self._file, 0, size)
        self._memory = mmap.mmap(self._file, size)
        self._memory[_MARK] = os.urandom(8)
        # the mark until whose change this process is alone; None: it is not known to be
        self._alone_until: bytes | None = None
        # in this turn
        self._may_write = False
        self._read_count = 0
        self._number = 0
        self._is_locked = False
        self._retry_at_s = 0.0
        self._unheard: dict[bytes, float] = {}
        # by process, in the order of their numbers
        self._granted: dict[bytes, deque[_Granted]] = {}
        self._heard: dict[bytes, int] = {}

    def __enter__(self) -> None:
        """The turn begins."""
        self._may_write = self._memory[_MARK] == self._alone_until
        if self._may_write:
            return
        now = self._clock()
        self._may_write = self._is_locked = self._lock(now)
        try:
            self._read(now)
            # what one that is gone has granted counts for a while
            if self._is_locked and not self._granted and now >= self._find_at_s:
                self._find_at_s = now + _FIND_EACH_S
                self._find_others()
        except BaseException:
            self._unlock()
            raise

    def __exit__(self, *_: object) -> None:
        """The turn ends."""
        self._unlock()

    def _show_presence(self) -> bool:
        """False if the system has no such locks: then nobody knows that it is alone. Raises OSError."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _presence(fcntl.F_RDLCK))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def _find_others(self) -> None:
        mark = self._memory[_MARK]
        kind, *_ = _FILE_LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _presence(fcntl.F_WRLCK)))
        self._alone_until = mark if kind == fcntl.F_UNLCK else None

    def _unlock(self) -> None:
        if self._is_locked:
            self._is_locked = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def unseen_amount(self, key: str) -> float:
        """What others have granted of a bucket, and this process was not told of."""
        return self._unheard.get(_digest(key, 16), 0.0) if self._unheard else 0.0

    def record_grants(self, charges: Iterable[Charge]) -> int:
        """This process grants them, in its turn. Returns the number of the grant, which the others are told."""
        self._number += 1
        if self._may_write:
            now, count = self._clock(), self._read_count
            for one in charges:
                amount, place = at_least_zero(one.amount), _place(count)
                _RECORD.pack_into(self._memory, place, self._process, self._number, _digest(one.key, 16), amount, now)
                count += 1
            _COUNT.pack_into(self._memory, 0, count)
            self._read_count = count
        return self._number

    def mark_seen(self, process: str, number: int) -> None:
        """This process was told of the grants of another one up to ``number``."""
        origin = _digest(process, 8)
        self._heard.pop(origin, None)
        self._heard[origin] = number
        if len(self._heard) > _MOST_PROCESSES:
            del self._heard[next(iter(self._heard))]
        self._forget(origin, lambda one: one.number <= number)

    def _lock(self, began_s: float) -> bool:
        if began_s < self._retry_at_s:
            return False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() - began_s > _LONGEST_S:
                    break
                time.sleep(_LOOK_S)
            else:
                return True
        log.warning("another worker holds the lock of limits for longer than %g s; see whether it hangs", _LONGEST_S)
        self._retry_at_s = self._clock() + _PAUSE_S
        return False

    def _count(self) -> int:
        count: int = _COUNT.unpack_from(self._memory, 0)[0]
        return count

    def _read(self, now: float) -> None:
        """What others have granted since the last turn."""
        count = self._count()
        if count == self._read_count and not self._granted:
            return
        oldest_s = now - _KEPT_S
        for number in range(max(self._read_count, count - _MOST_RECORDS), count):
            origin, *fields = _RECORD.unpack_from(self._memory, _place(number))
            one = _Granted(*fields)
            if origin != self._process and one.number > self._heard.get(origin, 0) and one.at_s > oldest_s:
                self._granted.setdefault(origin, deque()).append(one)
                self._unheard[one.key] = self._unheard.get(one.key, 0.0) + one.amount
        self._read_count = count
        for origin in list(self._granted):
            self._forget(origin, lambda one: one.at_s <= oldest_s)

    def _forget(self, origin: bytes, is_old: Callable[[_Granted], bool]) -> None:
        granted = self._granted.get(origin)
        if granted is None:
            return
        while granted and is_old(granted[0]):
            one = granted.popleft()
            self._unheard[one.key] -= one.amount
            if self._unheard[one.key] <= _ROUNDING:
                del self._unheard[one.key]
        if not granted:
            del self._granted[origin]


def _presence(kind: int) -> bytes:
    """Of a lock on the first byte. It is the open file's: nobody else closes it, and the kernel does if we end."""
    return _FILE_LOCK.pack(kind, os.SEEK_SET, 0, 1, 0)


def _place(number: int) -> int:
    return _MARK.stop + number % _MOST_RECORDS * _RECORD.size


@lru_cache(maxsize=4096)
def _digest(name: str, size: int) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=size).digest()
