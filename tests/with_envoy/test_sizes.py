# SPDX-License-Identifier: Apache-2.0
"""Configurations larger than what Envoy takes by default: lists of models, hosts, servers, changes under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from aiohttp import web

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, configuration
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.envoy.bundle import MOST_ENDPOINT_FILES
from controller.bundle.envoy_admin_client import read_envoy_state, why_not_ready
from extproc.api.config_loader import load_directory
from extproc.wire_names import CHAT_PATH, MODELS_PATH
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# More models than Envoy's list takes, more servers than Linux gives inotify instances to a user.
SIZES = ObjectCounts(models=150, routes=180, hosts=30, adapters=40, endpoints=300)
PLACE = "127.0.0.1:1"


class Large:
    """``bundle --watch`` and Envoy on a large configuration, without extproc; engines tell where and how they were
    asked.
    """

    def __init__(self, folder: Path, sizes: ObjectCounts, processes: Processes, http: httpx.AsyncClient) -> None:
        listen, admin, extproc, metrics, self.engines = free_ports(5)
        self.sizes, self.processes, self.http = sizes, processes, http
        self.url, self.pages = f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{metrics}"
        self.config, self.out = folder / "config", folder / "envoy"
        self.config.mkdir()
        self.admin = f"127.0.0.1:{admin}"
        addresses = [f"127.0.0.1:{listen}", self.admin, f"127.0.0.1:{extproc}"]
        self.write(configuration(sizes, GatewayPorts(*addresses, engines=self.engines), "Open"))

    def write(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            draft = self.config / f".{name}"
            draft.write_bytes(content)
            draft.replace(self.config / name)

    async def start(self) -> None:
        words = ["--config", str(self.config), "--out", str(self.out), "--watch", "--metrics", self.pages[7:]]
        await self.processes.start("bundle", [sys.executable, "-m", "controller", "bundle", *words])

        async def is_written() -> bool:
            return (self.out / "bootstrap.json").is_file()

        await self.processes.wait_ready("bundle", is_written)
        await self.processes.start("envoy", envoy_command(self.out))
        await eventually(self.is_ready)

    async def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.http.get(f"{self.pages}/readyz")).status_code == 200
        return False

    async def ask(self, model: str, host: str = "localhost") -> httpx.Response:
        return await self.http.post(f"{self.url}{CHAT_PATH}", json={"model": model}, headers={"host": host})

    async def serves(self, model: str) -> bool:
        return (await self.ask(model)).status_code == 200


async def answer(request: web.Request) -> web.StreamResponse:
    """What was asked, then, after a while, the end."""
    asked = json.loads(await request.read())
    said = web.StreamResponse()
    await said.prepare(request)
    await said.write(json.dumps({"asked": asked, "host": request.headers["host"]}).encode())
    await asyncio.sleep(asked.get("seconds", 0))
    await said.write_eof(b"\n")
    return said


@pytest.fixture
async def large(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Large]:
    """Of ``SIZES``, or of the sizes that a test is given."""
    sizes: ObjectCounts = getattr(request, "param", SIZES)
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=120) as http:
        one = Large(tmp_path, sizes, processes, http)
        app = web.Application()
        app.add_routes([web.post(CHAT_PATH, answer)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        # the engines' addresses are many, of the loopback interface
        await web.TCPSite(runner, "0.0.0.0", one.engines).start()  # noqa: S104 - all of 127.0.0.0/8, for this test
        await one.start()
        yield one
        await runner.cleanup()


async def test_more_models_than_envoys_own_limits_are_served_and_listed_without_extproc(large: Large) -> None:
    assert SIZES.models > MOST_ENDPOINT_FILES
    for model in ("model-0", "model-149", "adapter-39"):
        for host in ("localhost", "h29.example.com"):
            answered = (await large.ask(model, host)).json()
            # engines see the host that the client asked for, and their own name for the model
            assert answered["host"] == host
            assert answered["asked"]["model"] == (model if model.startswith("adapter") else f"org/{model}")
    assert (await large.ask("model-150")).status_code == 404
    # only an HTTPRoute may have something in front of an inference path
    prefixed = await large.http.post(f"{large.url}/v1/load_lora_adapter{CHAT_PATH}", json={"model": "model-0"})
    assert prefixed.status_code == 404
    assert prefixed.json()["error"]["code"] == "model_not_found"
    for host in ("localhost", "h29.example.com"):
        listed = (await large.http.get(f"{large.url}{MODELS_PATH}", headers={"host": host})).json()
        assert len(listed["data"]) == SIZES.model_routes + SIZES.adapters


@pytest.mark.slow
@pytest.mark.parametrize("large", [ObjectCounts()], indirect=True, ids=["1000-models"])
async def test_a_thousand_models_on_two_thousand_hosts_are_served_and_changed(large: Large) -> None:
    for model, host in (("model-2999", "localhost"), ("adapter-4999", "h1999.example.com")):
        answered = (await large.ask(model, host)).json()
        assert answered["host"] == host
    listed = (await large.http.get(f"{large.url}{MODELS_PATH}", headers={"host": "h7.example.com"})).json()
    assert len(listed["data"]) == large.sizes.model_routes + large.sizes.adapters
    file = large.config / "routes-59.json"
    routes = json.loads(file.read_bytes())
    routes[-1]["spec"]["modelName"] = "renamed"
    large.write({file.name: json.dumps(routes).encode()})

    async def is_renamed() -> bool:
        return await large.serves("renamed")

    await eventually(is_renamed)
    assert (await large.ask("model-2999")).status_code == 404


async def test_a_client_cannot_ask_for_the_host_that_models_without_extproc_have(large: Large) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(large.url.rpartition(":")[2]))
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: without-extproc/default\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_endpoints_that_change_with_many_servers_end_no_answer(large: Large) -> None:
    """Clusters have their endpoints in them then, and are replaced whole."""
    running = [
        asyncio.create_task(
            large.http.post(f"{large.url}{CHAT_PATH}", json={"model": "model-0", "seconds": 4 + number % 3})
        )
        for number in range(20)
    ]
    file = large.config / "servers-0.json"
    servers = json.loads(file.read_bytes())
    address = servers[0]["spec"]["endpoints"][0]["address"]
    for number in range(6):
        ends = [address, f"127.9.9.{number + 1}:{large.engines}"]
        servers[0]["spec"]["endpoints"] = [{"address": one} for one in ends]
        large.write({file.name: json.dumps(servers).encode()})
        assert await large.serves("model-0")
        await asyncio.sleep(0.7)
    assert [one.status_code for one in await asyncio.gather(*running)] == [200] * 20


async def test_models_come_and_go_one_after_another(large: Large) -> None:
    file = large.config / "routes-0.json"
    routes = json.loads(file.read_bytes())
    for number in range(3):
        routes[0]["spec"]["modelName"] = f"renamed-{number}"
        large.write({file.name: json.dumps(routes).encode()})

        async def is_renamed(name: str = f"renamed-{number}") -> bool:
            return await large.serves(name)

        await eventually(is_renamed)
    assert (await large.ask("model-0")).status_code == 404


@pytest.mark.slow
async def test_servers_that_become_few_are_served_on_and_by_an_envoy_that_starts_anew(large: Large) -> None:
    """They have files of endpoints then, which must be there before clusters name them."""
    few = configuration(
        ObjectCounts(models=20, routes=20, hosts=2, adapters=1, endpoints=40),
        GatewayPorts(PLACE, PLACE, PLACE, engines=large.engines),
        "Open",
    )
    for file in large.config.glob("*.json"):
        if file.name not in few:
            file.unlink()
    large.write({name: text for name, text in few.items() if name != "gateway.json"})

    async def has_files() -> bool:
        assert await large.serves("model-0")
        return len([*(large.out / "eds").rglob("*.json")]) == 20

    # what has left the configuration stays for a while
    await eventually(has_files, pause_s=0.2)
    await large.processes.end("envoy")
    await large.processes.start("envoy", envoy_command(large.out))
    await eventually(large.is_ready)
    for model in ("model-0", "model-19"):
        assert await large.serves(model)


async def test_an_envoy_that_starts_with_routes_that_it_refuses_is_not_ready_and_says_so(large: Large) -> None:
    await large.processes.end("bundle")
    await large.processes.end("envoy")
    file = large.out / "rds.json"
    page = json.loads(file.read_bytes())
    page["resources"][0]["max_direct_response_body_size_bytes"] = 1000
    file.write_text(json.dumps(page))
    acknowledgements = AcknowledgementPoller(read_envoy_state, f"{large.out}/bootstrap.json")
    acknowledgements.expect(load_directory(large.config), large.out, 0.0)
    await large.processes.start("envoy", envoy_command(large.out))

    async def has_nothing() -> bool:
        return (await asyncio.to_thread(acknowledgements.poll, float("inf"))).has_nothing

    await eventually(has_nothing)
    assert "serves nothing" in acknowledgements.report.refused

    async def is_live() -> bool:
        return "initializing" not in (await asyncio.to_thread(why_not_ready, large.admin)).lower()

    await eventually(is_live)
    assert "has no routes" in why_not_ready(large.admin)
