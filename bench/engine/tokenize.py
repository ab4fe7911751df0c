# SPDX-License-Identifier: Apache-2.0
"""``POST /tokenize`` as in vLLM: the tokens of a chat or of a prompt."""

from __future__ import annotations

import msgspec
from aiohttp import web

from bench.engine.text import Message, render_chat, tokens_of


class TokenizeRequest(msgspec.Struct):
    """Either messages or a prompt."""

    messages: list[Message] | None = None
    prompt: str | None = None


async def tokenize(http: web.Request) -> web.Response:
    """The handler: tokens as this engine counts them."""

    try:
        asked = msgspec.json.decode(await http.read(), type=TokenizeRequest)
    except msgspec.DecodeError as error:
        return web.json_response({"message": str(error)}, status=400)
    text = (asked.prompt or "").encode() if asked.messages is None else render_chat(asked.messages)
    tokens = tokens_of(text)
    return web.json_response({"count": len(tokens), "max_model_len": 131_072, "tokens": tokens})
