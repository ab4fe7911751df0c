# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts with the engines' POST /tokenize."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import numpy as np

from extproc.request.anthropic_chat import chat_of
from extproc.request.model import Api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.types import Arrival
    from extproc.feeds.engine_access import EngineAccess
    from extproc.scheduling.pool import Pool

_KEPT_FIELDS: Final = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class EngineTokenizers:
    """Tokenizers that share one HTTP client. ``access``: TLS and keys of engines."""

    def __init__(self, access: EngineAccess) -> None:
        self._http = aiohttp.ClientSession()
        self._access = access

    def of(self, pool: Pool) -> EngineTokenizer:
        """One that asks the engines of ``pool``."""
        return EngineTokenizer(pool, self._http, self._access)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


class EngineTokenizer:
    """Asks the engine with the fewest requests in flight (POST /tokenize), of those that do not fail; if it is not
    there, the next.

    An engine that is gone has the fewest of all: by its load alone it would be asked every time.
    """

    def __init__(self, pool: Pool, http: aiohttp.ClientSession, access: EngineAccess) -> None:
        self._pool = pool
        self._http = http
        self._access = access

    async def tokens(self, arrival: Arrival) -> Sequence[int] | None:
        """Tokenize in the engine, which applies its own chat template."""
        body: dict[str, Any] = msgspec.json.decode(arrival.body)
        if arrival.request.api is Api.MESSAGES:
            asked: dict[str, Any] = chat_of(body)
        elif arrival.request.api is Api.CHAT:
            asked = {name: body[name] for name in _KEPT_FIELDS if name in body}
        elif isinstance(body.get("prompt"), str):
            asked = {"prompt": body["prompt"]}
        else:
            return None
        payload = json.dumps({"model": arrival.destination.model, **asked}).encode()
        engines = self._engines()
        for address in engines:
            try:
                return await self._ask(address, payload)
            except aiohttp.ClientError as error:
                if address == engines[-1] or not isinstance(error, aiohttp.ClientConnectionError):
                    raise ConnectionError(f"{address}/tokenize: {error}") from error
        raise ConnectionError("there is no engine to ask")

    def _engines(self) -> list[str]:
        """The two to ask, the better one first; one if there are no more."""
        table = self._pool.table
        load = np.where(table.is_active, table.in_flight, np.inf)
        best_first = np.lexsort((load, table.failures > 0, ~table.is_active))
        return [table.addresses[row] for row in best_first[:2].tolist() if table.is_active[row]]

    async def _ask(self, address: str, payload: bytes) -> Sequence[int]:
        access = await self._access.of(self._pool.spec, address)
        url = f"{'http' if access.tls is None else 'https'}://{address}/tokenize"
        headers = {"content-type": "application/json"}
        if access.authorization:
            headers["authorization"] = access.authorization
        async with self._http.post(
            url, data=payload, headers=headers, ssl=access.tls or True, server_hostname=access.server_name
        ) as answer:
            answer.raise_for_status()
            return _decoder.decode(await answer.read()).tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


_decoder: Final = msgspec.json.Decoder(_Tokens)
