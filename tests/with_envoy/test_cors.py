# SPDX-License-Identifier: Apache-2.0
"""Scripts of other origins through a real Envoy: what browsers may ask is answered before anybody is authenticated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually
from tests.with_envoy.test_admission import edit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-cors-0123"
CORS = {
    "allowOrigins": ["https://app.example.com", "https://*.apps.example.com"],
    "allowMethods": ["GET", "POST"],
    "allowHeaders": ["authorization", "content-type"],
    "exposeHeaders": ["x-request-id"],
    "allowCredentials": True,
    "maxAge": 600,
}
ASKED = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(
        tmp_path_factory.mktemp("cors") / "stack",
        EngineFlags(count=1, speed=20.0),
        gateway={"cors": CORS, "authentication": {"apiKeys": [{"name": "a", "key": KEY, "tenant": "a"}]}},
        headers={"authorization": f"Bearer {KEY}"},
        watch=True,
    ) as running:
        yield running


async def preflight(stack: Stack, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with httpx.AsyncClient(base_url=stack.url, timeout=20) as http:
        return await http.options("/v1/chat/completions", headers=headers)


async def ask(stack: Stack, origin: str, key: str = KEY, model: str = ALIAS) -> httpx.Response:
    headers = {"origin": origin, "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=20) as http:
        return await http.post("/v1/chat/completions", json={**ASKED, "model": model}, headers=headers)


@pytest.mark.parametrize("origin", ["https://app.example.com", "https://one.apps.example.com"])
async def test_a_browsers_question_needs_no_key(stack: Stack, origin: str) -> None:
    answer = await preflight(stack, origin)
    assert answer.status_code == 200
    told = answer.headers
    assert told["access-control-allow-origin"] == origin
    assert told["access-control-allow-methods"] == "GET,POST"
    assert told["access-control-allow-headers"] == "authorization,content-type"
    assert told["access-control-allow-credentials"] == "true"
    assert told["access-control-max-age"] == "600"


@pytest.mark.parametrize(
    "origin", ["https://app.example.com.evil.example", "http://app.example.com", "https://apps.example.com", "null"]
)
async def test_other_origins_are_told_nothing(stack: Stack, origin: str) -> None:
    assert "access-control-allow-origin" not in (await preflight(stack, origin)).headers
    answer = await ask(stack, origin)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("key", "model", "status"), [(KEY, ALIAS, 200), ("sk-unknown-1", ALIAS, 401), (KEY, "no-such-model", 404)]
)
async def test_scripts_may_read_answers_and_refusals(stack: Stack, key: str, model: str, status: int) -> None:
    answer = await ask(stack, "https://app.example.com", key, model)
    assert answer.status_code == status, answer.text
    assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
    assert answer.headers["access-control-expose-headers"] == "x-request-id"


async def test_a_policy_changes_without_a_new_listener(stack: Stack) -> None:
    listeners = (stack.directory / "envoy" / "lds.json").read_bytes()
    edit(stack, "GatewayConfig", cors={**CORS, "allowOrigins": ["https://new.example.com"]})

    async def is_new() -> bool:
        return "access-control-allow-origin" in (await preflight(stack, "https://new.example.com")).headers

    await eventually(is_new)
    assert "access-control-allow-origin" not in (await preflight(stack, "https://app.example.com")).headers
    assert (stack.directory / "envoy" / "lds.json").read_bytes() == listeners
    edit(stack, "GatewayConfig", cors=CORS)
