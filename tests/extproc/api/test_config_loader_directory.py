# SPDX-License-Identifier: Apache-2.0
"""A directory is read again where it has changed, and only there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import ConfigDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.api.yaml_documents import Document

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
    read_file = ConfigDirectory._read_file

    def noting(directory: ConfigDirectory, name: str) -> bytes:
        opened.append(name)
        return read_file(directory, name)

    monkeypatch.setattr(ConfigDirectory, "_read_file", noting)
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
    with pytest.raises(ConfigInvalid, match="does not exist; name a directory that holds YAML"):
        directory.read()
    assert not directory.has_changed()
    away.rename(path)
    assert directory.has_changed()
    assert keys(directory) == ["default/a", "default/b"]


def test_what_is_replaced_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ConfigDirectory(path)
    read_file = ConfigDirectory._read_file
    moments = iter([lambda: replace(path / "a.yaml", SERVER.replace("NAME", "z"))])

    def in_the_middle(directory: ConfigDirectory, name: str) -> bytes:
        content = read_file(directory, name)
        next(moments, lambda: None)()
        return content

    monkeypatch.setattr(ConfigDirectory, "_read_file", in_the_middle)
    assert keys(directory) == ["default/b", "default/z"]


def test_too_much_is_refused_before_it_is_read(path: Path) -> None:
    directory = ConfigDirectory(path)
    with (path / "b.yaml").open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(ConfigInvalid, match=r"b.yaml: has 50000000 bytes, and 4194304 are read"):
        directory.read()
    assert not directory.has_changed()
    (path / "b.yaml").unlink()
    for number in range(5):
        with (path / f"{number}.json").open("wb") as file:
            file.truncate(16_000_000)
    with pytest.raises(ConfigInvalid, match=r"its files have 80000[0-9]+ bytes, and 67108864 are read"):
        directory.read()


def test_a_directory_without_documents_of_ours_is_a_mistake(tmp_path: Path) -> None:
    directory = ConfigDirectory(tmp_path)
    with pytest.raises(ConfigInvalid, match="holds no ModelServer and no ModelRoute"):
        directory.read()
    (tmp_path / "keys.json").write_text('{"keys": []}')
    with pytest.raises(ConfigInvalid, match="holds no ModelServer and no ModelRoute"):
        directory.read()


def test_a_name_that_is_no_text_and_control_characters_are_shown_escaped(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\n.yaml")).write_text("kind: [")
    with pytest.raises(ConfigInvalid) as caught:
        ConfigDirectory(tmp_path).read()
    assert str(caught.value).isprintable()
    str(caught.value).encode()


def test_an_exception_that_nobody_expected_is_a_mistake_without_its_text(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(document: Document) -> None:
        raise LookupError(document.text)

    monkeypatch.setattr("extproc.api.config_loader.decode", fail)
    directory = ConfigDirectory(path)
    with pytest.raises(ConfigInvalid, match=r"a.yaml: makes the reader fail with LookupError"):
        directory.read()
    assert "in fail" in caplog.text
    assert "metadata" not in caplog.text
