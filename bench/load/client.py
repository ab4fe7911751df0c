"""Streams chat completions and notes when the tokens come.

Sessions begin at their time whatever the state of the others (open loop), turns follow their answers (closed loop, as people
do). A request is timed from the moment at which it was due, so that a late client does not hide a slow server.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.workload.sessions import Session, Turn, Workload

_TIMEOUT_S: Final = 300


class Result(msgspec.Struct, frozen=True):
    """What one request met. Times in seconds of the wall clock from the start; ``error`` is empty for a good answer.

    ``engine``: who served it, where that is known. ``place``: the number of its session in the workload, and of its turn.
    """

    due_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str = ""
    label: str = ""
    engine: str = ""
    place: tuple[int, int] = (0, 0)


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


class Answer(msgspec.Struct):
    """What a stream said: its text, its usage, and whether it came to its end."""

    text: str
    usage: _Usage
    is_complete: bool


def read_stream(raw: bytes) -> Answer:
    """The answer in the server-sent events of a chat completion; events that are no JSON raise DecodeError."""
    answer = Answer("", _Usage(), is_complete=False)
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


class Client:
    """``speed``: how much faster than the wall clock the engines live; the workload's times are in their time."""

    def __init__(self, url: str, model: str, *, speed: float, on_result: Callable[[Result], None]) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._speed = speed
        self._on_result = on_result

    async def send(self, workload: Workload) -> list[Result]:
        """The results of all requests, in the order in which they ended."""
        results: list[Result] = []

        def note(result: Result) -> None:
            results.append(result)
            self._on_result(result)

        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http,
            asyncio.TaskGroup() as tasks,
        ):
            began = asyncio.get_running_loop().time()
            for session in workload.sessions:
                tasks.create_task(self._converse(http, session, began, note))
        return results

    async def _converse(
        self, http: aiohttp.ClientSession, session: Session, began: float, note: Callable[[Result], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        opening = session.opening()
        messages = list(opening)
        due = began + session.begins_s / self._speed
        for turn in session.turns:
            due += turn.think_s / self._speed
            await asyncio.sleep(due - clock())
            if turn.is_whole:
                messages = list(opening)
            messages.append({"role": "user", "content": turn.text})
            result, text = await self._ask(http, session, messages, turn, due=due, began=began)
            note(result)
            if result.error:
                return  # a conversation without its answer cannot go on
            messages.append({"role": "assistant", "content": text})
            due = clock()

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        session: Session,
        messages: list[dict[str, str]],
        turn: Turn,
        *,
        due: float,
        began: float,
    ) -> tuple[Result, str]:
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
        error, answer = "", Answer("", _Usage(), is_complete=False)
        try:
            async with http.post(self._url, data=msgspec.json.encode(body), headers=headers) as response:
                # engines write the first token together with what a stream begins with
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
        result = Result(
            due_s=due - began,
            first_token_s=first - began,
            last_token_s=last - began,
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            output_tokens=answer.usage.completion_tokens,
            error=error,
            label=session.label,
        )
        return result, answer.text
