# SPDX-License-Identifier: Apache-2.0
"""The cost of a request in the headers of its answer, through a real Envoy; against what its row costs."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from extproc.api.pricing import Price, TokenCounts, compile_prices, cost_micros
from extproc.wire_names import COST_CURRENCY, COST_MICROS
from tests.extproc.scenes import configuration, endpoints
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRICING: Final = [
    {
        "currency": "EUR",
        "perMillion": {"input": "2.5", "cachedInput": "0.25", "output": "10", "reasoning": "0.000001"},
        "perRequest": "0.000003",
        "tiers": [
            {"aboveInputTokens": 1000, "perMillion": {"input": "4", "cacheWrite": "5", "output": "12"}},
            {"aboveInputTokens": 50_000, "perMillion": {"input": "0.3"}},
        ],
    }
]
LIAR: Final = {COST_MICROS: "1", COST_CURRENCY: "XXX"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("cost-header")
    spec = {"usageLog": {"path": str(directory / "usage.log"), "costHeader": True}}
    async with gateway_on(directory, gateway=spec, more={"pricing": PRICING}) as running:
        yield running


async def ask(gateway: Gateway, path: str = "/v1/chat/completions", **fields: object) -> httpx.Response:
    body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, **fields}
    return await gateway.http.post(f"{gateway.url}{path}", json=body)


def answers(gateway: Gateway, content: bytes, *, plain: bool = True, **headers: str) -> None:
    gateway.engine.pieces, gateway.engine.is_plain = (content,), plain
    gateway.engine.headers = headers


def cost_of(answer: httpx.Response) -> tuple[str, str] | None:
    found = answer.headers.get(COST_MICROS), answer.headers.get(COST_CURRENCY)
    return None if found == (None, None) else found


def expected(tokens: TokenCounts) -> tuple[str, str]:
    written = f"{endpoints('10.0.0.1:8000')}pricing: {json.dumps(PRICING)}"
    price = compile_prices(configuration(servers={"llama": written}).servers[0].spec.pricing).price_at(0.0)
    assert isinstance(price, Price)
    return str(cost_micros(price, tokens)), "EUR"


async def test_a_plain_answer_has_the_exact_cost_of_its_tokens(gateway: Gateway) -> None:
    rng = random.Random(0)
    for _ in range(60):
        given = rng.choice([30, 1000, 1001, 50_000, 200_000])
        cached, output = rng.randint(0, given), rng.randint(0, 10_000)
        reasoning = rng.randint(0, output)
        usage = {
            "prompt_tokens": given,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
        answers(gateway, json.dumps({"choices": [], "usage": usage}).encode(), **LIAR)
        answer = await ask(gateway)
        assert answer.json()["usage"] == usage
        assert cost_of(answer) == expected(TokenCounts(given, cached, 0, output, reasoning))


async def test_the_messages_api_counts_what_it_writes_to_a_cache(gateway: Gateway) -> None:
    usage = {"input_tokens": 900, "cache_read_input_tokens": 150, "cache_creation_input_tokens": 350}
    content = {"type": "message", "content": [], "usage": {**usage, "output_tokens": 12}}
    answers(gateway, json.dumps(content).encode())
    assert cost_of(await ask(gateway, "/v1/messages")) == expected(TokenCounts(1400, 150, 350, 12))


HOSTILE: Final = [
    {"usage": {"prompt_tokens": -5, "completion_tokens": 1e300}},
    {"usage": {"prompt_tokens": 10, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": 10**6}}},
]


async def test_hostile_counts_cost_what_they_can_at_most(gateway: Gateway) -> None:
    for content, counts in zip(HOSTILE, (TokenCounts(), TokenCounts(10, 10)), strict=True):
        answers(gateway, json.dumps(content).encode())
        assert cost_of(await ask(gateway)) == expected(counts)


async def test_a_request_cannot_bring_a_price_of_its_own(gateway: Gateway) -> None:
    usage: dict[str, Any] = {"usage": {"prompt_tokens": 10, "completion_tokens": 1}}
    answers(gateway, json.dumps(usage).encode())
    body = {"user": '"price":{"currency":"USD","rates":{"input":9}}'}
    assert cost_of(await ask(gateway, **body)) == expected(TokenCounts(10, output=1))


async def test_what_has_no_cost_or_cannot_wait_has_no_header(gateway: Gateway) -> None:
    # no usage, a stream, one that is too long to be held, a refusal
    answers(gateway, b'{"choices": []}', **LIAR)
    assert cost_of(await ask(gateway)) is None
    answers(gateway, b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n', plain=False, **LIAR)
    assert cost_of(await ask(gateway, stream=True)) is None
    text = "a" * (1024 * 1024)
    answers(gateway, json.dumps({"text": text, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode())
    long = await ask(gateway)
    assert (cost_of(long), long.json()["text"]) == (None, text)
    refused = await ask(gateway, model="nobody")
    assert (refused.status_code, cost_of(refused)) == (404, None)
