# SPDX-License-Identifier: Apache-2.0
"""Descriptions of structs and their fields, extracted from the source.

A field's description is its ``msgspec.Meta`` description, or the comment above it, or the text after the field's name
and a colon in the struct's docstring.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
import typing
from typing import Final, NamedTuple

import msgspec

# ``name``: or ``one`` and ``other``: where a clause may begin
_CLAUSE: Final = re.compile(r"(?:^|(?<=[.,;:)] ))((?:``\w+``(?:, | and )?)+): ")
_NAME: Final = re.compile(r"``(\w+)``")


class StructDocs(NamedTuple):
    """A struct's own description, without the clauses of single fields, and the fields' descriptions by attribute.

    Both in Markdown; fields have their YAML names.
    """

    text: str
    fields: dict[str, str]


def read_field_docs(cls: type) -> StructDocs:
    """Of a struct and its bases."""
    text, clauses = _split(inspect.cleandoc(cls.__doc__ or ""), {field.name for field in msgspec.structs.fields(cls)})
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            comments |= _comments(base)
    said = {**clauses, **comments, **_descriptions(cls)}
    names = {field.name: field.encode_name for field in msgspec.structs.fields(cls)}
    return StructDocs(
        wrap_paragraphs(_markdown(text, names)), {name: _markdown(one, names) for name, one in said.items()}
    )


def wrap_paragraphs(text: str) -> str:
    """Paragraphs in lines of at most 118 columns."""
    paragraphs = (textwrap.wrap(one, 118, break_on_hyphens=False, break_long_words=False) for one in text.split("\n\n"))
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _markdown(text: str, names: dict[str, str]) -> str:
    """Docstrings mark code by two backticks, Markdown by one."""
    named = _NAME.sub(lambda match: f"``{names.get(match[1], match[1])}``", text)
    return named.replace("``", "`")


def _split(docstring: str, fields: set[str]) -> tuple[str, dict[str, str]]:
    """Clauses that begin with fields' names are theirs, up to the next such clause or the end of the paragraph."""
    paragraphs, clauses = [], {}
    for paragraph in docstring.split("\n\n"):
        pieces = _CLAUSE.split(" ".join(paragraph.split()))
        rest = [pieces[0]]
        for names, said in zip(pieces[1::2], pieces[2::2], strict=True):
            found = _NAME.findall(names)
            if fields.issuperset(found):
                clauses.update(dict.fromkeys(found, _sentence(said)))
            else:
                rest.append(f"{names}: {said}")
        paragraphs.append("".join(rest).strip())
    return "\n\n".join(one for one in paragraphs if one), clauses


def _comments(cls: type) -> dict[str, str]:
    """Comment lines directly above a field; a struct that is made at run time has no source."""
    lines, definitions = _source(cls.__module__)
    found: dict[str, str] = {}
    if cls.__qualname__ not in definitions:
        return found
    for node in definitions[cls.__qualname__].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        comment = " ".join(line.strip().removeprefix("#").strip() for line in lines[first : node.lineno - 1])
        if comment:
            found[node.target.id] = _sentence(comment)
    return found


@functools.cache
def _source(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """A module's lines, and its classes outside functions by qualified name."""
    try:
        text = inspect.getsource(sys.modules[module])
    except OSError:
        return [], {}
    found = {}
    waiting = [("", node) for node in ast.parse(text).body]
    for prefix, node in waiting:
        if isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}"
            found[name] = node
            waiting += ((f"{name}.", inner) for inner in node.body)
    return text.splitlines(), found


def _descriptions(cls: type) -> dict[str, str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: meta.description
        for name, hint in hints.items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.description
    }


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".,;")
    return text[:1].upper() + text[1:]
