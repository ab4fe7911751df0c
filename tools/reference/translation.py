# SPDX-License-Identifier: Apache-2.0
"""The reference page of the fields of requests that are translated from one API to another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from extproc.translate import anthropic_messages, openai_responses
from tools.reference.kinds import MARK

if TYPE_CHECKING:
    from extproc.translate.json_fields import FieldRule, Fields

_HEAD: Final = """\
# Fields of translated requests

What becomes of a request's top-level fields where the engine has another API than the client.
[Translation](../translation.md) has contents, answers and streams. Between messages and responses, a field passes both
tables. A field that is in no table is dropped, and so are other values than those that a table names.
"""
_TABLES: Final[tuple[tuple[str, Fields], ...]] = (
    ("From messages to chat", anthropic_messages.TO_CHAT),
    ("From chat to messages", anthropic_messages.FROM_CHAT),
    ("From responses to chat", openai_responses.TO_CHAT),
    ("From chat to responses", openai_responses.FROM_CHAT),
)


def page() -> str:
    """The Markdown page."""
    lines = [MARK, "", _HEAD]
    for title, fields in _TABLES:
        lines += [f"## {title}", "", "| field | becomes |", "|---|---|"]
        lines += [f"| `{name}` | {_becomes(field)} |" for name, field in sorted(fields.items())]
        lines.append("")
    return "\n".join(lines)


def _becomes(field: FieldRule) -> str:
    neutral = " or ".join(f"`{json.dumps(one)}`" for one in field.neutral if one is not None and type(one) is not float)
    unless = f" unless it is {neutral}" if neutral else ""
    if field.refused:
        return f"refused{unless}: {field.refused}"
    if field.values is not None:
        return f"`{field.to}`: " + ", ".join(f"`{one}` as `{other}`" for one, other in field.values.items())
    if field.to or field.note:
        return field.note or f"`{field.to}`"
    return f"dropped{unless}"
