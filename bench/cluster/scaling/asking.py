# SPDX-License-Identifier: Apache-2.0
"""Clients of a model: streams through Envoy, each noted with what became of it."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

from bench.cluster.scaling.watching import now_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.kube.resources import Object

_LONGEST_S = 300.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended. ``error``: empty if its answer was whole."""

    began_at_s: float
    first_at_s: float
    ended_at_s: float
    error: str = ""


class Asking:
    """``url``: of Envoy. ``asked``: all that have ended; those that ``hang_up`` ended are not among them."""

    def __init__(self, url: str, model: str) -> None:
        self.asked: list[Asked] = []
        self.open = 0
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._numbers: Iterator[int] = itertools.count()
        self._tasks: set[asyncio.Task[Asked]] = set()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_LONGEST_S)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()
        await self._http.close()

    @property
    def failures(self) -> list[str]:
        """Of all that have ended."""
        return [one.error for one in self.asked if one.error]

    def ask(self, *, tokens: int = 4, words: int = 10) -> asyncio.Task[Asked]:
        """Begin one stream. ``words``: of the prompt, about a token each."""
        task = asyncio.create_task(self.stream(tokens=tokens, words=words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def all_ended(self) -> None:
        """Until all streams so far have ended by themselves."""
        await asyncio.gather(*self._tasks)

    async def hang_up(self) -> None:
        """End all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def steadily(self, per_s: float, *, tokens: int = 4, words: int = 10) -> None:
        """Begin streams at even distances, until cancelled."""
        next_s = now_s()
        while True:
            _ = self.ask(tokens=tokens, words=words)
            next_s += 1 / per_s
            await asyncio.sleep(next_s - now_s())

    async def stream(self, *, tokens: int, words: int) -> Asked:
        """One stream, to its end."""
        began_s, first_s, tail, status = now_s(), 0.0, b"", "no answer"
        self.open += 1
        try:
            async with self._http.post(self._url, json=self._question(tokens, words)) as answer:
                status = str(answer.status)
                async for chunk in answer.content.iter_any():
                    first_s = first_s or now_s()
                    tail = (tail + chunk)[-400:]
        except (aiohttp.ClientError, TimeoutError) as caught:
            status = f"{status}, {caught!r}"
        finally:
            self.open -= 1
        is_whole = status == "200" and tail.endswith(b"data: [DONE]\n\n")
        after_s = now_s() - began_s
        error = "" if is_whole else f"{status} after {after_s:.1f} s: {tail[-300:].decode(errors='replace')}"
        ended = Asked(began_at_s=began_s, first_at_s=first_s, ended_at_s=now_s(), error=error)
        self.asked.append(ended)
        return ended

    def _question(self, tokens: int, words: int) -> Object:
        text = f"{next(self._numbers)} of {id(self)} " + "long " * words
        message = {"role": "user", "content": text}
        return {"model": self._model, "messages": [message], "max_tokens": tokens, "stream": True}
