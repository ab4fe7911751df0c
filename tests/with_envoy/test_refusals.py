# SPDX-License-Identifier: Apache-2.0
"""An engine refuses what the others serve, or a client asks for what no engine serves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.with_envoy.stand_in import Engine, Gateway, gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
}


class Three:
    """A gateway in front of three engines."""

    def __init__(self, gateway: Gateway, engines: Sequence[Engine]) -> None:
        self._gateway = gateway
        self.engines = engines

    async def ask(self, text: str) -> int:
        """The status of one request, whose outcome has reached extproc."""
        before = len(self._gateway.outcomes())
        body = {"model": "llama", "messages": [{"role": "user", "content": text}]}
        answer = await self._gateway.http.post(f"{self._gateway.url}/v1/chat/completions", json=body)
        await self._gateway.outcomes_since(before)
        return answer.status_code

    async def avoided(self) -> bool:
        page = (await self._gateway.http.get(f"{self._gateway.metrics}/metrics")).text
        return "attache_endpoint_avoided{" in page

    def first(self) -> Engine:
        """The one that was asked, after one request."""
        return next(one for one in self.engines if one.requests)


@pytest_asyncio.fixture(loop_scope="module")
async def three(tmp_path: Path) -> AsyncIterator[Three]:
    others = [Engine(), Engine()]
    async with gateway_on(tmp_path, others=others) as gateway:
        engines = [gateway.engine, *others]
        for engine in engines:
            engine.is_plain, engine.pieces = True, [json.dumps(ANSWER).encode()]
        yield Three(gateway, engines)


async def test_what_one_engine_refuses_another_serves(three: Three) -> None:
    assert await three.ask("question 0 " * 50) == 200
    ill = three.first()
    ill.refuses = "question"
    asked = [await three.ask(f"question {number % 4} " * 50) for number in range(60)]
    assert asked.count(400) == 1, "the first; Envoy tries those after it elsewhere"
    assert asked.count(200) == 59


async def test_an_engine_that_refuses_everything_is_avoided(three: Three) -> None:
    assert await three.ask("question") == 200
    three.first().refuses = "question"
    asked = [await three.ask(f"{number} is a new question") for number in range(90)]
    assert asked.count(400) == 1
    assert await three.avoided()


async def test_a_client_whose_requests_no_engine_serves_has_none_avoided(three: Three) -> None:
    for engine in three.engines:
        engine.refuses = "bad"
    asked = [await three.ask("a long beginning " * 200 + f"{number} bad") for number in range(60)]
    assert set(asked) == {400}
    assert not await three.avoided()
    assert 60 < sum(one.requests for one in three.engines) <= 120, "each second request is tried twice more"
    assert all("x-envoy-retriable-status-codes" not in one.asked_headers for one in three.engines)
