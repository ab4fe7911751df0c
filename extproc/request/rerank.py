# SPDX-License-Identifier: Apache-2.0
"""Bodies that compare texts: rerank in the form of Jina and Cohere, and score in those of vLLM and SGLang.

An engine reads the query once with each document, so it counts as often. In the prompt it comes first: requests with
the same query share a prefix, as they do in the cache of a model that reads query and document as one text.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.refusals import BadRequest
from extproc.request.inference_request import (
    ABSENT,
    CommonFields,
    InferenceRequest,
    PromptListSize,
    given_values,
    json_without_closing_mark,
    make_request,
    media_in,
    span_of_large_contents,
)
from extproc.wire_names import Api

_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Compared(CommonFields, kw_only=True, gc=False):
    """``instruct``, ``instruction``: written before each query (SGLang, vLLM)."""

    instruct: msgspec.Raw = ABSENT
    instruction: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT


class _Rerank(_Compared, kw_only=True, gc=False):
    query: msgspec.Raw
    documents: msgspec.Raw


class _Score(_Compared, kw_only=True, gc=False):
    """``query`` and ``items``: SGLang's. vLLM has all others."""

    query: msgspec.Raw = ABSENT
    queries: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    data_1: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT
    data_2: msgspec.Raw = ABSENT


def parse_rerank(body: bytes) -> InferenceRequest:
    """POST /v1/rerank."""
    request = _rerank.decode(body)
    return _compared(Api.RERANK, request, body, request.query, request.documents)


def parse_score(body: bytes) -> InferenceRequest:
    """POST /v1/score: one text with each of the others, or as many with as many, pair by pair."""
    request = _score.decode(body)
    first = request.queries or request.text_1 or request.data_1 or request.query
    second = request.documents or request.items or request.text_2 or request.data_2
    if not first or not second:
        missing = "text_2" if first else "text_1"
        raise BadRequest(f"The field '{missing}' is missing; send two texts, or lists of them.", param=missing)
    return _compared(Api.SCORE, request, body, first, second)


def _compared(api: Api, fields: _Compared, body: bytes, query: msgspec.Raw, documents: msgspec.Raw) -> InferenceRequest:
    """The request to compare ``query`` with ``documents``: each a text, an object with parts, or a list of them."""
    count, queries = _count(documents), _count(query)
    instructions = given_values(fields.instruct, fields.instruction, fields.chat_template_kwargs)
    # of several queries, each has a document of its own
    repeated = (count - 1) * memoryview(query).nbytes if queries == 1 else 0
    repeated += (max(count, queries) - 1) * sum(memoryview(one).nbytes for one in instructions)
    prompts = PromptListSize(max(count, queries), repeated_bytes=repeated)
    prompt = b"\n".join((*instructions, json_without_closing_mark(query), json_without_closing_mark(documents)))
    one, many = media_in([_listed(query)]), media_in([_listed(documents)])
    media = msgspec.structs.replace(one, tokens=(count if queries == 1 else 1) * one.tokens).plus(many)
    return make_request(
        api, fields, prompt, None, span_of_large_contents(documents, body), answers=0, prompts=prompts, media=media
    )


def _listed(value: msgspec.Raw) -> msgspec.Raw:
    """An object as a list of itself."""
    view = memoryview(value)
    return msgspec.Raw(b"[%b]" % bytes(view)) if bytes(view[:1]) == b"{" else value


def _count(value: msgspec.Raw) -> int:
    view = memoryview(value)
    return max(1, len(_list.decode(view))) if bytes(view[:1]) == b"[" else 1


_rerank: Final = msgspec.json.Decoder(_Rerank)
_score: Final = msgspec.json.Decoder(_Score)
