# SPDX-License-Identifier: Apache-2.0
"""Limits through a real Envoy against clients that try to get round them: no request passes undecided, none is free."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, Stack, running_stack
from extproc.api.config_loader import load_directory
from tests.waiting import eventually
from tests.with_envoy.trailers import with_trailers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# a bucket that hardly fills while tests run
TOKENS = 100_000
LIMIT = {"per": "Header", "header": "x-account", "unit": "month", "totalTokens": TOKENS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two fast engines behind a limit for each value of a header; without extproc Envoy would balance by itself."""
    flags = EngineFlags(count=2, speed=20.0, stream_headers="first-token", apart=True)
    async with running_stack(
        tmp_path_factory.mktemp("stack"), flags, route={"rateLimits": [LIMIT]}, gateway={"failureMode": "Open"}
    ) as running:
        yield running


class Client:
    """One account."""

    def __init__(self, http: httpx.AsyncClient, account: str) -> None:
        self._http = http
        self._account = account

    async def post(self, content: bytes, path: str = CHAT) -> httpx.Response:
        headers = {"content-type": "application/json", "x-account": self._account}
        return await self._http.post(path, content=content, headers=headers)

    async def ask(self, path: str = CHAT, **fields: object) -> httpx.Response:
        return await self.post(body(**fields), path)

    async def left(self) -> int:
        """Tokens left of its limit, by a request that costs a few."""
        answer = await self.ask(max_tokens=1)
        assert answer.status_code == 200
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    async def is_charged(self, least: int, most: int) -> bool:
        """Whether so many tokens are gone, with those that the questions cost."""
        return least <= TOKENS - await self.left() <= most


