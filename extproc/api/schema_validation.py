# SPDX-License-Identifier: Apache-2.0
"""Every way in which plain data differs from a type; decoders stop at the first.

Walks the data beside msgspec's own description of the type; single values, and in the end the whole, are judged by
``msgspec.convert`` itself, so this can never accept what the decoder refuses.
"""

from __future__ import annotations

import difflib
import re
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import inspect

from extproc.api.config_errors import escape_unprintable
from extproc.api.error_hints import bounds_hint, quote_value, shape_hint
from extproc.api.quantities import decode_quantity
from extproc.api.spec import ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.api.config_errors import Finding, Path


_MAX_FINDINGS: Final = 100
_MAX_COMPARED: Final = 300
# Mistakes under these fields never show the value: a refused configuration must not put keys into logs.
_SECRET: Final = frozenset({"authentication", "cacheSecret", "keys"})
_PLAIN: Mapping[type[inspect.Type], type] = {
    inspect.BoolType: bool,
    inspect.AnyType: object,
    inspect.DictType: dict,
    inspect.VarTupleType: list,
    inspect.ListType: list,
}


def check_shape(value: object, cls: type) -> list[Finding]:
    """The first hundred differences between ``value`` and a ``cls``; empty if and only if it decodes."""
    found = list(islice(_walk(value, inspect.type_info(cls), ()), _MAX_FINDINGS))
    if not found:
        try:
            msgspec.convert(value, cls, dec_hook=decode_quantity, str_keys=True)
        except msgspec.ValidationError as error:
            found.append(((), _lower_first(str(error))))
    return found


def advise_field(key: str, cls: type, value: Mapping[object, object]) -> str:
    """What is probably meant by a field of ``value``, a ``cls``, that this has not."""
    kind = inspect.type_info(cls)
    fields = kind.fields if isinstance(kind, inspect.StructType) else ()
    return _field_advice(key, {field.encode_name: field for field in fields}, value)


