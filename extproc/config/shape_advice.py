# SPDX-License-Identifier: Apache-2.0
"""What to say of a value of another type than its field's, in the words of YAML"""

from __future__ import annotations

import json
import re
from typing import Final

from msgspec import inspect

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
_LONGEST: Final = 300


def shape_advice(value: object, kind: inspect.Type, *, is_secret: bool) -> str:
    """What ``value`` is and what to write instead; empty where its type is right. A secret's value is not repeated."""
    wanted = _wanted(kind)
    if not wanted or _fits(value, kind):
        return ""
    if value is None:
        return f"has no value; write {wanted}"
    if is_secret:
        return f"is {_named(value)}; write {wanted}"
    shown = _shown(value)
    match kind:
        case inspect.StrType() if isinstance(value, bool | int | float):
            return f"{shown} is {_named(value)}; put it in quotes if it is meant as text"
        case inspect.IntType() | inspect.FloatType() if isinstance(value, str) and _NUMBER.fullmatch(value):
            return f"'{value}' is text; write {value} without quotes"
        case inspect.BoolType() if isinstance(value, str) and value.lower() in {"true", "false"}:
            return f"'{value}' is text; write {value.lower()} without quotes"
        case _:
            return f"{shown} is {_named(value)}; write {wanted}"


def _wanted(kind: inspect.Type) -> str:
    match kind:
        case inspect.StrType():
            return "text"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.BoolType():
            return "true or false"
        case inspect.StructType():
            required = [field.encode_name for field in kind.fields if field.required]
            names = required or [field.encode_name for field in kind.fields][:3]
            return f"fields, indented, such as {', '.join(f'{name}:' for name in names[:3])}"
        case inspect.DictType():
            return "names with values, indented, such as name: value"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list, each item in a line that begins with '- '"
        case _:
            return ""


def _fits(value: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case _:
            return isinstance(value, list)


def _named(value: object) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case dict():
            return "a mapping of fields"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        text = f"'{value}'"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
