# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts with the model's tokenizer files, or with the engines' /tokenize."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp
import msgspec
import numpy as np

from extproc.feeds.chat_template import ChatTemplate, TemplateInvalid
from extproc.request.model import Api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.types import Arrival
    from extproc.metrics.registry import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

# Longer texts are encoded in a thread, so as not to delay other requests (the tokenizer releases the GIL).
_THREAD_BYTES: Final = 16 * 1024
_KEPT_FIELDS: Final = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizerMissing(Exception):
    """The tokenizer's files are missing or unusable."""


class Tokenizer(Protocol):
    """Turns a request into the tokens that engines will see."""

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, None if unsupported. May raise OSError, aiohttp.ClientError or ValueError."""
        ...


class Tokenizers:
    """The tokenizers of all pools. A failure never stops a request: the approximate index decides instead."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._made: dict[str, tuple[str | None, Tokenizer]] = {}
        self._http: aiohttp.ClientSession | None = None
        self._failing: set[str] = set()

    async def tokens_of(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, or None if that fails or takes too long."""
        pool = arrival.pool
        if arrival.request.api not in {Api.CHAT, Api.COMPLETIONS}:
            self._metrics.tokenized(pool.name, "unsupported")
            return None
        try:
            async with asyncio.timeout(pool.spec.tokenizer.timeout):
                found = await self._tokenizer(pool).tokens(arrival)
        except TimeoutError:
            found, result = None, "timeout"
        except (aiohttp.ClientError, OSError, ValueError, TokenizerMissing, TemplateInvalid) as error:
            found, result = None, "failed"
            if pool.name not in self._failing:
                self._failing.add(pool.name)
                log.warning("cannot tokenize prompts for %s, using the approximate index: %s", pool.name, error)
        else:
            result = "unsupported" if found is None else "tokenized"
            self._failing.discard(pool.name)
        self._metrics.tokenized(pool.name, result)
        return found

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    def _tokenizer(self, pool: Pool) -> Tokenizer:
        path = pool.spec.tokenizer.path
        made = self._made.get(pool.name)
        if made is not None and made[0] == path:
            return made[1]
        if path is not None:
            tokenizer: Tokenizer = LocalTokenizer(Path(path))
        else:
            if self._http is None:
                self._http = aiohttp.ClientSession()
            tokenizer = EngineTokenizer(pool, self._http)
        self._made[pool.name] = path, tokenizer
        return tokenizer


class LocalTokenizer:
    """A Hugging Face tokenizer: ``tokenizer.json``, and ``tokenizer_config.json`` with the chat template."""

    def __init__(self, directory: Path) -> None:
        try:
            # an optional dependency, needed only for local tokenizers
            from tokenizers import Tokenizer as FastTokenizer  # noqa: PLC0415
        except ImportError:
            raise TokenizerMissing("install the extra: pip install 'attache[tokenizer]'") from None
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissing(f"there is no {file}; name a model's directory in tokenizer.path, or leave it out")
        self._tokenizer = FastTokenizer.from_file(str(file))
        self._template = ChatTemplate.read(directory)

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize as vLLM does: chats with the template, completions with the leading special tokens."""
        body = msgspec.json.decode(arrival.body)
        if arrival.request.api is Api.CHAT:
            return await self._encode(self._template.render(body), special=False)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return await self._encode(prompt, special=True)
        is_tokens = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
        return prompt if is_tokens else None

    async def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        def encode() -> Sequence[int]:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
            return ids

        return await asyncio.to_thread(encode) if len(text) > _THREAD_BYTES else encode()


class EngineTokenizer:
    """Asks the engine with the fewest requests in flight (POST /tokenize)."""

    def __init__(self, pool: Pool, http: aiohttp.ClientSession) -> None:
        self._pool = pool
        self._http = http

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize in the engine, which applies its own chat template."""
        body: dict[str, Any] = msgspec.json.decode(arrival.body)
        if arrival.request.api is Api.CHAT:
            asked: dict[str, Any] = {name: body[name] for name in _KEPT_FIELDS if name in body}
        elif isinstance(body.get("prompt"), str):
            asked = {"prompt": body["prompt"]}
        else:
            return None
        table = self._pool.table
        load = np.where(table.is_active, table.in_flight, np.iinfo(np.int64).max)
        address = table.addresses[int(load.argmin())]
        payload = json.dumps({"model": arrival.destination.model, **asked}).encode()
        url = f"http://{address}/tokenize"
        async with self._http.post(url, data=payload, headers={"content-type": "application/json"}) as answer:
            answer.raise_for_status()
            return _decoder.decode(await answer.read()).tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


_decoder: Final = msgspec.json.Decoder(_Tokens)
