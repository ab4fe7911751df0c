# SPDX-License-Identifier: Apache-2.0
"""Many clients that ask again and again, and count what they were told."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tally(msgspec.Struct):
    """``lost``: errors before anything of an answer had come. ``cut``: streams that ended early after their first
    byte.
    """

    good: int = 0
    lost: list[str] = []
    cut: int = 0


class Load:
    """``clients`` at once, alternately streamed and plain, until told to stop. ``pause_s``: after each answer."""

    def __init__(self, url: str, *, clients: int = 24, output_tokens: int = 20, pause_s: float = 0.0) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._clients = clients
        self._output_tokens = output_tokens
        self._pause_s = pause_s
        self._stopped = asyncio.Event()
        self._numbers: Iterator[int] = itertools.count()
        self.tally = Tally()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        )
        self._tasks = [asyncio.create_task(self._ask_again()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)
        await self._http.close()

    async def more(self, count: int) -> None:
        """Until so many more have been answered."""
        target = self.tally.good + count
        async with asyncio.timeout(120):
            while self.tally.good < target:  # noqa: ASYNC110  many tasks count, none of them is the last
                await asyncio.sleep(0.02)

    async def _ask_again(self) -> None:
        while not self._stopped.is_set():
            await self._ask(next(self._numbers))
            await asyncio.sleep(self._pause_s)

    async def _ask(self, number: int) -> None:
        is_streamed = number % 2 == 0
        body = {
            "model": "llama",
            "messages": [{"role": "user", "content": f"{number % 8} " + "a few words to prefill " * 20}],
            "max_tokens": self._output_tokens,
            "stream": is_streamed,
        }
        has_begun = False
        try:
            async with self._http.post(self._url, json=body) as answer:
                has_begun = answer.status == 200
                whole = await answer.read()
                is_whole = whole.endswith(b"data: [DONE]\n\n") if is_streamed else b'"usage"' in whole
                if answer.status == 200 and is_whole:
                    self.tally.good += 1
                elif has_begun:
                    self.tally.cut += 1
                else:
                    self.tally.lost.append(f"{answer.status} {whole[:300].decode()}")
        except aiohttp.ClientError as error:
            if has_begun:
                self.tally.cut += 1
            else:
                self.tally.lost.append(repr(error))
