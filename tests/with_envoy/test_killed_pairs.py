# SPDX-License-Identifier: Apache-2.0
"""Engines of a prefill/decode pair that are killed in the middle of a request, behind a real Envoy, with a fallback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from bench.stack.processes import Processes, free_ports
from controller.usage.rows import parse_usage_line
from tests.waiting import eventually
from tests.with_envoy.test_fallback import Engine as Spare
from tests.with_envoy.test_fallback import document, route, running
from tests.with_envoy.test_prefill_leg import LATER_S, PROMPT, pairs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.usage.rows import UsageRow
    from tests.with_envoy.test_fallback import Gateway

# A prompt takes a second, SGLang's engines meet in five, and an answer of a thousand tokens is longer than any test.
SLOW: Final = "0.02"
# A prompt takes ten seconds.
SLOWER: Final = "0.002"
LONG: Final = 1000


class Scene:
    """``log``: of usage. ``messages``: extproc's log. ``pids``, ``urls``: of the engines, by role. ``body``: what each
    request has.
    """

    body: Final = {"model": "llama", "messages": [{"role": "user", "content": PROMPT}]}

    def __init__(self, gateway: Gateway, spare: Spare, log: Path, messages: Path) -> None:
        self.gateway = gateway
        self.spare = spare
        self.log = log
        self.messages = messages
        self.pids: dict[str, int] = {}
        self.urls: dict[str, str] = {}

    def kill(self, role: str) -> None:
        os.kill(self.pids[role], signal.SIGKILL)

    async def works(self, role: str) -> bool:
        """Whether the engine has a request that has not ended."""
        page = (await self.gateway.http.get(f"{self.urls[role]}/metrics")).text
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        return any(float(line.split()[-1]) > 0 for line in page.splitlines() if line.startswith(names))

    async def has_leg(self) -> bool:
        """Whether extproc waits for the prefill engine."""
        return any((await self.gateway.values("attache_prefill_legs_in_flight")).values())

    async def ask(self, **fields: object) -> httpx.Response:
        return await self.gateway.http.post(f"{self.gateway.url}/v1/chat/completions", json=self.body | fields)

    def blamed(self) -> set[str]:
        """The roles of engines whose breaker has opened, as extproc's log has it."""
        opened = [line for line in self.messages.read_text().splitlines() if "the breaker of engine" in line]
        return {role for role in self.urls for line in opened if f"engine {self.address(role)} of" in line}

    async def is_over(self) -> UsageRow:
        """Nothing is in flight any more, and extproc knows its outcome; its one row."""

        async def is_free() -> bool:
            if sum((await self.gateway.values("attache_answers_total")).values()) != 1:
                return False
            legs = await self.gateway.values("attache_prefill_legs_in_flight")
            return not any((*(await self.gateway.values("attache_in_flight")).values(), *legs.values()))

        await eventually(is_free)
        await eventually(lambda: self.log.exists() and self.log.stat().st_size > 0)
        (line,) = self.log.read_bytes().splitlines()
        return parse_usage_line(line, LATER_S)

    def address(self, role: str) -> str:
        return self.urls[role].removeprefix("http://")


