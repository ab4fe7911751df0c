# SPDX-License-Identifier: Apache-2.0
"""Budgets through a real Envoy: many streams at once on a small budget, and what clients see of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANTS: Final = ("streams", "unbounded", "openai", "anthropic", "free", "soft", "money")
KEYS: Final = [{"name": name, "key": f"sk-{name}-0123", "tenant": name} for name in TENANTS]
HELLO: Final[Any] = [{"role": "user", "content": "hello"}]
STREAMS, PAID, TOKENS = 200, 20, 40
# a month, so that no window ends while tests run but once in a while
MONTH: Final = {"window": "Month", "timeZone": "Europe/Berlin"}


def of(tenant: str, most: dict[str, object], **fields: object) -> dict[str, object]:
    return {"name": tenant, "tenants": [tenant], "max": most, **MONTH, **fields}


BUDGETS: Final = [
    of("streams", {"outputTokens": PAID * TOKENS}),
    of("unbounded", {"tokens": 30_000}),
    of("openai", {"requests": 1}),
    of("anthropic", {"requests": 1}, per="ApiKey"),
    of("soft", {"requests": 4}, soft=0.5),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(
        tmp_path_factory.mktemp("budgets") / "stack",
        EngineFlags(count=2, speed=20.0, stream_headers="first-token"),
        gateway={
            "authentication": {"apiKeys": KEYS},
            "budgets": [of("money", {"money": "0.002"}, per="Route")],
            "failureMode": "Close",
        },
        more={"pricing": [{"perMillion": {"input": 1, "output": 10}}]},
        route={"budgets": BUDGETS},
        headers={"authorization": f"Bearer {KEYS[4]['key']}"},
    ) as running:
        yield running


class Client:
    """A tenant's."""

    def __init__(self, http: httpx.AsyncClient, tenant: str) -> None:
        self._http = http
        self._headers = {"authorization": f"Bearer sk-{tenant}-0123"}

    async def ask(self, **fields: object) -> httpx.Response:
        content = {"model": ALIAS, "messages": HELLO, **fields}
        return await self._http.post("/v1/chat/completions", json=content, headers=self._headers)

    async def streamed(self, **fields: object) -> tuple[int, str, int]:
        """Status, code of the error, and tokens of the whole."""
        answer = await self.ask(stream=True, stream_options={"include_usage": True}, **fields)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["code"], 0
        chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        usage = json.loads(chunks[-1])["usage"]
        return 200, "", usage["completion_tokens"]


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as client:
        yield client


async def test_two_hundred_streams_at_once_get_a_budget_for_twenty(http: httpx.AsyncClient) -> None:
    client = Client(http, "streams")
    found = await asyncio.gather(*(client.streamed(max_tokens=TOKENS) for _ in range(STREAMS)))
    statuses = Counter((status, code) for status, code, _ in found)
    assert set(statuses) == {(200, ""), (429, "insufficient_quota")}
    # their maximum is known, so that there is no error of an estimate
    assert sum(tokens for *_, tokens in found) <= PAID * TOKENS
    assert statuses[200, ""] >= PAID


async def test_without_a_maximum_the_excess_is_that_of_estimates(http: httpx.AsyncClient) -> None:
    client = Client(http, "unbounded")
    found = await asyncio.gather(*(client.streamed() for _ in range(STREAMS)))
    statuses = Counter((status, code) for status, code, _ in found)
    assert set(statuses) == {(200, ""), (429, "insufficient_quota")}
    # a first answer is estimated at 1,000 tokens: each granted one may exceed that, and none is granted beyond
    excess = sum(max(0, tokens - 1_000) for *_, tokens in found)
    assert sum(tokens for *_, tokens in found) <= 30_000 + excess


async def test_openai_sees_insufficient_quota_and_asks_once(stack: Stack) -> None:
    asked = Counter[int]()

    async def count(answer: httpx.Response) -> None:
        asked[answer.status_code] += 1

    async with (
        httpx.AsyncClient(event_hooks={"response": [count]}, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="sk-openai-0123", http_client=http) as client,
    ):
        first = await client.chat.completions.with_raw_response.create(model=ALIAS, messages=HELLO, max_tokens=2)
        assert first.headers["x-attache-budget-remaining"].startswith('"openai";r=0;t=')
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=ALIAS, messages=HELLO, max_tokens=2)
    error = caught.value
    assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
    assert "The monthly budget 'openai' of this tenant (1 requests) is used up." in error.message
    assert 0 < int(error.response.headers["retry-after"]) <= 31 * 86_400 + 3_600
    assert error.response.headers["x-attache-budget-remaining"].startswith('"openai";r=0;')
    # it retries other refusals with this status
    assert asked == {200: 1, 429: 1}


