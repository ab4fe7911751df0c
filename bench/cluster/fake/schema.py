# SPDX-License-Identifier: Apache-2.0
"""Structural schemas of custom resources: defaults, pruning, and the plain rules. No CEL."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_ROOT: Final = frozenset({"apiVersion", "kind", "metadata"})


def with_defaults(value: Any, schema: Schema) -> Any:  # noqa: ANN401 - JSON
    """``value`` with the schema's defaults where a field is missing."""
    if isinstance(value, dict):
        result = dict(value)
        for name, below in (schema.get("properties") or {}).items():
            if name not in result and "default" in below:
                result[name] = copy.deepcopy(below["default"])
            if name in result:
                result[name] = with_defaults(result[name], below)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            known = schema.get("properties") or {}
            result = {name: one if name in known else with_defaults(one, more) for name, one in result.items()}
        return result
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items") or {}) for item in value]
    return value


def unknown_fields(value: object, schema: Schema, path: str = "") -> list[str]:
    """The fields that the schema does not have, which a server prunes, or refuses if asked to be strict."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource"):
        return []
    if isinstance(value, list):
        below = schema.get("items") or {}
        return [one for number, item in enumerate(value) for one in unknown_fields(item, below, f"{path}[{number}]")]
    if not isinstance(value, dict) or schema.get("type") != "object":
        return []
    properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
    found: list[str] = []
    for name, item in value.items():
        place = f"{path}.{name}".lstrip(".")
        if not path and name in _ROOT:
            continue
        if name in properties:
            found += unknown_fields(item, properties[name], place)
        elif isinstance(more, Mapping):
            found += unknown_fields(item, more, place)
        elif not more:
            found.append(place)
    return found


def pruned(value: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """``value`` without these fields."""
    result = copy.deepcopy(value)
    for place in unknown:
        *above, last = re.split(r"\.(?![^\[]*\])", place)
        holder: Any = result
        for name in above:
            first, *numbers = re.split(r"[\[\]]+", name.rstrip("]"))
            holder = holder[first]
            for number in numbers:
                holder = holder[int(number)]
        holder.pop(last, None)
    return result


def faults_in(value: object, schema: Schema, path: str = "") -> list[str]:
    """What breaks the schema, one sentence a field, as ``spec.replicas: Invalid value``."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: Invalid value: must be an integer or a string"]
    if value is None:
        return [] if schema.get("nullable") else [f"{path}: Invalid value: null"]
    kind = schema.get("type")
    if kind and not _is_a(value, kind):
        return [f"{path}: Invalid value: must be of type {kind}"]
    found = [f"{path}: {why}" for check in _CHECKS for why in check(value, schema)]
    if isinstance(value, dict):
        properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
        found += [
            f"{path}.{name}".lstrip(".") + ": Required value"
            for name in schema.get("required") or ()
            if name not in value
        ]
        for name, item in value.items():
            below = properties.get(name, more if isinstance(more, Mapping) else None)
            if below is not None and not (not path and name in _ROOT):
                found += faults_in(item, below, f"{path}.{name}".lstrip("."))
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += faults_in(item, schema.get("items") or {}, f"{path}[{number}]")
    return found


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _enum(value: object, schema: Schema) -> list[str]:
    allowed = schema.get("enum")
    return [f"Unsupported value: {value!r}"] if allowed is not None and value not in allowed else []


def _range(value: object, schema: Schema) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    found = []
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and (value < least or (schema.get("exclusiveMinimum") and value == least)):
        found.append(f"Invalid value: {value}: must be at least {least}")
    if most is not None and (value > most or (schema.get("exclusiveMaximum") and value == most)):
        found.append(f"Invalid value: {value}: must be at most {most}")
    return found


def _length(value: object, schema: Schema) -> list[str]:
    if isinstance(value, str):
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        pattern = schema.get("pattern")
        if pattern and not re.search(pattern, value):
            return [f"Invalid value: {value!r}: must match {pattern}"]
    elif isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems")
    elif isinstance(value, dict):
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    else:
        return []
    if len(value) < least:
        return [f"Invalid value: must have at least {least}"]
    return [f"Too many: must have at most {most}"] if most is not None and len(value) > most else []


def _keys(value: object, schema: Schema) -> list[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(value, list):
        return []
    seen = [tuple(item.get(key) for key in keys) for item in value if isinstance(item, dict)]
    return [
        f"Duplicate value: {dict(zip(keys, one, strict=True))}"
        for one in sorted({one for one in seen if seen.count(one) > 1}, key=str)
    ]


_CHECKS: Final[tuple[Callable[[object, Schema], list[str]], ...]] = (_enum, _range, _length, _keys)
