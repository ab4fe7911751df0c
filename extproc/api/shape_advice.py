# SPDX-License-Identifier: Apache-2.0
"""What to say of a value of another type than its field's, in the words of YAML."""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
_LONGEST: Final = 300
# What a field of such a type holds, and what to write there.
_WANTED: Final[Mapping[type[inspect.Type], tuple[tuple[type, ...], str]]] = MappingProxyType(
    {
        inspect.StrType: ((str,), "text"),
        inspect.IntType: ((int,), "a whole number"),
        inspect.FloatType: ((int, float), "a number"),
        inspect.BoolType: ((bool,), "true or false"),
        inspect.StructType: ((dict,), ""),
        inspect.DictType: ((dict,), "names with values, indented, such as name: value"),
        inspect.ListType: ((list,), "a list, each item on a line that begins with '- '"),
        inspect.VarTupleType: ((list,), "a list, each item on a line that begins with '- '"),
    }
)
_CALLED: Final[Mapping[type, str]] = MappingProxyType(
    {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        dict: "a mapping of fields",
        list: "a list",
    }
)


def shape_advice(value: object, kind: inspect.Type, *, is_secret: bool) -> str:
    """What ``value`` is and what to write instead; empty where its type is right. A secret's value is not repeated."""
    types, wanted = _WANTED.get(type(kind), ((object,), ""))
    if object in types or type(value) in types:
        return ""
    if isinstance(kind, inspect.StructType):
        wanted = f"fields, indented, such as {_some_fields(kind)}"
    if value is None:
        return f"has no value; write {wanted}"
    called = _CALLED.get(type(value), f"a {type(value).__name__}")
    if is_secret:
        return f"is {called}; write {wanted}"
    return f"{shown(value)} is {called}; {_about_quotes(value, kind) or f'write {wanted}'}"


def _about_quotes(value: object, kind: inspect.Type) -> str:
    """For a value that only quotes make text, or that lacks them; else empty."""
    if isinstance(kind, inspect.StrType):
        return "put it in quotes if it is meant as text" if isinstance(value, bool | int | float) else ""
    if not isinstance(value, str):
        return ""
    is_number = isinstance(kind, inspect.IntType | inspect.FloatType) and _NUMBER.fullmatch(value)
    is_boolean = isinstance(kind, inspect.BoolType) and value.lower() in {"true", "false"}
    return f"write {value.lower()} without quotes" if is_number or is_boolean else ""


def bounds_advice(value: object, kind: inspect.Type) -> str:
    """What to write instead of a number that is too small or too large; empty for another one."""
    if not isinstance(kind, inspect.IntType | inspect.FloatType) or not isinstance(value, int | float):
        return ""
    if kind.ge is not None and value < kind.ge:
        return f"{value} is too small; write at least {kind.ge}"
    if kind.gt is not None and value <= kind.gt:
        return f"{value} is too small; write more than {kind.gt:g}"
    if kind.le is not None and value > kind.le:
        return f"{value} is too large; write at most {kind.le}"
    return f"{value} is too large; write less than {kind.lt:g}" if kind.lt is not None and value >= kind.lt else ""


def shown(value: object) -> str:
    """As it could stand in the file, shortened."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _some_fields(kind: inspect.StructType) -> str:
    """The first three, of those that are required if any is."""
    names = [field.encode_name for field in kind.fields if field.required] or [one.encode_name for one in kind.fields]
    return ", ".join(f"{name}:" for name in names[:3])
