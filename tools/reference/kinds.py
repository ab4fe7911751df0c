# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the kinds: every field with its type, default and meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml
from msgspec import inspect

from controller.api.crds import field_docs
from controller.kube import custom_resources as crds
from extproc.api.admission import InferenceObjective
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.http_route import HTTPRoute
from extproc.api.picker_config import EndpointPickerConfig
from extproc.api.spec import API_VERSION, NAME, NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SIMPLE: Final[Mapping[type, str]] = {
    inspect.BoolType: "boolean",
    inspect.AnyType: "anything",
    inspect.NoneType: "null",
}
_PLAIN: Final = frozenset({bool, int, float, str})
# Bounds of numbers beyond this only guard arithmetic.
_FAR: Final = 2**31 - 1
_CLASSES: Final = (*(kind.document for kind in DOCUMENT_KINDS), *(kind.document for kind in crds.KINDS))
# EndpointPickerConfig is llm-d's, and has pages of its own.
KINDS: Final[Mapping[str, type]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower(): cls
    for cls in _CLASSES
    if cls is not EndpointPickerConfig
}
# Kubernetes' own; and the foreign kind has the apiVersions of those who define it.
_METADATA: Final = "metadata"
_FOREIGN: Final[Mapping[type, str]] = {
    InferenceObjective: "that of the Gateway API Inference Extension, or llm-d's",
    HTTPRoute: "`gateway.networking.k8s.io/v1`",
}
MARK: Final = "<!-- written by make generate -->"


def type_text(kind: inspect.Type, link: Callable[[inspect.StructType], str]) -> str:
    """``kind`` in words; ``link`` writes a struct."""
    match kind:
        case inspect.Metadata(type=inner):
            return type_text(inner, link)
        case inspect.StructType():
            return link(kind)
        case inspect.UnionType(types=types):
            return " or ".join(type_text(one, link) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.VarTupleType() | inspect.ListType():
            return f"list of {type_text(kind.item_type, link)}{_lengths(kind)}"
        case inspect.DictType():
            return f"map of {type_text(kind.key_type, link)} to {type_text(kind.value_type, link)}{_lengths(kind)}"
    return _scalar_text(kind)


def _scalar_text(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case inspect.IntType():
            return f"integer{_range(kind)}"
        case inspect.FloatType():
            return f"number{_range(kind)}"
        case inspect.StrType():
            return "name" if kind.pattern in {NAME, NAMESPACE} else "string"
        case inspect.CustomType(cls=cls):
            return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()
    return _SIMPLE.get(type(kind), type(kind).__name__.removesuffix("Type").lower())


def default_text(field: inspect.Field) -> str:
    """As it is written in YAML; empty for a field that has none, or whose default is a struct with its own page
    section.
    """
    if field.required:
        return "required"
    value = default_of(field)
    if value is None or isinstance(value, msgspec.Struct) or value in ((), [], {}, ""):
        return ""
    if isinstance(value, (tuple, list)) and isinstance(value[0], msgspec.Struct):
        return "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if type(value) is float else f"`{value}`"


def default_of(field: inspect.Field) -> Any:  # noqa: ANN401 - any field's
    """The value; None where there is none."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    factory: Any = field.default_factory
    return None if factory is msgspec.NODEFAULT else factory()


def structs_in(kind: inspect.Type) -> Iterator[tuple[str, inspect.StructType]]:
    """The structs directly in ``kind``, each with what is appended to the field's path: nothing, ``[]`` or ``.*``."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from structs_in(inner)
        case inspect.StructType():
            yield "", kind
        case inspect.UnionType(types=types):
            for one in types:
                yield from structs_in(one)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            yield from ((f"[]{rest}", struct) for rest, struct in structs_in(item))
        case inspect.DictType(value_type=value):
            yield from ((f".*{rest}", struct) for rest, struct in structs_in(value))


def as_yaml(values: tuple[msgspec.Struct, ...]) -> str:
    """Structs as they would be written, without what is a default anyway."""
    return str(yaml.safe_dump([_given(one) for one in values], sort_keys=False))


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    kind = inspect.type_info(type(struct))
    fields = kind.fields if isinstance(kind, inspect.StructType) else ()
    pairs = ((field, getattr(struct, field.name)) for field in fields)
    given = ((field, value) for field, value in pairs if field.required or value != default_of(field))
    return {field.encode_name: value if type(value) in _PLAIN else str(value) for field, value in given}


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = _bound(kind.ge), _bound(kind.le)
    if low and high:
        return f", {low} to {high}"
    words = [f"at least {low}" * bool(low), f"at most {high}" * bool(high)]
    words += [] if kind.gt is None else [f"above {_bound(kind.gt)}"]
    words += [] if kind.lt is None else [f"below {_bound(kind.lt)}"]
    return "".join(f", {word}" for word in words if word)


def _bound(value: float | None) -> str:
    """Empty for one that nobody comes near."""
    if value is None or abs(value) >= _FAR:
        return ""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _lengths(kind: inspect.VarTupleType | inspect.ListType | inspect.DictType) -> str:
    low, high = kind.min_length or 0, kind.max_length
    if high is not None:
        return f", {low:,} to {high:,}" if low else f", at most {high:,}"
    return f", at least {low:,}" if low else ""


class _Section(msgspec.Struct, frozen=True):
    """A struct at the first place where it is used."""

    path: str
    struct: inspect.StructType
    default: tuple[msgspec.Struct, ...] = ()


def page(cls: type) -> str:
    """The Markdown page of one kind."""
    sections = list(_sections(cls))
    places = {one.struct.cls: one.path for one in sections}
    lines = [MARK, "", f"# {cls.__name__}", "", field_docs.read_field_docs(cls).text, ""]
    version = _FOREIGN.get(cls, f"`{API_VERSION}`")
    named = f"`kind` is `{cls.__name__}`, `apiVersion` is {version}, and `metadata.name` is required."
    lines += [field_docs.wrap_paragraphs(named), ""]
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
    docs = field_docs.read_field_docs(section.struct.cls)
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
