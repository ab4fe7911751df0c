# SPDX-License-Identifier: Apache-2.0
"""Files that the code does not make as they stand are found; ``make check`` compares those of the clone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from extproc.core.request_states import RequestState
from tools import architecture_tree, generated

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_missing_different_or_made_by_nothing_is_named_and_generate_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tmp_path / "pages"
    wanted = {pages / "new.md": b"new", pages / "old.md": b"now", tmp_path / "same.md": b"same"}
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(generated, "FOLDERS", (pages,))
    monkeypatch.setattr(generated, "generated_files", lambda: wanted)
    pages.mkdir()
    (pages / "old.md").write_text("before")
    (pages / "removed.md").touch()
    (tmp_path / "same.md").write_text("same")
    (tmp_path / "other.md").touch()
    assert generated.main(["--check"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" is not what the code makes of it: run `make generate`")[0] for line in said] == [
        "pages/new.md",
        "pages/old.md",
        "pages/removed.md",
    ]
    assert (pages / "old.md").read_text() == "before"
    assert generated.main([]) == 0
    assert generated.main(["--check"]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.md")) == ["new.md", "old.md", "other.md", "same.md"]


def test_what_is_made_of_other_made_files_is_made_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Helm chart is made of the manifests as they lie there."""
    rules, chart = tmp_path / "rules.yaml", tmp_path / "chart.yaml"
    rules.write_text("old")
    monkeypatch.setattr(generated, "FOLDERS", ())
    monkeypatch.setattr(generated, "generated_files", lambda: {rules: b"new", chart: rules.read_bytes()})
    assert generated.main([]) == 0
    assert chart.read_text() == "new"


def test_files_that_never_agree_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("")
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(generated, "FOLDERS", ())
    monkeypatch.setattr(generated, "generated_files", lambda: {page: page.read_bytes() + b"x"})
    assert generated.main([]) == 1
    assert capsys.readouterr().out == "page.md is made of itself, and never the same: mend what makes it\n"


def test_the_states_of_a_request_are_drawn_as_their_module_draws_them() -> None:
    page = "a\n<!-- the tree: written by make generate -->\n<!-- end of the tree -->\nb\n"
    with pytest.raises(ValueError, match="needs the lines '<!-- the states: written by make generate -->'"):
        architecture_tree.with_parts(page)
    page += "<!-- the states: written by make generate -->\nold\n<!-- end of the states -->\nc\n"
    _, _, drawn = architecture_tree.with_parts(page).partition("b\n")
    assert "old" not in drawn
    assert drawn.endswith("```\n<!-- end of the states -->\nc\n")
    assert {state.name for state in RequestState} <= set(re.findall(r"[A-Z_]{2,}", drawn))


def test_a_list_below_its_comment_is_written_anew_and_what_stands_around_it_stays() -> None:
    text = "- a:\n  # x, by make generate\n  - old\n  b: [c]\n- d:\n    # y, by make generate\n  - e\n"
    found = generated.with_lists(text, {"x": ["one", "two"], "y": ["three"]})
    assert found == text.replace("- old\n", "- one\n  - two\n").replace("  - e\n", "    - three\n  - e\n")
    with pytest.raises(ValueError, match="unpack"):
        generated.with_lists(text, {"z": []})
