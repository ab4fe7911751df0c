# SPDX-License-Identifier: Apache-2.0
"""Writes a configuration directory: only what differs, each file whole or not at all.

Files are written in an order that readers can follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.bundle.atomic_files import FileChanged, ignore_change, remove_file, replace_file
from controller.gateway.compile.source_objects import SOURCE_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Name prefixes of this writer's files; it keeps all other files of the directory.
_OURS: Final = (
    *("backend.", "clientca.", "configmap.", "gateway.", "httproute.", "picker.", "secret."),
    # a GatewayConfig is gateway.json
    *(f"{kind.lower()}." for kind in SOURCE_KINDS if kind != "GatewayConfig"),
)
_ROUTES: Final = ("httproute.", "modelroute.")
# Names and settings may be secret: for the owner alone.
_MODE: Final = 0o600


class WrittenFiles(msgspec.Struct, frozen=True):
    """Names of the files that were written and removed."""

    written: tuple[str, ...]
    removed: tuple[str, ...]


class DirectoryWriter:
    """The directory ``folder``; its present content is read once."""

    def __init__(self, folder: Path, changed: FileChanged = ignore_change) -> None:
        """``changed``: called with each file that was written or removed."""
        self._folder = folder
        self._changed = changed
        self._known: dict[str, bytes] | None = None

    def write(self, files: Mapping[str, bytes]) -> WrittenFiles:
        """Make the directory hold ``files``, in their order; raises OSError, after which the next call does all
        again.
        """
        known, self._known = self._known, None
        if known is None:
            known = self._read()
        written = tuple(name for name, content in files.items() if known.get(name) != content)
        for name in written:
            replace_file(self._folder / name, files[name], _MODE, self._changed)
        # what referred to these files has been written without them
        removed = tuple(sorted((name for name in known if name not in files), key=_removal_order))
        for name in removed:
            remove_file(self._folder / name, self._changed)
        self._known = dict(files)
        return WrittenFiles(written, removed)

    def _read(self) -> dict[str, bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return {path.name: path.read_bytes() for path in self._folder.iterdir() if path.name.startswith(_OURS)}


def _removal_order(name: str) -> tuple[bool, str]:
    """Routes go before the servers and backends that they name."""
    return not name.startswith(_ROUTES), name
