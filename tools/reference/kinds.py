# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the kinds: every field with its type, default and meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import inspect

from controller.api.crds import field_docs
from controller.api.crds import kinds as crds
from extproc.api.admission import InferenceObjective
from extproc.api.http_route import Backend, HTTPRoute
from extproc.api.spec import API_VERSION
from tools.reference.field_types import as_yaml, default_of, default_text, structs_in, type_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KINDS: Final[Mapping[str, type]] = {
    **{re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.name).lower(): kind.document for kind in crds.KINDS},
    "inference-objective": InferenceObjective,
    "http-route": HTTPRoute,
    "backend": Backend,
}
# Kubernetes' own; and the foreign kind has the apiVersions of those who define it.
_METADATA: Final = "metadata"
_FOREIGN: Final[Mapping[type, str]] = {
    InferenceObjective: "that of the Gateway API Inference Extension, or llm-d's",
    HTTPRoute: "`gateway.networking.k8s.io/v1`",
}
MARK: Final = "<!-- written by make generate -->"


class _Section(msgspec.Struct, frozen=True):
    """A struct at the first place where it is used."""

    path: str
    struct: inspect.StructType
    default: tuple[msgspec.Struct, ...] = ()


def page(cls: type) -> str:
    """The Markdown page of one kind."""
    sections = list(_sections(cls))
    places = {one.struct.cls: one.path for one in sections}
    lines = [MARK, "", f"# {cls.__name__}", "", field_docs.read(cls).text, ""]
    version = _FOREIGN.get(cls, f"`{API_VERSION}`")
    named = f"`kind` is `{cls.__name__}`, `apiVersion` is {version}, and `metadata.name` is required."
    lines += [field_docs.wrapped(named), ""]
    for section in sections:
        lines += _section_lines(section, places)
    return "\n".join(lines)


def _sections(cls: type) -> Iterator[_Section]:
    """Depth first, in the order of the fields; a struct that occurs again is not repeated."""
    seen: set[type] = set()

    def walk(section: _Section) -> Iterator[_Section]:
        if section.struct.cls in seen:
            return
        seen.add(section.struct.cls)
        yield section
        for field in section.struct.fields:
            value = default_of(field)
            given = value if isinstance(value, tuple) else ()
            for rest, struct in structs_in(field.type):
                yield from walk(_Section(f"{section.path}.{field.encode_name}{rest}", struct, given))

    for field in _struct(cls).fields:
        if field.name != _METADATA:
            yield from walk(_Section(field.encode_name, _struct(field.type)))


def _struct(kind: type | inspect.Type) -> inspect.StructType:
    found = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    if not isinstance(found, inspect.StructType):
        msg = f"{found} is no struct"
        raise TypeError(msg)
    return found


def _section_lines(section: _Section, places: Mapping[type, str]) -> list[str]:
    docs = field_docs.read(section.struct.cls)
    lines = [f"## `{section.path}`", ""]
    if docs.text:
        lines += [docs.text, ""]
    return [*lines, *field_table(section.struct, docs, places), *_default_lines(section)]


def _default_lines(section: _Section) -> list[str]:
    return ["Default:", "", "```yaml", as_yaml(section.default).rstrip(), "```", ""] if section.default else []


def field_table(struct: inspect.StructType, docs: field_docs.StructDocs, places: Mapping[type, str]) -> list[str]:
    """One row a field; structs are linked to the sections where they are described."""

    def link(kind: inspect.StructType) -> str:
        path = places[kind.cls]
        return f"[{kind.cls.__name__}](#{anchor(path)})"

    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in struct.fields:
        meaning = docs.fields.get(field.name, "").replace("|", "\\|")
        kind = type_text(field.type, link).replace("|", "\\|")
        rows.append(f"| `{field.encode_name}` | {kind} | {default_text(field)} | {meaning} |")
    return [*rows, ""]


def anchor(heading: str) -> str:
    """How GitHub and MkDocs name a heading of code."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_")
