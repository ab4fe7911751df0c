# SPDX-License-Identifier: Apache-2.0
"""Pages of the site that stand at the top of the repository: a hook of MkDocs, see mkdocs.yml."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parent.parent
PAGES: Final[Mapping[str, str]] = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "envoy/README.md": "bundles.md",
}
_LINK: Final = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - MkDocs is not installed where types are checked
    """Add the pages."""
    file = import_module("mkdocs.structure.files").File
    for source, page in PAGES.items():
        files.append(file.generated(config, page, content=with_site_links((ROOT / source).read_text())))
    return files


def with_site_links(text: str) -> str:
    """Links from the top of the repository to links from the top of the site."""

    def link(match: re.Match[str]) -> str:
        target, part = match[1], match[2] or ""
        return f"]({PAGES.get(target) or target.removeprefix('docs/')}{part})"

    return _LINK.sub(link, text)