def suggest_similar(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` where one of ``known`` is close, else the list of them."""
    names = sorted(known)
    close = _nearest(word, names)
    if close:
        return f"did you mean '{close[0]}'?"
    if not names:
        return "there is none"
    more = f" and {len(names) - _MAX_COMPARED} more" if len(names) > _MAX_COMPARED else ""
    return f"write one of: {', '.join(names[:_MAX_COMPARED])}{more}"


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    """The closest of ``known``, if one is close; capitals, dashes and underscores make no difference."""
    # comparing takes time in proportion to both lengths and the number of names
    names = sorted(known)[:_MAX_COMPARED]
    word = word[:_MAX_COMPARED]
    same = [name for name in names if _bare(name) == _bare(word)]
    return same[:1] or difflib.get_close_matches(word, names, n=1)


def _bare(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()


def _walk(value: object, kind: inspect.Type, path: Path) -> Iterator[Finding]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from _walk(value, inner, path)
        case inspect.UnionType():
            yield from _walk_optional(value, kind, path)
        case inspect.StructType() if isinstance(value, dict):
            yield from _walk_struct(value, kind, path)
        case inspect.VarTupleType() | inspect.ListType() if isinstance(value, list):
            yield from _check_length(value, kind, path)
            for index, item in enumerate(value):
                yield from _walk(item, kind.item_type, (*path, index))
        case inspect.DictType() if isinstance(value, dict):
            for key, item in value.items():
                yield from _check_leaf(_key(key, kind.key_type), kind.key_type, (*path, str(key)))
                yield from _walk(item, kind.value_type, (*path, str(key)))
        case _:
            yield from _check_leaf(value, kind, path)


def _walk_optional(value: object, kind: inspect.UnionType, path: Path) -> Iterator[Finding]:
    if value is not None:
        (held,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
        yield from _walk(value, held, path)


def _key(key: object, kind: inspect.Type) -> object:
    """JSON has only text as keys, also where numbers are meant."""
    is_number = isinstance(kind, inspect.IntType) and isinstance(key, str) and key.lstrip("-").isdecimal()
    return int(str(key)) if is_number else key


def _walk_struct(value: dict[object, object], kind: inspect.StructType, path: Path) -> Iterator[Finding]:
    fields = {field.encode_name: field for field in kind.fields}
    unsupported: Mapping[object, str] = getattr(kind.cls, "UNSUPPORTED", {})
    for key, item in value.items():
        if instead := unsupported.get(key) or (unsupported.get(item) if isinstance(item, str) else None):
            yield (*path, str(key)), instead
        elif key in fields and (elsewhere := _choice_of_another(str(key), item, fields)):
            yield (*path, key), elsewhere
        elif key in fields:
            yield from _walk(item, fields[key].type, (*path, key))
        elif kind.forbid_unknown_fields:
            yield (*path, str(key)), f"there is no such field; {_field_advice(str(key), fields, value)}"
    misspelt = {near: str(key) for key in value if key not in fields for near in _nearest(str(key), fields)}
    for name, field in fields.items():
        if not field.required or name in value:
            continue
        if name not in misspelt:
            yield path, f"the field '{name}' is missing; it is required"
        elif not kind.forbid_unknown_fields:
            yield (*path, misspelt[name]), f"there is no such field; did you mean '{name}'?"


def _choice_of_another(key: str, value: object, fields: Mapping[str, inspect.Field]) -> str:
    """Advice for a choice that is none of the field ``key`` and is one of another field; else empty."""
    own = _choices(fields[key])
    if not own or not isinstance(value, str) or value.lower() in map(str.lower, own):
        return ""
    for name, field in fields.items():
        for choice in _choices(field):
            if name != key and choice.lower() == value.lower():
                return f"'{value}' is a choice of '{name}': write {name}: {choice}, and here one of: {', '.join(own)}"
    return ""


def _choices(field: inspect.Field) -> list[str]:
    return [str(one) for one in field.type.values] if isinstance(field.type, inspect.LiteralType) else []


def _field_advice(key: str, fields: Mapping[str, inspect.Field], value: Mapping[object, object]) -> str:
    """The probable meaning of a field of ``value`` that is not among ``fields``."""
    if key.startswith("-"):
        return f"write a space between the dash of a list item and its field: '- {key.lstrip('-')}:'"
    holders = [name for name, field in fields.items() if key in _fields_of(field.type)]
    meant = [name for name in holders if name in value] or holders
    if not _nearest(key, fields) and len(meant) == 1:
        return f"'{meant[0]}' has one: indent it below that"
    return suggest_similar(key, fields)


def _fields_of(kind: inspect.Type) -> set[str]:
    match kind:
        case inspect.Metadata(type=inner):
            return _fields_of(inner)
        case inspect.UnionType():
            return set().union(*(_fields_of(part) for part in kind.types))
        case inspect.StructType():
            return {field.encode_name for field in kind.fields}
        case _:
            return set()


def _check_length(value: list[object], kind: inspect.VarTupleType | inspect.ListType, path: Path) -> Iterator[Finding]:
    if kind.min_length is not None and len(value) < kind.min_length:
        yield path, f"has {len(value)} items; write at least {kind.min_length}"
    if kind.max_length is not None and len(value) > kind.max_length:
        yield path, f"has {len(value)} items; write at most {kind.max_length}"


def _advice(value: object, kind: inspect.Type) -> str:
    """For text that does not match the pattern or the length of its field; empty if it does."""
    if not isinstance(value, str) or not isinstance(kind, inspect.StrType):
        return ""
    if kind.pattern is not None and not re.search(kind.pattern, value):
        return ADVICE[kind.pattern]
    least, most = kind.min_length or 0, kind.max_length
    if len(value) < least:
        return f"has {len(value)} characters; write at least {least}" if value else "is empty; write something"
    return f"has {len(value)} characters; write at most {most}" if most is not None and len(value) > most else ""


def _check_leaf(value: object, kind: inspect.Type, path: Path) -> Iterator[Finding]:
    if isinstance(kind, inspect.LiteralType):
        if value not in kind.values:
            wrong = _shown(value, path) if isinstance(value, str) or _is_secret(path) else quote_value(value)
            yield path, f"{wrong} is not a choice; {suggest_similar(str(value), map(str, kind.values))}"
        return
    if isinstance(kind, inspect.CustomType):
        try:
            decode_quantity(kind.cls, value)
        except ValueError as error:
            yield path, "is not written as it must be" if _is_secret(path) else str(error)
        return
    try:
        msgspec.convert(value, _to_annotation(kind))
    except msgspec.ValidationError as error:
        if advice := _advice(value, kind):
            yield path, f"{_shown(value, path)} {advice}"
        else:
            said = shape_hint(value, kind, is_secret=_is_secret(path)) or bounds_hint(value, kind)
            yield (
                path,
                said or f"{_lower_first(str(error))}{'' if _is_secret(path) else f'; it is {quote_value(value)}'}",
            )


def _to_annotation(kind: inspect.Type) -> object:
    match kind:
        case inspect.StrType():
            meta = msgspec.Meta(min_length=kind.min_length, max_length=kind.max_length, pattern=kind.pattern)
            return Annotated[str, meta]
        case inspect.IntType():
            return Annotated[int, _bounds(kind)]
        case inspect.FloatType():
            return Annotated[float, _bounds(kind)]
        case inspect.StructType():
            return kind.cls
        case inspect.DateTimeType():
            return Annotated[datetime, msgspec.Meta(tz=kind.tz)]
        case _ if type(kind) in _PLAIN:
            return _PLAIN[type(kind)]
        case _:
            msg = f"the configuration types use {type(kind).__name__}, which this check does not know yet"
            raise TypeError(msg)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> msgspec.Meta:
    # msgspec takes one bound a side
    if kind.gt is not None:
        return msgspec.Meta(gt=kind.gt, le=kind.le) if kind.lt is None else msgspec.Meta(gt=kind.gt, lt=kind.lt)
    return msgspec.Meta(ge=kind.ge, le=kind.le) if kind.lt is None else msgspec.Meta(ge=kind.ge, lt=kind.lt)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _is_secret(path: Path) -> bool:
    return not _SECRET.isdisjoint(path)


def _shown(value: object, path: Path) -> str:
    return "the value" if _is_secret(path) else f"'{escape_unprintable(str(value)[:_MAX_COMPARED])}'"
