# SPDX-License-Identifier: Apache-2.0
"""The directory is written whole or not at all, by file, and only where it differs."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from controller.gateway.directory_writer import DirectoryWriter

if TYPE_CHECKING:
    from pathlib import Path

SERVER, ROUTE, GATEWAY = "modelserver.default.a.json", "modelroute.default.a.json", "gateway.json"


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    writer = DirectoryWriter(tmp_path)
    assert writer.write({GATEWAY: b"1", SERVER: b"2"}).written == (GATEWAY, SERVER)
    inode = (tmp_path / GATEWAY).stat().st_ino
    assert writer.write({GATEWAY: b"1", SERVER: b"3"}).written == (SERVER,)
    assert (tmp_path / GATEWAY).stat().st_ino == inode
    assert (tmp_path / SERVER).read_bytes() == b"3"


def test_what_an_earlier_process_left_is_taken_over_and_others_files_stay(tmp_path: Path) -> None:
    (tmp_path / SERVER).write_bytes(b"same")
    (tmp_path / ROUTE).write_bytes(b"old")
    (tmp_path / "mine.yaml").write_bytes(b"by hand")
    done = DirectoryWriter(tmp_path).write({SERVER: b"same"})
    assert done.written == ()
    assert done.removed == (ROUTE,)
    assert {path.name for path in tmp_path.iterdir()} == {SERVER, "mine.yaml"}


def test_routes_go_before_the_servers_that_they_name(tmp_path: Path) -> None:
    writer = DirectoryWriter(tmp_path)
    writer.write({SERVER: b"1", ROUTE: b"2"})
    assert writer.write({}).removed == (ROUTE, SERVER)


def test_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    DirectoryWriter(tmp_path).write({GATEWAY: b"1"})
    assert stat.S_IMODE((tmp_path / GATEWAY).stat().st_mode) == 0o600


def test_after_a_failure_everything_is_looked_at_again(tmp_path: Path) -> None:
    folder = tmp_path / "config"
    writer = DirectoryWriter(folder)
    writer.write({GATEWAY: b"1", SERVER: b"1"})
    (folder / SERVER).unlink()
    (folder / SERVER).mkdir()  # what nobody would do, and no file can replace
    with pytest.raises(OSError, match="directory"):
        writer.write({GATEWAY: b"2", SERVER: b"2"})
    (folder / SERVER).rmdir()
    assert writer.write({GATEWAY: b"2", SERVER: b"2"}).written == (SERVER,)
    assert not list(folder.glob(".*")), "no drafts are left behind"
