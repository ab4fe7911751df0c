# SPDX-License-Identifier: Apache-2.0
"""Two simulated engines as a pair, over HTTP, under each connector; and what goes wrong between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from aiohttp import web

from bench.engine.hardware import PRESETS
from bench.engine.kv_connectors import TransferConfig
from bench.engine.kv_exchange import ExchangeSettings
from bench.engine.kv_transfer import TransferNetwork
from bench.engine.request import GARBAGE
from bench.engine.scheduler import EngineLimits
from bench.engine.server import EngineServer, EngineSettings
from bench.stack.processes import free_ports
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "llama"
PROMPT = "once upon a time " * 40
HARDWARE = PRESETS["h100-llama-3.1-8b"]
# 170 tokens of 131,072 bytes are 22 ms of it
NETWORK = TransferNetwork(1e9, latency_s=0.001, handshake_s=0.1)
TOKENS = 170


class Engine:
    def __init__(self, port: int, side_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.side_port = side_port
        self.side = f"http://127.0.0.1:{side_port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)
        self.settings: EngineSettings | None = None
        self.server: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until it answers. A second start is that of another process: with another id, and nothing cached."""
        assert self.settings is not None
        self.server = asyncio.create_task(EngineServer(self.settings).run())
        await eventually(lambda: _is_up(self))

    async def stop(self) -> None:
        assert self.server is not None
        self.server.cancel()
        await asyncio.gather(self.server, return_exceptions=True)

    async def complete(self, prompt: str = PROMPT, *, request_id: str = "", **fields: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}
        return await self.http.post("/v1/completions", json=body, headers={"x-request-id": request_id})

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def computed(self) -> float:
        return await self.metric('vllm:prompt_tokens_by_source_total{engine="0",model_name="llama",source="local_comp')

    async def is_free(self) -> bool:
        return await self.metric("vllm:kv_cache_usage_perc") == 0


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode

    async def are_free(self) -> None:
        """Until neither holds a block."""
        await eventually(self.prefill.is_free)
        await eventually(self.decode.is_free)


@contextlib.asynccontextmanager
async def running(
    connector: str, *, speed: float = 1.0, version: str = "1", extra: dict[str, Any] | None = None, **config: object
) -> AsyncGenerator[Pair]:
    """A pair of engines. ``version``: of the decode engine; the other's is 1."""
    ports = free_ports(4)
    engines = [Engine(*ports[:2]), Engine(*ports[2:])]
    async with asyncio.TaskGroup() as tasks:
        for engine, role, its in zip(engines, ("kv_producer", "kv_consumer"), ("1", version), strict=True):
            # a lease must not end because the machine is busy
            more = {"kv_connector_extra_config": {"kv_lease_duration": 3600.0, **(extra or {})}, **config}
            made = msgspec.convert({"kv_connector": connector, "kv_role": role, **more}, TransferConfig)
            exchange = ExchangeSettings(
                config=made,
                host="127.0.0.1",
                port=engine.side_port,
                model=MODEL,
                network=NETWORK,
                kv_bytes=float(HARDWARE.model.kv_bytes_per_token),
                speed=speed,
                version=its,
            )
            settings = EngineSettings(
                host="127.0.0.1",
                port=int(engine.url.rpartition(":")[2]),
                model=MODEL,
                adapters=(),
                hardware=HARDWARE,
                limits=EngineLimits(num_gpu_blocks=1000),
                max_model_len=4000,
                default_max_tokens=8,
                speed=speed,
                seed=0,
                headers_first=False,
                exchange=exchange,
            )
            engine.settings = settings
            engine.server = tasks.create_task(EngineServer(settings).run())
        for engine in engines:
            await eventually(lambda engine=engine: _is_up(engine))  # type: ignore[misc]
        yield Pair(*engines)
        for engine in engines:
            await engine.http.aclose()
            await engine.stop()


async def _is_up(engine: Engine) -> bool:
    try:
        await engine.http.get(f"{engine.side}/query")
        return (await engine.http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


NIXL = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "p0",
    "remote_request_id": "a-1",
}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


async def prefilled(pair: Pair, request_id: str = "a") -> dict[str, Any]:
    """The parameters of a prefill by NIXL."""
    answer = await pair.prefill.complete(request_id=request_id, max_tokens=1, kv_transfer_params=ASKED)
    found: dict[str, Any] = answer.json()["kv_transfer_params"]
    return found


