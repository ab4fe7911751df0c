# SPDX-License-Identifier: Apache-2.0
"""The tree in ARCHITECTURE.md is that of the code, and every module begins with the sentence that stands there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from extproc.scheduling.registry import BUILT_IN
from tools.architecture_tree import PAGE, with_tree

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path.relative_to(ROOT)
    for package in ("attache", "extproc", "controller", "bench", "tools")
    for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_says_what_it_is(module: Path) -> None:
    text = (ROOT / module).read_text()
    if not text.strip():
        return
    said = ast.get_docstring(ast.parse(text))
    assert said, "begin with a sentence that says what this module is"
    assert "\n" not in said.split("\n\n")[0], "say in one line what this module is; the rest after an empty line"


def test_the_plugin_page_names_every_plugin() -> None:
    page = (ROOT / "docs" / "reference" / "plugins.md").read_text()
    assert [name for name in BUILT_IN if f"`{name}`" not in page] == []


def test_the_tree_in_the_architecture_page_is_that_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_tree(page) == page, "run make generate"


def test_envoys_folder_holds_files_and_is_no_package() -> None:
    # site-packages has an envoy of its own
    assert not list((ROOT / "envoy").rglob("*.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))
