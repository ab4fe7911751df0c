# SPDX-License-Identifier: Apache-2.0
"""A configuration directory of which only what has changed is read again."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from extproc.config.errors import ConfigInvalid, Mistake
from extproc.config.load import Loader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from extproc.config.types import Snapshot

SUFFIXES: Final = (".yaml", ".yml", ".json")
_TRIES: Final = 10

# Inode, times of the last change of content and of inode, and size of a file.
_Identity = tuple[int, int, int, int]


class ConfigDirectory:
    """The YAML and JSON files of a directory, without hidden files and folders (Kubernetes has its own there)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loader = Loader()
        # what was there when it was last read; None: no directory
        self._seen: Mapping[str, _Identity] | None = None
        self._is_stale = True
        self._contents: dict[str, tuple[_Identity, bytes]] = {}
        # read within the last moment: what is written in the same tick of the file system's clock looks the same
        self._young: set[str] = set()

    def has_changed(self) -> bool:
        """Whether any file has come, gone, or been written or replaced since ``read``, whatever that came to.

        Costs a stat for each file, and reads once more what was new at the last ``read``.
        """
        if self._is_stale or self._scan() != self._seen:
            return True
        young, self._young = self._young, set()
        for name in young:
            if self._content_of(name) != self._contents[name][1]:
                self._is_stale = True
                del self._contents[name]
                return True
        return False

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid with all mistakes, or OSError.

        What changed while it was read is read again: a directory that is just being replaced can look empty.
        """
        found = self._try()
        for _ in range(_TRIES):
            if self._scan() == self._seen:
                break
            found = self._try()
        if isinstance(found, Exception):
            raise found
        return found

    def _try(self) -> Snapshot | ConfigInvalid | OSError:
        self._seen, self._is_stale = self._scan(), False
        if self._seen is None:
            self._young = set()
            advice = "is not a directory that can be read; name one that holds YAML or JSON files"
            return ConfigInvalid([Mistake(str(self._path), 0, "", advice)])
        try:
            return self._loader.load(self._read_files(self._seen))
        except (ConfigInvalid, OSError) as error:
            return error

    def _read_files(self, seen: Mapping[str, _Identity]) -> dict[str, bytes]:
        contents: dict[str, tuple[_Identity, bytes]] = {}
        for name, identity in seen.items():
            known = self._contents.get(name)
            if known is not None and known[0] == identity:
                contents[name] = known
            else:
                contents[name] = identity, (self._path / name).read_bytes()
        fresh = {name for name in contents if contents[name] is not self._contents.get(name)}
        self._young = fresh | (self._young & contents.keys())
        self._contents = contents
        return {name: content for name, (_, content) in contents.items()}

    def _content_of(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except OSError:
            return None

    def _scan(self) -> Mapping[str, _Identity] | None:
        try:
            with os.scandir(self._path) as entries:
                found = [(entry.name, _identity(entry)) for entry in entries if _is_ours(entry.name)]
        except OSError:
            return None
        return {name: identity for name, identity in sorted(found) if identity is not None}


def load_directory(path: Path) -> Snapshot:
    """The snapshot of a directory that is read once; raises ConfigInvalid with all mistakes, or OSError."""
    return ConfigDirectory(path).read()


def _is_ours(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(".")


def _identity(entry: os.DirEntry[str]) -> _Identity | None:
    try:
        found = entry.stat()
    except OSError:  # replaced between listing and asking, or a link to nothing
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
