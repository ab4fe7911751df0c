# SPDX-License-Identifier: Apache-2.0
"""Every module begins with a line that says what it is, and ARCHITECTURE.md has the tree of packages."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.llmd.plugin_types import BUILT_IN

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path.relative_to(ROOT)
    for package in ("attache", "extproc", "controller", "bench", "tools")
    for path in (ROOT / package).rglob("*.py")
)


# Comments, then the docstring's first paragraph.
HEAD = re.compile(r'(?:#[^\n]*\n)*"""([^"].*?)(?:"""|\n\n)', re.DOTALL)


def test_every_module_begins_with_a_line_that_says_what_it_is() -> None:
    texts = {module: (ROOT / module).read_text() for module in MODULES}
    heads = {module: HEAD.match(text) for module, text in texts.items() if text.strip()}
    assert [str(module) for module, head in heads.items() if head is None or "\n" in head[1].strip()] == []


def test_the_plugin_page_names_every_plugin() -> None:
    page = (ROOT / "docs" / "reference" / "plugins.md").read_text()
    assert [name for name in BUILT_IN if f"`{name}`" not in page] == []


def test_envoys_folder_holds_files_and_is_no_package() -> None:
    # site-packages has an envoy of its own
    assert not list((ROOT / "envoy").rglob("*.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))
