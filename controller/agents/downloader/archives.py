# SPDX-License-Identifier: Apache-2.0
"""Unpack zip and tar archives into a directory, in bounded memory.

Each member is checked first: none may leave the directory, and all together must be within the limits.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from io import FileIO
from typing import IO, TYPE_CHECKING, Final, Literal, Self, cast

import msgspec

from controller.agents.downloader.core.errors import ContentRefused
from controller.agents.downloader.core.fetch_plan import safe_path
from controller.agents.downloader.environment import import_optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from controller.agents.downloader.core.fetch_plan import Archive

_GIB: Final = 1024**3
Kind = Literal["file", "directory", "symlink", "hardlink", "other"]
_BLOCK: Final = 1024**2
# Extended headers are read into memory whole.
_LARGEST_HEADER: Final = 1024**2
# 100,000 members with names of 120 characters.
_LARGEST_TABLE: Final = 16 * 1024**2
_ZSTD_WINDOW: Final = 128 * 1024**2
_EXTENDED: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


class ArchiveLimits(msgspec.Struct, frozen=True):
    """``ratio``: most unpacked bytes for each packed one, checked once ``ratio_from`` bytes are unpacked."""

    members: int = 100_000
    size: int = 4096 * _GIB
    ratio: int = 200
    ratio_from: int = 64 * 1024**2


class Member(msgspec.Struct, frozen=True):
    """A member of an archive. ``target``: of a link. ``other``: a device, a FIFO, or any other kind."""

    name: str
    kind: Kind
    size: int = 0
    target: str = ""


class MemberCheck:
    """Judges the members of one archive, or of the layers of an image, in their order.

    A symbolic link may point to what lies in the directory: ``..`` only at its beginning, where it counts from a real
    directory. Nothing is written through a link. A hard link repeats a file of the same archive.
    """

    def __init__(self, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._count = 0
        self._size = 0
        self._kinds: dict[str, str] = {}

    def checked_destination(self, member: Member) -> str | None:
        """The path to write the member to; None: it is the directory itself. Raises ContentRefused."""
        path = _normal(member.name)
        if not path:
            if member.kind == "directory":
                return None
            raise ContentRefused(f"the archive has a member without a name: {member.name!r}")
        self._check_parents(path)
        self._check_kind(path, member)
        if member.kind == "file":
            self._size += member.size
            if self._size > self._limits.size:
                raise ContentRefused(f"the archive unpacks to more than {self._limits.size} bytes")
        self._add(path, "file" if member.kind == "hardlink" else member.kind)
        return path

    def forget_removed(self, path: str) -> None:
        """A later layer of an image removed ``path`` and all below it."""
        for known in [one for one in self._kinds if one == path or one.startswith(f"{path}/")]:
            del self._kinds[known]

    def _check_parents(self, path: str) -> None:
        parts = path.split("/")
        for length in range(1, len(parts)):
            parent = "/".join(parts[:length])
            kind = self._kinds.get(parent)
            if kind is None:
                self._add(parent, "directory")
            elif kind != "directory":
                raise ContentRefused(f"{path!r} would be written through {parent!r}, which is no directory")

    def _add(self, path: str, kind: str) -> None:
        """Directories that an archive only implies count as members, too: all state is bounded."""
        if path not in self._kinds:
            self._count += 1
            if self._count > self._limits.members:
                raise ContentRefused(f"the archive has more than {self._limits.members} members")
        self._kinds[path] = kind

    def _check_kind(self, path: str, member: Member) -> None:
        before = self._kinds.get(path)
        if before is not None and (before == "directory") != (member.kind == "directory"):
            raise ContentRefused(f"{path!r} is in the archive as a directory and as something else")
        match member.kind:
            case "symlink":
                check_symlink(path, member.target)
            case "hardlink":
                if self._kinds.get(_normal(member.target)) != "file":
                    raise ContentRefused(f"{path!r} is a hard link to no earlier file of the archive")
            case "other":
                raise ContentRefused(f"{path!r} is a device, a FIFO or another kind that is never written")
            case _:
                pass


def hard_link_target(target: str) -> str:
    """The path of the file that a hard link of an admitted member repeats."""
    return _normal(target)


def is_bomb(limits: ArchiveLimits, packed: int, unpacked: int) -> bool:
    """Whether the ratio of unpacked to packed bytes marks an archive bomb."""
    return unpacked > limits.ratio_from and unpacked > limits.ratio * max(packed, 1)


def _normal(name: str) -> str:
    if name.startswith("/"):
        raise ContentRefused(f"the archive has an absolute path: {name!r}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return safe_path("/".join(parts)) if parts else ""


def check_symlink(path: str, target: str) -> None:
    """Raises ContentRefused for a symbolic link at ``path`` that leads out of the directory."""
    refused = ContentRefused(f"{path!r} is a link to {target!r}, which leads out of the directory")
    if not target or target.startswith("/") or "\0" in target:
        raise refused
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if ".." in parts[ups:] or ups > path.count("/"):
        raise refused


class UnpackingStopped(Exception):
    """The download was ended from outside."""


class Unpacker:
    """Writes archives into ``directory``. Layers of an image go into the same one, in their order.

    ``wants``: whether a file is wanted, by its path. ``is_stopped`` is called between blocks, because a thread cannot
    be cancelled.
    """

    def __init__(
        self,
        directory: Path,
        limits: ArchiveLimits,
        is_stopped: Callable[[], bool],
        *,
        wants: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._is_stopped = is_stopped
        self._wants = wants
        self._only = ""
        self._is_layer = False
        self._members = MemberCheck(limits)

    def unpack(self, archive: Path, kind: Archive, *, only: str = "", is_layer: bool = False) -> None:
        """Write an archive's files. ``only``: what lies in this folder of it, without the folder; empty: all.

        Raises ContentRefused, LibraryMissing or OSError; what was written before is the caller's to remove.
        """
        self._only, self._is_layer = only, is_layer
        try:
            if kind == "zip":
                self._unpack_zip(archive)
            else:
                self._unpack_tar(archive, kind)
        except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ContentRefused(f"{archive.name} is no sound {kind} archive: {error}") from error
        except (RuntimeError, NotImplementedError, UnicodeError) as error:  # encrypted; a method that Python lacks
            raise ContentRefused(f"{archive.name} cannot be unpacked: {error}") from error

    def _unpack_zip(self, archive: Path) -> None:
        packed = archive.stat().st_size
        unpacked = 0
        with _BoundedReads(archive) as packed_file, zipfile.ZipFile(cast("IO[bytes]", packed_file)) as file:
            for info in file.infolist():
                mode = info.external_attr >> 16
                is_special = bool(mode) and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode))
                unpacked += info.file_size
                if is_bomb(self._limits, packed, unpacked):
                    raise ContentRefused(f"{archive.name} unpacks to {self._limits.ratio} times its size")
                kind: Kind = "other" if is_special else "directory" if info.is_dir() else "file"
                path = self._admit(Member(info.filename, kind, info.file_size))
                if path is None:
                    continue
                if info.is_dir():
                    self._make_directory(path)
                else:
                    with file.open(info) as content:
                        self._write(path, content, info.file_size, executable=bool(mode & 0o100))

    def _unpack_tar(self, archive: Path, kind: Archive) -> None:
        with archive.open("rb") as packed, _decompressed(packed, kind) as unpacked:
            counted = _Counted(unpacked, packed, self._limits, archive.name)
            with tarfile.open(
                fileobj=cast("IO[bytes]", counted), mode="r|", tarinfo=_BoundedInfo, bufsize=_BLOCK // 4
            ) as tar:
                for info in tar:
                    # a stream is read once, so tarfile's list of members is not needed
                    tar.members = []  # type: ignore[attr-defined]
                    self._one(tar, info)

    def _one(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        member = _member(info)
        if self._is_layer and self._white_out(member.name):
            return
        path = self._admit(member)
        if path is None:
            return
        target = self._directory / path
        match member.kind:
            case "directory":
                self._make_directory(path)
            case "symlink":
                check_symlink(path, member.target)  # where it is kept, it has fewer directories above it
                self._clear_target(target)
                target.symlink_to(member.target)
            case "hardlink":
                original = self._kept(hard_link_target(member.target))
                if not original:
                    raise ContentRefused(f"{path!r} is a hard link to a file outside of {self._only!r}")
                self._clear_target(target)
                os.link(self._directory / original, target, follow_symlinks=False)
            case _:
                content = tar.extractfile(info)
                if content is not None:
                    self._write(path, content, info.size, executable=bool(info.mode & 0o100))

    def _admit(self, member: Member) -> str | None:
        """Where to write the member; None: nowhere."""
        if self._is_stopped():
            raise UnpackingStopped
        path = self._members.checked_destination(member)
        kept = self._kept(path) if path else ""
        return kept if kept and (member.kind == "directory" or self._wants(kept)) else None

    def _kept(self, path: str) -> str:
        """The path relative to the selected folder; empty: outside of it."""
        if not self._only:
            return path
        return path.removeprefix(f"{self._only}/") if path.startswith(f"{self._only}/") else ""

    def _white_out(self, name: str) -> bool:
        """Whether the member is a layer's word that an earlier layer's file is gone; then it is removed."""
        parent, _, last = name.removeprefix("./").rpartition("/")
        if not last.startswith(_WHITEOUT):
            return False
        gone = parent if last == _OPAQUE else f"{parent}/{last.removeprefix(_WHITEOUT)}".lstrip("/")
        # its folder is judged like any other
        self._members.checked_destination(Member(f"{parent}/{_WHITEOUT}".lstrip("/"), "file"))
        self._members.forget_removed(gone)
        kept = self._kept(gone)
        if kept:
            target = self._directory / kept
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        return True

    def _make_directory(self, path: str) -> None:
        (self._directory / path).mkdir(parents=True, exist_ok=True)

    def _clear_target(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)

    def _write(self, path: str, content: IO[bytes], size: int, *, executable: bool) -> None:
        target = self._directory / path
        self._clear_target(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        left = size
        with os.fdopen(os.open(target, flags, 0o755 if executable else 0o644), "wb", buffering=0) as out:
            while left:
                if self._is_stopped():
                    raise UnpackingStopped
                block = content.read(min(_BLOCK, left))
                if not block:
                    raise ContentRefused(f"{path!r} in the archive is cut short")
                _write_all(out.fileno(), block)
                left -= len(block)
            os.fsync(out.fileno())


class _BoundedReads(FileIO):
    """Refuses a zip with a huge table of contents: zipfile reads it at once, and keeps it as objects."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes."""
        if size is not None and size > _LARGEST_TABLE:
            raise ContentRefused(f"the archive has a table of contents of {size} bytes")
        return super().read(size) or b""


