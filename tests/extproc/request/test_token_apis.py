# SPDX-License-Identifier: Apache-2.0
"""Bodies of vLLM's token-in token-out API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from extproc.refusals import BadRequest
from extproc.request.body_parser import parse_body
from extproc.request.token_apis import prompt_tokens_in
from extproc.wire_names import Api

if TYPE_CHECKING:
    from extproc.request.inference_request import InferenceRequest


def generate(**fields: object) -> InferenceRequest:
    sent = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 7, "n": 2}, **fields}
    return parse_body(Api.GENERATE, json.dumps(sent).encode())


def test_a_request_is_read() -> None:
    request = generate(stream=True)
    assert (request.model, request.is_streamed, request.max_output_tokens, request.answers) == ("m", True, 7, 2)
    assert request.prompts.token_ids == 3
    assert request.lacks_stream_usage


def test_longer_prompts_begin_with_shorter_ones_unless_their_pictures_differ() -> None:
    assert generate(token_ids=[1, 2, 3, 4]).prompt.startswith(generate().prompt)
    with_picture = generate(features={"mm_hashes": {"image": ["a"]}})
    assert not generate(features={"mm_hashes": {"image": ["b"]}}, token_ids=[1, 2, 3, 4]).prompt.startswith(
        with_picture.prompt
    )


def test_behind_a_single_pool_no_model_need_be_named() -> None:
    assert generate(model="").model == ""


@pytest.mark.parametrize("token_ids", [[], "hello", 7, None, {}])
def test_a_prompt_is_a_list_of_tokens(token_ids: object) -> None:
    with pytest.raises(BadRequest, match="token_ids"):
        generate(token_ids=token_ids)


def test_what_steers_an_engine_is_found_where_its_connectors_look() -> None:
    hidden = {"extra_args": {"kv_transfer_params": {"remote_host": "10.0.0.1"}, "other": 1}}
    assert generate(sampling_params=hidden).internal_fields == ("kv_transfer_params",)
    assert generate(kv_transfer_params={}).internal_fields == ("kv_transfer_params",)
    assert generate(vllm_xargs={"data_parallel_rank": 1}).internal_fields == ("data_parallel_rank",)
    assert generate(sampling_params={"extra_args": None}).internal_fields == ()


def test_its_tokens_are_known_without_a_tokenizer() -> None:
    assert prompt_tokens_in(b'{"token_ids": [1, 2, 3]}') == [1, 2, 3]
    assert prompt_tokens_in(b'{"token_ids": [1, 2, 3], "features": null}') == [1, 2, 3]
    assert prompt_tokens_in(b'{"token_ids": [1, 2, 3], "features": {"mm_hashes": {}}}') is None, (
        "pictures are not in them"
    )
    assert prompt_tokens_in(b'{"token_ids": ["a"]}') is None
