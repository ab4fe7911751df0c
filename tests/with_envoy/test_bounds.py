# SPDX-License-Identifier: Apache-2.0
"""What clients may make Envoy hold: bodies, connections, memory. Answers are bounded by none of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING

import httpx

from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
BODY = {"model": "llama", "messages": []}


async def test_a_small_limit_of_bodies_does_not_bound_answers(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, gateway={"maxBodySize": "100Ki"}) as gateway:
        gateway.engine.is_plain = True
        names = {CHAT: ("prompt_tokens", "completion_tokens"), RESPONSES: ("input_tokens", "output_tokens")}
        for number, (path, (prompt, completion)) in enumerate(names.items()):
            text = 'x"\n' * 1_000_000
            gateway.engine.pieces = [json.dumps({"text": text, "usage": {prompt: 31, completion: 7}}).encode()]
            answer = await gateway.http.post(gateway.url + path, json={**BODY, "input": "x"})
            assert (answer.status_code, len(answer.content)) == (200, len(gateway.engine.pieces[0]))
            assert await gateway.outcomes_since(number) == [{"prompt": 31, "completion": 7, "cached": None}]
        refused = await gateway.http.post(gateway.url + CHAT, json={**BODY, "user": "x" * 200_000})
        assert refused.status_code == 413
        assert "100Ki" in refused.json()["error"]["message"]


async def test_more_requests_than_a_connection_to_extproc_takes_have_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.bundle.envoy.clusters.MOST_STREAMS", 4)
    four = "import runpy, extproc.wire_names as p; p.MOST_STREAMS = 4; runpy.run_module('extproc', None, '__main__')"
    async with gateway_on(tmp_path, program=("-c", four)) as gateway:
        gateway.engine.pieces, gateway.engine.then = [b"data: {}\n\n"], "hang"
        async with contextlib.AsyncExitStack() as held:
            for _ in range(2):
                request = partial(gateway.http.stream, "POST", gateway.url + CHAT, json={**BODY, "stream": True})
                answers = await asyncio.gather(*(held.enter_async_context(request()) for _ in range(10)))
                assert [one.status_code for one in answers] == [200] * 10
            page = (await gateway.http.get(f"{gateway.metrics}/metrics")).text
            assert "attache_open_streams 20.0" in page, "extproc has decided each"


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Once it is, or once something comes."""
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_connections_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, gateway={"maxConnections": 4}) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        closings = [asyncio.create_task(is_closed(reader)) for reader, _ in held]
        # not so long that Envoy would close those that say nothing
        await eventually(lambda: sum(one.done() and one.result() for one in closings) >= 2, timeout_s=30)
        for one in closings:
            one.cancel()
        await asyncio.gather(*closings, return_exceptions=True)
        for _, writer in held:
            await close(writer)


async def test_a_body_that_does_not_come_ends_its_request(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, gateway={"requestTimeout": "1s"}) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(4096), 120)
        assert b" 408 " in answer.splitlines()[0]
        assert b'"error"' in answer
        await close(writer)


async def test_unfinished_bodies_end_before_memory_does(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, gateway={"maxHeap": "80Mi", "maxBodySize": "16Mi"}) as gateway:
        gateway.engine.is_plain = True
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        writers = []
        for _ in range(12):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 16000000\r\n\r\n".encode())
            writer.write(b" " * 15_000_000)
            writers.append(writer)
        await asyncio.sleep(2)
        for writer in writers:
            await close(writer)
        async with httpx.AsyncClient(timeout=60) as http:

            async def is_served() -> bool:
                return (await http.post(gateway.url + CHAT, json=BODY)).status_code == 200

            # an Envoy that ended for want of memory would refuse the connection
            await eventually(is_served)