class _BoundedInfo(tarfile.TarInfo):
    """Refuses huge extended headers, which tarfile would read into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """A header as it is read, before anything that it announces."""
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENDED and info.size > _LARGEST_HEADER:
            raise ContentRefused(f"the archive has a header of {info.size} bytes")
        return info


class _Counted:
    """A stream that refuses to give too many bytes for those that went in."""

    def __init__(self, unpacked: IO[bytes], packed: IO[bytes], limits: ArchiveLimits, name: str) -> None:
        self._unpacked = unpacked
        self._packed = packed
        self._limits = limits
        self._name = name
        self._given = 0

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes."""
        block = self._unpacked.read(size)
        self._given += len(block)
        if is_bomb(self._limits, self._packed.tell(), self._given):
            raise ContentRefused(f"{self._name} unpacks to more than {self._limits.ratio} times its size")
        return block


def _decompressed(packed: IO[bytes], kind: Archive) -> IO[bytes]:
    if kind == "tar.gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed, mode="rb"))
    if kind == "tar.zst":
        zstandard = import_optional("zstandard", "zstd")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return cast("IO[bytes]", decompressor.stream_reader(packed, read_across_frames=True, closefd=False))
    return open(os.dup(packed.fileno()), "rb")  # noqa: PTH123 - the same file, to be closed by itself


def _member(info: tarfile.TarInfo) -> Member:
    if info.isreg() and not info.issparse():
        return Member(info.name, "file", info.size)
    if info.isdir():
        return Member(info.name, "directory")
    if info.issym():
        return Member(info.name, "symlink", target=info.linkname)
    if info.islnk():
        return Member(info.name, "hardlink", target=info.linkname)
    return Member(info.name, "other")


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def walk_files(directory: Path) -> Iterator[Path]:
    """Regular files and links below ``directory``, in order."""
    for folder, names, files in os.walk(directory):
        names.sort()
        for name in sorted(files + [one for one in names if os.path.islink(os.path.join(folder, one))]):  # noqa: PTH114, PTH118
            yield type(directory)(folder) / name
