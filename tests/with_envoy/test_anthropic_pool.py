# SPDX-License-Identifier: Apache-2.0
"""The same APIs behind a gateway with one pool: answers pass through extproc, and no ModelRoute names a model."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import EngineFlags, EnginePorts
from bench.stack.processes import Processes, free_ports
from tests.waiting import eventually
from tests.with_envoy.gateways import Gateway, gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES: Final = EngineFlags(count=3, speed=20.0, stream_headers="first-token", adapters=("base",))
LONG: Final = "Tell me something that I do not know, please. " * 40


class Pool:
    """Three engines behind a gateway that sends bodies in pieces."""

    def __init__(self, made: Gateway, engines: list[str]) -> None:
        self.url, self.metrics, self._engines = made.url, made.metrics, engines

    async def served(self) -> list[int]:
        """How many requests each engine has answered."""
        async with httpx.AsyncClient(timeout=60) as http:
            return [
                total((await http.get(f"{url}/metrics")).text, "vllm:request_success_total") for url in self._engines
            ]

    async def counted(self, name: str) -> int:
        """A metric of extproc, summed over its labels."""
        async with httpx.AsyncClient(timeout=60) as http:
            return total((await http.get(f"{self.metrics}/metrics")).text, name)


def total(text: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """The engines serve an adapter under the name by which the pool knows its model."""
    directory = tmp_path_factory.mktemp("pool")
    ports = [EnginePorts(*three) for three in zip(*[iter(free_ports(9))] * 3, strict=True)]
    addresses = [f"127.0.0.1:{one.http}" for one in ports]
    (directory / "engines").mkdir()
    async with Processes(directory / "engines") as processes, httpx.AsyncClient(timeout=60) as http:
        await processes.start("engines", [sys.executable, "-m", "bench.engine", *ENGINES.arguments(ports)])

        async def are_there() -> bool:
            try:
                return (await http.get(f"http://{addresses[-1]}/health")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(are_there)
        async with gateway(directory / "gateway", addresses) as made:
            yield Pool(made, [f"http://{one}" for one in addresses])


async def test_both_clients_go_on_where_the_prefix_is(pool: Pool) -> None:
    said: list[Any] = [{"role": "user", "content": LONG}]
    before = await pool.served()
    async with (
        anthropic.AsyncAnthropic(base_url=pool.url, api_key="none", max_retries=0) as claude,
        openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for turn in range(4):
            if turn % 2:
                answer = await client.chat.completions.create(model="base", max_tokens=2, messages=said)
                assert answer.usage is not None
            elif turn:
                async with claude.messages.stream(model="base", max_tokens=2, messages=said) as stream:
                    assert (await stream.get_final_message()).usage.output_tokens == 2
            else:
                await claude.messages.create(model="base", max_tokens=2, messages=said)
            said += [{"role": "assistant", "content": f"Well. {LONG}"}, {"role": "user", "content": f"And {turn}?"}]
        assert (await claude.messages.count_tokens(model="base", messages=said)).input_tokens > len(LONG)
    after = await pool.served()
    assert sorted(new - old for old, new in zip(before, after, strict=True)) == [0, 0, 4]


async def test_usage_is_read_out_of_its_events_on_the_way(pool: Pool) -> None:
    before = await pool.counted("attache_prompt_tokens_total")
    asked: list[Any] = [{"role": "user", "content": "Never said before. " * 60}]
    prompts = 0
    async with anthropic.AsyncAnthropic(base_url=pool.url, api_key="none", max_retries=0) as claude:
        for _ in range(2):
            async with claude.messages.stream(model="base", max_tokens=2, messages=asked) as stream:
                usage = (await stream.get_final_message()).usage
            prompts += usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.cache_read_input_tokens

    async def is_counted() -> bool:
        return await pool.counted("attache_prompt_tokens_total") - before == prompts

    await eventually(is_counted)


async def test_tokens_in_tokens_out_without_a_model(pool: Pool) -> None:
    before = await pool.served()
    async with httpx.AsyncClient(base_url=pool.url, timeout=30) as http:
        for more in range(3):
            body = {"token_ids": list(range(1000, 3000 + 100 * more)), "sampling_params": {"max_tokens": 3}}
            answer = await http.post("/inference/v1/generate", json=body)
            assert len(answer.json()["choices"][0]["token_ids"]) == 3
    after = await pool.served()
    assert sorted(new - old for old, new in zip(before, after, strict=True)) == [0, 0, 3]


async def test_what_an_engine_refuses_is_passed_on_in_its_form(pool: Pool) -> None:
    async with anthropic.AsyncAnthropic(base_url=pool.url, api_key="none", max_retries=0) as claude:
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await claude.messages.create(
                model="base", max_tokens=1, messages=[{"role": "user", "content": "word " * 600_000}]
            )
        with pytest.raises(anthropic.BadRequestError) as steering:
            await claude.messages.create(
                model="base",
                max_tokens=1,
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"kv_transfer_params": {"remote_host": "10.0.0.1"}},
            )
    assert steering.value.type == "invalid_request_error"
    assert "kv_transfer_params" in str(steering.value.api_message)
