# SPDX-License-Identifier: Apache-2.0
"""APIs that write no text, as in vLLM: an answer costs the prefill of its prompts and one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.engine.formats import Job
from bench.engine.request import Request
from extproc.protocol import Api

if TYPE_CHECKING:
    from collections.abc import Mapping


_EMBEDDING_SIZE: Final = 64


class Pooling(msgspec.Struct, frozen=True):
    """One API: its body's type, its prompts as a job, and the answer."""

    body: type[Any]
    to_job: Callable[[Any], Job]
    answer: Callable[[Any, Request], dict[str, Any]]


class EmbeddingsRequest(msgspec.Struct):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str]

    @property
    def texts(self) -> list[str]:
        """All that is to be embedded."""
        return [self.input] if isinstance(self.input, str) else self.input


def _embeddings_job(body: EmbeddingsRequest) -> Job:
    return _job(body.model, "".join(body.texts))


def _embeddings(body: EmbeddingsRequest, request: Request) -> dict[str, Any]:
    """Vectors of the texts' first bytes: equal texts have equal vectors."""
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(text)} for index, text in enumerate(body.texts)
    ]
    return {"object": "list", "data": data, "model": body.model, "usage": _usage(request)}


class RerankRequest(msgspec.Struct):
    """POST /v1/rerank. ``top_n``: how many results are answered; 0 for all."""

    model: str
    query: str
    documents: list[str]
    top_n: int = 0


def _rerank_job(body: RerankRequest) -> Job:
    return _job(body.model, "".join(body.query + document for document in body.documents))


def _rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
    """By the words in common with the query, the best first."""
    scored = sorted([(-_likeness(body.query, text), index) for index, text in enumerate(body.documents)])
    results = [
        {"index": index, "document": {"text": body.documents[index]}, "relevance_score": -score}
        for score, index in scored
    ]
    head = {"id": f"rerank-{request.key:08x}", "model": body.model, "usage": _usage(request)}
    return {**head, "results": results[: body.top_n or None]}


class ScoreRequest(msgspec.Struct):
    """POST /v1/score, of one text with each of others."""

    model: str
    text_1: str
    text_2: str | list[str]

    @property
    def others(self) -> list[str]:
        """What ``text_1`` is compared with."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


def _score_job(body: ScoreRequest) -> Job:
    return _job(body.model, "".join(body.text_1 + other for other in body.others))


def _score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    data = [
        {"index": index, "object": "score", "score": _likeness(body.text_1, other)}
        for index, other in enumerate(body.others)
    ]
    return {"object": "list", "data": data, "model": body.model, "usage": _usage(request)}


def _likeness(query: str, text: str) -> float:
    """The part of the query's words that the text has, from 0 to 1."""
    words = set(query.split())
    return len(words & set(text.split())) / max(1, len(words))


def _job(model: str, prompt: str) -> Job:
    return Job(model=model, prompt=prompt.encode(), max_tokens=1, is_streamed=False, wants_usage=False)


def _usage(request: Request) -> dict[str, int]:
    return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}


def _vector(text: str) -> list[float]:
    padded = text.encode().ljust(_EMBEDDING_SIZE, b" ")
    return [byte / 255 for byte in padded[:_EMBEDDING_SIZE]]


POOLING: Final[Mapping[Api, Pooling]] = {
    Api.EMBEDDINGS: Pooling(EmbeddingsRequest, _embeddings_job, _embeddings),
    Api.RERANK: Pooling(RerankRequest, _rerank_job, _rerank),
    Api.SCORE: Pooling(ScoreRequest, _score_job, _score),
}