@asynccontextmanager
async def scene_of(
    directory: Path, *, connector: str = "NixlConnector", speed: str = SLOW, **group: object
) -> AsyncIterator[Scene]:
    spare = Spare("spare", [])
    await spare.start()
    ports = free_ports(4)
    roles = {"prefill": ("kv_producer", ports[0], ports[1]), "decode": ("kv_consumer", ports[2], ports[3])}
    endpoints = [{"address": f"127.0.0.1:{port}", "labels": {"role": role}} for role, (_, port, _) in roles.items()]
    engine = {"engine": "SGLang"} if connector == "bootstrap_room" else {}
    if engine:
        group["transferPort"] = ports[1]
    # what Envoy ejects is for other tests
    policy = {"trafficPolicy": {"outlierDetection": {"consecutiveFailures": 1000}}, "scrapeInterval": "0s"}
    documents = [
        document(
            "ModelServer",
            "llama",
            {"model": "llama", "endpoints": endpoints, "pdGroup": pairs(connector, **group), **policy, **engine},
        ),
        document("ModelServer", "spare", {"model": "small", "endpoints": [{"address": spare.address}], **policy}),
        route("llama", {"targetModels": [{"modelServerName": "llama"}], "fallback": [{"modelServerName": "spare"}]}),
    ]
    log = directory / "usage.log"
    directory.joinpath("engines").mkdir()
    async with (
        Processes(directory / "engines") as processes,
        running(directory / "stack", documents, {}, [], {"usageLog": {"path": str(log)}}) as gateway,
    ):
        scene = Scene(gateway, spare, log, directory / "stack" / "extproc.log")
        for role, (kind, port, side) in roles.items():
            transfer = json.dumps({"kv_connector": "SGLang" if engine else connector, "kv_role": kind})
            command = [sys.executable, "-m", "attache", "engine", "--port", str(port), "--model", "llama"]
            command += ["--side-channel-port", str(side), "--kv-transfer-config", transfer, "--speed", speed]
            scene.urls[role] = f"http://127.0.0.1:{port}"
            scene.pids[role] = await processes.start(role, command)

            async def is_up(url: str = scene.urls[role]) -> bool:
                try:
                    return (await gateway.http.get(f"{url}/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await processes.wait_ready(role, is_up)
        yield scene
    await spare.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_engine_that_dies_while_it_computes_leaves_the_request_to_the_fallback(
    tmp_path: Path, *, stream: bool
) -> None:
    async with scene_of(tmp_path, speed=SLOWER, onPrefillFailure="Fail") as scene:
        asking = asyncio.create_task(scene.ask(stream=stream))
        await eventually(lambda: scene.works("prefill"))
        scene.kill("prefill")
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-attache-served-by"] == "default/spare"
        row = await scene.is_over()
        assert (row.server, row.endpoint, row.attempts, row.is_failed) == (
            "default/spare",
            scene.spare.address,
            1,
            False,
        )
        assert len(scene.spare.got) == 1
        (labels,) = await scene.gateway.values("attache_fallbacks_total")
        assert {*labels} == {"default/spare", "prefill"}
        await eventually(lambda: scene.blamed() == {"prefill"})


@pytest.mark.parametrize(
    ("connector", "speed", "is_prefilled", "stream"),
    [
        ("NixlConnector", SLOW, True, False),
        ("NixlConnector", SLOWER, False, False),
        ("NixlConnector", SLOWER, False, True),
        ("bootstrap_room", SLOW, False, False),
    ],
)
async def test_a_decode_engine_that_dies_before_its_first_byte_is_blamed_alone(
    tmp_path: Path, connector: str, speed: str, *, is_prefilled: bool, stream: bool
) -> None:
    """``is_prefilled``: its prompt is computed by then. Headers of a stream come before its first token."""
    async with scene_of(tmp_path, connector=connector, speed=speed) as scene:
        asking = asyncio.create_task(scene.ask(max_tokens=LONG, stream=stream, temperature=0.25))
        await eventually(lambda: scene.works("decode") if is_prefilled else scene.has_leg())
        scene.kill("decode")
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-attache-served-by"] == "default/spare"
        row = await scene.is_over()
        assert (row.server, row.endpoint, row.attempts, row.is_failed) == (
            "default/spare",
            scene.spare.address,
            2,
            False,
        )
        # what stands in it of the KV cache is for the engine that has died
        (got,) = map(json.loads, scene.spare.got)
        asked = {**scene.body, "max_tokens": LONG, "stream": stream, "temperature": 0.25}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        assert got == {**asked, **usage, "model": "small"}
        await eventually(lambda: scene.blamed() == {"decode"})


async def test_a_prefill_engine_of_sglang_that_dies_is_blamed_alone_and_the_fallback_answers(tmp_path: Path) -> None:
    """extproc has the decode engine end the request, which is an error of that engine for Envoy."""
    async with scene_of(tmp_path, connector="bootstrap_room") as scene:
        asking = asyncio.create_task(scene.ask(max_tokens=LONG))
        await eventually(scene.has_leg)
        scene.kill("prefill")
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-attache-served-by"] == "default/spare"
        row = await scene.is_over()
        assert (row.server, row.attempts, row.is_failed) == ("default/spare", 2, False)
        assert len(scene.spare.got) == 1
        await eventually(lambda: scene.blamed() == {"prefill"})


async def test_a_stream_whose_decode_engine_dies_breaks(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        body = {"model": "llama", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": LONG, "stream": True}
        url = f"{scene.gateway.url}/v1/chat/completions"
        pieces = list[str]()

        async def read(answer: httpx.Response) -> None:
            async for piece in answer.aiter_text():
                pieces.append(piece)
                if len(pieces) == 3:
                    scene.kill("decode")

        async with scene.gateway.http.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await read(answer)
        assert "[DONE]" not in "".join(pieces)
        row = await scene.is_over()
        assert (row.server, row.endpoint, row.ended, row.is_failed) == (
            "default/llama",
            scene.address("decode"),
            "engine",
            True,
        )
        assert not scene.spare.got
        assert "prefill" not in scene.blamed()


async def test_a_prefill_engine_that_dies_after_its_part_changes_nothing(tmp_path: Path) -> None:
    async with scene_of(tmp_path, onPrefillFailure="Fail") as scene:
        body = {"model": "llama", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, "stream": True}
        url = f"{scene.gateway.url}/v1/chat/completions"
        pieces = list[str]()
        async with scene.gateway.http.stream("POST", url, json=body) as answer:
            async for piece in answer.aiter_text():
                pieces.append(piece)
                if len(pieces) == 3:
                    scene.kill("prefill")
        assert "[DONE]" in "".join(pieces)
        row = await scene.is_over()
        assert (row.server, row.ended, row.output) == ("default/llama", "whole", 30)
        assert not scene.blamed()
