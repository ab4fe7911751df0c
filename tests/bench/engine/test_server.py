# SPDX-License-Identifier: Apache-2.0
"""The engine as a client sees it: vLLM's answers, metrics and faults."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings
from bench.stack.processes import free_ports
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import openai

MODEL = "llama"
PROMPT = "once upon a time " * 40


class Engine:
    def __init__(self, url: str, server: asyncio.Task[None]) -> None:
        self.url = url
        self.server = server
        self.http = httpx.AsyncClient(base_url=url, timeout=20)

    async def complete(self, prompt: object = PROMPT, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(params=[True])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    (port,) = free_ports(1)
    settings = EngineSettings(
        host="127.0.0.1",
        port=port,
        model=MODEL,
        adapters=("sql",),
        hardware=PRESETS["h100-llama-3.1-8b"],
        limits=EngineLimits(num_gpu_blocks=1000),
        max_model_len=4000,
        default_max_tokens=8,
        speed=20.0,
        seed=0,
        headers_first=request.param,
    )
    async with asyncio.TaskGroup() as tasks:
        server = tasks.create_task(EngineServer(settings).run())
        one = Engine(f"http://127.0.0.1:{port}", server)

        async def is_up() -> bool:
            try:
                return (await one.http.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(is_up)
        yield one
        await one.http.aclose()
        server.cancel()


async def test_a_repeated_prompt_is_reported_as_cached(engine: Engine) -> None:
    first = (await engine.complete()).json()["usage"]
    assert first["prompt_tokens_details"] is None
    assert first["completion_tokens"] == 16
    second = (await engine.complete()).json()["usage"]
    assert second["prompt_tokens"] == 170
    assert second["prompt_tokens_details"]["cached_tokens"] == 160
    assert await engine.metric("vllm:prefix_cache_hits_total") == 160
    assert await engine.metric("vllm:request_success_total") == 2
    assert await engine.metric("vllm:num_requests_running") == 0


async def test_a_prompt_may_be_token_ids(engine: Engine) -> None:
    first = (await engine.complete(list(range(100)))).json()["usage"]
    second = (await engine.complete([*range(64), *range(1000, 1036)])).json()["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"] == 100
    assert second["prompt_tokens_details"]["cached_tokens"] == 64


async def test_each_prompt_of_a_list_gets_its_choices(engine: Engine) -> None:
    ids = list(range(100))
    for prompts in ([PROMPT, "short"], [ids, [7, 8]], [PROMPT, ids]):
        answer = (await engine.complete(prompts, max_tokens=3, n=2)).json()
        assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
        assert [len(one["text"]) for one in answer["choices"]] == [12] * 4
        assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 170 + 100
    streamed = (await engine.complete(["a", "b"], max_tokens=3, stream=True)).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    for index in (0, 1):
        reasons = [one["choices"][0]["finish_reason"] for one in events if one["choices"][0]["index"] == index]
        assert reasons == [None, None, "length"]
    assert await engine.metric("vllm:request_success_total") == 3 * 4 + 2
    assert await engine.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[]], [1, [2]], {"a": 1}])
async def test_a_list_that_is_neither_prompts_nor_tokens_is_refused(engine: Engine, prompt: object) -> None:
    answer = await engine.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert answer.status_code == 400


async def test_a_client_that_leaves_frees_the_places_of_all_choices(engine: Engine) -> None:
    body = {"model": MODEL, "prompt": ["x", "y"], "max_tokens": 3000, "n": 2}
    with pytest.raises(httpx.ReadTimeout):
        await engine.http.post("/v1/completions", json=body, timeout=0.3)

    async def is_idle() -> bool:
        return await engine.metric("vllm:num_requests_running") == 0

    await eventually(is_idle)


SALTED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", SALTED),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
        ("/v1/messages", SALTED),
    ],
)
async def test_prompts_share_cached_blocks_with_the_same_salt_alone(
    engine: Engine, path: str, body: dict[str, object]
) -> None:
    async def cached(**salt: str) -> bool:
        answer = await engine.http.post(path, json={"model": MODEL, **body, **salt})
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        return bool(details.get("cached_tokens") or details.get("cache_read_input_tokens"))

    assert [await cached() for _ in range(2)] == [False, True]
    assert [await cached(cache_salt="a") for _ in range(2)] == [False, True]
    assert [await cached(cache_salt="b"), await cached(cache_salt="a"), await cached()] == [False, True, True]


async def test_a_streamed_chat_carries_its_usage_only_if_asked(engine: Engine) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    plain = (await engine.http.post("/v1/chat/completions", json=asked)).text
    assert '"usage"' not in plain
    events = [json.loads(line[6:]) for line in plain.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
    assert plain.endswith("data: [DONE]\n\n")

    with_usage = await engine.http.post(
        "/v1/chat/completions", json={**asked, "stream_options": {"include_usage": True}}
    )
    last = [json.loads(line[6:]) for line in with_usage.text.splitlines() if line.startswith("data: {")][-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_the_openai_client_reads_every_api(engine: Engine) -> None:
    import openai  # noqa: PLC0415 - half a second, which collection need not take in each process

    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        await check_every_api(client)


async def check_every_api(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="sql", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_tokens=2
    )
    assert chat.choices[0].message.content
    response = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert response.usage is not None
    assert response.usage.output_tokens == 2
    stream = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True)
    kinds = [event.type async for event in stream]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 2,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    vectors = await client.embeddings.create(model=MODEL, input=["a", "a", "b"], encoding_format="float")
    first, second, third = (one.embedding for one in vectors.data)
    assert first == second != third
    assert [model.id async for model in client.models.list()] == [MODEL, "sql"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b'{"model": "llama"}', 400),
        (b'{"model": "other", "prompt": "x"}', 404),
        (json.dumps({"model": "llama", "prompt": "abc " * 5000}).encode(), 400),
    ],
)
async def test_what_it_cannot_serve_is_refused(engine: Engine, content: bytes, status: int) -> None:
    answer = await engine.http.post("/v1/completions", content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_client_that_leaves_frees_its_place(engine: Engine) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await engine.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 3000}, timeout=1.0)

    async def is_idle() -> bool:
        return await engine.metric("vllm:num_requests_running") == 0

    await eventually(is_idle)
    assert await engine.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1


async def test_faults_come_as_often_as_asked(engine: Engine) -> None:
    await engine.http.post("/faults", json={"fault": "unavailable", "times": 2})
    assert [(await engine.complete()).status_code for _ in range(3)] == [503, 503, 200]

    await engine.http.post("/faults", json={"fault": "cut", "after_tokens": 2})
    with pytest.raises(httpx.RemoteProtocolError):
        await engine.complete(stream=True)
    assert (await engine.complete(stream=True)).text.endswith("[DONE]\n\n")

    refused = await engine.http.post("/faults", json={"fault": "explode"})
    assert refused.status_code == 400
    assert "refuse, stall, cut, unavailable, ill, ill-page, drop-events and fail-loads" in refused.text


async def test_it_refuses_connections_for_a_while_and_comes_back(engine: Engine) -> None:
    await engine.http.post("/faults", json={"fault": "refuse", "for_s": 0.3})

    async def new_connection_is_taken() -> bool:
        async with httpx.AsyncClient(timeout=60) as fresh:
            try:
                return (await fresh.get(f"{engine.url}/health")).status_code == 200
            except httpx.ConnectError:
                return False

    assert not await new_connection_is_taken()
    await eventually(new_connection_is_taken)


@pytest.mark.parametrize("engine", [True, False], indirect=True, ids=["headers at once", "headers with a token"])
async def test_headers_of_a_stream_come_when_they_are_told_to(engine: Engine, request: pytest.FixtureRequest) -> None:
    headers_first = request.node.callspec.params["engine"]
    await engine.http.post("/faults", json={"fault": "stall", "for_s": 30})
    body = {"model": MODEL, "prompt": "x", "stream": True}
    # only where they wait for a token must the time pass
    asking = engine.http.stream("POST", "/v1/completions", json=body, timeout=20 if headers_first else 0.5)
    if headers_first:
        async with asking as answer:
            assert answer.status_code == 200
    else:
        with pytest.raises(httpx.ReadTimeout):
            await asking.__aenter__()


async def test_running_requests_are_cut_when_the_engine_is_told_to_end(engine: Engine) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3000, "stream": True}
    async with engine.http.stream("POST", "/v1/completions", json=asked) as answer:
        chunks = answer.aiter_raw()
        await anext(chunks)
        engine.server.cancel()
        with pytest.raises(httpx.RemoteProtocolError):
            b"".join([one async for one in chunks])


async def test_a_form_that_cannot_be_read_is_the_clients_mistake(engine: Engine) -> None:
    part = b'content-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/\x1b\xb8wav'
    answer = await engine.http.post(
        "/v1/audio/transcriptions",
        content=b"--cut\r\n" + part + b"\r\n\r\nRIFF\r\n--cut--\r\n",
        headers={"content-type": "multipart/form-data; boundary=cut"},
    )
    assert answer.status_code == 400
    assert "the form cannot be read" in answer.text
