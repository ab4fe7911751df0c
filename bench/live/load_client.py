# SPDX-License-Identifier: Apache-2.0
"""Streams chat completions and notes when their tokens come.

Sessions begin at their instants whatever the state of the others (open loop); turns follow their answers (closed
loop, as with people). A request is timed from when it was due, so that a late client does not hide a slow server.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.reporting.request_results import RequestResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.workload.sessions import Session, SessionTurn, Workload

_TIMEOUT_S: Final = 300


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class StreamResponse(msgspec.Struct):
    """The text and the usage of a stream, and whether it came to its end."""

    text: str
    usage: _Usage
    is_complete: bool


def read_stream(raw: bytes) -> StreamResponse:
    """The answer in the server-sent events of a chat completion. Raises DecodeError for an event that is not JSON."""
    answer = StreamResponse("", _Usage(), is_complete=False)
    texts: list[str] = []
    for line in raw.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            answer.is_complete = True
            continue
        event = _DECODER.decode(line[6:])
        texts.extend(choice.delta.content for choice in event.choices if choice.delta.content)
        answer.usage = event.usage or answer.usage
    answer.text = "".join(texts)
    return answer


_DECODER: Final = msgspec.json.Decoder(_Event)


class LoadClient:
    """``speed``: engine seconds per second of the wall clock; the workload's times are engine time.

    ``on_result`` is called when a request has ended.
    """

    def __init__(self, url: str, model: str, *, speed: float, on_result: Callable[[RequestResult], None]) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._speed = speed
        self._on_result = on_result

    async def send(self, workload: Workload) -> list[RequestResult]:
        """The results of all requests, in the order in which they ended."""
        results: list[RequestResult] = []

        def note(result: RequestResult) -> None:
            results.append(result)
            self._on_result(result)

        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http,
            asyncio.TaskGroup() as tasks,
        ):
            began_at_s = asyncio.get_running_loop().time()
            for session in workload.sessions:
                tasks.create_task(self._converse(http, session, began_at_s, note))
        return results

    async def _converse(
        self, http: aiohttp.ClientSession, session: Session, began_at_s: float, note: Callable[[RequestResult], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        opening = session.opening_messages()
        messages = list(opening)
        due_at_s = began_at_s + session.begins_at_s / self._speed
        for turn in session.turns:
            due_at_s += turn.think_s / self._speed
            await asyncio.sleep(due_at_s - clock())
            if turn.is_whole:
                messages = list(opening)
            messages.append({"role": "user", "content": turn.text})
            result, text = await self._ask(http, session, messages, turn, due_at_s=due_at_s, began_at_s=began_at_s)
            note(result)
            if result.error:
                return  # a conversation without its answer cannot go on
            messages.append({"role": "assistant", "content": text})
            due_at_s = clock()

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        session: Session,
        messages: list[dict[str, str]],
        turn: SessionTurn,
        *,
        due_at_s: float,
        began_at_s: float,
    ) -> tuple[RequestResult, str]:
        body = {
            "model": session.adapter or self._model,
            "messages": messages,
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {**session.headers, "content-type": "application/json"}
        clock = asyncio.get_running_loop().time
        parts: list[bytes] = []
        first = last = 0.0
        error, answer = "", StreamResponse("", _Usage(), is_complete=False)
        try:
            async with http.post(self._url, data=msgspec.json.encode(body), headers=headers) as response:
                # engines write the first token together with the beginning of the stream

                async for part in response.content.iter_any():
                    last = clock()
                    first = first or last
                    parts.append(part)
                raw = b"".join(parts)
                if response.status == 200:
                    answer = read_stream(raw)
                    error = "" if answer.is_complete else "the stream ended early"
                else:
                    error = f"{response.status} {raw[:300].decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        details = answer.usage.prompt_tokens_details
        result = RequestResult(
            due_at_s=due_at_s - began_at_s,
            first_token_at_s=first - began_at_s,
            last_token_at_s=last - began_at_s,
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            output_tokens=answer.usage.completion_tokens,
            error=error,
            label=session.label,
        )
        return result, answer.text
