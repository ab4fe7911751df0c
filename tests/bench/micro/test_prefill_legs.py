# SPDX-License-Identifier: Apache-2.0
"""What a prefill leg costs, from rounds to figures; and the sidecar that it is compared with."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web

from bench.micro.instant_engine import prefill_response, serve
from bench.micro.prefill_legs import LegCost, LegReport, LegRound, ProcessMemory, leg_figures, markdown
from bench.micro.prefill_sidecar import PREFILLER, prefill_body
from bench.micro.prefill_sidecar import serve as serve_sidecar
from bench.stack.processes import free_ports
from tests.waiting import eventually


def round_of(prefill_ms: float, whole: LegCost, gateway: LegCost, sidecar: LegCost) -> LegRound:
    return LegRound(prefill_ms, {"whole": whole, "gateway": gateway, "sidecar": sidecar})


ROUNDS = [
    round_of(0.5, LegCost(2.0, 400, 500, 300), LegCost(4.5, 900, 1000, 320), LegCost(6.5, 1400, 10_500, 310)),
    round_of(0.5, LegCost(2.0, 400, 500, 300), LegCost(3.5, 800, 1000, 320), LegCost(4.5, 1400, 5_500, 310)),
    round_of(1.0, LegCost(2.0, 400, 500, 300), LegCost(4.5, 600, 1000, 320), LegCost(5.0, 1200, 5_500, 310)),
]


def test_a_leg_adds_what_is_above_a_request_without_one_and_the_prefill_itself() -> None:
    found = leg_figures(100_000, ROUNDS)
    # 4.5 - 2.0 - 0.5, 3.5 - 2.0 - 0.5, 4.5 - 2.0 - 1.0
    assert (found.added_ms["gateway"].median, found.added_ms["gateway"].low, found.added_ms["gateway"].high) == (
        1.5,
        1,
        2,
    )
    assert found.added_ms["sidecar"].median == 2.0
    assert found.cpu_us["gateway"].median == 400
    assert found.events_cpu_us["sidecar"].median == 5000
    # of each round: 2/4, 1/2, 1.5/2
    assert found.ratios["added latency"].median == 0.5
    assert found.ratios["added latency"].high == 0.75
    assert found.ratios["CPU, 100 events"].median == 0.1


def test_memory_is_a_multiple_of_the_bodies() -> None:
    assert ProcessMemory(100, 700).growth_per_body_byte(200) == 3.0


def test_the_table_has_a_line_for_each_size() -> None:
    memory = {"gateway": ProcessMemory(2**20, 3 * 2**20, 200), "sidecar": ProcessMemory(2**20, 2 * 2**20)}
    report = LegReport(0.5, 0.25, [leg_figures(100_000, ROUNDS)], memory, {100_000: ROUNDS})
    text = markdown(report)
    assert "| 100 KB | 1.50 | 2.00 | 400 | 1,000 | 500 | 5,000 | 0.50 | 0.40 | 0.10 |" in text
    assert "200 at the same time: 1 MiB before, at most 3 MiB" in text
    assert "busy for 25%" in text


def test_the_sidecar_asks_for_one_token() -> None:
    body: dict[str, Any] = {"model": "m", "stream": True, "stream_options": {}, "max_tokens": 9}
    found = prefill_body(body)
    assert (found["stream"], found["max_tokens"]) == (False, 1)
    assert "stream_options" not in found
    assert found["kv_transfer_params"]["do_remote_decode"] is True


async def test_the_sidecar_makes_the_leg_and_passes_the_answer() -> None:
    asked: list[dict[str, Any]] = []

    async def decode(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"answer": 1})

    app = web.Application()
    app.router.add_post("/{path:.*}", decode)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    prefill, sidecar = free_ports(2)
    tasks = [
        asyncio.create_task(one)
        for one in (
            serve([prefill], everywhere=False, post=prefill_response(64)),
            serve_sidecar(sidecar, f"127.0.0.1:{runner.addresses[0][1]}"),
        )
    ]
    url, body = f"http://127.0.0.1:{sidecar}/v1/chat/completions", {"model": "m"}
    async with aiohttp.ClientSession() as http:

        async def ask(headers: dict[str, str]) -> bytes | None:
            try:
                async with http.post(url, json=body, headers=headers) as answer:
                    return await answer.read()
            except aiohttp.ClientError:
                return None

        async def is_up() -> bool:
            return await ask({}) is not None

        await eventually(is_up)
        assert json.loads(await ask({PREFILLER: f"127.0.0.1:{prefill}"}) or b"") == {"answer": 1}
    assert "kv_transfer_params" not in asked[0]
    assert asked[-1]["kv_transfer_params"]["remote_block_ids"] == [[0, 1, 2, 3]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()


async def test_a_prefill_engine_may_hold_requests() -> None:
    (port,) = free_ports(1)
    task = asyncio.create_task(serve([port], everywhere=False, post=prefill_response(32), pause_s=0.2))
    async with aiohttp.ClientSession() as http:

        async def ask() -> dict[str, Any] | None:
            try:
                async with http.post(f"http://127.0.0.1:{port}/v1/completions", json={}) as answer:
                    found: dict[str, Any] = await answer.json()
                    return found
            except aiohttp.ClientError:
                return None

        async def is_up() -> bool:
            return await ask() is not None

        await eventually(is_up)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        found = await ask()
        assert clock() - began_s >= 0.19
        assert found is not None
        assert found["kv_transfer_params"]["remote_block_ids"] == [[0, 1]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
