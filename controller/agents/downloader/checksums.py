# SPDX-License-Identifier: Apache-2.0
"""Checksums of files on the disk, in bounded memory."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Final, Protocol

from controller.agents.downloader.libraries import library

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO
    from pathlib import Path

    from controller.agents.downloader.core.listing import Checksum

_BLOCK: Final = 1024**2


class _Hash(Protocol):
    def update(self, block: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    """CRC-32 as zlib has it."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, block: memoryview, /) -> None:
        """Take a block into account."""
        self._value = zlib.crc32(block, self._value)

    def hexdigest(self) -> str:
        """Eight digits."""
        return f"{self._value:08x}"


class _Crc32c:
    """Castagnoli's CRC-32."""

    def __init__(self) -> None:
        self._extend: Callable[[int, bytes], int] = library("google_crc32c", "gs").extend
        self._value = 0

    def update(self, block: memoryview, /) -> None:
        """Take a block into account."""
        self._value = self._extend(self._value, bytes(block))

    def hexdigest(self) -> str:
        """Eight digits."""
        return f"{self._value:08x}"


def digest_of(path: Path, checksum: Checksum, is_stopped: Callable[[], bool]) -> str | None:
    """What the file's checksum is, by the algorithm of ``checksum``; None if it was stopped."""
    with path.open("rb", buffering=0) as file:
        if checksum.algorithm == "md5-parts":
            return _md5_of_parts(file, checksum.part_size, is_stopped)
        made = _hash(checksum, path.stat().st_size)
        return made.hexdigest() if _feed(file, made, None, is_stopped) else None


def _hash(checksum: Checksum, size: int) -> _Hash:
    match checksum.algorithm:
        case "sha256":
            return hashlib.sha256()
        case "git-sha1":
            made = hashlib.sha1(usedforsecurity=False)
            made.update(f"blob {size}\0".encode())
            return made
        case "crc32":
            return _Crc32()
        case "crc32c":
            return _Crc32c()
        case _:
            return hashlib.md5(usedforsecurity=False)


def _md5_of_parts(file: FileIO, part_size: int, is_stopped: Callable[[], bool]) -> str | None:
    digests = []
    while True:
        part = hashlib.md5(usedforsecurity=False)
        before = file.tell()
        if not _feed(file, part, part_size, is_stopped):
            return None
        if file.tell() == before:
            break
        digests.append(part.digest())
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def _feed(file: FileIO, made: _Hash, limit: int | None, is_stopped: Callable[[], bool]) -> bool:
    """Up to ``limit`` bytes of the file; False: stopped."""
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    left = limit
    while left is None or left > 0:
        if is_stopped():
            return False
        count = file.readinto(view if left is None else view[: min(left, _BLOCK)])
        if not count:
            break
        made.update(view[:count])
        left = None if left is None else left - count
    return True
