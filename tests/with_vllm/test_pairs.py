# SPDX-License-Identifier: Apache-2.0
"""extproc makes the prefill leg between two real engines. NixlConnector transfers the KV cache by TCP, ExampleConnector
by files of a directory.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from bench.stack.processes import Processes, free_ports
from tests.waiting import PATIENCE_S, eventually
from tests.with_vllm.conftest import Gateway, engine_command, gateway_of, until_up
from tests.with_vllm.model import NAME, weights_script, write_model
from tests.with_vllm.test_real_engines import words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="session")
BLOCK: Final = 128


class Connector(msgspec.Struct, frozen=True):
    """``transfer``: in ``--kv-transfer-config``. ``rest``: most tokens of a prompt that the decode engine computes;
    with ExampleConnector those behind the last whole block before the last token.
    """

    name: str
    transfer: dict[str, object]
    rest: int = 0


# a lease must not end because the machine is busy
NIXL: Final = Connector("NixlConnector", {"kv_connector_extra_config": {"kv_lease_duration": 3600}})
EXAMPLE: Final = Connector("ExampleConnector", {}, rest=BLOCK + 1)


class Engine:
    """One of the pair."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.http = httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S)

    async def metric(self, name: str, label: str = "") -> float:
        """The sum of a family's series that have the label."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        found = [line for line in lines if re.split("[{ ]", line)[0] == name and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def prompt_tokens(self) -> dict[str, float]:
        """So far, by where they came from."""
        names = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return {name: await self.metric("vllm:prompt_tokens_by_source_total", f'source="{name}"') for name in names}

    async def is_free(self) -> bool:
        """Whether it holds no block for any request."""
        return not await self.metric("vllm:num_requests_running") and not await self.metric("vllm:kv_cache_usage_perc")


class Pair(msgspec.Struct, frozen=True):
    """Two engines behind a gateway. All prompts are prefilled by one, and decoded by the other."""

    connector: Connector
    processes: Processes
    prefill: Engine
    decode: Engine
    gateway: Gateway
    client: openai.AsyncOpenAI

    async def legs(self, outcome: str) -> float:
        """How many ended so."""
        return await self.gateway.metric(f'attache_prefill_legs_total{{outcome="{outcome}"')

    async def are_free(self) -> None:
        """Until neither holds a block."""
        await eventually(self.prefill.is_free)
        await eventually(self.decode.is_free)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", name="pair", params=[NIXL, EXAMPLE], ids=lambda one: one.name
)
async def running_pair(
    request: pytest.FixtureRequest, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    connector: Connector = request.param
    directory = tmp_path_factory.mktemp("pair")
    model, store, ports, roles = directory / "model", directory / "store", free_ports(4), ("prefill", "decode")
    write_model(model)
    store.mkdir()
    writing = await asyncio.create_subprocess_exec(vllm_python, *weights_script(model))
    assert await writing.wait() == 0
    endpoints = [
        {"address": f"127.0.0.1:{port}", "labels": {"role": role}} for role, port in zip(roles, ports, strict=False)
    ]
    group = {
        "prefillLabels": {"role": "prefill"},
        "decodeLabels": {"role": "decode"},
        "minUncachedTokens": 0,
        "decideBy": "UncachedTokens",
        "leg": "Gateway",
        "connector": connector.name,
        "lease": "3600s",
    }
    async with Processes(directory) as processes:
        for number, role in enumerate(roles):
            transfer = {
                "kv_connector": connector.name,
                "kv_role": ("kv_producer", "kv_consumer")[number],
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"shared_storage_path": str(store)},
                **connector.transfer,
            }
            flags = ["--block-size", str(BLOCK), "--dtype", "float32", "--kv-transfer-config", json.dumps(transfer)]
            command = engine_command(
                vllm_python,
                model,
                ports[number],
                flags,
                VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(ports[2 + number]),
                UCX_TLS="tcp,sm,self",
            )
            await processes.start(role, command)
        for role, port in zip(roles, ports, strict=False):
            await until_up(processes, role, port)
        prefill, decode = [Engine(str(one["address"])) for one in endpoints]
        async with (
            prefill.http,
            decode.http,
            gateway_of(directory, {"endpoints": endpoints, "pdGroup": group}) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Pair(connector, processes, prefill, decode, gateway, client)


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0}


async def answers_of(client: openai.AsyncOpenAI, model: str, texts: list[str]) -> list[str]:
    """A chat and a completion, each streamed and not."""
    ask: Any = client
    whole = await ask.chat.completions.create(model=model, **chat(texts[0]))
    chunks = await ask.chat.completions.create(model=model, **chat(texts[1]), stream=True)
    found = [whole.choices[0].message.content]
    found.append("".join([one.choices[0].delta.content or "" async for one in chunks if one.choices]))
    completion = await complete(client, model, texts[2])
    pieces = await ask.completions.create(model=model, prompt=texts[3], max_tokens=24, temperature=0, stream=True)
    return [*found, completion, "".join([one.choices[0].text async for one in pieces if one.choices])]


async def complete(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0)
    return answer.choices[0].text


def prompts(count: int, seed: int) -> list[str]:
    """Of 1,000 to 1,400 tokens: not of whole blocks, and computed in one step."""
    rng = random.Random(seed)
    return [words(rng, rng.randrange(1000, 1400)) for _ in range(count)]


async def test_answers_are_those_of_one_engine_and_the_decode_engine_computes_no_prompt(pair: Pair) -> None:
    texts = prompts(4, seed=1)
    found = await answers_of(pair.client, "chat", texts)
    computed, got = await pair.prefill.prompt_tokens(), await pair.decode.prompt_tokens()
    assert len(set(found)) == len(texts)
    assert await pair.legs("prefilled") == len(texts)
    assert got["local_compute"] <= len(texts) * pair.connector.rest
    assert got["external_kv_transfer"] == computed["local_compute"] - got["local_compute"]
    await pair.are_free()
    async with openai.AsyncOpenAI(base_url=f"http://{pair.prefill.address}/v1", api_key="none") as alone:
        assert await answers_of(alone, NAME, texts) == found


async def test_a_client_that_leaves_during_its_prefill_leaves_nothing_behind(pair: Pair) -> None:
    before = [await one.prompt_tokens() for one in (pair.prefill, pair.decode)]
    leaving = asyncio.create_task(complete(pair.client, "chat", words(random.Random(2), 8000)))

    async def computes() -> bool:
        return await pair.prefill.metric("vllm:num_requests_running") == 1

    await eventually(computes)
    leaving.cancel()
    await asyncio.wait([leaving])

    async def has_left() -> bool:
        return await pair.legs("left") == 1

    await eventually(has_left)
    await pair.are_free()
    # they are counted with the first token
    assert [await one.prompt_tokens() for one in (pair.prefill, pair.decode)] == before


# with NixlConnector, the decode engine reads out of the memory of the engine that is killed
@pytest.mark.parametrize("pair", [EXAMPLE], indirect=True, ids=lambda one: one.name)
async def test_when_the_prefill_engine_is_killed_the_decode_engine_computes_the_prompts(pair: Pair) -> None:
    texts = prompts(24, seed=3)
    prefilled, before = await pair.legs("prefilled"), await pair.decode.prompt_tokens()

    async def ask(some: list[str]) -> list[str]:
        # one by one: ExampleConnector stores what one step computes of a prompt
        return [await complete(pair.client, "chat", one) for one in some]

    found = await ask(texts[:8])
    # while it prefills nothing: the decode engine ends at a file that is half written
    await pair.processes.end("prefill", signal.SIGKILL)
    found += await ask(texts[8:])
    assert await pair.legs("prefilled") - prefilled == 8
    assert await pair.legs("unreachable") >= 1
    computed = (await pair.decode.prompt_tokens())["local_compute"] - before["local_compute"]
    assert computed >= sum(len(one) for one in texts[8:])
    async with openai.AsyncOpenAI(base_url=f"http://{pair.decode.address}/v1", api_key="none") as alone:
        assert [await complete(alone, NAME, one) for one in texts] == found
