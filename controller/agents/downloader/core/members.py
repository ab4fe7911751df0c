# SPDX-License-Identifier: Apache-2.0
"""Which members of an archive may be written: none leaves the directory, all fit the limits."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from controller.agents.downloader.core.errors import ContentRefused
from controller.agents.downloader.core.listing import safe_path

_GIB: Final = 1024**3


class ArchiveLimits(msgspec.Struct, frozen=True):
    """``ratio``: unpacked bytes for each packed one, looked at once ``ratio_from`` bytes are unpacked."""

    members: int = 100_000
    size: int = 4096 * _GIB
    ratio: int = 200
    ratio_from: int = 64 * 1024**2


Kind = Literal["file", "directory", "symlink", "hardlink", "other"]


class Member(msgspec.Struct, frozen=True):
    """What an archive says of a member. ``target``: of a link. ``other``: a device, a FIFO, whatever else there is."""

    name: str
    kind: Kind
    size: int = 0
    target: str = ""


class Members:
    """Judges the members of one archive, or of the layers of an image, in their order.

    A symbolic link may point to what lies in the directory: ``..`` only at its beginning, where it counts from a real
    directory. Nothing is written through a link. A hard link repeats a file of the same archive.
    """

    def __init__(self, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._count = 0
        self._size = 0
        self._kinds: dict[str, str] = {}

    def admit(self, member: Member) -> str | None:
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

    def forget(self, path: str) -> None:
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
        """Directories that an archive only implies count as members, too: all that is remembered is bounded."""
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
    """Whether so many bytes came out of so few that the archive is no honest one."""
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