async def test_nixl_pull_transfers_the_prompt_and_frees_it() -> None:
    async with running("NixlConnector") as pair:
        await pair.prefill.complete(max_tokens=1)
        params = await prefilled(pair)
        assert params["remote_request_id"].startswith("a-")
        assert (params["remote_num_tokens"], len(params["remote_block_ids"][0])) == (TOKENS, 11)
        assert params["remote_prefill_cached_tokens"] == 160
        assert not await pair.prefill.is_free()
        answer = (await pair.decode.complete(kv_transfer_params=params)).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 160}
        assert answer["usage"]["completion_tokens"] == 4
        assert await pair.decode.computed() == 0
        assert await pair.decode.metric("vllm:nixl_bytes_transferred_count") == 1
        assert await pair.decode.metric("vllm:nixl_xfer_time_seconds_sum") > 0.1
        await pair.are_free()


async def test_without_parameters_the_decode_engine_computes_and_counts() -> None:
    async with running("NixlConnector") as pair:
        params = await prefilled(pair)
        await pair.decode.complete(kv_transfer_params={**params, "remote_host": None})
        assert await pair.decode.computed() == TOKENS
        assert await pair.decode.metric("vllm:nixl_bytes_transferred_count") == 0


async def test_after_the_lease_the_answer_is_garbage_with_status_200() -> None:
    async with running("NixlConnector", extra={"kv_lease_duration": 1.0}) as pair:
        params = await prefilled(pair)
        await eventually(pair.prefill.is_free)
        assert await pair.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        answer = await pair.decode.complete(kv_transfer_params=params)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == GARBAGE.decode() * 4
        assert await pair.decode.computed() == 0


async def test_versions_are_not_paired() -> None:
    async with running("NixlConnector", version="2") as pair:
        answer = await pair.decode.complete(kv_transfer_params=await prefilled(pair))
        assert answer.status_code == 500
        assert "version" in answer.json()["error"]["message"]
        assert await pair.decode.metric("vllm:nixl_num_failed_transfers_total") == 1
        await pair.are_free()


async def test_a_restarted_or_dead_prefill_engine_fails_the_request_or_it_is_computed() -> None:
    async with running("NixlConnector", kv_load_failure_policy="recompute") as pair:
        params = await prefilled(pair)
        (nobody,) = free_ports(1)
        for wrong in ({"remote_engine_id": "another"}, {"remote_port": nobody}):
            answer = await pair.decode.complete(kv_transfer_params={**params, **wrong})
            assert answer.status_code == 200
            assert GARBAGE.decode() not in answer.json()["choices"][0]["text"]
        assert await pair.decode.metric("vllm:nixl_num_failed_transfers_total") == 2
    async with running("NixlConnector") as pair:
        params = await prefilled(pair)
        answer = await pair.decode.complete(kv_transfer_params={**params, "remote_engine_id": "another"})
        assert answer.status_code == 500


async def test_a_refused_decode_request_frees_the_prefill() -> None:
    async with running("NixlConnector") as pair:
        params = await prefilled(pair)
        refused = await pair.decode.complete("x " * 20_000, kv_transfer_params=params)
        assert refused.status_code == 400
        await eventually(pair.prefill.is_free)
        assert await pair.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_a_client_that_leaves_during_the_prefill_leaves_nothing_pinned() -> None:
    async with running("NixlConnector", speed=0.004) as pair:
        leg = asyncio.create_task(prefilled(pair))
        await eventually(lambda: _runs(pair.prefill))
        leg.cancel()
        await asyncio.wait([leg])
        await eventually(pair.prefill.is_free)


async def _runs(engine: Engine) -> bool:
    return await engine.metric("vllm:num_requests_running") == 1


async def test_a_decode_engine_sends_heartbeats_until_its_client_leaves() -> None:
    heard: Counter[str] = Counter()

    async def hear(http: web.Request) -> web.Response:
        heard[http.path] += 1
        if http.path == "/handshake":
            await asyncio.Event().wait()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/{any}", hear)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    params = {**NIXL, "remote_host": "127.0.0.1", "remote_port": port}
    async with running("NixlConnector", speed=100.0) as pair:
        waiting = asyncio.create_task(pair.decode.complete(kv_transfer_params=params))
        await eventually(lambda: heard["/heartbeat"] >= 3)
        waiting.cancel()
        await asyncio.wait([waiting])
        # it tells that nobody will read
        await eventually(lambda: heard["/release"] == 1)
        await eventually(pair.decode.is_free)
    await runner.cleanup()


async def test_a_heartbeat_prolongs_a_lease_that_is_there() -> None:
    async with running("NixlConnector") as pair:
        key = (await prefilled(pair))["remote_request_id"]
        answers = [
            (await pair.prefill.http.post(f"{pair.prefill.side}/{path}", json={"key": key})).json()["found"]
            for path in ("heartbeat", "release", "heartbeat")
        ]
        assert answers == [True, True, False]


Leg = Callable[[Pair], tuple[dict[str, Any], dict[str, Any]]]


