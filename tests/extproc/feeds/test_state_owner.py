# SPDX-License-Identifier: Apache-2.0
"""Of a predecessor and its successor one writes the files of their worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.feeds.state_owner import StateOwner

if TYPE_CHECKING:
    from pathlib import Path


def test_a_successor_owns_what_its_predecessor_has_released(tmp_path: Path) -> None:
    first, second, other = StateOwner(tmp_path, 0), StateOwner(tmp_path, 0), StateOwner(tmp_path, 1)
    assert first.owns()
    assert first.owns()
    assert not second.owns()
    assert other.owns()
    first.release()
    assert second.owns()
    assert not first.owns()


def test_where_nothing_can_be_locked_every_process_owns(tmp_path: Path) -> None:
    assert StateOwner(tmp_path / "missing", 0).owns()
