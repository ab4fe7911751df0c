# SPDX-License-Identifier: Apache-2.0
"""Files that others name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from extproc.api.untrusted_files import open_regular_file


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        with open_regular_file(tmp_path / name) as opened:
            assert opened.read() == b"content"


def test_what_is_no_file_is_refused_at_once_and_leaves_nothing_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = _open_files()
    for name in (tmp_path / "pipe", tmp_path / "folder", tmp_path / "none", "/dev/null", "a\0b"):
        with pytest.raises(OSError, match=r"regular file|No such file|null byte"):
            open_regular_file(name)
    assert _open_files() == before
