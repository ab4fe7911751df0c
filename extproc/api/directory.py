# SPDX-License-Identifier: Apache-2.0
"""A configuration directory of which only what has changed is read again."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, Protocol

from extproc.api.errors import ConfigInvalid, Mistake
from extproc.api.load import Loader, unforeseen
from extproc.api.picker_config import check_shape_alone

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from extproc.api.picker_config import PickerCheck
    from extproc.api.snapshot import Snapshot

SUFFIXES: Final = (".yaml", ".yml", ".json")
_TRIES: Final = 10
# A file of 4 MiB of YAML has 50,000 endpoints and takes seconds to read; JSON takes a hundredth of that.
MAX_YAML_BYTES: Final = 4 * 1024 * 1024
MAX_JSON_BYTES: Final = 16 * 1024 * 1024
MAX_DIRECTORY_BYTES: Final = 64 * 1024 * 1024

# Inode, times of the last change of content and of inode, and size of a file.
_Identity = tuple[int, int, int, int]


class Directory(Protocol):
    """Where a configuration is read."""

    @property
    def path(self) -> Path:
        """The folder; files that documents name are relative to it."""
        ...

    def has_changed(self) -> bool:
        """Whether ``read`` may have something else to return than before."""
        ...

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid."""
        ...


class ConfigDirectory:
    """The YAML and JSON files of a directory, without hidden files and folders (Kubernetes has its own there)."""

    def __init__(self, path: Path, check_picker: PickerCheck = check_shape_alone) -> None:
        self.path = path
        self._loader = Loader(check_picker)
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
        """The snapshot of what is there now; raises ConfigInvalid with all mistakes, and nothing else.

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

    def _why_unseen(self) -> str:
        if not self.path.exists():
            return "does not exist"
        return "is not a directory that can be read" if self.path.is_dir() else "is a file"

    def _try(self) -> Snapshot | ConfigInvalid:
        self._seen, self._is_stale = self._scan(), False
        if self._seen is None:
            self._young = set()
            return self._refusal(f"{self._why_unseen()}; name a directory that holds YAML or JSON files")
        try:
            _check_sizes(self.path, self._seen)
            snapshot = self._loader.load(self._read_files(self._seen))
        except ConfigInvalid as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever files do to their reader, they must not end the process
            return ConfigInvalid([unforeseen(str(self.path), error)])
        if self._loader.is_empty:
            advice = "holds no ModelServer and no ModelRoute, nor another document of ours"
            return self._refusal(f"{advice}; write some in files that end in {', '.join(SUFFIXES)}")
        return snapshot

    def _refusal(self, message: str) -> ConfigInvalid:
        return ConfigInvalid([Mistake(str(self.path), 0, "", message)])

    def _read_files(self, seen: Mapping[str, _Identity]) -> dict[str, bytes]:
        """Raises ConfigInvalid."""
        contents: dict[str, tuple[_Identity, bytes]] = {}
        mistakes = []
        for name, identity in seen.items():
            known = self._contents.get(name)
            if known is not None and known[0] == identity:
                contents[name] = known
                continue
            try:
                contents[name] = identity, self._read_file(name)
            except OSError as error:
                mistakes.append(Mistake(name, 0, "", f"cannot be read: {error.strerror}; mend that or remove the file"))
        fresh = {name for name in contents if contents[name] is not self._contents.get(name)}
        self._young = fresh | (self._young & contents.keys())
        self._contents = contents
        if mistakes:
            raise ConfigInvalid(mistakes)
        return {name: content for name, (_, content) in contents.items()}

    def _read_file(self, name: str) -> bytes:
        """Raises OSError. A file that grows while it is read is cut off here, and read again as changed."""
        with (self.path / name).open("rb") as file:
            return file.read(max_bytes(name))

    def _content_of(self, name: str) -> bytes | None:
        try:
            return self._read_file(name)
        except OSError:
            return None

    def _scan(self) -> Mapping[str, _Identity] | None:
        try:
            with os.scandir(self.path) as entries:
                found = [(entry.name, _identity(entry)) for entry in entries if _is_ours(entry.name)]
        except OSError:
            return None
        return {name: identity for name, identity in sorted(found) if identity is not None}


def load_directory(path: Path, check_picker: PickerCheck = check_shape_alone) -> Snapshot:
    """The snapshot of a directory that is read once; raises ConfigInvalid with all mistakes."""
    return ConfigDirectory(path, check_picker).read()


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


def _check_sizes(directory: Path, seen: Mapping[str, _Identity]) -> None:
    """Before anything is read. Raises ConfigInvalid."""
    sizes = {name: identity[-1] for name, identity in seen.items()}
    mistakes = [
        Mistake(name, 0, "", f"has {size} bytes, and {max_bytes(name)} are read; split it, or write large ones as JSON")
        for name, size in sizes.items()
        if size > max_bytes(name)
    ]
    total = sum(sizes.values())
    if not mistakes and total > MAX_DIRECTORY_BYTES:
        advice = f"its files have {total} bytes, and {MAX_DIRECTORY_BYTES} are read; remove what is not used"
        mistakes = [Mistake(str(directory), 0, "", advice)]
    if mistakes:
        raise ConfigInvalid(mistakes)


def max_bytes(name: str) -> int:
    """The largest file of this name that is read."""
    return MAX_JSON_BYTES if name.endswith(".json") else MAX_YAML_BYTES
