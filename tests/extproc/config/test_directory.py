# SPDX-License-Identifier: Apache-2.0
"""A directory is read again where it has changed, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config.directory import ConfigDirectory
from extproc.config.errors import ConfigInvalid

SERVER = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: NAME}
spec: {model: m, endpoints: []}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(SERVER.replace("NAME", name))
    return tmp_path


def replace(file: Path, text: str) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)


def keys(directory: ConfigDirectory) -> list[str]:
    return [one.metadata.key for one in directory.read().servers]


def test_what_has_been_read_has_not_changed(path: Path) -> None:
    directory = ConfigDirectory(path)
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/b"]
    assert not directory.has_changed()
    assert not directory.has_changed()


def test_files_that_come_go_or_are_replaced_are_changes(path: Path) -> None:
    directory = ConfigDirectory(path)
    directory.read()
    replace(path / "b.yaml", SERVER.replace("NAME", "c"))
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/c"]
    (path / "d.yml").write_text(SERVER.replace("NAME", "d"))
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/c", "default/d"]
    (path / "a.yaml").unlink()
    assert directory.has_changed()
    assert keys(directory) == ["default/c", "default/d"]
    (path / "notes.txt").write_text("nothing of ours")
    (path / ".hidden.yaml").write_text("{")
    (path / "folder.yaml").mkdir()
    assert not directory.has_changed()


def test_only_files_that_have_changed_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ConfigDirectory(path)
    directory.read()
    directory.has_changed()
    opened: list[str] = []
    read_bytes = Path.read_bytes

    def noting(file: Path) -> bytes:
        opened.append(file.name)
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", noting)
    replace(path / "b.yaml", SERVER.replace("NAME", "c"))
    assert directory.has_changed()
    directory.read()
    assert opened == ["b.yaml"]


def test_a_write_in_the_same_tick_of_the_clock_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ConfigDirectory(path)
    directory.read()
    seen = directory._scan()
    (path / "b.yaml").write_text(SERVER.replace("NAME", "c"))
    # a file system whose clock is too coarse to tell the two writes apart
    monkeypatch.setattr(directory, "_scan", lambda: seen)
    assert directory.has_changed()
    assert directory.has_changed(), "until it is read"
    assert keys(directory) == ["default/a", "default/c"]
    assert not directory.has_changed()


def test_a_broken_file_is_told_once_and_the_mended_one_is_a_change(path: Path) -> None:
    directory = ConfigDirectory(path)
    directory.read()
    (path / "b.yaml").write_text(SERVER[:60])
    assert directory.has_changed()
    with pytest.raises(ConfigInvalid):
        directory.read()
    assert not directory.has_changed()
    (path / "b.yaml").write_text(SERVER.replace("NAME", "b"))
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/b"]


def test_a_directory_that_is_gone_is_told_once_and_is_a_change_when_it_is_back(path: Path) -> None:
    directory = ConfigDirectory(path)
    directory.read()
    away = path.rename(path.with_name("away"))
    assert directory.has_changed()
    with pytest.raises(ConfigInvalid, match="is not a directory that can be read"):
        directory.read()
    assert not directory.has_changed()
    away.rename(path)
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/b"]


def test_what_is_replaced_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ConfigDirectory(path)
    read_bytes = Path.read_bytes
    moments = iter([lambda: replace(path / "a.yaml", SERVER.replace("NAME", "z"))])

    def in_the_middle(file: Path) -> bytes:
        content = read_bytes(file)
        next(moments, lambda: None)()
        return content

    monkeypatch.setattr(Path, "read_bytes", in_the_middle)
    assert keys(directory) == ["default/b", "default/z"]
