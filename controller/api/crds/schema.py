# SPDX-License-Identifier: Apache-2.0
"""Structs to the structural schemas of Kubernetes: types, bounds, defaults, descriptions and CEL rules.

Kubernetes fills in defaults only where the enclosing object exists. So a field whose default is a struct gets the
default ``{}``, and the struct's fields get their own. Empty lists and maps are not written as defaults: a rule with
``has()`` is true only where the user wrote the field.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec import inspect

from controller.api.crds import field_docs
from controller.api.shared_types import LayeredSpec
from extproc.api.error_hints import NO_DURATION
from extproc.api.quantities import ByteSize, Duration, Money

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.spec import Spec

Schema = dict[str, Any]

_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING: Final = "x-kubernetes-int-or-string"
_CUSTOM: Final[Mapping[type, Schema]] = {
    Duration: {
        "type": "string",
        "maxLength": 64,
        # a pattern would be all that a user is shown
        "x-kubernetes-validations": [
            {
                "rule": r"self.matches(r'^(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h|d))+)$')",
                "messageExpression": f'"\'" + self + "\' {NO_DURATION}"',
            }
        ],
    },
    ByteSize: {
        _INT_OR_STRING: True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 64,
        "pattern": r"^([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[kMGTPE]|[eE]\+?[0-9]{1,2})?$",
    },
    # Kubernetes has no field of a fraction or text: fractions are text there
    Money: {
        _INT_OR_STRING: True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 64,
        "pattern": r"^([0-9]+\.?[0-9]{0,6}|\.[0-9]{1,6})$",
    },
}
_PLAIN: Final[Mapping[type, Schema]] = {
    inspect.BoolType: {"type": "boolean"},
    inspect.DateTimeType: {"type": "string", "format": "date-time"},
}


def crd_schema(cls: type) -> Schema:
    """The schema of a struct's objects, without references."""
    return _schema(inspect.type_info(cls))


def _schema(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return {**_schema(inner), **(extra or {})}
        case inspect.StructType():
            return _object(kind)
        case inspect.UnionType(types=types):
            return _union([one for one in types if not isinstance(one, inspect.NoneType)])
        case inspect.VarTupleType() | inspect.ListType():
            lengths = {"minItems": kind.min_length, "maxItems": kind.max_length}
            return {"type": "array", "items": _schema(kind.item_type), **_given(lengths)}
        case inspect.DictType():
            return _map(kind)
    return _scalar(kind)


def _map(kind: inspect.DictType) -> Schema:
    if isinstance(kind.value_type, inspect.AnyType):
        return {"type": "object", _PRESERVE: True}
    lengths = {"minProperties": kind.min_length, "maxProperties": kind.max_length}
    return {"type": "object", "additionalProperties": _schema(kind.value_type), **_given(lengths)}


def _scalar(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.IntType():
            return {"type": "integer", "format": "int64", **_bounds(kind)}
        case inspect.FloatType():
            return {"type": "number", **_bounds(kind)}
        case inspect.StrType():
            given = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": _re2(kind.pattern)}
            return {"type": "string", **_given(given)}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case inspect.CustomType(cls=cls) if cls in _CUSTOM:
            return dict(_CUSTOM[cls])
    if type(kind) in _PLAIN:
        return dict(_PLAIN[type(kind)])
    msg = f"no schema is known for {type(kind).__name__}; add it here, or use another type in the struct"
    raise TypeError(msg)


def _union(types: list[inspect.Type]) -> Schema:
    """One type, or a whole number or text."""
    if len(types) == 1:
        return _schema(types[0])
    schemas = {one["type"]: one for one in map(_schema, types)}
    if set(schemas) != {"integer", "string"}:
        msg = f"Kubernetes has no field that is one of {', '.join(schemas)}; use one type"
        raise TypeError(msg)
    # int-or-string takes the checks of both, and has no format
    checks = {**schemas["integer"], **schemas["string"]}
    plain = {name: value for name, value in checks.items() if name not in ("type", "format")}
    return {_INT_OR_STRING: True, "anyOf": [{"type": "integer"}, {"type": "string"}], **plain}


def _object(kind: inspect.StructType) -> Schema:
    docs = field_docs.read_field_docs(kind.cls)
    is_layered = issubclass(kind.cls, LayeredSpec)
    properties = {
        field.encode_name: _property(field, docs.fields.get(field.name, ""), has_default=not is_layered)
        for field in kind.fields
    }
    schema: Schema = {"type": "object", "properties": properties}
    if docs.text:
        schema["description"] = docs.text
    required = [field.encode_name for field in kind.fields if field.required]
    if required:
        schema["required"] = required
    rules = getattr(cast("type[Spec]", kind.cls), "CEL", ())
    if rules:
        schema["x-kubernetes-validations"] = [{"rule": one.rule, "message": one.message} for one in rules]
    return schema


def _property(field: inspect.Field, description: str, *, has_default: bool) -> Schema:
    schema = _schema(field.type)
    if description:
        schema["description"] = description
    default = _default(field) if has_default else None
    if default is not None:
        schema["default"] = default
        if _may_be_null(field.type):
            # otherwise an explicit null would become the default again
            schema["nullable"] = True
    return schema


def _may_be_null(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.UnionType) and any(isinstance(one, inspect.NoneType) for one in kind.types)


def _default(field: inspect.Field) -> object:
    """The default as plain data; None if the schema has none."""
    if field.required or field.default is msgspec.NODEFAULT:
        return None
    if isinstance(field.default, msgspec.Struct):
        return _written(field.default)
    if field.default in ((), ""):
        return None
    return to_plain(field.default)


def _written(struct: msgspec.Struct) -> Schema:
    """The fields that are not defaults anyway."""
    kind = cast("inspect.StructType", inspect.type_info(type(struct)))
    pairs = ((field, getattr(struct, field.name)) for field in kind.fields)
    return {
        field.encode_name: to_plain(value)
        for field, value in pairs
        if field.required or (field.default is not msgspec.NODEFAULT and value != field.default)
    }


def to_plain(value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Any value of a struct's field as JSON would have it."""
    if isinstance(value, (Duration, ByteSize, Money)):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return _written(value)
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: to_plain(one) for name, one in value.items()}
    return value.isoformat() if isinstance(value, datetime) else value


def _re2(pattern: str | None) -> str | None:
    """Kubernetes' regular expressions (RE2) have no ``\\Z``; their ``$`` matches only at the end."""
    return None if pattern is None else pattern.replace(r"\Z", "$")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> Schema:
    """Exclusive bounds are flags beside the bound, as in OpenAPI 3.0."""
    found = _given({"minimum": kind.ge, "maximum": kind.le})
    if kind.gt is not None:
        found |= {"minimum": kind.gt, "exclusiveMinimum": True}
    if kind.lt is not None:
        found |= {"maximum": kind.lt, "exclusiveMaximum": True}
    return found


def _given(values: Mapping[str, object]) -> Schema:
    return {name: value for name, value in values.items() if value is not None}
