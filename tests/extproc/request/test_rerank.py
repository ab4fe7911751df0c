# SPDX-License-Identifier: Apache-2.0
"""What bodies that compare texts ask for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from extproc.refusals import BadRequest
from extproc.request.body_parser import parse_body
from extproc.wire_names import Api

if TYPE_CHECKING:
    from extproc.request.inference_request import InferenceRequest

FORMS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("query", "items"))
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def rerank(query: object, documents: object) -> InferenceRequest:
    return parse_body(Api.RERANK, json.dumps({"model": "m", "query": query, "documents": documents}).encode())


def score(**fields: object) -> InferenceRequest:
    return parse_body(Api.SCORE, json.dumps({"model": "m", **fields}).encode())


def test_a_query_counts_once_for_each_document() -> None:
    one, three = rerank("which?", ["a" * 50]), rerank("which?", ["a" * 50, "b" * 50, "c" * 50])
    assert (one.prompts.count, three.prompts.count) == (1, 3)
    assert one.text_bytes == len(one.prompt)
    # a name in quotes has eight bytes
    assert three.text_bytes == len(three.prompt) + 2 * 8
    assert one.tokens_scale_with_bytes
    assert not three.tokens_scale_with_bytes, "its bytes say nothing of what a byte costs"


def test_nothing_is_written() -> None:
    asked = rerank("which?", ["a"])
    assert (asked.answers, asked.max_output_tokens) == (0, None)


def test_the_same_query_is_the_same_prefix() -> None:
    first, second = rerank("which?", ["a", "b"]), rerank("which?", ["c"])
    assert first.prompt.startswith(b'"which?\n["')
    assert second.prompt.startswith(b'"which?\n["')


def test_documents_may_be_one_text_or_have_pictures() -> None:
    assert rerank("which?", "a").prompts.count == 1
    assert rerank("which?", []).prompts.count == 1
    shown = rerank("which?", [{"content": [PICTURE]}, {"content": [PICTURE, PICTURE]}])
    assert shown.media.tokens == 3000
    for query in ([PICTURE], {"content": [PICTURE]}):
        assert rerank(query, ["a", "b"]).media.tokens == 2000


@pytest.mark.parametrize(("first", "second"), FORMS)
def test_one_text_is_scored_with_each_of_others(first: str, second: str) -> None:
    asked = score(**{first: "which?", second: ["a", "b", "c"]})
    assert (asked.prompts.count, asked.answers) == (3, 0)
    assert asked.prompts.repeated_bytes == 2 * 8
    assert asked.prompt == b'"which?\n["a", "b", "c"'


def test_texts_are_scored_pair_by_pair() -> None:
    asked = score(text_1=["a", "b"], text_2=["c", "d"])
    assert (asked.prompts.count, asked.prompts.repeated_bytes) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "param"), [({}, "text_1"), ({"queries": "a"}, "text_2"), ({"documents": "a"}, "text_1")]
)
def test_a_score_needs_two_texts(fields: dict[str, str], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        score(**fields)
    assert caught.value.param == param
