# SPDX-License-Identifier: Apache-2.0
"""The last good value stays, and each outcome is told once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.file_reloading import Reloadable

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_good_value_stays_while_files_cannot_be_read_or_used(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("1")
    one = Reloadable(file.read_text, int)
    assert (one.value, one.poll()) == (1, "unchanged")
    file.write_text("2")
    assert (one.poll(), one.value) == ("new", 2)
    file.write_text("x")
    assert (one.poll(), one.poll(), one.value) == ("refused", "unchanged", 2)
    assert one.problem
    file.unlink()
    assert (one.poll(), one.poll(), one.value) == ("refused", "unchanged", 2)
    assert one.problem == f"{file}: No such file or directory"
    file.write_text("2")
    assert (one.poll(), one.problem) == ("mended", "")


def test_without_a_first_good_value_there_is_a_fallback_or_an_error(tmp_path: Path) -> None:
    file = tmp_path / "n"
    with pytest.raises(OSError, match="No such file"):
        Reloadable(file.read_text, int)
    one = Reloadable(file.read_text, int, 7)
    assert (one.value, one.poll()) == (7, "unchanged")
    file.write_text("8")
    assert (one.poll(), one.value) == ("new", 8)
