# SPDX-License-Identifier: Apache-2.0
"""A cache and its entries on the disk: directories, locks of the kernel, markers that are written last, eviction."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.agents.downloader.core.errors import CacheUnusable, DiskFull

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEY_LENGTH: Final = 32
Step = Literal["use", "fetch", "follow"]


class CacheEntry:
    """One model at one revision: ``content/`` for engines, ``incoming/`` for what is not verified yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.content = directory / "content"
        self.incoming = directory / "incoming"
        self.journal = directory / "journal"
        self._marker = directory / "ready.json"
        self._used = directory / "used"

    def create_directories(self) -> None:
        """The directories; raises OSError."""
        self.content.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(exist_ok=True)

    def read_completion_marker(self) -> CompletionMarker | None:
        """None: the entry is not complete."""
        try:
            return parse_completion_marker(self._marker.read_bytes())
        except FileNotFoundError:
            return None

    def mark_complete(self, marker: CompletionMarker) -> None:
        """Write the marker once everything else is on the disk. The journal goes after it: no crash fetches all
        again.
        """
        shutil.rmtree(self.incoming, ignore_errors=True)
        for folder, _, _ in os.walk(self.content):
            fsync_path(Path(folder))
        write_atomically(self._marker, msgspec.json.encode(marker))
        fsync_path(self.directory.parent)
        self.journal.unlink(missing_ok=True)

    def touch(self) -> None:
        """Record this use, for eviction. A cache that is mounted read-only causes no failure."""
        with contextlib.suppress(OSError):
            self._used.touch()

    def clear(self) -> None:
        """Delete all files fetched so far, and the journal."""
        self.journal.unlink(missing_ok=True)
        for directory in (self.incoming, self.content):
            if directory.exists():
                shutil.rmtree(directory)
        self.create_directories()

    def eviction_candidate(self, *, is_held: bool) -> EvictionCandidate:
        """The inputs of eviction; raises OSError if the entry disappears meanwhile."""
        marker = self.read_completion_marker()
        seen = [
            path.stat().st_mtime for path in (self._used, self.journal, self._marker, self.directory) if path.exists()
        ]
        size = marker.size if marker else disk_usage(self.directory)
        return EvictionCandidate(
            self.directory.name, size, max(seen, default=0.0), is_held=is_held, is_ready=marker is not None
        )


class WeightCache:
    """A directory that all pods of a node share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._locks = root / "locks"
        self._answers = root / "answers"

    def create_directories(self) -> None:
        """The directories; raises CacheUnusable."""
        try:
            for directory in (self.root, self._locks, self._answers):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheUnusable(f"the cache {self.root} cannot be made: {error.strerror}") from error

    def entry(self, key: str) -> CacheEntry:
        """The entry of this key, which may not exist."""
        return CacheEntry(self.root / key)

    def remove(self, key: str) -> None:
        """Delete an entry whose locks the caller holds. A crash half way leaves no entry that looks complete."""
        directory = self.root / key
        (directory / "ready.json").unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def fill_lock(self, key: str) -> FileLock:
        """The lock that the writer of an entry holds."""
        return FileLock(self._locks / key)

    def use_lock(self, key: str) -> FileLock:
        """Shared by processes that read the entry for longer (``--hold``), exclusive for eviction."""
        return FileLock(self._locks / f"{key}.use")

    def store_listing_key(self, question: str, key: str) -> None:
        """Store the key of a listing, for use while its source is unavailable."""
        write_atomically(self._answers / question, key.encode())

    def stored_listing_key(self, question: str) -> str:
        """The stored key of the last listing; empty if there is none."""
        try:
            return (self._answers / question).read_text().strip()
        except OSError:
            return ""

    def entry_keys(self) -> list[str]:
        """Keys of all entries, complete or not."""
        return [path.name for path in self.root.iterdir() if len(path.name) == _KEY_LENGTH and path.is_dir()]

    def free_bytes(self) -> int:
        """Free bytes for an unprivileged process."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize


class FileLock:
    """A lock of the kernel on a file: a process that dies, however, has let go of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if it is free. Raises CacheUnusable where the file system has no locks."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
        except BlockingIOError:
            return False
        except OSError as error:
            raise CacheUnusable(f"{self._path} cannot be locked: {error.strerror}; is it NFS without locks?") from error
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let go. The file stays: to remove it would let two processes lock two files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def fsync_path(path: Path) -> None:
    """Have a file or directory on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that readers, and a machine that crashes, see the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def disk_usage(directory: Path) -> int:
    """Bytes on the disk below ``directory``."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # its owner is at work
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118 - a hundred thousand files
    return total


@contextlib.contextmanager
def translate_disk_errors(what: str) -> Iterator[None]:
    """Turn errors of the file system into ours: DiskFull, else CacheUnusable."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(f"no room left to write {what}: {error.strerror}") from error
        raise CacheUnusable(f"cannot write {what}: {error.strerror or error}") from error


class CachedFile(msgspec.Struct, frozen=True):
    """A file of a complete entry; ``checksum``: from the source, as ``algorithm:digits``."""

    path: str
    size: int
    checksum: str = ""


class CompletionMarker(msgspec.Struct, frozen=True):
    """Written last: everything before it is on the disk. ``uri`` is without credentials; times are RFC 3339."""

    uri: str
    revision: str
    size: int
    files: tuple[CachedFile, ...]
    completed_at: str


class EntryLockState(msgspec.Struct, frozen=True):
    """An entry and its lock, as a process sees them."""

    is_ready: bool
    holds_lock: bool


def next_cache_step(found: EntryLockState) -> Step:
    """Use a complete entry; fetch only with the lock; else follow the process that holds it.

    If the holder dies, the kernel frees its lock at once. The follower that gets it next finds an incomplete entry and
    fetches the missing ranges.
    """
    if found.is_ready:
        return "use"
    return "fetch" if found.holds_lock else "follow"


def parse_completion_marker(text: bytes) -> CompletionMarker | None:
    """None: it is no marker, such as one that a full disk cut short; the entry then counts as unfinished."""
    try:
        return msgspec.json.decode(text, type=CompletionMarker)
    except msgspec.DecodeError:
        return None


class EvictionCandidate(msgspec.Struct, frozen=True):
    """A cache entry to consider for eviction. ``used_at_s``: the last use, or the last write of an unfinished one."""

    key: str
    size: int
    used_at_s: float
    is_held: bool
    is_ready: bool = True


def choose_evictions(entries: Sequence[EvictionCandidate], *, limit: int, needed: int, keep: str) -> list[str]:
    """Keys to remove, least recently used first, until all entries and ``needed`` more bytes fit ``limit``.

    Entries in use stay, and so does ``keep``, the one about to be made. Incomplete ones go first, as they have no
    readers.
    """
    excess = sum(one.size for one in entries if one.key != keep) + needed - limit
    removed: list[str] = []
    for one in sorted(entries, key=lambda entry: (entry.is_ready, entry.used_at_s)):
        if excess <= 0:
            break
        if not one.is_held and one.key != keep:
            removed.append(one.key)
            excess -= one.size
    return removed