def _push(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    return ASKED, {
        "do_remote_prefill": True,
        "remote_engine_id": "p0",
        "remote_host": "127.0.0.1",
        "remote_port": pair.prefill.side_port,
        "remote_request_id": "one",
    }


def _mooncake(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    where = {"remote_engine_id": "p0", "remote_bootstrap_addr": pair.prefill.side}
    return {**ASKED, "transfer_id": "xfer-1"}, {"do_remote_prefill": True, "transfer_id": "xfer-1", **where}


def _p2p(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    where = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": pair.prefill.side_port}
    return {"remote_decoder": {"kv_request_id": "r"}}, {"remote_prefiller": where}


@pytest.mark.parametrize(
    ("connector", "legs", "order"),
    [
        ("NixlPushConnector", _push, "prefill first"),
        ("NixlPushConnector", _push, "decode first"),
        ("MooncakeConnector", _mooncake, "prefill first"),
        ("MooncakeConnector", _mooncake, "decode first"),
        ("OffloadingConnector", _p2p, "prefill first"),
    ],
)
async def test_the_other_connectors_of_vllm(connector: str, legs: Leg, order: str) -> None:
    async with running(connector, engine_id="p0") as pair:
        to_prefill, to_decode = legs(pair)

        async def prefill() -> httpx.Response:
            return await pair.prefill.complete(request_id="one", max_tokens=1, kv_transfer_params=to_prefill)

        if order == "prefill first":
            answered = (await prefill()).json().get("kv_transfer_params")
            if connector == "NixlPushConnector":
                # what the decode engine gets here was known before
                assert to_decode.items() <= answered.items()
            else:
                assert answered is None
        decode = asyncio.create_task(pair.decode.complete(request_id="one", kv_transfer_params=to_decode))
        if order == "decode first":
            await eventually(lambda: _holds(pair.decode))
            await prefill()
        answer = await decode
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert await pair.decode.computed() == 0
        await pair.are_free()


async def _holds(engine: Engine) -> bool:
    return not await engine.is_free()


async def test_mooncakes_query_names_the_engine() -> None:
    async with running("MooncakeConnector", engine_id="p0") as pair:
        found = (await pair.prefill.http.get(f"{pair.prefill.side}/query")).json()
        assert found["0"]["engine_id"] == "p0"
        assert found["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")


async def test_mooncake_keeps_no_prefill_that_ended_by_a_stop() -> None:
    async with running("MooncakeConnector") as pair:
        schema = {"type": "json_schema", "json_schema": {"name": "nothing", "schema": {"type": "null"}}}
        params = {**ASKED, "transfer_id": "xfer-1"}
        answer = await pair.prefill.complete(response_format=schema, kv_transfer_params=params)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await eventually(pair.prefill.is_free)


async def test_a_mooncake_decode_without_its_prefill_waits_480_seconds_and_fails() -> None:
    async with running("MooncakeConnector", speed=1000.0, engine_id="p0") as pair:
        answer = await pair.decode.complete(kv_transfer_params=_mooncake(pair)[1])
        assert answer.status_code == 500
        assert "in time" in answer.json()["error"]["message"]
        await pair.are_free()


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        ("ExampleConnector", 10),
        ("LMCacheConnectorV1", 170),
        ("MooncakeStoreConnector", 10),
        ("HF3FSKVConnector", 10),
        ("FlexKVConnectorV1", 10),
    ],
)
async def test_a_shared_store_joins_two_requests_without_parameters(
    connector: str, expected: int, tmp_path: Path
) -> None:
    async with running(connector, extra={"shared_storage_path": str(tmp_path)}) as pair:
        await pair.prefill.complete(max_tokens=1)
        await pair.decode.complete()
        # whole prompts up to the last full block; of LMCache's chunks of 256 tokens the prompt has none
        assert await pair.decode.computed() == expected
        await pair.decode.complete("something else " * 40)
        assert await pair.decode.computed() == expected + 150
        await pair.are_free()


ROOMS = (("a-1", 2**62 + 7), ("b-1", 2**62 + 8))


def _rooms(pair: Pair, rid: str = ROOMS[0][0], room: int = ROOMS[0][1]) -> dict[str, Any]:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.side_port}
    return {**where, "bootstrap_room": room, "rid": rid}


async def test_sglang_computes_when_both_are_there() -> None:
    async with running("SGLang") as pair:
        prefill = asyncio.create_task(pair.prefill.complete(**_rooms(pair)))
        decode = await pair.decode.complete(**_rooms(pair))
        assert decode.json()["usage"]["completion_tokens"] == 4
        # it cuts the answer itself
        assert (await prefill).json()["usage"]["completion_tokens"] == 1
        assert await pair.decode.computed() == 0
        await pair.are_free()


