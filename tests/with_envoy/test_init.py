# SPDX-License-Identifier: Apache-2.0
"""``attache init``, then ``attache serve``: two directories beside each other, and engines behind TLS."""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import TYPE_CHECKING

import httpx
from aiohttp import web

from attache.init import main
from bench.stack.processes import Processes, free_ports
from extproc.api.config_loader import load_directory
from tests.certificates import Authority
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


async def test_two_directories_are_served_at_once(
    tmp_path: Path, envoy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = free_ports(2)
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
        for port in engines:
            command = ["-m", "bench.engine", "--port", str(port), "--model", MODEL]
            await processes.start(f"engine-{port}", [sys.executable, *command])
        words = [word for port in engines for word in ("--engine", f"127.0.0.1:{port}")]

        async def are_listed() -> bool:
            try:
                for port in engines:
                    await http.get(f"http://127.0.0.1:{port}/v1/models")
            except httpx.TransportError:
                return False
            return True

        await eventually(are_listed)
        served: list[tuple[str, str, str]] = []
        for name in ("one", "two"):
            # the second one finds the ports of the first in use
            assert await asyncio.to_thread(main, [str(tmp_path / name), *words, "--key", name]) == 0
            said = capsys.readouterr().out.splitlines()
            key = next(line.rpartition(" ")[2] for line in said if line.startswith("key of"))
            program = ["env", f"ENVOY={envoy}", sys.executable, "-m", *said[-1].split()]
            await processes.start(f"serve-{name}", program)
            log = tmp_path / f"serve-{name}.log"

            def is_ready(log: Path = log) -> bool:
                return "ready: clients connect to" in log.read_text()

            await eventually(is_ready)
            metrics = said[-1].partition("--metrics ")[2] or "127.0.0.1:9003"
            served.append((load_directory(tmp_path / name).gateway.listen, metrics, key))
        assert len({listen for listen, _, _ in served}) == 2
        for listen, metrics, key in served:
            url = f"http://{listen}/v1/chat/completions"
            bearer = {"authorization": f"Bearer {key}"}

            async def is_served(url: str = url, bearer: dict[str, str] = bearer) -> bool:
                return (await http.post(url, json=body, headers=bearer)).status_code == 200

            await eventually(is_served)
            assert (await http.post(url, json=body)).status_code == 401
            page = (await http.get(f"http://{metrics}/metrics")).text
            assert all(f'endpoint="127.0.0.1:{port}"' in page for port in engines)


async def test_engines_behind_tls_and_a_key_are_served_as_they_are_found(
    tmp_path: Path, envoy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, keys = Authority(), []
    for name, text in (("ca.pem", authority.cert), ("key", b"sk-engine\n")):
        (tmp_path / name).write_bytes(text)
    files = authority.issue(dns=["engine.example.com", "gateway.example.com"]).write(tmp_path, "engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certFile"], files["keyFile"])
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}

    async def answer(request: web.Request) -> web.Response:
        keys.append((request.path, request.headers.get("authorization")))
        if request.path == "/metrics":
            return web.Response(text="sglang:num_running_reqs 0\n")
        return web.json_response({"data": [{"id": MODEL}], "choices": [], "usage": {}})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        words = ["--engine", f"https://127.0.0.1:{runner.addresses[0][1]}", "--engine-ca", str(tmp_path / "ca.pem")]
        words += ["--engine-server-name", "engine.example.com", "--engine-key-file", str(tmp_path / "key")]
        words += ["--key", "web", "--limit", "1/hour", "--tls", files["certFile"], files["keyFile"]]
        assert await asyncio.to_thread(main, [str(tmp_path / "config"), *words]) == 0
        said = capsys.readouterr().out.splitlines()
        (key,) = (line.rpartition(" ")[2] for line in said if line.startswith("key of"))
        (listener,) = load_directory(tmp_path / "config").gateway.listeners
        trusted = ssl.create_default_context(cadata=authority.cert.decode())
        async with (
            Processes(tmp_path) as processes,
            httpx.AsyncClient(timeout=60, verify=trusted, base_url=f"https://{listener.address}") as http,
        ):
            await processes.start("serve", ["env", f"ENVOY={envoy}", sys.executable, "-m", *said[-1].split()])

            async def post() -> httpx.Response:
                return await http.post(
                    "/v1/chat/completions",
                    json=asked,
                    headers={"authorization": f"Bearer {key}"},
                    extensions={"sni_hostname": "gateway.example.com"},
                )

            async def is_served() -> bool:
                try:
                    return (await post()).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_served)
            assert (await post()).status_code == 429
        assert {path for path, _ in keys} >= {"/v1/models", "/metrics", "/v1/chat/completions"}
        assert {sent for _, sent in keys} == {"Bearer sk-engine"}
    finally:
        await runner.cleanup()
