# SPDX-License-Identifier: Apache-2.0
"""Answers whose form a request prescribes: JSON, JSON of a schema, and calls of a function that is forced.

A real engine masks the tokens that do not fit a grammar. This one writes a value that fits the schema and lets it cost
as many tokens as it has. Like theirs, it is cut where the limit of tokens is reached.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from bench.engine.fake_tokenizer import BYTES_PER_TOKEN, answer_text

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

FinishReason = Literal["length", "stop", "tool_calls"]
_ANY_OBJECT: Final = '{"text": "%s"}'
# Tokens of it without its text.
_FRAME_TOKENS: Final = 3
# Below it, what a schema does not require is left out: schemas may refer to themselves.
_FULL_DEPTH: Final = 4
_DEEPEST: Final = 32
_MOST_VALUES: Final = 10_000
_MOST_CHARACTERS: Final = 100_000
_FORMATS: Final = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "email": "someone@example.com",
    "hostname": "host.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "12345678-1234-4234-8234-123456789abc",
}


class OutputConstraint(msgspec.Struct, frozen=True):
    """What an answer must be. ``schema``: of its JSON; None: any object. ``function``: that it calls with this JSON;
    empty: none. ``reason``: why it ends, unless it is cut.
    """

    schema: Any = None
    function: str = ""
    reason: FinishReason = "stop"


class GeneratedAnswer(msgspec.Struct, frozen=True):
    """``text``: four bytes a token."""

    text: bytes
    reason: FinishReason


def write_answer(structure: OutputConstraint | None, tokens: int, rng: random.Random) -> GeneratedAnswer:
    """An answer of at most ``tokens`` tokens; without a ``structure`` it has so many. Raises StructureInvalid."""
    if structure is None:
        return GeneratedAnswer(answer_text(rng, tokens), "length")
    if structure.schema is None:
        words = answer_text(rng, max(0, tokens - _FRAME_TOKENS)).decode().strip()
        text = _ANY_OBJECT % words if words else "{}"
    else:
        text = json.dumps(generate_value(structure.schema, rng))
    padded = text.encode() + b" " * (-len(text) % BYTES_PER_TOKEN)
    is_cut = len(padded) > tokens * BYTES_PER_TOKEN
    return GeneratedAnswer(padded[: tokens * BYTES_PER_TOKEN], "length" if is_cut else structure.reason)


def read_output_constraint(asked: Mapping[str, Any] | None) -> OutputConstraint | None:
    """Of ``response_format`` of chats and completions, ``text.format`` of responses, ``output_config.format`` of
    messages; None: any text. Raises StructureInvalid.
    """
    kind = (asked or {}).get("type", "text")
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        return OutputConstraint()
    if kind != "json_schema":
        raise StructureInvalid(f"there is no format '{kind}'; write text, json_object or json_schema")
    holder = asked.get("json_schema", asked)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if schema is None:
        raise StructureInvalid("json_schema needs a schema")
    return OutputConstraint(schema)


def forced_tool_call(
    functions: Mapping[str, Any], name: str | None, *, reason: FinishReason = "tool_calls"
) -> OutputConstraint:
    """``functions``: schemas of their arguments by name. ``name``: of the one to call; None: the first one. Raises
    StructureInvalid.
    """
    if not functions:
        raise StructureInvalid("tool_choice needs tools")
    chosen = next(iter(functions)) if name is None else name
    if chosen not in functions:
        raise StructureInvalid(f"tool_choice: there is no tool '{chosen}'")
    return OutputConstraint(functions[chosen] or {"type": "object"}, chosen, reason)


class StructureInvalid(msgspec.ValidationError):
    """No answer can have this form here; the message has the reason."""


def generate_value(schema: Any, rng: random.Random) -> Any:  # noqa: ANN401 - JSON
    """A value that fits the JSON schema; raises StructureInvalid if none is found."""
    try:
        return _Writer(schema, rng).value(schema, 0)
    except (TypeError, AttributeError, KeyError) as error:
        raise StructureInvalid(f"the schema is not valid: {error}") from None


class _Writer:
    def __init__(self, root: Any, rng: random.Random) -> None:  # noqa: ANN401 - JSON
        self._root = root
        self._rng = rng
        self._values = 0

    def value(self, schema: Any, depth: int) -> Any:  # noqa: ANN401 - JSON
        self._values += 1
        if self._values > _MOST_VALUES or depth > _DEEPEST:
            raise StructureInvalid("the schema has no end, or values too large for this engine")
        if schema is True:
            schema = {"type": "string"}
        if not isinstance(schema, dict):
            raise StructureInvalid(f"'{schema}' is no schema that a value fits")
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"])
        if not {"anyOf", "oneOf", "allOf"} & schema.keys():
            return self._of_type(_type_of(schema), schema, depth)
        return self.value(self._combined(schema, depth), depth + 1)

    def _combined(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """``schema`` without its choices: one of each is made."""
        whole = {name: one for name, one in schema.items() if name not in {"anyOf", "oneOf", "allOf"}}
        chosen = [self._branch(schema[name], depth) for name in ("anyOf", "oneOf") if name in schema]
        for part in [*chosen, *schema.get("allOf", ())]:
            whole = _merged(whole, part)
            if "$ref" in whole:
                whole = _merged(whole, self._referred(whole.pop("$ref")))
        return whole

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> Any:  # noqa: ANN401 - JSON
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, is_whole=kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        raise StructureInvalid(f"there is no type '{kind}'")

    def _referred(self, reference: str) -> Any:  # noqa: ANN401 - JSON
        found = self._root
        head, *names = reference.split("/")
        try:
            for name in names:
                found = found[name.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            found = None
        if head != "#" or found is None:
            raise StructureInvalid(f"there is nothing at '{reference}' in the schema")
        return found

    def _one_of(self, values: list[Any]) -> Any:  # noqa: ANN401 - JSON
        if not values:
            raise StructureInvalid("an empty list of choices fits no value")
        return self._rng.choice(values)

    def _branch(self, branches: list[Any], depth: int) -> Any:  # noqa: ANN401 - JSON
        """Far down, one that ends."""
        leaves = [one for one in branches if isinstance(one, dict) and not {"$ref", "properties", "items"} & one.keys()]
        return self._one_of(leaves if depth > _FULL_DEPTH and leaves else branches[:1])

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        names = [name for name in properties if depth <= _FULL_DEPTH or name in required]
        others = schema.get("additionalProperties", True)
        missing = max(0, schema.get("minProperties", 0) - len({*names, *required}))
        more = [f"key{number}" for number in range(min(missing, _MOST_VALUES))]
        return {
            name: self.value(properties.get(name, others), depth + 1)
            for name in dict.fromkeys([*names, *required, *more])
        }

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        wanted = max(least, len(first), 1 if depth <= _FULL_DEPTH and items is not False else 0)
        found: list[Any] = []
        while len(found) < min(wanted, most):
            position = len(found)
            one = self.value(first[position] if position < len(first) else items, depth + 1)
            if not schema.get("uniqueItems") or one not in found:
                found.append(one)
        if len(found) < least:
            raise _nothing_fits(schema)
        return found

    def _string(self, schema: dict[str, Any]) -> str:
        if "pattern" in schema:
            raise StructureInvalid("this engine writes no text by a pattern; leave 'pattern' out of the schema")
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        least, most = schema.get("minLength", 0), schema.get("maxLength", _MOST_CHARACTERS)
        if not least <= most or least > _MOST_CHARACTERS:
            raise _nothing_fits(schema)
        text = answer_text(self._rng, max(2, -(-least // BYTES_PER_TOKEN) + 1)).decode().strip()
        return text[: min(most, max(least, 2 * BYTES_PER_TOKEN - 1))]

    def _number(self, schema: dict[str, Any], *, is_whole: bool) -> float:
        step = schema.get("multipleOf", 1 if is_whole else 0.5)
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        over, under = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        first = max(low, over) if max(low, over) > -math.inf else min(0, high, under - step)
        for number in range(math.ceil(first / step), math.ceil(first / step) + 3):
            if low <= number * step <= high and over < number * step < under:
                found = number * step
                return int(found) if is_whole else found
        middle = (max(low, over) + min(high, under)) / 2
        if is_whole or "multipleOf" in schema or not low <= middle <= high or not over < middle < under:
            raise _nothing_fits(schema)
        return float(middle)


def _nothing_fits(schema: dict[str, Any]) -> StructureInvalid:
    return StructureInvalid(f"no value fits {json.dumps(schema)[:200]}")


def _type_of(schema: dict[str, Any]) -> str:
    """Of several types the first that is not null."""
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return str(next((one for one in kinds if one != "null"), "null"))
    if kinds is not None:
        return str(kinds)
    if {"properties", "required", "additionalProperties"} & schema.keys():
        return "object"
    return "array" if {"items", "prefixItems"} & schema.keys() else "string"


def _merged(one: dict[str, Any], other: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if not isinstance(other, dict):
        raise StructureInvalid(f"'{other}' is no schema that a value fits")
    properties = {**one.get("properties", {}), **other.get("properties", {})}
    required = [*one.get("required", []), *other.get("required", [])]
    whole = {**one, **other}
    return {
        **whole,
        **({"properties": properties} if properties else {}),
        **({"required": required} if required else {}),
    }
