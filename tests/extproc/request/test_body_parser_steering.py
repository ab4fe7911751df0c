# SPDX-License-Identifier: Apache-2.0
"""Fields by which clients could steer engines are found in every API's body, read or not."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from extproc.refusals import BadRequest
from extproc.request.body_parser import MOST_OBJECTS, parse_body, steering_fields_of_unread_body
from extproc.request.inference_request import STEERING_FIELDS
from extproc.wire_names import Api

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    Api.CHAT: {"messages": HELLO},
    Api.COMPLETIONS: {"prompt": "hello"},
    Api.EMBEDDINGS: {"input": "hello"},
    Api.RESPONSES: {"input": "hello"},
    Api.MESSAGES: {"messages": HELLO, "max_tokens": 7},
    Api.COUNT_TOKENS: {"messages": HELLO},
    Api.GENERATE: {"token_ids": [1], "sampling_params": {}},
}


@pytest.mark.parametrize("name", STEERING_FIELDS)
@pytest.mark.parametrize("api", BODIES)
def test_they_are_found_beside_the_others_and_in_what_vllm_passes_on(api: Api, name: str) -> None:
    plain = {"model": "m", **BODIES[api]}
    assert parse_body(api, json.dumps(plain | {"vllm_xargs": {"ngram_size": 30}}).encode()).internal_fields == ()
    for steering in ({name: 1}, {"vllm_xargs": {"ngram_size": 30, name: "a"}}):
        body = json.dumps(plain | steering).encode()
        assert parse_body(api, body).internal_fields == (name,)
        assert steering_fields_of_unread_body(body) == (name,)


@pytest.mark.parametrize("arguments", [None, [], "kv_transfer_params", 7])
def test_what_is_no_object_is_for_the_engine_to_refuse(arguments: object) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "vllm_xargs": arguments}).encode()
    assert parse_body(Api.CHAT, body).internal_fields == ()


def test_a_body_beyond_our_bounds_hides_none() -> None:
    many = json.dumps({"pad": [{}] * (MOST_OBJECTS + 1), "model": "m", "messages": HELLO, "kv_transfer_params": {}})
    with pytest.raises(BadRequest):
        parse_body(Api.CHAT, many.encode())
    assert steering_fields_of_unread_body(many.encode()) == ("kv_transfer_params",)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"])
@pytest.mark.parametrize(
    "text",
    [
        ' {"top_p": NaN, "bootstrap_host": "10.9.9.9"}',
        ' {"top_p": NaN, "boots\\u0074rap_host": "10.9.9.9"}',
        '{"text": "a", "bootstrap_host": ["10.9.9.9"]}',
        '{"sampling_params": {"extra_args": {"bootstrap_host": 1}}}',
        '{"sampling_params": {"top_p": NaN, "extra_args": {"bootstrap_host": 1}}}',
    ],
)
def test_what_only_engines_read_hides_none(text: str, encoding: str) -> None:
    assert steering_fields_of_unread_body(text.encode(encoding)) == ("bootstrap_host",)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\x01",
        b"--boundary\r\nContent-Type: audio/wav\r\n\r\n{kv_transfer_params}",
        b"{",
        b'{"a": 1}',
        b'["kv_transfer_params"]',
        b'{"text": "\\"kv_transfer_params\\" is refused", "top_p": NaN}',
        b'{"text": "kv_transfer_params", "sampling_params": {}}',
    ],
)
def test_other_bodies_have_none(body: bytes) -> None:
    assert steering_fields_of_unread_body(body) == ()


def test_millions_of_members_take_no_memory() -> None:
    many = ",".join(f'"{number}":0' for number in range(300_000))
    body = f'{{{many}, "vllm_xargs": {{{many}, "lora_path": "/a"}}}}'.encode()
    tracemalloc.start()
    try:
        assert steering_fields_of_unread_body(body) == ("lora_path",)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()
