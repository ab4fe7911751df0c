# SPDX-License-Identifier: Apache-2.0
"""Requests joined, answered by an engine double and split are answered as each alone."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.agents.runtime.batching.tensor_merge import (
    ResponseUnsplittable,
    is_joinable_path,
    merge_requests,
    parse_batch_part,
    split_response,
)

V1 = "/v1/models/m:predict"
V2 = "/v2/models/m/infer"
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
VALUES = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=4), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=6,
)
BODIES = st.builds(
    lambda instances, more: {"instances": instances, **more},
    st.lists(VALUES, max_size=4),
    st.dictionaries(st.sampled_from(["signature_name", "parameters"]), VALUES, max_size=1),
)


def leaves(value: object) -> list[Any]:
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


def answer_v1(body: bytes) -> bytes:
    """An engine whose answer shows each instance and the types that one array of all has."""
    asked = json.loads(body)
    has_float = any(isinstance(one, float) for one in leaves(asked["instances"]))
    return json.dumps(
        {"predictions": [[one, has_float, asked.get("parameters")] for one in asked["instances"]]}
    ).encode()


def rows_of(tensor: dict[str, Any]) -> list[Any]:
    each = prod(tensor["shape"][1:])
    values = leaves(tensor["data"])
    assert len(values) == prod(tensor["shape"])
    return [values[begin : begin + each] for begin in range(0, len(values), each)]


def answer_v2(body: bytes) -> bytes:
    """An engine with two outputs: its inputs' rows, and their lengths in lists of one."""
    asked = json.loads(body)
    inputs = [rows_of(one) for one in asked["inputs"]]
    rows = [leaves([one[number] for one in inputs]) for number in range(asked["inputs"][0]["shape"][0])]
    outputs = [
        {"name": "flat", "datatype": "X", "shape": [len(rows), len(rows[0])], "data": leaves(rows)},
        {"name": "nested", "datatype": "INT64", "shape": [len(rows), 1], "data": [[len(one)] for one in rows]},
    ]
    found = {"model_name": "m", "parameters": asked.get("parameters", {}), "outputs": outputs}
    return json.dumps({**found, **({"id": asked["id"]} if "id" in asked else {})}).encode()


@given(st.lists(BODIES, min_size=1, max_size=6))
def test_v1_answers_are_those_of_each_alone(bodies: list[dict[str, Any]]) -> None:
    encoded = [json.dumps(one).encode() for one in bodies]
    parts = [parse_batch_part(V1, one) for one in encoded]
    for form in {one.form for one in parts if one is not None}:
        mine = [(body, one) for body, one in zip(encoded, parts, strict=True) if one is not None and one.form == form]
        answers = split_response(answer_v1(merge_requests([one for _, one in mine])), [one for _, one in mine])
        assert [json.loads(one) for one in answers] == [json.loads(answer_v1(body)) for body, _ in mine]


@st.composite
def v2_bodies(draw: st.DrawFn) -> dict[str, Any]:
    rows, is_nested, inputs = draw(st.integers(1, 3)), draw(st.booleans()), []
    for name in draw(st.sampled_from([["x"], ["x", "y"]])):
        width = draw(st.integers(1, 2))
        numbers = [draw(NUMBERS) for _ in range(rows * width)]
        data = [numbers[begin : begin + width] for begin in range(0, len(numbers), width)] if is_nested else numbers
        inputs.append({"name": name, "datatype": "FP64", "shape": [rows, width], "data": data})
    more: dict[str, Any] = draw(st.sampled_from([{}, {"id": "7"}, {"parameters": {"a": 1}}]))
    return {**more, "inputs": inputs}


@given(st.lists(v2_bodies(), min_size=1, max_size=6))
def test_v2_answers_are_those_of_each_alone(bodies: list[dict[str, Any]]) -> None:
    encoded = [json.dumps(one).encode() for one in bodies]
    parts = [parse_batch_part(V2, one) for one in encoded]
    assert None not in parts
    for form in {one.form for one in parts if one is not None}:
        mine = [(body, one) for body, one in zip(encoded, parts, strict=True) if one is not None and one.form == form]
        answers = split_response(answer_v2(merge_requests([one for _, one in mine])), [one for _, one in mine])
        assert [json.loads(one) for one in answers] == [json.loads(answer_v2(body)) for body, _ in mine]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), VALUES)
def test_a_tensor_is_joined_only_if_it_has_as_many_values_as_its_shape(shape: list[int], data: object) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    part = parse_batch_part(V2, json.dumps({"inputs": [tensor]}).encode())
    if part is not None:
        assert part.rows == shape[0]
        rows_of(tensor)


@given(st.binary(max_size=60))
def test_no_body_raises(body: bytes) -> None:
    assert parse_batch_part(V1, b'{"instances":' + body) is None or body
    assert parse_batch_part(V2, b'{"inputs":' + body) is None or body


@pytest.mark.parametrize("path", [V1, V2, "/v1/models/a%2Fb/versions/3:predict", "/v2/models/m/versions/2/infer"])
def test_paths_of_predictions_may_be_joined(path: str) -> None:
    assert is_joinable_path(path)


@pytest.mark.parametrize(
    "path", ["/v1/models/m:explain", "/v1/models/m", "/v2/models/m/generate", "/v2/models/m/infer?a=1", "/x" + V2]
)
def test_other_paths_may_not(path: str) -> None:
    assert not is_joinable_path(path)


def forms(*bodies: str, path: str = V1) -> set[object]:
    parts = [parse_batch_part(path, one.encode()) for one in bodies]
    assert None not in parts
    return {one.form for one in parts if one is not None}


