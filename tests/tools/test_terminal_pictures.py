# SPDX-License-Identifier: Apache-2.0
"""What attache top and attache explain print of a failing engine stands in the pages about them."""

from __future__ import annotations

import pytest

from extproc.endpoints.health import ADVICE, EngineFailure
from tools.terminal_pictures import pages, with_block

ILL = "10.0.0.3:8000"


def test_both_blocks_show_the_engine_that_is_avoided_and_why() -> None:
    texts = {path.name: text for path, text in pages().items()}
    top = texts["operations.md"].partition("<!-- attache top")[2].partition("<!-- end of attache top")[0]
    assert "engines: 3 serving, 1 avoided" in top
    assert f"{EngineFailure.ERROR.value}; {ADVICE[EngineFailure.ERROR]}" in top
    assert [line.split()[2] for line in top.splitlines() if line.startswith(f"default/llama  {ILL}")] == ["AVOIDED"]
    explained = texts["picking.md"].partition("<!-- attache explain")[2].partition("<!-- end of attache explain")[0]
    assert f"{ILL} is avoided: {EngineFailure.ERROR.value}" in explained
    assert pages() == {path: path.read_text() for path in pages()}


def test_a_page_without_a_place_is_named() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        with_block("text", "attache top", "block")
