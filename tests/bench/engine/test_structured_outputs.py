# SPDX-License-Identifier: Apache-2.0
"""Values that fit JSON schemas, as pydantic's models judge them, and schemas that no value fits."""

from __future__ import annotations

import datetime as dt  # noqa: TC003 - pydantic reads it
import json
import random
import uuid  # noqa: TC003 - pydantic reads it
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from bench.engine.structured_outputs import (
    OutputConstraint,
    StructureInvalid,
    forced_tool_call,
    generate_value,
    read_output_constraint,
    write_answer,
)


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    town: str
    zip: Annotated[str, Field(min_length=5, max_length=5)]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=7, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Tree(BaseModel):
    name: str
    children: list[Tree]
    parent: Tree | None = None


class Order(BaseModel):
    id: uuid.UUID
    at: dt.datetime
    day: dt.date
    count: Annotated[int, Field(gt=2, multiple_of=5)]
    share: Annotated[float, Field(gt=0.2, lt=0.3)]
    below: Annotated[float, Field(lt=-3)]
    pet: Cat | Dog
    places: Annotated[list[Place], Field(min_length=2, max_length=3)]
    words: Annotated[set[str], Field(min_length=3)]
    pair: tuple[int, str]
    extra: dict[str, int]
    note: str | None


@pytest.mark.parametrize("model", [Place, Order, Tree])
@pytest.mark.parametrize("seed", range(5))
def test_values_fit_the_schemas_of_models(model: type[BaseModel], seed: int) -> None:
    value = generate_value(model.model_json_schema(), random.Random(seed))
    model.model_validate_json(json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": 3}, 3),
        ({"enum": ["only"]}, "only"),
        ({"type": "null"}, None),
        ({"type": ["null", "integer"], "minimum": 4, "maximum": 4}, 4),
        ({"type": "array", "maxItems": 0}, []),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [1, 2]),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]}, {"a": 1, "b": 2}),
        ({"anyOf": [{"const": 1}], "description": "one"}, 1),
        ({"type": "string", "maxLength": 0}, ""),
        ({"properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"const": "x"}}}, {"a": "x"}),
        ({"type": "object", "additionalProperties": {"const": 0}, "minProperties": 2}, {"key0": 0, "key1": 0}),
    ],
)
def test_values_worked_out_by_hand(schema: Any, value: Any) -> None:  # noqa: ANN401 - JSON
    assert generate_value(schema, random.Random(0)) == value


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "^a+$"}, "writes no text by a pattern"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no value fits"),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, "no value fits"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value fits"),
        ({"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}, "too large"),
        ({"type": "array", "minItems": 10**9}, "too large"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "no value fits"),
        ({"$ref": "#"}, "no end"),
        ({"$ref": "#/$defs/none"}, "nothing at '#/$defs/none'"),
        ({"$ref": "https://example.com/schema"}, "nothing at"),
        ({"type": "colour"}, "no type 'colour'"),
        ({"enum": []}, "fits no value"),
        ({"type": "string", "minLength": "x"}, "is not valid"),
        (False, "no schema"),
    ],
)
def test_a_schema_that_no_value_of_ours_fits_is_refused_with_the_reason(schema: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(StructureInvalid) as refused:
        generate_value(schema, random.Random(0))
    assert said in str(refused.value)


def test_an_answer_has_four_bytes_a_token_and_is_cut_at_its_limit() -> None:
    structure = OutputConstraint({"const": "abcdefgh"})
    whole = write_answer(structure, 100, random.Random(0))
    assert (whole.text, whole.reason) == (b'"abcdefgh"  ', "stop")
    cut = write_answer(structure, 2, random.Random(0))
    assert (cut.text, cut.reason) == (b'"abcdefg', "length")


@pytest.mark.parametrize("tokens", [1, 3, 4, 50])
def test_an_object_without_a_schema_is_as_long_as_it_may_be(tokens: int) -> None:
    written = write_answer(OutputConstraint(), tokens, random.Random(0))
    assert isinstance(json.loads(written.text), dict)
    assert written.reason == "stop"
    assert len(written.text) // 4 in {tokens, 1}


def test_what_is_asked_for_is_read_as_the_apis_write_it() -> None:
    schema = {"type": "object"}
    assert read_output_constraint(None) is read_output_constraint({"type": "text"}) is None
    assert read_output_constraint({"type": "json_object"}) == OutputConstraint()
    assert read_output_constraint(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ) == OutputConstraint(schema)
    assert read_output_constraint({"type": "json_schema", "name": "a", "schema": schema}) == OutputConstraint(schema)
    for wrong in ({"type": "json_schema"}, {"type": "yaml"}):
        with pytest.raises(StructureInvalid):
            read_output_constraint(wrong)
    assert forced_tool_call({"a": None, "b": schema}, None) == OutputConstraint({"type": "object"}, "a", "tool_calls")
    assert forced_tool_call({"a": None, "b": schema}, "b", reason="stop") == OutputConstraint(schema, "b", "stop")
    with pytest.raises(StructureInvalid, match="no tool 'c'"):
        forced_tool_call({"a": None}, "c")
    with pytest.raises(StructureInvalid, match="needs tools"):
        forced_tool_call({}, None)
