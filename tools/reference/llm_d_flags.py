# SPDX-License-Identifier: Apache-2.0
"""The page of llm-d's flags, from the table that reads them."""

from __future__ import annotations

from typing import Final

from controller.commands.epp import FLAGS

_HEADER: Final = """# llm-d's flags

`attache epp` takes the flags of llm-d's endpoint picker and of the Inference Extension's before it, with one dash or
two, and in `camelCase` too. Any other flag is refused.
[Moving from llm-d](../migrating.md#from-llm-ds-endpoint-picker) has the steps.

This page is written by `make generate`.
"""
_TITLES: Final = (
    ("obeyed", "## Obeyed", "what it does"),
    ("accepted", "## Accepted, without effect: a line in the log says so", "why"),
    ("refused", "## Refused, unless the value asks for nothing", "why"),
)


def page() -> str:
    """The whole page."""
    parts = [_HEADER]
    for fate, title, what in _TITLES:
        flags = [one for one in FLAGS if one.fate == fate]
        third = {"obeyed": "default", "accepted": "", "refused": "taken all the same"}[fate]
        head = ["flag", *([third] if third else []), what]
        rows = [
            [f"`--{one.name}`", *([_shown(one.default or one.harmless)] if third else []), one.note] for one in flags
        ]
        parts += [title, "", _row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    return "\n".join(parts)


def _shown(value: str) -> str:
    return f"`{value}`" if value else ""


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
