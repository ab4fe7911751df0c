# SPDX-License-Identifier: Apache-2.0
"""The selected files of a model, the key of their cache entry, and their missing byte ranges.

The key depends on the bytes alone, not on the caller. File names are checked: all are safe to write. A journal has the
ranges on the disk. This module decides when to retry, and when a server sends too slowly.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.agents.downloader.core.errors import ContentRefused, SourceNotFound, UriInvalid
from controller.agents.downloader.core.uri import Location

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Archive = Literal["", "zip", "tar", "tar.gz", "tar.zst"]
_ENDINGS: Final[Mapping[str, Archive]] = {
    ".zip": "zip",
    ".tar": "tar",
    ".tar.gz": "tar.gz",
    ".tgz": "tar.gz",
    ".tar.zst": "tar.zst",
}
_LONGEST_PART: Final = 255
_LONGEST_PATH: Final = 1024
_MOST_FILES: Final = 100_000
# Of how entries are laid out: an entry of another layout is never taken for one of this.
_LAYOUT: Final = 1
_HEAD: Final = "attache-journal-1"


class Checksum(msgspec.Struct, frozen=True):
    """A file's checksum from its source, in hexadecimal digits.

    ``md5-parts``: the MD5 of the MD5s of parts of ``part_size`` bytes, as S3 makes it of an upload in parts.
    ``git-sha1``: the SHA-1 that git gives a blob.
    """

    algorithm: Literal["sha256", "md5", "md5-parts", "git-sha1", "crc32", "crc32c"]
    value: str
    part_size: int = 0


class RemoteFile(msgspec.Struct, frozen=True):
    """A file that can be fetched.

    ``path``: below the model's directory. ``size``: None if the server does not report it. ``locator``: by which its
    source finds it. ``version``: the ETag that responses must have; empty: not compared. ``ranges``: range requests are
    supported. ``archive``: unpack it; ``only``: of the archive, what lies in this folder, without the folder.
    """

    path: str
    size: int | None
    locator: str
    checksum: Checksum | None = None
    version: str = ""
    ranges: bool = True
    archive: Archive = ""
    only: str = ""


class FileListing(msgspec.Struct, frozen=True):
    """All files at ``revision``, a text that changes whenever any of their bytes does."""

    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def total_size(self) -> int:
        """Of all files whose size is known, in bytes."""
        return sum(file.size or 0 for file in self.files)


def safe_path(path: str) -> str:
    """``path``, if it stays below the directory that it is written to; raises ContentRefused."""
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ContentRefused(f"{path!r} is no path below the model's directory")
    if len(path.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_PART for part in parts):
        raise ContentRefused(f"{path[:80]!r}... is too long for a path")
    return path


def archive_kind(path: str) -> Archive:
    """The kind of archive by the name's suffix; empty: none."""
    lower = path.lower()
    return next((kind for ending, kind in _ENDINGS.items() if lower.endswith(ending)), "")


def is_wanted(path: str, allow: Sequence[str], ignore: Sequence[str]) -> bool:
    """Some pattern of ``allow`` fits (or there is none), and none of ``ignore``. ``*`` also fits ``/``; ``dir/``: all
    in it.
    """
    return (not allow or _fits(path, allow)) and not _fits(path, ignore)


def choose_files(
    listing: FileListing, allow: Sequence[str], ignore: Sequence[str], sha256: Mapping[str, str]
) -> FileListing:
    """What is to be fetched, in order of names, with the user's checksums; raises NotThere and ContentRefused.

    Archives are always fetched: the patterns are for what is in them.
    """
    found = (one for one in listing.files if one.archive or is_wanted(one.path, allow, ignore))
    wanted = sorted(found, key=lambda one: one.path)
    if not wanted:
        raise SourceNotFound("there is no file" + (" that the patterns leave" if listing.files else ""))
    if len(wanted) > _MOST_FILES:
        raise ContentRefused(f"{len(wanted)} files are too many; choose some with --allow")
    paths = {safe_path(one.path) for one in wanted}
    if len(paths) != len(wanted):
        raise ContentRefused("two files have the same name")
    for path in paths:
        parts = path.split("/")
        if any("/".join(parts[:length]) in paths for length in range(1, len(parts))):
            raise ContentRefused(f"{path!r} lies in a file")
    unknown = sorted(set(sha256) - paths)
    if unknown:
        raise UriInvalid(f"--sha256 names a file that is not fetched: {unknown[0]!r}")
    return FileListing(listing.revision, tuple(_checked(one, sha256) for one in wanted))


def mark_single_archive(listing: FileListing) -> FileListing:
    """A listing that is one archive has it unpacked; every other one is as it was."""
    if len(listing.files) != 1 or listing.files[0].archive:
        return listing
    (file,) = listing.files
    return FileListing(listing.revision, (msgspec.structs.replace(file, archive=archive_kind(file.path)),))


def _checked(file: RemoteFile, sha256: Mapping[str, str]) -> RemoteFile:
    value = sha256.get(file.path)
    return msgspec.structs.replace(file, checksum=Checksum("sha256", value)) if value else file


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, one + "*" if one.endswith("/") else one) for one in patterns)


class FileSelection(msgspec.Struct, frozen=True):
    """The user's selection of files. ``sha256``: pairs of file and digest; they are part of the selection."""

    place: Location
    revision: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    sha256: tuple[tuple[str, str], ...] = ()
    unpack: bool = True


