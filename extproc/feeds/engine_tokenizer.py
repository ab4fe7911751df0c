# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts with the engines' POST /tokenize."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from extproc.feeds.engine_answers import Unreadable, most_tokens, tokens_in_answer
from extproc.feeds.engine_http import EngineHttp
from extproc.request.anthropic import chat_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.types import Arrival
    from extproc.feeds.engine_access import EngineAccess
    from extproc.scheduling.pool import Pool

_KEPT_FIELDS: Final = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_PATH: Final = "/tokenize"
# Of an answer: a token with its comma and spaces, and what stands beside the list.
_TOKEN_BYTES: Final = 16
_OTHER_BYTES: Final = 64 * 1024


class Refused(ValueError):
    """An engine does not tokenize a prompt; another one would not either."""


class EngineTokenizers:
    """Tokenizers that share one HTTP client. ``access``: TLS and keys of engines."""

    def __init__(self, access: EngineAccess) -> None:
        self._http = EngineHttp(access)

    def of(self, pool: Pool) -> EngineTokenizer:
        """One that asks the engines of ``pool``."""
        return EngineTokenizer(pool, self._http)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


class EngineTokenizer:
    """Asks the engine with the fewest requests in flight (POST /tokenize), of those that do not fail; if it is not
    there, or nobody can read its answer, the next.

    An engine that is gone has the fewest of all: by its load alone it would be asked every time.
    """

    def __init__(self, pool: Pool, http: EngineHttp) -> None:
        self._pool = pool
        self._http = http

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize in the engine, which applies its own chat template. Raises OSError and ValueError."""
        body: dict[str, Any] = msgspec.json.decode(arrival.body)
        chat = chat_in(body, arrival.request)
        if chat is not None:
            asked: dict[str, Any] = {name: chat[name] for name in _KEPT_FIELDS if name in chat}
        elif isinstance(body.get("prompt"), str):
            asked = {"prompt": body["prompt"]}
        else:
            return None
        payload = json.dumps({"model": arrival.destination.model, **asked}).encode()
        engines = self._engines()
        for address in engines:
            try:
                return await self._ask(address, payload)
            except (ConnectionError, Unreadable):
                if address == engines[-1]:
                    raise
        raise ConnectionError("there is no engine to ask")

    def _engines(self) -> list[str]:
        """The two to ask, the better one first; one if there are no more."""
        table = self._pool.table
        load = np.where(table.is_active, table.in_flight, np.inf)
        best_first = np.lexsort((load, table.failures > 0, ~table.is_active))
        return [table.addresses[row] for row in best_first[:2].tolist() if table.is_active[row]]

    async def _ask(self, address: str, payload: bytes) -> Sequence[int]:
        most = most_tokens(payload)
        answer = await self._http.post(
            self._pool.spec,
            address,
            _PATH,
            payload,
            timeout_s=self._pool.spec.tokenizer.timeout,
            most_bytes=_TOKEN_BYTES * most + _OTHER_BYTES,
        )
        if answer.status != HTTPStatus.OK:
            raise Refused(f"{address}{_PATH} answers {answer.status}")
        return tokens_in_answer(answer.body, most)
