# SPDX-License-Identifier: Apache-2.0
"""Fallbacks for prompts that a model refuses for their length or content, through a real Envoy."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from tests.waiting import eventually
from tests.with_envoy.test_fallback import Engine, route, running, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from tests.with_envoy.test_fallback import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILURES: Final = ["connect", "timeout", "overloaded", "server-error"]
TOO_LONG: Final = {"error": {"message": "too many", "type": "invalid_request_error", "code": "context_length_exceeded"}}
# as engines and providers write it, and the status
CONTEXT: Final = [
    (400, TOO_LONG),
    (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 4096 tokens. However, your request has 5000 input"
                " tokens. Please reduce the length of the input messages.",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            }
        },
    ),
    (400, {"object": "error", "message": "The input (85050 tokens) is longer than the model's context length (32768)."}),
    (
        400,
        {
            "object": "error",
            "message": "The sum of prompt length (5000.0), query length (0) should not exceed max_num_tokens (4096)",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "prompt is too long: 213462 tokens > 200000 maximum"},
        },
    ),
    (413, TOO_LONG),
    (422, {"detail": "Input length 9000 exceeds maximum context length 4096"}),
]
POLICY: Final = [
    (400, {"error": {"message": "The response was filtered.", "type": None, "param": "prompt", "code": "content_filter"}}),
    (400, {"error": {"code": "content_policy_violation", "message": "no", "type": "image_generation_user_error"}}),
    (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"},
        },
    ),
]


def says(
    content: object, *, status: int = 400, headers: Mapping[str, str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An answer of known length; ``content``: bytes, or what becomes JSON."""

    async def answer(_: web.Request) -> web.StreamResponse:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return web.Response(body=body, status=status, headers={"content-type": "application/json", **(headers or {})})

    return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    log: list[tuple[str, str]] = []
    engines = {name: Engine(name, log) for name in ("a1", "a2", "b1", "b2", "c1")}
    for one in engines.values():
        await one.start()
    target = [{"modelServerName": "a"}]
    fallback = [
        {"modelServerName": "b", "on": FAILURES},
        {"modelServerName": "c", "on": [*FAILURES, "context-window", "content-policy"]},
    ]
    both = [{"modelServerName": name, "on": [*FAILURES, "context-window"]} for name in ("b", "c")]
    documents = [
        server("a", "big/model", [engines["a1"], engines["a2"]]),
        server("b", "another", [engines["b1"], engines["b2"]]),
        server("c", "long", [engines["c1"]]),
        route("m", {"targetModels": target, "fallback": fallback, "retry": {"idleTimeout": "2s"}}),
        route("both", {"targetModels": target, "fallback": both}),
        route("plain", {"targetModels": target, "fallback": [{"modelServerName": "c"}]}),
    ]
    async with running(tmp_path_factory.mktemp("refusals") / "stack", documents, engines, log) as found:
        yield found
    for one in engines.values():
        await one.stop()


def refuse(gateway: Gateway, *names: str, **answer: Any) -> None:
    content = answer.pop("content", TOO_LONG)
    for name in names:
        gateway.engines[name].says = says(content, **answer)


def letters(gateway: Gateway) -> str:
    """The ModelServers in the order of attempts."""
    return "".join(name[0] for name, _ in gateway.log)


@pytest.mark.parametrize(("status", "content"), [*CONTEXT, *POLICY])
async def test_the_fallback_that_takes_it_is_asked_next(gateway: Gateway, status: int, content: object) -> None:
    await gateway.heal()
    refuse(gateway, "a1", "a2", "b1", "b2", content=content, status=status)
    for stream in (False, True):
        answer = await gateway.ask(stream=stream)
        assert answer.status_code == 200, answer.text
        # no other engine of the model that has refused it, nor the fallback without that class
        assert letters(gateway) == "ac"
        assert answer.headers["x-attache-served-by"] == "default/c"
        assert "x-attache-refused-for" not in answer.headers
        assert gateway.log[1] == ("c1", "long")
