# SPDX-License-Identifier: Apache-2.0
"""Of a predecessor and its successor one writes the files of their worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.feeds.state_lock import StateLock

if TYPE_CHECKING:
    from pathlib import Path


def test_a_successor_owns_what_its_predecessor_has_released(tmp_path: Path) -> None:
    first, second, other = StateLock(tmp_path, 0), StateLock(tmp_path, 0), StateLock(tmp_path, 1)
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    assert other.try_acquire()
    first.release()
    assert second.try_acquire()
    assert not first.try_acquire()


def test_where_nothing_can_be_locked_every_process_owns(tmp_path: Path) -> None:
    assert StateLock(tmp_path / "missing", 0).try_acquire()
