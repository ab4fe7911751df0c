# SPDX-License-Identifier: Apache-2.0
"""``POST /tokenize`` and ``/detokenize`` as in vLLM: the tokens of a chat or of a prompt, and the text of tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from bench.engine.formats import TokenId, refused
from bench.engine.text import Message, render_chat, tokens_of
from extproc.protocol import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TokenizeRequest(msgspec.Struct):
    """Either messages or a prompt."""

    messages: list[Message] | None = None
    prompt: str | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    """Tokens of four bytes each."""

    tokens: list[TokenId]
    model: str | None = None


def handlers(serves: Callable[[str], bool]) -> dict[Api, Handler]:
    """``serves``: whether a model has this name here."""

    def handler(body: type[Any], answer: Callable[[Any], dict[str, Any]]) -> Handler:
        decoder = msgspec.json.Decoder(body)

        async def handle(http: web.Request) -> web.Response:
            try:
                asked = decoder.decode(await http.read())
            except msgspec.DecodeError as error:
                return refused(str(error))
            if asked.model and not serves(asked.model):
                return refused(f"The model `{asked.model}` does not exist.", status=404, kind="NotFoundError")
            return web.json_response(answer(asked))

        return handle

    return {Api.TOKENIZE: handler(TokenizeRequest, _tokenize), Api.DETOKENIZE: handler(DetokenizeRequest, _detokenize)}


def _tokenize(asked: TokenizeRequest) -> dict[str, Any]:
    text = (asked.prompt or "").encode() if asked.messages is None else render_chat(asked.messages)
    tokens = tokens_of(text)
    return {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens}


def _detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": array("I", asked.tokens).tobytes().rstrip(b"\0").decode(errors="replace")}
