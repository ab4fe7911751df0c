# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts with the model's tokenizer files, or asks the engines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.feeds.chat_template import ChatTemplate, TemplateInvalid
from extproc.request.anthropic import chat_in
from extproc.request.generate import tokens_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.types import Arrival
    from extproc.feeds.engine_access import EngineAccess
    from extproc.feeds.engine_tokenizer import EngineTokenizers
    from extproc.metrics.registry import Metrics
    from extproc.scheduling.pool import Pool

log = logging.getLogger(__name__)

# Longer texts are encoded in a thread, so as not to delay other requests (the tokenizer releases the GIL).
_THREAD_BYTES: Final = 16 * 1024


class TokenizerMissing(Exception):
    """The tokenizer's files are missing or unusable."""


class Tokenizer(Protocol):
    """Turns a request into the tokens that engines will see."""

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, None if unsupported. May raise OSError or ValueError."""
        ...


class Tokenizers:
    """The tokenizers of all pools. A failure never stops a request: the approximate index decides instead."""

    def __init__(self, metrics: Metrics, access: EngineAccess) -> None:
        """``access``: TLS and keys of engines."""
        self._metrics = metrics
        self._access = access
        self._made: dict[str, tuple[str | None, Tokenizer]] = {}
        self._engines: EngineTokenizers | None = None
        self._failing: set[str] = set()

    async def tokens_of(self, arrival: Arrival) -> Sequence[int] | None:
        """The prompt's tokens, or None if that fails or takes too long."""
        pool = arrival.pool
        request = arrival.request
        prompt = None if request.api is None else request.api.spec.prompt
        if prompt == "tokens":
            # the client has sent them; the parser has refused those that no engine knows
            return tokens_in(arrival.body)
        # of pictures in a chat an engine knows, but not in the chat that is made of another body
        has_pictures = prompt == "anthropic messages" and bool(request.media.tokens)
        if prompt is None or has_pictures:
            self._metrics.tokenized(pool.name, "unsupported")
            return None
        try:
            async with asyncio.timeout(pool.spec.tokenizer.timeout):
                found = await self._tokenizer(pool).tokens(arrival)
        except TimeoutError:
            found, result = None, "timeout"
        except Exception as error:  # noqa: BLE001 - bodies, templates and answers are others'; the index can do without
            found, result = None, "failed"
            self._warn_once(pool, error)
        else:
            result = "unsupported" if found is None else "tokenized"
            self._failing.discard(pool.name)
        self._metrics.tokenized(pool.name, result)
        return found

    async def close(self) -> None:
        """Close all connections."""
        if self._engines is not None:
            await self._engines.close()

    def _warn_once(self, pool: Pool, error: Exception) -> None:
        """Until it works again; with the traceback of an error that nobody has foreseen."""
        if pool.name in self._failing:
            return
        self._failing.add(pool.name)
        foreseen = isinstance(error, OSError | ValueError | TokenizerMissing | TemplateInvalid)
        log.warning(
            "cannot tokenize prompts for %s, using the approximate index: %s",
            pool.name,
            error,
            exc_info=None if foreseen else error,
        )

    def _tokenizer(self, pool: Pool) -> Tokenizer:
        path = pool.spec.tokenizer.path
        made = self._made.get(pool.name)
        if made is not None and made[0] == path:
            return made[1]
        if path is not None:
            tokenizer: Tokenizer = LocalTokenizer(Path(path))
        else:
            if self._engines is None:
                # its HTTP client takes a tenth of a second to load: only processes that ask engines need it
                from extproc.feeds.engine_tokenizer import EngineTokenizers  # noqa: PLC0415

                self._engines = EngineTokenizers(self._access)
            tokenizer = self._engines.of(pool)
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
        chat = chat_in(body, arrival.request)
        if chat is not None:
            return await self._encode(self._template.render(chat), special=False)
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