async def test_anthropic_sees_a_rate_limit_error_with_the_message(stack: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-anthropic-0123", timeout=60) as client:
        await client.messages.create(model=ALIAS, max_tokens=2, messages=HELLO)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model=ALIAS, max_tokens=2, messages=HELLO)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["error"]["type"] == "rate_limit_error"
    assert "The monthly budget 'anthropic' of this API key" in body["error"]["message"]
    assert body["error"]["details"] == {"error_code": "insufficient_quota"}


async def test_answers_warn_beyond_the_soft_share(http: httpx.AsyncClient) -> None:
    answers = [await Client(http, "soft").ask(max_tokens=2) for _ in range(5)]
    assert [one.status_code for one in answers] == [200] * 4 + [429]
    assert ["x-attache-budget-warning" in one.headers for one in answers] == [False, True, True, True, True]
    assert answers[2].headers["x-attache-budget-warning"] == '"soft";used=0.75;unit="requests"'


async def test_money_is_spent_by_prices_over_all_callers_and_shown(stack: Stack, http: httpx.AsyncClient) -> None:
    client = Client(http, "money")
    spent = 0
    for _ in range(50):
        answer = await client.ask(max_tokens=20)
        if answer.status_code == 429:
            break
        usage = answer.json()["usage"]
        spent += usage["prompt_tokens"] + 10 * usage["completion_tokens"]
    error = answer.json()["error"]
    assert error["code"] == "insufficient_quota"
    assert "The monthly budget 'money' of all callers" in error["message"]
    # 0.002 USD; what is left is less than one request may cost
    assert 1_500 <= spent <= 2_000
    name = 'attache_cost_micros_total{currency="USD",server="default/llama",tenant="money"}'

    async def is_counted() -> bool:
        page = (await http.get(f"{stack.metrics}/metrics")).text
        return f"{name} {spent:.1f}\n" in page or f"{name} {spent}\n" in page

    await eventually(is_counted)


async def test_who_has_no_budget_is_bounded_by_none(http: httpx.AsyncClient) -> None:
    answer = await Client(http, "free").ask(max_tokens=2)
    assert answer.status_code == 200
    assert "x-attache-budget-remaining" not in answer.headers


@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_workers_that_are_asked_at_once_grant_a_budget_once(tmp_path: Path, workers: int) -> None:
    flags = EngineFlags(count=2, speed=20.0, stream_headers="first-token")
    budget = {"name": "all", "per": "Route", "max": {"outputTokens": PAID * TOKENS}, **MONTH}
    async with (
        running_stack(tmp_path / "stack", flags, workers=workers, route={"budgets": [budget]}) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=120, limits=httpx.Limits(max_connections=STREAMS)) as http,
    ):
        client = Client(http, "any")
        found = await asyncio.gather(*(client.streamed(max_tokens=TOKENS) for _ in range(STREAMS)))
    statuses = Counter((status, code) for status, code, _ in found)
    assert set(statuses) == {(200, ""), (429, "insufficient_quota")}
    assert sum(tokens for *_, tokens in found) <= PAID * TOKENS
    assert statuses[200, ""] >= PAID


async def test_workers_share_a_budget(tmp_path: Path) -> None:
    flags = EngineFlags(count=1, speed=20.0, stream_headers="first-token")
    budget = {"name": "all", "per": "Route", "max": {"requests": 10}, **MONTH}
    async with (
        running_stack(tmp_path / "stack", flags, workers=2, route={"budgets": [budget]}) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        host, _, first = stack.metrics.removeprefix("http://").partition(":")
        pages = [f"http://{host}:{int(first) + number}/metrics" for number in range(2)]
        content = {"model": ALIAS, "messages": HELLO, "max_tokens": 2}

        def knows(page: str, used: int) -> Callable[[], Awaitable[bool]]:
            series = 'attache_budget_used_ratio{budget="default/llama/all",caller="",unit="requests"} '

            async def is_known() -> bool:
                text = (await http.get(page)).text
                shown = [line for line in text.splitlines() if line.startswith(series)]
                return [round(float(line.removeprefix(series)) * 10) for line in shown] == [used]

            return is_known

        for used in range(1, 11):
            assert (await http.post("/v1/chat/completions", json=content)).status_code == 200
            for page in pages:
                await eventually(knows(page, used))
        for _ in range(20):
            assert (await http.post("/v1/chat/completions", json=content)).status_code == 429
