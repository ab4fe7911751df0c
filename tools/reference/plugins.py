# SPDX-License-Identifier: Apache-2.0
"""The reference page of the plugins: every type with its formula and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import inspect

from controller.api.crds import field_docs
from extproc.llmd.notes import without_effect
from extproc.llmd.registry import ACCEPTED, BUILT_IN, NOT_BUILT
from tools.reference.kinds import MARK, field_table, structs_in

if TYPE_CHECKING:
    from collections.abc import Iterator

_TITLES: Final = {
    "filter": "Filters",
    "filter and scorer": "Filters that also score",
    "scorer": "Scorers",
    "picker": "Pickers",
    "profile handler": "Profile handlers",
    "decider": "Deciders",
    "reporter": "Reporters",
    "admitter": "Admitters",
    "screener": "Screeners",
    "flow control": "Flow control",
    "data source": "Sources of data",
}
_HEAD: Final = """\
# Plugins

The types that an EndpointPickerConfig may name, by kind, with their parameters. Types on one line are names of the same
plugin. [The plugins page](../picking.md#plugins) says how they work together and how to write one.
"""
_ACCEPTED: Final = """\
## Accepted without effect

These types of llm-d configure what is built in here, or what is configured elsewhere. Files that name them are read
unchanged.

| type | what does its work here |
|---|---|
"""
_REFUSED: Final = """\
## Refused

A file that names one of these types would mean something else without it. Most are of published drafts, or of llm-d's
own tests.

| type | what to write in its place |
|---|---|
"""


def page() -> str:
    """The Markdown page."""
    lines = [MARK, "", _HEAD]
    for kind, title in _TITLES.items():
        lines += [f"## {title}", ""]
        classes: dict[type, list[str]] = {}
        for name, plugin in BUILT_IN.items():
            if plugin.kind == kind:
                classes.setdefault(plugin.cls, []).append(name)
        for cls, names in classes.items():
            lines += _plugin(cls, names)
    rows = [f"| `{name}` | {place} |" for name, place in sorted(ACCEPTED.items())]
    refused = [f"| `{name}` | {message} |" for name, message in sorted(NOT_BUILT.items())]
    return "\n".join((*lines, _ACCEPTED + "\n".join(rows), "", _REFUSED + "\n".join(refused), ""))


def _plugin(cls: type, names: list[str]) -> list[str]:
    docs = field_docs.read(cls)
    head = ", ".join(f"`{name}`" for name in names)
    lines = [f"### {head}", "", docs.text, ""]
    struct = inspect.type_info(cls)
    assert isinstance(struct, inspect.StructType)  # noqa: S101 - a plugin is a struct
    if not struct.fields:
        return lines + _without_effect(cls)
    inner = list(_inner(struct, names[0]))
    lines += field_table(struct, docs, {one.cls: path for path, one in inner})
    lines += _without_effect(cls)
    for path, one in inner:
        said = field_docs.read(one.cls)
        lines += [f"#### `{path}`", "", said.text, ""]
        lines += field_table(one, said, {other.cls: place for place, other in inner})
    return lines


def _without_effect(cls: type) -> list[str]:
    reasons = without_effect(cls)
    if not reasons:
        return []
    rows = [f"| `{name}` | {reason} |" for name, reason in reasons.items()]
    return ["| accepted, without effect | because |", "|---|---|", *rows, ""]


def _inner(struct: inspect.StructType, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    for field in struct.fields:
        for rest, found in structs_in(field.type):
            yield f"{path}.{field.encode_name}{rest}", found
            yield from _inner(found, f"{path}.{field.encode_name}{rest}")
