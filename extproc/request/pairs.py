# SPDX-License-Identifier: Apache-2.0
"""Bodies that compare one text with many: rerank, in the form of Jina and Cohere, as vLLM and SGLang serve it.

An engine reads the query once with each document, so it counts as often. In the prompt it comes first: requests with
the same query share a prefix, as they do in the cache of a model that reads query and document as one text.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.protocol import Api
from extproc.request.model import (
    Common,
    InferenceRequest,
    Media,
    Prompts,
    large_contents,
    media_in,
    opened,
    request_of,
)


class _Rerank(Common, kw_only=True, gc=False):
    query: msgspec.Raw
    documents: msgspec.Raw


def rerank(body: bytes) -> InferenceRequest:
    """POST /v1/rerank."""
    asked = _rerank.decode(body)
    return _compared(Api.RERANK, asked, body, asked.query, asked.documents)


def _compared(api: Api, fields: Common, body: bytes, query: msgspec.Raw, documents: msgspec.Raw) -> InferenceRequest:
    """The request to compare ``query`` with ``documents``: each a text, an object with parts, or a list of them."""
    count = _count(documents)
    prompts = Prompts(count, repeated_bytes=(count - 1) * memoryview(query).nbytes)
    prompt = b"\n".join((opened(query), opened(documents)))
    one, many = media_in([_listed(query)]), media_in([_listed(documents)])
    media = Media(count * one.tokens + many.tokens, one.size_bytes + many.size_bytes)
    return request_of(
        api, fields, prompt, None, large_contents(documents, body), answers=0, prompts=prompts, media=media
    )


def _listed(value: msgspec.Raw) -> msgspec.Raw:
    """An object as a list of itself."""
    view = memoryview(value)
    return msgspec.Raw(b"[%b]" % bytes(view)) if bytes(view[:1]) == b"{" else value


def _count(value: msgspec.Raw) -> int:
    view = memoryview(value)
    return max(1, len(_list.decode(view))) if bytes(view[:1]) == b"[" else 1


_rerank: Final = msgspec.json.Decoder(_Rerank)
_list: Final = msgspec.json.Decoder(list[msgspec.Raw])