async def test_sglangs_prefill_alone_waits_until_its_timeout() -> None:
    async with running("SGLang", speed=1000.0) as pair:
        answer = await pair.prefill.complete(**_rooms(pair))
        assert answer.status_code == 500
        assert "did not ask" in answer.json()["error"]["message"]
        assert await pair.prefill.computed() == 0


async def test_sglangs_decode_is_told_that_its_prefill_failed() -> None:
    async with running("SGLang") as pair:
        decode = asyncio.create_task(pair.decode.complete(**_rooms(pair, rid="abc-1")))
        await eventually(lambda: _holds(pair.decode))
        await pair.decode.http.post("/abort_request", json={"rid": "abc"})
        assert (await decode).status_code == 500
        await pair.are_free()


async def test_a_prefill_of_sglang_that_waits_for_its_decode_engine_is_aborted_by_its_id() -> None:
    async with running("SGLang") as pair:
        one, other = (asyncio.create_task(pair.prefill.complete(**_rooms(pair, rid, room))) for rid, room in ROOMS)
        await eventually(lambda: _aborted(pair.prefill, "a-", one))
        assert one.result().json()["error"]["message"] == "Aborted"
        assert not other.done()
        await eventually(lambda: _aborted(pair.prefill, "b-1", other))
        assert other.result().status_code == 500
        assert await pair.prefill.computed() == 0


async def _aborted(engine: Engine, rid: str, request: asyncio.Task[httpx.Response]) -> bool:
    """The request may not have come yet: asked again and again."""
    await engine.http.post("/abort_request", json={"rid": rid})
    return request.done()


async def test_a_prefill_of_sglang_whose_client_leaves_keeps_nothing() -> None:
    async with running("SGLang") as pair:
        prefill = asyncio.create_task(pair.prefill.complete(**_rooms(pair)))
        key = str(ROOMS[0][1])
        # a decode engine asks for it, and never reads it
        ready = await pair.prefill.http.post(f"{pair.prefill.side}/await", json={"key": key, "wait_s": 60.0})
        assert ready.json()["found"]
        assert not prefill.done()
        prefill.cancel()
        await asyncio.wait([prefill])
        await eventually(pair.prefill.is_free)


async def test_prompts_of_one_request_to_sglang_have_rooms_of_their_own() -> None:
    prompts = [PROMPT, "something else " * 40]
    async with running("SGLang") as pair:
        rids, rooms = zip(*ROOMS, strict=True)
        where = {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [pair.prefill.side_port] * 2}
        fields = {"prompt": prompts, **where, "bootstrap_room": rooms, "rid": rids}
        answers = await asyncio.gather(*[one.complete(**fields) for one in (pair.prefill, pair.decode)])
        assert [one.json()["usage"]["completion_tokens"] for one in answers] == [2, 8]
        assert await pair.decode.computed() == 0
        await pair.are_free()
        decode = asyncio.create_task(pair.decode.complete(**fields))
        await eventually(lambda: _aborted(pair.decode, rids[1], decode))
        assert decode.result().status_code == 500
        await pair.are_free()
        assert (await pair.decode.complete(**{**fields, "prompt": prompts[:1]})).status_code == 400
        assert (await pair.decode.complete(**{**fields, "bootstrap_port": 1})).status_code == 400


async def test_a_decode_engine_of_sglang_waits_in_vain_for_300_seconds_in_an_empty_room() -> None:
    async with running("SGLang", speed=1000.0) as pair:
        prefill, decode = await asyncio.gather(
            pair.prefill.complete(**_rooms(pair, *ROOMS[0])), pair.decode.complete(**_rooms(pair, *ROOMS[1]))
        )
        assert (prefill.status_code, decode.status_code) == (500, 500)
        assert "in time" in decode.json()["error"]["message"]
        await pair.are_free()


async def test_sglang_refuses_a_request_without_a_room() -> None:
    async with running("SGLang") as pair:
        assert (await pair.decode.complete()).status_code == 400


async def test_tensorrt_llm_context_first() -> None:
    async with running("TensorRT-LLM") as pair:
        asked = {"request_type": "context_only", "disagg_request_id": 2**42 + 1}
        context = (await pair.prefill.complete(disaggregated_params=asked)).json()
        params = context["choices"][0]["disaggregated_params"]
        assert (params["disagg_request_id"], len(params["first_gen_tokens"])) == (2**42 + 1, 1)
        assert len(context["prompt_token_ids"]) == TOKENS
        answer = await pair.decode.http.post(
            "/v1/completions",
            json={
                "model": MODEL,
                "prompt": context["prompt_token_ids"],
                "max_tokens": 4,
                "disaggregated_params": {**params, "request_type": "generation_only"},
            },
        )
        assert answer.json()["usage"]["prompt_tokens"] == TOKENS
        assert await pair.decode.computed() == 0
        await pair.are_free()
