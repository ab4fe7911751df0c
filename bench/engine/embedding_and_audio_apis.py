# SPDX-License-Identifier: Apache-2.0
"""APIs beside those that write text, as in vLLM: embeddings, scores, audio and tokens."""

from __future__ import annotations

import io
import wave
from array import array
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from bench.engine.api_formats import GenerationJob, TokenId, error_response
from bench.engine.fake_tokenizer import Message, render_chat, tokens_of
from bench.engine.request import Request
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

_EMBEDDING_SIZE: Final = 64


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A job as the finished request, or as the answer that it cannot be done.
Compute = Callable[[GenerationJob], Awaitable[Request | web.Response]]
_SAMPLE_RATE: Final = 16_000
_TOKENS_PER_S: Final = 25
_CHARACTERS_PER_S: Final = 15
_BYTES_PER_S: Final = 8_000


class PoolingApi(msgspec.Struct, frozen=True):
    """One API: its body's type, its prompts as a job, and the answer."""

    body: type[Any]
    to_job: Callable[[Any], GenerationJob]
    answer: Callable[[Any, Request], dict[str, Any]]


class EmbeddingsRequest(msgspec.Struct):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str]

    @property
    def texts(self) -> list[str]:
        """All that is to be embedded."""
        return [self.input] if isinstance(self.input, str) else self.input


def _embeddings_job(body: EmbeddingsRequest) -> GenerationJob:
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


def _rerank_job(body: RerankRequest) -> GenerationJob:
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
    def texts_to_compare(self) -> list[str]:
        """What ``text_1`` is compared with."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


def _score_job(body: ScoreRequest) -> GenerationJob:
    return _job(body.model, "".join(body.text_1 + other for other in body.texts_to_compare))


def _score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    data = [
        {"index": index, "object": "score", "score": _likeness(body.text_1, other)}
        for index, other in enumerate(body.texts_to_compare)
    ]
    return {"object": "list", "data": data, "model": body.model, "usage": _usage(request)}


def _likeness(query: str, text: str) -> float:
    """The part of the query's words that the text has, from 0 to 1."""
    words = set(query.split())
    return len(words & set(text.split())) / max(1, len(words))


def _job(model: str, prompt: str) -> GenerationJob:
    return GenerationJob(model=model, prompts=(prompt.encode(),), max_tokens=1, is_streamed=False, wants_usage=False)


def _usage(request: Request) -> dict[str, int]:
    return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}


def _vector(text: str) -> list[float]:
    padded = text.encode().ljust(_EMBEDDING_SIZE, b" ")
    return [byte / 255 for byte in padded[:_EMBEDDING_SIZE]]


POOLING: Final[Mapping[Api, PoolingApi]] = {
    Api.EMBEDDINGS: PoolingApi(EmbeddingsRequest, _embeddings_job, _embeddings),
    Api.RERANK: PoolingApi(RerankRequest, _rerank_job, _rerank),
    Api.SCORE: PoolingApi(ScoreRequest, _score_job, _score),
}


class SpeechRequest(msgspec.Struct):
    """POST /v1/audio/speech."""

    model: str
    input: str


def audio_handlers(compute: Compute) -> dict[Api, Handler]:
    """How each API is answered."""

    async def speech(http: web.Request) -> web.StreamResponse:
        try:
            body = _speech.decode(await http.read())
        except msgspec.DecodeError as error:
            return error_response(str(error))
        tokens = max(1, len(body.input) * _TOKENS_PER_S // _CHARACTERS_PER_S)
        done = await compute(_audio_job(body.model, body.input.encode(), tokens))
        if isinstance(done, web.Response):
            return done
        return web.Response(body=_silence(done.produced), content_type="audio/wav")

    async def transcribe(http: web.Request) -> web.StreamResponse:
        try:
            form = await http.post()
        except (ValueError, HttpProcessingError) as error:
            return error_response(f"the form cannot be read: {error}")
        model, file = form.get("model"), form.get("file")
        if not isinstance(model, str) or not isinstance(file, web.FileField):
            return error_response("'model' and 'file' are required")
        audio = file.file.read()
        seconds = max(1, len(audio) // _BYTES_PER_S)
        done = await compute(_audio_job(model, audio[: 4 * _TOKENS_PER_S * seconds], None))
        if isinstance(done, web.Response):
            return done
        return web.json_response({"text": done.answer.decode(), "usage": {"type": "duration", "seconds": seconds}})

    return {Api.SPEECH: speech, Api.TRANSCRIPTIONS: transcribe}


def _audio_job(model: str, prompt: bytes, max_tokens: int | None) -> GenerationJob:
    return GenerationJob(model=model, prompts=(prompt,), max_tokens=max_tokens, is_streamed=False, wants_usage=False)


def _silence(tokens: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_SAMPLE_RATE)
        out.writeframes(bytes(2 * _SAMPLE_RATE * tokens // _TOKENS_PER_S))
    return file.getvalue()


_speech: Final = msgspec.json.Decoder(SpeechRequest)


class TokenizeRequest(msgspec.Struct):
    """Either messages or a prompt."""

    messages: list[Message] | None = None
    prompt: str | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    """Tokens of four bytes each."""

    tokens: list[TokenId]
    model: str | None = None


def tokenize_handlers(serves: Callable[[str], bool]) -> dict[Api, Handler]:
    """``serves``: whether a model has this name here."""

    def handler(body: type[Any], answer: Callable[[Any], dict[str, Any]]) -> Handler:
        decoder = msgspec.json.Decoder(body)

        async def handle(http: web.Request) -> web.Response:
            try:
                request = decoder.decode(await http.read())
            except msgspec.DecodeError as error:
                return error_response(str(error))
            if request.model and not serves(request.model):
                return error_response(f"The model `{request.model}` does not exist.", status=404, kind="NotFoundError")
            return web.json_response(answer(request))

        return handle

    return {Api.TOKENIZE: handler(TokenizeRequest, _tokenize), Api.DETOKENIZE: handler(DetokenizeRequest, _detokenize)}


def _tokenize(asked: TokenizeRequest) -> dict[str, Any]:
    text = (asked.prompt or "").encode() if asked.messages is None else render_chat(asked.messages)
    tokens = tokens_of(text)
    return {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens}


def _detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": array("I", asked.tokens).tobytes().rstrip(b"\0").decode(errors="replace")}
