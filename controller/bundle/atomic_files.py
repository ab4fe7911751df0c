# SPDX-License-Identifier: Apache-2.0
"""Replaces a file whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

FileChanged = Callable[[Path, bytes | None], None]
"""Gets each file that was written, and its content; None if it was removed."""


def ignore_change(_file: Path, _content: bytes | None) -> None:
    """Changes of files that nobody asks about."""


def remove_file(file: Path, changed: FileChanged = ignore_change) -> None:
    """Remove a file if there is one. Raises OSError."""
    try:
        file.unlink()
    except FileNotFoundError:
        return
    changed(file, None)


def replace_file(file: Path, content: bytes, mode: int, changed: FileChanged = ignore_change) -> None:
    """A reader, or a crash, never meets half a file. One that would not change is left alone. Raises OSError."""
    if file.is_file() and file.read_bytes() == content:
        if stat.S_IMODE(file.stat().st_mode) != mode:
            file.chmod(mode)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            os.fchmod(descriptor, mode)
            opened.flush()
            os.fsync(descriptor)
        draft.replace(file)
    except BaseException:
        draft.unlink()
        raise
    changed(file, content)
