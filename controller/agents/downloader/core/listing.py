# SPDX-License-Identifier: Apache-2.0
"""The files of a model at one revision, which of them are wanted, and the key of their cache entry.

The key is the same for the same bytes, whoever asks. Names of files are checked: all are safe to write.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.agents.downloader.core.errors import ContentRefused, NotThere, UriInvalid
from controller.agents.downloader.core.uri import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


class Checksum(msgspec.Struct, frozen=True):
    """What a source says of a file's bytes, in hexadecimal digits.

    ``md5-parts``: the MD5 of the MD5s of parts of ``part_size`` bytes, as S3 makes it of an upload in parts.
    ``git-sha1``: the SHA-1 that git gives a blob.
    """

    algorithm: Literal["sha256", "md5", "md5-parts", "git-sha1", "crc32", "crc32c"]
    value: str
    part_size: int = 0


class RemoteFile(msgspec.Struct, frozen=True):
    """A file that can be fetched.

    ``path``: below the model's directory. ``size``: None if the server does not say. ``locator``: what its source needs
    to find it. ``version``: the ETag that answers must have; empty: not compared. ``ranges``: parts can be asked for.
    ``archive``: unpack it; ``only``: of the archive, what lies in this folder, without the folder.
    """

    path: str
    size: int | None
    locator: str
    checksum: Checksum | None = None
    version: str = ""
    ranges: bool = True
    archive: Archive = ""
    only: str = ""


class Listing(msgspec.Struct, frozen=True):
    """All files at ``revision``, a text that changes whenever any of their bytes does."""

    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
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


def archive_of(path: str) -> Archive:
    """Which kind of archive the name says; empty: none."""
    lower = path.lower()
    return next((kind for ending, kind in _ENDINGS.items() if lower.endswith(ending)), "")


def is_wanted(path: str, allow: Sequence[str], ignore: Sequence[str]) -> bool:
    """Some pattern of ``allow`` fits (or there is none), and none of ``ignore``. ``*`` also fits ``/``; ``dir/``: all
    in it.
    """
    return (not allow or _fits(path, allow)) and not _fits(path, ignore)


def chosen(listing: Listing, allow: Sequence[str], ignore: Sequence[str], sha256: Mapping[str, str]) -> Listing:
    """What is to be fetched, in order of names, with the user's checksums; raises NotThere and ContentRefused.

    Archives are always fetched: the patterns are for what is in them.
    """
    found = (one for one in listing.files if one.archive or is_wanted(one.path, allow, ignore))
    wanted = sorted(found, key=lambda one: one.path)
    if not wanted:
        raise NotThere("there is no file" + (" that the patterns leave" if listing.files else ""))
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
    return Listing(listing.revision, tuple(_checked(one, sha256) for one in wanted))


def single_archive(listing: Listing) -> Listing:
    """A listing that is one archive has it unpacked; every other one is as it was."""
    if len(listing.files) != 1 or listing.files[0].archive:
        return listing
    (file,) = listing.files
    return Listing(listing.revision, (msgspec.structs.replace(file, archive=archive_of(file.path)),))


def _checked(file: RemoteFile, sha256: Mapping[str, str]) -> RemoteFile:
    value = sha256.get(file.path)
    return msgspec.structs.replace(file, checksum=Checksum("sha256", value)) if value else file


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, one + "*" if one.endswith("/") else one) for one in patterns)


# Of how entries are laid out: an entry of another layout is never taken for one of this.
_LAYOUT: Final = 1


class Wanted(msgspec.Struct, frozen=True):
    """What a user asks for. ``sha256``: pairs of file and digest; they are part of what is asked."""

    place: Place
    revision: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    sha256: tuple[tuple[str, str], ...] = ()
    unpack: bool = True


def content_key(wanted: Wanted, listing: Listing) -> str:
    """The directory of what ``wanted`` is at the listing's revision."""
    files = [(one.path, one.size, one.version, one.archive, one.only, one.checksum) for one in listing.files]
    return _digest([_LAYOUT, wanted.place.canonical(), listing.revision, *_choice(wanted), files])


def question_key(wanted: Wanted, who: str) -> str:
    """The file that remembers what this question of ``who`` was last answered with."""
    return _digest([_LAYOUT, who, wanted.place.canonical(), asked_revision(wanted), *_choice(wanted)])


def asked_revision(wanted: Wanted) -> str:
    """The revision that the option, the URI, or neither says."""
    return wanted.revision or str(getattr(wanted.place, "revision", "") or getattr(wanted.place, "reference", ""))


def listing_digest(parts: object) -> str:
    """A short text that changes with any of ``parts``: the revision of a source that has no revisions."""
    return _digest(parts)


def _choice(wanted: Wanted) -> list[object]:
    return [sorted(wanted.allow), sorted(wanted.ignore), sorted(wanted.sha256), wanted.unpack]


def _digest(parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
