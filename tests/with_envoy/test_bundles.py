# SPDX-License-Identifier: Apache-2.0
"""Bundles in a real Envoy: accepted as they are, and harmless to answers that pass through."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from aiohttp import web

from bench.stack.loopback_stack import ALIAS, documents, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import GOLDEN_PATH, write_bundle_once
from extproc.api.config_loader import load_directory
from tests.waiting import until_served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BUNDLES = Path(__file__).parent.parent.parent / "envoy" / "bundles"
NAMES = sorted(folder.name for folder in BUNDLES.iterdir())


def copy_of(name: str, directory: Path) -> Path:
    """The golden bundle where this machine may have it: its own path replaced, and the addresses that it listens on."""
    shutil.copytree(BUNDLES / name, directory)
    listen, admin, steps = free_ports(3)
    for file in directory.rglob("*.json"):
        text = file.read_text().replace(GOLDEN_PATH, str(directory)).replace("/var/lib/attache/", f"{directory}/")
        text = text.replace('"address": "0.0.0.0"', '"address": "127.0.0.1"')
        text = text.replace('"port_value": 8080', f'"port_value": {listen}')
        text = text.replace('"port_value": 8081', f'"port_value": {steps}')
        file.write_text(text.replace('"port_value": 9901', f'"port_value": {admin}'))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_golden_bundles_pass_envoys_validation(envoy: str, tmp_path: Path, name: str) -> None:
    bundle = copy_of(name, tmp_path / "bundle")
    checked = subprocess.run(
        [envoy, "--mode", "validate", "-c", str(bundle / "bootstrap.json")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
async def test_golden_bundles_are_taken_whole_by_a_running_envoy(tmp_path: Path, name: str) -> None:
    # validation reads the bootstrap alone; what the watched files hold is only judged when Envoy runs
    bundle = copy_of(name, tmp_path / "bundle")
    port = json.loads((bundle / "bootstrap.json").read_text())["admin"]["address"]["socket_address"]["port_value"]
    admin = f"http://127.0.0.1:{port}"
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
        await processes.start("envoy", envoy_command(bundle))

        async def is_ready() -> bool:
            try:
                return (await http.get(f"{admin}/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await processes.wait_ready("envoy", is_ready)
        stats = (await http.get(f"{admin}/stats?filter=(cds|lds|rds).*update_(rejected|success|failure)")).text
        counts = {line.rpartition(": ")[0]: int(line.rpartition(": ")[2]) for line in stats.splitlines() if line}
        assert counts["cluster_manager.cds.update_success"] == 1
        assert counts["listener_manager.lds.update_success"] == 1
        assert counts["http.attache.rds.attache.update_success"] == 1
        assert not [name for name, count in counts.items() if count and "success" not in name]


class Engine:
    """A stand-in that answers what the test wants, when the test wants it."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "first"}}]}\n\n')
        await self.go_on.wait()
        await response.write(b"data: not JSON at all\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def embed(self, _: web.Request) -> web.Response:
        return web.json_response({"data": "7" * 80_000_000})


class Gateway:
    def __init__(self, url: str, engine: Engine) -> None:
        self.url = url
        self.engine = engine


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """An Envoy without extproc in front of the stand-in."""
    listen, admin, extproc = free_ports(3)
    engine = Engine()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", engine.stream), web.post("/v1/embeddings", engine.embed)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = tmp_path / "config"
    config.mkdir()
    addresses = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{extproc}"}
    text = documents([f"127.0.0.1:{runner.addresses[0][1]}"], gateway=addresses)
    (config / "a.yaml").write_text(text)
    write_bundle_once(load_directory(config), tmp_path / "envoy", str(tmp_path / "envoy"))
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
        await processes.start("envoy", envoy_command(tmp_path / "envoy"))

        await until_served(http, f"http://127.0.0.1:{listen}")
        yield Gateway(f"http://127.0.0.1:{listen}", engine)
    await runner.cleanup()


async def test_tokens_reach_the_client_as_they_come_and_odd_events_pass(gateway: Gateway) -> None:
    body = {"model": ALIAS, "stream": True, "messages": []}
    async with (
        httpx.AsyncClient(timeout=10) as http,
        http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        # the stand-in sends no more until this has arrived
        assert "first" in await anext(lines)
        gateway.engine.go_on.set()
        rest = [line async for line in lines if line]
    assert rest == ["data: not JSON at all", "data: [DONE]"]


async def test_an_answer_larger_than_any_buffer_passes(gateway: Gateway) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(f"{gateway.url}/v1/embeddings", json={"model": ALIAS, "input": "x"})
    assert answer.status_code == 200
    assert len(answer.content) > 80_000_000


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"model": "unknown"}', 404), (b'{"messages": []}', 400), (b"not JSON", 400), (b'{"model": 7}', 400)],
)
async def test_without_extproc_no_model_is_served_that_no_route_names(
    gateway: Gateway, body: bytes, status: int
) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(f"{gateway.url}/v1/embeddings", content=body)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == ("model_not_found" if status == 404 else None)