def test_instances_of_other_shapes_and_types_are_not_joined() -> None:
    different = ("[1,2]", "[1,2,3]", "[1.0,2]", '["a","b"]', '{"x":1}', '{"x":[1]}', "1", "null", "[1,[2]]")
    assert len(forms(*(f'{{"instances":[{one}]}}' for one in different))) == len(different)


def test_integers_beside_floats_are_of_one_kind_within_a_request() -> None:
    assert len(forms('{"instances":[[1,2.5]]}', '{"instances":[[1,2],[0.5,1]]}')) == 1


def test_other_members_keep_requests_apart() -> None:
    assert len(forms('{"instances":[1]}', '{"instances":[1],"a":1}', '{"a": 1, "instances":[2]}')) == 2


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"instances":[]}',
        '{"instances":[[1],[1,2]]}',
        '{"instances":[9223372036854775808]}',
        '{"instances":{"a":1}}',
        '{"inputs":[1]}',
        '{"instances":[1]',
        '{"instances":[NaN]}',
        '{"instances":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_v1_bodies_that_are_uncertain_are_not_joined(body: str) -> None:
    assert parse_batch_part(V1, body.encode()) is None


def tensor(shape: object, data: object, **more: object) -> dict[str, object]:
    return {"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [tensor([1, 2], [1])],
        [tensor([1, 2], [1, 2, 3])],
        [tensor([2, 2], [[1, 2, 3], [4]])],
        [tensor([2, 1], [1, [2]])],
        [tensor([0, 2], [])],
        [tensor([-1, 2], [1, 2])],
        [tensor([], 1)],
        [tensor([1, 1], [{"a": 1}])],
        [tensor([1], [1]), tensor([2], [1, 2])],
        [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}],
    ],
)
def test_v2_tensors_that_do_not_have_their_shape_are_not_joined(inputs: list[object]) -> None:
    assert parse_batch_part(V2, json.dumps({"inputs": inputs}).encode()) is None


def test_v2_requests_of_other_names_types_shapes_or_parameters_are_not_joined() -> None:
    different: list[dict[str, object]] = [
        {"inputs": [tensor([1, 2], [1, 2])]},
        {"inputs": [tensor([1, 2], [[1, 2]])]},
        {"inputs": [tensor([2], [1, 2])]},
        {"inputs": [tensor([1, 2], [1, 2], name="y")]},
        {"inputs": [tensor([1, 2], [1, 2], datatype="FP64")]},
        {"inputs": [tensor([1, 2], [1, 2], parameters={"a": 1})]},
        {"inputs": [tensor([1, 2], [1, 2])], "parameters": {"a": 1}},
        {"inputs": [tensor([1, 2], [1, 2])], "outputs": [{"name": "y"}]},
    ]
    assert len(forms(*map(json.dumps, different), path=V2)) == len(different)


def test_numbers_and_texts_stay_as_they_are_written() -> None:
    parts = [parse_batch_part(V1, body) for body in (b'{"instances":[1.50e1]}', b'{"instances": [ 0.10 , 2.0 ]}')]
    assert merge_requests([one for one in parts if one]) == b'{"instances":[1.50e1, 0.10 , 2.0 ]}'
    answers = split_response(b'{"predictions": [1.0, "\\u00e4", 3e0]}', [one for one in parts if one])
    assert answers == [b'{"predictions":[1.0]}', b'{"predictions":["\\u00e4",3e0]}']


def test_each_answer_has_its_own_id() -> None:
    ids: list[dict[str, object]] = [{"id": "a"}, {}, {"id": "b"}, {}]
    parts = [parse_batch_part(V2, json.dumps({"inputs": [tensor([1], [1])], **one}).encode()) for one in ids]
    whole = json.dumps({"id": "engine", "outputs": [tensor([4], [1, 2, 3, 4])]}).encode()
    found = [json.loads(one)["id"] for one in split_response(whole, [one for one in parts if one])]
    assert found == ["a", "engine-1", "b", "engine-3"]


TWO = [one for body in (b'{"instances":[1]}', b'{"instances":[2]}') if (one := parse_batch_part(V1, body))]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ('{"predictions":[1]}', "1 predictions for 2 instances"),
        ('{"predictions":[1,2,3]}', "3 predictions for 2 instances"),
        ('{"predictions":{"a":[1,2]}}', "not the JSON"),
        ('{"predictions":[1,2],"scores":[3,4]}', "lists in 'scores'"),
        ("nothing", "not the JSON"),
        ("{}", "not the JSON"),
        ("[" * 100_000, "not the JSON"),
    ],
)
def test_v1_answers_that_cannot_be_shared_out_say_why(answer: str, why: str) -> None:
    with pytest.raises(ResponseUnsplittable, match=why):
        split_response(answer.encode(), TWO)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ([tensor([1], [1])], r"the shape \[1\] for 2 rows"),
        ([tensor([2, 2], [1, 2, 3])], "3 values for the shape"),
        ([{"name": "x", "datatype": "FP32", "shape": [2]}], "not the JSON"),
        ([tensor([2], [1, 2], parameters={"a": [1, 2]})], "lists in 'parameters'"),
        ([tensor([], [1])], "for 2 rows"),
    ],
)
def test_v2_answers_that_cannot_be_shared_out_say_why(outputs: list[object], why: str) -> None:
    parts = [parse_batch_part(V2, json.dumps({"inputs": [tensor([1], [number])]}).encode()) for number in range(2)]
    with pytest.raises(ResponseUnsplittable, match=why):
        split_response(json.dumps({"outputs": outputs}).encode(), [one for one in parts if one])
