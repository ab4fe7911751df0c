# SPDX-License-Identifier: Apache-2.0
"""Write the pages under docs/reference: ``python -m tools.reference``, part of ``make generate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.reference import apis, commands, kinds, llm_d, plugins

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"


def pages() -> Mapping[str, str]:
    """Every page by the name of its file."""
    found = {f"{name}.md": kinds.page(cls) for name, cls in kinds.KINDS.items()}
    others = {
        "apis.md": apis.page(),
        "plugins.md": plugins.page(),
        "commands.md": commands.page(),
        "llm-d-flags.md": llm_d.flags_page(),
    }
    files = {"llm-d-plugins.md": llm_d.parameters_page(), "llm-d-files.md": llm_d.files_page()}
    return {**found, **others, **files}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text.rstrip("\n") + "\n")