def body(**fields: object) -> bytes:
    return json.dumps({"model": ALIAS, "messages": [{"role": "user", "content": "hello"}], **fields}).encode()


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """An account of the test's own."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        yield Client(http, request.node.name)


async def test_a_trailer_behind_the_body_gets_round_no_decision(stack: Stack) -> None:
    status, answer = await with_trailers(stack.url + CHAT, body(max_tokens=2), {"x-account": "trailers"})
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == 2
    status, answer = await with_trailers(stack.url + CHAT, body(max_tokens=TOKENS + 1), {"x-account": "trailers"})
    assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
    content = json.dumps({"model": "none", "messages": []}).encode()
    status, answer = await with_trailers(stack.url + CHAT, content, {"x-account": "trailers"})
    assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n", "priority"])
async def test_numbers_that_are_none_are_refused_and_charge_nobody(client: Client, name: str) -> None:
    for text in ("9" * 400, "-1e308", "1e308", "-100000", "1.5", "true", '"7"', "-1000000000000000"):
        if (name, text) == ("priority", "-100000"):
            continue
        content = body(max_tokens=1).replace(b'"max_tokens": 1', f'"{name}": {text}'.encode())
        answer = await client.post(content)
        assert answer.status_code == 400, text
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (name, "invalid_request_error")
    assert TOKENS - 200 <= await client.left() <= TOKENS


async def test_several_answers_are_charged_several_times(client: Client) -> None:
    assert (await client.ask(max_tokens=TOKENS // 10, n=11)).status_code == 429
    assert (await client.ask(COMPLETIONS, prompt="hi", max_tokens=TOKENS // 10, best_of=11)).status_code == 429
    assert (await client.ask(COMPLETIONS, prompt=["hi"] * 11, max_tokens=TOKENS // 10)).status_code == 429
    assert TOKENS - 200 <= await client.left() <= TOKENS


async def test_images_count_before_the_engine_says_what_they_take(client: Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, *[image] * (TOKENS // 1_000)]}
    assert (await client.ask(messages=[message], max_tokens=1)).status_code == 429
    assert TOKENS - 200 <= await client.left() <= TOKENS


LONG = "word " * TOKENS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello", "name": LONG}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": "hello", "reasoning_content": LONG}]}),
        (CHAT, {"documents": [{"text": LONG}]}),
        (CHAT, {"chat_template": LONG}),
        (CHAT, {"chat_template_kwargs": {"rules": LONG}}),
        (CHAT, {"input_ids": [1] * TOKENS}),
        (CHAT, {"prompt_token_ids": [1] * TOKENS}),
        (CHAT, {"prompt_token_ids_b64": "AQAA" * (4 * TOKENS // 3 + 1)}),
        (COMPLETIONS, {"prompt": "hello", "suffix": LONG}),
        ("/v1/responses", {"input": "hello", "previous_response": {"output": [LONG]}}),
        ("/v1/responses", {"input": "hello", "prompt": {"id": "1", "variables": {"rules": LONG}}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": LONG}]}]}),
    ],
)
async def test_text_counts_before_the_request_goes_wherever_engines_read_it(
    client: Client, path: str, fields: dict[str, object]
) -> None:
    answer = await client.ask(path, max_tokens=1, **fields)
    assert answer.status_code == 429, answer.text


async def test_several_answers_streamed_are_charged_as_asked_for_until_the_engine_says_what_they_took(
    client: Client,
) -> None:
    # JSON of this schema ends by itself, long before 500 tokens
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    json_mode = {"response_format": {"type": "json_schema", "json_schema": {"name": "short", "schema": schema}}}
    answer = await client.ask(max_tokens=500, n=100, stream=True, stream_options={"include_usage": False}, **json_mode)
    assert answer.status_code == 200
    assert b"completion_tokens" not in answer.content
    assert TOKENS - int(answer.headers["x-ratelimit-remaining-tokens"]) >= 50_000
    # each question of how much is left costs some 22
    await eventually(lambda: client.is_charged(100, 40_000), pause_s=0.1)


async def test_a_request_that_no_engine_served_costs_no_tokens(stack: Stack, client: Client) -> None:
    before = await client.left()
    for name in ("engine-0", "engine-1"):
        await stack.processes.end(name)
    answer = await client.ask(max_tokens=50_000)
    assert answer.status_code == 503

    # both together would not fit into the limit
    async def is_back() -> bool:
        return (await client.ask(max_tokens=90_000)).status_code == 503

    await eventually(is_back)
    assert before > 0


@pytest.mark.slow
async def test_new_values_of_a_header_are_no_new_allowance_without_end(tmp_path: Path) -> None:
    limit = {"per": "Header", "header": "x-account", "unit": "month", "requests": 1}
    flags = EngineFlags(count=2, speed=20.0)
    asking = asyncio.Semaphore(16)
    limits = httpx.Limits(max_connections=16)
    async with (
        running_stack(tmp_path / "stack", flags, route={"rateLimits": [limit]}) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30, limits=limits) as http,
    ):

        async def ask(number: int) -> int:
            async with asking:
                return (await Client(http, f"{number}" + "x" * 4_000).ask(max_tokens=1)).status_code

        statuses = await asyncio.gather(*(ask(number) for number in range(1_200)))
    assert statuses.count(200) == 1_001
    assert statuses.count(429) == 199


async def test_a_tenant_of_many_users_gets_the_part_of_one(tmp_path: Path) -> None:
    one_at_a_time = {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1}
    control = {"saturation": one_at_a_time, "flowBy": "User"}
    served: list[str] = []
    async with (
        running_stack(
            tmp_path / "stack",
            EngineFlags(count=1, speed=10.0),
            gateway={"clients": "Trusted"},
            more={"flowControl": control},
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):

        async def ask(tenant: str, user: str) -> None:
            headers = {"content-type": "application/json", "x-attache-tenant": tenant, "x-attache-user": user}
            answer = await http.post(CHAT, content=body(max_tokens=20), headers=headers)
            assert answer.status_code == 200
            served.append(tenant)

        asked = [ask("many", f"user-{number}") for number in range(60)]
        await asyncio.gather(*asked, *(ask("one", "alone") for _ in range(30)))
    # both wait until about 60 were served, where a busy machine does not send some later; the part of one among 61
    # users would be one of 50
    assert 12 <= served[:50].count("one") <= 30


HASTY = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: hasty}
spec: {model: MODEL, endpoints: [{address: "ENGINE"}], trafficPolicy: {timeout: 10ms, retry: {attempts: 0}}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: hasty}
spec: {modelName: hasty, rules: [{targetModels: [{modelServerName: hasty}]}]}
"""


async def test_a_gateway_that_is_trusted_chooses_no_other_servers_time_limit(tmp_path: Path) -> None:
    async with (
        running_stack(
            tmp_path / "stack", EngineFlags(count=1, speed=1.0), gateway={"clients": "Trusted"}, watch=True
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        hasty = HASTY.replace("MODEL", MODEL).replace("ENGINE", stack.engines[0].removeprefix("http://"))
        (stack.config / "hasty.yaml").write_text(hasty)

        async def ask(model: str, **headers: str) -> int:
            asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
            return (await http.post(CHAT, json=asked, headers=headers)).status_code

        async def is_cut_off() -> bool:
            return await ask("hasty") == 504

        await eventually(is_cut_off)
        (limit,) = {one.spec.traffic_policy.route_settings_text for one in load_directory(stack.config).servers} - {""}
        assert await ask(ALIAS, **{"x-attache-policy": limit}) == 200
