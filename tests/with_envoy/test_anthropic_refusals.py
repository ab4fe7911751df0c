# SPDX-License-Identifier: Apache-2.0
"""Whatever refuses a request, clients of Anthropic's API get its status, its type, and when to come back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS: Final = [
    {"name": name, "key": f"sk-{name}-0123", "tenant": name} for name in ("acme", "bell", "lora", "slow", "chat")
]
HELLO: Final[Any] = [{"role": "user", "content": "hello"}]
ONE_AT_A_TIME: Final = {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Keys, a tenant that may use an adapter alone, three requests an hour, small bodies, one request at a time."""
    async with running_stack(
        tmp_path_factory.mktemp("refusing") / "stack",
        EngineFlags(count=1, speed=20.0, stream_headers="first-token", adapters=("sql",)),
        gateway={
            "authentication": {"apiKeys": KEYS},
            "tenants": [{"name": "lora", "models": ["sql"]}],
            "maxBodySize": "256Ki",
            "cachedTokens": "Hidden",
            "failureMode": "Close",
        },
        more={"flowControl": {"saturation": ONE_AT_A_TIME, "timeout": "300ms", "maxRequests": 1}},
        route={"rateLimits": [{"per": "Tenant", "unit": "hour", "requests": 3}]},
        headers={"authorization": f"Bearer {KEYS[0]['key']}"},
    ) as running:
        yield running


def claude(stack: Stack, tenant: str) -> anthropic.AsyncAnthropic:
    """The tenant's client, which sends its key as ``x-api-key``."""
    return anthropic.AsyncAnthropic(base_url=stack.url, api_key=f"sk-{tenant}-0123", max_retries=0, timeout=30)


async def refusal(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.APIStatusError:  # noqa: ANN401
    asked = {"model": ALIAS, "max_tokens": 2, "messages": HELLO, **fields}
    with pytest.raises(anthropic.APIStatusError) as caught:
        await client.messages.create(**asked)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    return caught.value


async def test_who_nobody_knows_and_who_may_not(stack: Stack) -> None:
    async with claude(stack, "nobody") as stranger, claude(stack, "lora") as other:
        unknown, forbidden = await refusal(stranger), await refusal(other)
    assert isinstance(unknown, anthropic.AuthenticationError)
    assert unknown.type == "authentication_error"
    assert isinstance(forbidden, anthropic.PermissionDeniedError)
    assert forbidden.type == "permission_error"
    assert forbidden.error_code == "model_not_allowed"


async def test_a_body_that_is_too_large(stack: Stack) -> None:
    async with claude(stack, "bell") as client:
        large = await refusal(client, messages=[{"role": "user", "content": "x" * 300_000}])
    assert isinstance(large, anthropic.ContentTooLargeError)
    assert large.type == "request_too_large"  # type: ignore[comparison-overlap]  # the client's list of types lacks it


async def test_a_limit_that_is_used_up_says_when_it_is_not(stack: Stack) -> None:
    async with claude(stack, "acme") as client:
        for _ in range(3):
            answer = await client.messages.create(model=ALIAS, max_tokens=1, messages=HELLO)
            assert answer.usage.cache_read_input_tokens is None, "it is hidden"
        over = await refusal(client)
    assert isinstance(over, anthropic.RateLimitError)
    assert over.type == "rate_limit_error"
    assert int(over.response.headers["retry-after"]) >= 1


async def test_full_engines_are_an_overload_and_no_limit_of_the_caller(stack: Stack) -> None:
    """It is 529 whether there was no place in the queue or its wait was too long."""
    async with claude(stack, "slow") as busy, claude(stack, "bell") as client:
        async with busy.messages.stream(model=ALIAS, max_tokens=100_000, messages=HELLO) as stream:
            await anext(aiter(stream.text_stream))
            late = await refusal(client)
        assert isinstance(late, anthropic.OverloadedError)
        assert (late.status_code, late.type, late.error_code) == (529, "overloaded_error", "queue_timeout")
        assert int(late.response.headers["retry-after"]) >= 1


async def test_what_openai_clients_are_told_stays_as_it_was(stack: Stack) -> None:
    async with httpx.AsyncClient(
        base_url=stack.url, headers={"authorization": "Bearer sk-chat-0123"}, timeout=60
    ) as http:
        answer = await http.post("/v1/chat/completions", json={"model": "gpt-17", "messages": HELLO})
        assert answer.json()["error"]["code"] == "model_not_found"
        large = await http.post("/v1/chat/completions", content=b"x" * 300_000)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


async def test_without_engines_and_without_a_picker(stack: Stack) -> None:
    """The last test: it stops the engine, then extproc."""
    os.kill(stack.pids["engines"], signal.SIGKILL)
    async with claude(stack, "bell") as client:
        gone = await refusal(client)
        assert isinstance(gone, anthropic.ServiceUnavailableError)
        assert gone.type == "overloaded_error"
        os.kill(stack.pids["extproc"], signal.SIGKILL)

        async def is_closed() -> bool:
            return "cannot choose an engine" in str((await refusal(client)).api_message)

        await eventually(is_closed)
        closed = await refusal(client)
    assert (closed.status_code, closed.type) == (503, "overloaded_error")
    assert int(closed.response.headers["retry-after"]) >= 1
