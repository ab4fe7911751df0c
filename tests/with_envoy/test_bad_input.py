# SPDX-License-Identifier: Apache-2.0
"""What clients get wrong, or try: each gets a clear error in OpenAI's shape, and harms nobody else."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.waiting import eventually

if TYPE_CHECKING:
    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
NESTED = b'{"model": "llama", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


async def post(stack: Stack, content: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as http:
        return await http.post(
            stack.url + path, content=content, headers={"content-type": "application/json", **headers}
        )


def chat(text: str = "hello", **fields: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "llama", "messages": messages, "max_tokens": 2, **fields}).encode()


@pytest.mark.parametrize(
    ("content", "status", "told"),
    [
        (b'{"model": "llama", "messages": [', 400, "JSON"),
        (b"hello", 400, "JSON"),
        (b"[]", 400, "object"),
        (b"", 400, "body"),
        (b'{"messages": []}', 400, "model"),
        (b'{"model": 7, "messages": []}', 400, "model"),
        (b'{"model": "llama"}', 400, "messages"),
        (b'{"model": "llama", "messages": {"role": "user"}}', 400, "messages"),
        (b'{"model": "no-such-model", "messages": []}', 404, "no-such-model"),
        (b'{"model": "llama", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "UTF-8"),
        (NESTED, 400, "messages"),
    ],
    ids=[
        "broken JSON",
        "not JSON",
        "another shape",
        "no body",
        "no model",
        "a model that is a number",
        "no messages",
        "messages of another shape",
        "an unknown model",
        "invalid UTF-8",
        "deeply nested",
    ],
)
async def test_bad_bodies_are_refused_with_the_reason(stack: Stack, content: bytes, status: int, told: str) -> None:
    answer = await post(stack, content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"
    assert (await post(stack, chat())).status_code == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "write /v1 before it: /v1/chat/completions"),
        ("/v1/chat/completions/", "leave the slash at its end out: /v1/chat/completions"),
        ("/v1/v1/messages", "write /v1/messages"),
        ("/openai/v1/embeddings", "write /v1/embeddings"),
        ("/models", "write /v1 before it: /v1/models"),
        ("/", "there are /v1/"),
    ],
)
async def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(stack: Stack, path: str, told: str) -> None:
    answer = await post(stack, chat(), path)
    assert answer.status_code == 404
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/llama", "/v1/models/none", "/", CHAT, "/healthz"])
async def test_head_is_answered_as_get_without_the_body(stack: Stack, path: str) -> None:
    async with httpx.AsyncClient() as http:
        head, get = await http.head(stack.url + path), await http.get(stack.url + path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"].partition(";")[0] == get.headers["content-type"].partition(";")[0]


async def test_load_balancers_see_health_at_the_clients_port(stack: Stack) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{stack.url}/healthz")
    assert (answer.status_code, answer.text) == (200, "ok\n")


async def upgraded(stack: Stack, head: str, *headers: str, body: bytes = b"") -> tuple[int, str]:
    """Status and body of the answer to a request that asks for an upgrade."""
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"{head} HTTP/1.1", "host: a", "connection: upgrade", "upgrade: websocket", *headers]
    lines += [f"content-length: {len(body)}"] if body else []
    writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    status, _, rest = answer.decode().partition("\r\n")
    return int(status.split()[1]), rest.partition("\r\n\r\n")[2]


@pytest.mark.parametrize("head", ["GET /v1/realtime", f"POST {CHAT}", "GET /v1/models"])
async def test_a_request_for_an_upgrade_is_answered_404_at_once(stack: Stack, head: str) -> None:
    status, body = await upgraded(stack, head, body=chat() if head.startswith("POST") else b"")
    assert status == 404
    assert "without the header 'upgrade'" in body
    assert json.loads(body)["error"]["code"] == "unknown_url"


async def test_a_prompt_of_10_mb_is_routed(stack: Stack) -> None:
    # that it is too long for the model is for the engine to say, in its own words
    answer = await post(stack, chat("word " * 2_000_000))
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]


async def test_a_body_beyond_the_limit_is_refused(stack: Stack) -> None:
    answer = await post(stack, b" " * (17 * 1024 * 1024))
    assert answer.status_code == 413
    assert "16Mi" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/metrics", 404), ("POST", "/v1/load_lora_adapter", 404)],
)
async def test_what_is_not_served_stays_out_of_reach(stack: Stack, method: str, path: str, status: int) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.request(method, stack.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def served_by(stack: Stack) -> list[int]:
    async def count(http: httpx.AsyncClient, engine: str) -> int:
        text = (await http.get(f"{engine}/metrics")).text
        return int(sum(float(n) for n in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)))

    async with httpx.AsyncClient(timeout=60) as http:
        return [await count(http, engine) for engine in stack.engines]


async def test_a_client_steers_nothing_by_headers(stack: Stack) -> None:
    prompt = chat("steer me " * 200)
    await post(stack, prompt)
    before = await served_by(stack)
    for engine in stack.engines:
        await post(
            stack,
            prompt,
            **{
                "x-gateway-destination-endpoint": engine.removeprefix("http://"),
                "X-Gateway-Destination-Endpoint-Subset": engine.removeprefix("http://"),
                "x-attache-server": "nowhere",
                "x-envoy-upstream-rq-timeout-ms": "1",
            },
        )
    gained = [after - earlier for after, earlier in zip(await served_by(stack), before, strict=True)]
    # all three go where the prefix is, not where the client pointed
    assert sorted(gained) == [0, 0, 3]


async def test_a_client_that_leaves_during_the_wait_frees_its_place(stack: Stack) -> None:
    async def in_flight() -> float:
        async with httpx.AsyncClient(timeout=60) as http:
            text = (await http.get(f"{stack.metrics}/metrics")).text
        return sum(float(n) for n in re.findall(r"^attache_in_flight\{.*\} (\S+)$", text, re.MULTILINE))

    async with httpx.AsyncClient(timeout=60) as http:
        for engine in stack.engines:
            await http.post(f"{engine}/faults", json={"fault": "stall", "for_s": 5})
        asking = asyncio.create_task(http.post(stack.url + CHAT, content=chat()))

        async def is_in_flight() -> bool:
            return await in_flight() == 1

        await eventually(is_in_flight)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()

    async def nothing_is_in_flight() -> bool:
        return await in_flight() == 0

    await eventually(nothing_is_in_flight)
    assert (await post(stack, chat())).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(stack: Stack) -> None:
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    del reader
    assert (await post(stack, chat())).status_code == 200


async def test_a_body_in_chunks_without_its_length_is_served(stack: Stack) -> None:
    async def parts() -> object:
        yield chat()[:20]
        yield chat()[20:]

    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(stack.url + CHAT, content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 200