def cache_entry_key(wanted: FileSelection, listing: FileListing) -> str:
    """The name of the directory of ``wanted`` at the listing's revision."""
    files = [(one.path, one.size, one.version, one.archive, one.only, one.checksum) for one in listing.files]
    return _digest([_LAYOUT, wanted.place.canonical(), listing.revision, *_choice(wanted), files])


def cached_listing_key(wanted: FileSelection, who: str) -> str:
    """Name of the file that stores the last listing of ``wanted`` for the caller ``who``."""
    return _digest([_LAYOUT, who, wanted.place.canonical(), requested_revision(wanted), *_choice(wanted)])


def requested_revision(wanted: FileSelection) -> str:
    """The revision from the option or the URI; empty if neither has one."""
    return wanted.revision or str(getattr(wanted.place, "revision", "") or getattr(wanted.place, "reference", ""))


def listing_digest(parts: object) -> str:
    """A short text that changes with any of ``parts``: the revision of a source that has no revisions."""
    return _digest(parts)


def _choice(wanted: FileSelection) -> list[object]:
    return [sorted(wanted.allow), sorted(wanted.ignore), sorted(wanted.sha256), wanted.unpack]


def _digest(parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


class ByteRange(msgspec.Struct, frozen=True, order=True):
    """Bytes from ``start`` up to, not including, ``end``."""

    start: int
    end: int


class FilePart(msgspec.Struct, frozen=True):
    """One request's worth of a file. ``end`` None: until the server has no more (a file of unknown size)."""

    file: int
    start: int
    end: int | None


def merge_ranges(spans: Iterable[ByteRange]) -> list[ByteRange]:
    """The same bytes in order, without overlaps or neighbours."""
    found: list[ByteRange] = []
    for span in sorted(one for one in spans if one.end > one.start):
        if found and span.start <= found[-1].end:
            found[-1] = ByteRange(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def missing_ranges(size: int, there: Sequence[ByteRange]) -> list[ByteRange]:
    """What of ``size`` bytes is not ``there``."""
    found: list[ByteRange] = []
    at = 0
    for span in merge_ranges(there):
        if span.start > at:
            found.append(ByteRange(at, min(span.start, size)))
        at = max(at, span.end)
    if at < size:
        found.append(ByteRange(at, size))
    return [one for one in found if one.end > one.start]


def plan_file_parts(index: int, file: RemoteFile, there: Sequence[ByteRange], part_size: int) -> Iterator[FilePart]:
    """The requests that complete a file; one for all of it, if it cannot be had in ranges."""
    if file.size is None or not file.ranges:
        if file.size is None or missing_ranges(file.size, there):
            yield FilePart(index, 0, file.size)
        return
    for span in missing_ranges(file.size, there):
        for start in range(span.start, span.end, part_size):
            yield FilePart(index, start, min(start + part_size, span.end))


def journal_header(listing: FileListing, digest: str) -> str:
    """The first line of a journal: it belongs to this listing and no other."""
    return f"{_HEAD} {len(listing.files)} {digest}\n"


def journal_line(file: int, span: ByteRange) -> str:
    """Records that these bytes of a file are on the disk. The line before may have been cut short: the newline leads,
    and only a whole line ends with the dot.
    """
    return f"\n{file} {span.start} {span.end} ."


def journal_discard_line(file: int) -> str:
    """Records that nothing of a file is on the disk any more."""
    return journal_line(file, ByteRange(0, 0))


def read_journal(text: str, head: str) -> dict[int, list[ByteRange]] | None:
    """The ranges on the disk, by file. None: the journal is of another listing. Lines cut short by a crash or a full
    disk are left out.
    """
    if not text.startswith(head):
        return None
    there: dict[int, list[ByteRange]] = {}
    for line in text[len(head) :].splitlines():
        *words, last = line.split() or [""]
        if last != "." or len(words) != 3 or not all(word.isdecimal() for word in words):
            continue
        file, start, end = map(int, words)
        if end == 0:
            there[file] = []
        else:
            there.setdefault(file, []).append(ByteRange(start, end))
    return {file: merge_ranges(spans) for file, spans in there.items()}


class RetryPolicy(msgspec.Struct, frozen=True):
    """``attempts``: in a row without a byte of progress. ``first_s`` and ``longest_s``: of the waits between them."""

    attempts: int = 8
    first_s: float = 0.5
    longest_s: float = 30.0


def retry_delay_s(retry: RetryPolicy, failures: int, asked_s: float | None, chance: random.Random) -> float | None:
    """The wait after so many consecutive ``failures``; None: no further attempt.

    Full jitter: pods that failed together do not retry together. A server's own ``Retry-After`` is a lower bound, up to
    ten times the longest wait.
    """
    if failures >= retry.attempts:
        return None
    bound_s = min(retry.longest_s, retry.first_s * 2 ** (failures - 1))
    waited_s = chance.uniform(bound_s / 2, bound_s)
    return waited_s if asked_s is None else max(waited_s, min(asked_s, 10 * retry.longest_s))


class SlowTransferDetector:
    """Finds a server that sends just enough to pass for alive: less than ``least_bytes`` in each ``window_s``."""

    def __init__(self, window_s: float, least_bytes: int, now_s: float) -> None:
        self._window_s = window_s
        self._least_bytes = least_bytes
        self._since_s = now_s
        self._bytes = 0

    def add_bytes_and_check(self, count: int, now_s: float) -> bool:
        """Take ``count`` more bytes into account."""
        self._bytes += count
        if now_s - self._since_s < self._window_s:
            return False
        slow = self._bytes < self._least_bytes
        self._since_s, self._bytes = now_s, 0
        return slow
