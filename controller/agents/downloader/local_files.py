# SPDX-License-Identifier: Apache-2.0
"""Files on the disk: checksums, links to them, weights that are mounted already, and threads for calls that block."""

from __future__ import annotations

import asyncio
import hashlib
import os
import zlib
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from controller.agents.downloader.core.errors import (
    AccessRefused,
    CacheUnusable,
    ChecksumMismatch,
    ContentRefused,
    SourceNotFound,
    UriInvalid,
)
from controller.agents.downloader.core.fetch_plan import Checksum, safe_path
from controller.agents.downloader.core.uri import PvcLocation
from controller.agents.downloader.environment import import_optional

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO
    from pathlib import Path

    from controller.agents.downloader.core.fetch_plan import FileSelection
    from controller.agents.downloader.core.uri import FileLocation

_BLOCK: Final = 1024**2
_T = TypeVar("_T")


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
        self._extend: Callable[[int, bytes], int] = import_optional("google_crc32c", "gs").extend
        self._value = 0

    def update(self, block: memoryview, /) -> None:
        """Take a block into account."""
        self._value = self._extend(self._value, bytes(block))

    def hexdigest(self) -> str:
        """Eight digits."""
        return f"{self._value:08x}"


def file_digest(path: Path, checksum: Checksum, is_stopped: Callable[[], bool]) -> str | None:
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


def link_to_cache(path: Path, target: Path, cache: Path) -> None:
    """Let ``path`` lead to ``target``, a directory or file.

    A ``path`` that is a directory, such as a volume that is mounted there, gets a link for each file in ``target``;
    links into ``cache`` from before are removed. Raises CacheUnusable if something else is in the way.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            _link_each(path, target, cache)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, target)
    except OSError as error:
        raise CacheUnusable(f"{path} cannot be made a link to {target}: {error.strerror}") from error


def _link_each(directory: Path, target: Path, cache: Path) -> None:
    wanted = {one.name: one for one in (target.iterdir() if target.is_dir() else (target,))}
    for old in directory.iterdir():
        if old.is_symlink() and old.name not in wanted and old.readlink().is_relative_to(cache):
            old.unlink()
    for name, one in wanted.items():
        _replace(directory / name, one)


def _replace(path: Path, target: Path) -> None:
    """Replace a link atomically: a reader never finds none, or half of one."""
    if path.exists() and not path.is_symlink():
        raise CacheUnusable(f"{path} is there and is no link of ours; it is not replaced")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


async def run_in_thread(
    function: Callable[..., _T], *arguments: object, on_cancel: Callable[[], object] = lambda: None
) -> _T:
    """Run ``function`` in a thread. If we are cancelled, it is waited for: nothing writes to a file that we close.

    ``on_cancel`` makes the thread end early.
    """
    running = asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({running})
        raise


def resolve_local_path(place: PvcLocation | FileLocation, claims: Path, files: Path) -> Path:
    """The directory or file, with links resolved.

    ``claims``: below which claims are mounted by name. ``files``: below which ``file://`` must be. Raises NotThere,
    AccessRefused, and ContentRefused if a link leads out of them.
    """
    root = claims / place.claim if isinstance(place, PvcLocation) else files
    wanted = root / place.path if isinstance(place, PvcLocation) else files.__class__(place.path)
    try:
        found = wanted.resolve(strict=True)
        top = root.resolve(strict=True)
        if not found.is_relative_to(top):
            raise ContentRefused(f"{wanted} leads out of {root}")
        if found.is_dir():
            next(found.iterdir(), None)
        else:
            found.open("rb").close()
    except FileNotFoundError as error:
        raise SourceNotFound(f"{wanted} does not exist; is the volume mounted?") from error
    except PermissionError as error:
        raise AccessRefused(f"{wanted} may not be read by this user") from error
    except OSError as error:
        raise SourceNotFound(f"{wanted} cannot be read: {error.strerror}") from error
    return found


def check_local_files(wanted: FileSelection, found: Path) -> None:
    """Raises UriInvalid for what needs a copy, and ChecksumMismatch."""
    if wanted.revision or wanted.allow or wanted.ignore:
        raise UriInvalid("--revision, --allow and --ignore need a copy; pvc:// and file:// make none")
    for name, value in wanted.sha256:
        file = found / safe_path(name) if found.is_dir() else found
        if not file.is_file():
            raise SourceNotFound(f"{file} does not exist")
        digest = file_digest(file, Checksum("sha256", value), lambda: False)
        if digest != value.lower():
            raise ChecksumMismatch(f"{file} should have sha256 {value}, and has {digest}")
