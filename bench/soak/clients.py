# SPDX-License-Identifier: Apache-2.0
"""What the soak's clients send, and what is wrong with the answers that they get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import aiohttp
import msgspec

from bench.soak.engines import ENGINE_HEADER
from bench.workload.sessions import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 60.0
_PREFIXES: Final = 4
_PREFIX_TOKENS: Final = 700
# Two prompts fill extproc's index of an engine's small cache (64 KiB of text): all are full after the warm-up.
_TAIL_TOKENS: Final = 10_000
_OUTPUT_TOKENS: Final = 16
# In which a stream's end must be: the last event of a response repeats all of it.
_END_BYTES: Final = 4000

# Kinds of requests. ``honest`` must not be lost; ``mixed`` are served by an honest and a hostile engine; ``known`` use
# a name that was just added or deleted, which may be unknown for a while.
Audience = Literal["honest", "mixed", "hostile", "known"]


class Api(msgspec.Struct, frozen=True):
    """One API: its path, the body of a question, how its streams end, and where an answer names the model."""

    path: str
    body: Callable[[str], dict[str, Any]]
    end: bytes
    model: tuple[str, ...]


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": _OUTPUT_TOKENS}


def _prompt(text: str) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": _OUTPUT_TOKENS}


def _input(text: str) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": _OUTPUT_TOKENS}


APIS: Final[Mapping[str, Api]] = {
    "chat": Api("/v1/chat/completions", _chat, b"data: [DONE]", ("model",)),
    "completion": Api("/v1/completions", _prompt, b"data: [DONE]", ("model",)),
    "response": Api("/v1/responses", _input, b'"response.completed"', ("response", "model")),
    "message": Api("/v1/messages", _chat, b'"message_stop"', ("message", "model")),
}


class SoakRequest(msgspec.Struct, frozen=True):
    """One request. ``echoes``: the names of which the engine must have got one; empty: any. ``hosts``: where it may
    have been served; empty: anywhere. ``leaves``: its client goes with the first byte.
    """

    audience: Audience
    model: str
    number: int
    api: str = "chat"
    is_streamed: bool = True
    leaves: bool = False
    echoes: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()


class RequestOutcome(msgspec.Struct, frozen=True):
    """What became of it. ``at_s``: since the soak began. ``error``: empty if all is well; a client that left is."""

    at_s: float
    first_s: float
    status: int
    error: str


def request_body(question: SoakRequest) -> bytes:
    """Of some KB, most of which some other requests share."""
    text = text_of(f"shared {question.number % _PREFIXES}", _PREFIX_TOKENS) + text_of(
        f"own {question.number}", _TAIL_TOKENS
    )
    return msgspec.json.encode(
        {"model": question.model, "stream": question.is_streamed, **APIS[question.api].body(text)}
    )


def response_error(question: SoakRequest, status: int, served: str, raw: bytes) -> str:
    """The error of a complete answer; ``served``: the engine's address, as the engine reports it."""
    api = APIS[question.api]
    if status != 200:
        return f"{status} {raw[:200].decode(errors='replace').strip()}"
    if question.is_streamed and api.end not in raw[-_END_BYTES:]:
        return f"the stream ended early, after {len(raw)} bytes"
    if question.echoes and (echo := _echo(raw, api, is_streamed=question.is_streamed)) not in question.echoes:
        return f"the engine was asked for {echo}, not for {' or '.join(sorted(question.echoes))}"
    if question.hosts and served not in question.hosts:
        return f"an engine at {served} answered, not one at {' or '.join(sorted(question.hosts))}"
    return ""


def classify_outcome(question: SoakRequest, outcome: RequestOutcome, *, is_gone: bool) -> Literal["ok", "left", "lost"]:
    """Whether a request was lost. ``is_gone``: an honest one's name is in use no more; the gateway may have learnt that
    while the request was on its way.
    """
    may_be_unknown = question.audience == "known" or (question.audience == "honest" and is_gone)
    if outcome.error and not (may_be_unknown and outcome.status == 404):
        return "lost"
    return "left" if question.leaves else "ok"


def _echo(raw: bytes, api: Api, *, is_streamed: bool) -> str:
    """The model that an answer or its first event names; if it names none, why."""
    try:
        if not is_streamed:
            return str(json.loads(raw)["model"])
        start = raw.index(b"data: ") + 6
        found: Any = json.loads(raw[start : raw.index(b"\n", start)])
        for name in api.model:
            found = found[name]
        return str(found)
    except (ValueError, LookupError, TypeError) as error:
        return f"no model ({error!r})"


class SoakClient:
    """Sends questions to one gateway."""

    def __init__(self, url: str, http: aiohttp.ClientSession, began_at_s: float) -> None:
        self._url, self._http, self._began_at_s = url, http, began_at_s
        self._clock = asyncio.get_running_loop().time

    async def ask(self, question: SoakRequest) -> RequestOutcome:
        """Never raises: what goes wrong is the outcome's error."""
        sent_at_s, status, first_s, raw, error = self._clock(), 0, 0.0, bytearray(), ""
        try:
            async with self._http.post(
                f"{self._url}{APIS[question.api].path}",
                data=request_body(question),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            ) as response:
                status = response.status
                async for piece in response.content.iter_any():
                    first_s = first_s or self._clock() - sent_at_s
                    raw += piece
                    if question.leaves and status == 200:
                        response.close()
                        break
                else:
                    error = response_error(question, status, response.headers.get(ENGINE_HEADER, ""), bytes(raw))
        except (aiohttp.ClientError, TimeoutError, OSError) as caught:
            error = f"{type(caught).__name__} after {len(raw)} bytes: {caught}"
        return RequestOutcome(
            at_s=sent_at_s - self._began_at_s,
            first_s=first_s,
            status=status,
            error=error,
        )
