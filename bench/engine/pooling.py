# SPDX-License-Identifier: Apache-2.0
"""APIs that write no text, as in vLLM: an answer costs the prefill of its prompts and one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.engine.api import Job
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


def _job(model: str, prompt: str) -> Job:
    return Job(model=model, prompt=prompt.encode(), max_tokens=1, is_streamed=False, wants_usage=False)


def _usage(request: Request) -> dict[str, int]:
    return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}


def _vector(text: str) -> list[float]:
    padded = text.encode().ljust(_EMBEDDING_SIZE, b" ")
    return [byte / 255 for byte in padded[:_EMBEDDING_SIZE]]


POOLING: Final[Mapping[Api, Pooling]] = {Api.EMBEDDINGS: Pooling(EmbeddingsRequest, _embeddings_job, _embeddings)}
