# SPDX-License-Identifier: Apache-2.0
"""An Envoy with HTTPRoutes, extproc, and servers that tell what reached them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import h2.config
import h2.connection
import h2.events
import httpx
import msgspec
import yaml
from aiohttp import web

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

GATEWAY_API: Final = "gateway.networking.k8s.io/v1"
KINDS: Final = {"HTTPRoute": GATEWAY_API}
USAGE: Final = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


class Told(msgspec.Struct, frozen=True):
    """What reached a server, and which one. ``headers``: by lower-case name, repeated ones joined."""

    server: str
    method: str
    path: str
    headers: dict[str, str]
    body: str


class Servers:
    """Servers by name, each with an address of its own. They tell what they got, in answers and in ``told``."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.told: list[Told] = []
        self._runners: list[web.AppRunner] = []

    async def start(self, *names: str) -> None:
        for name in names:
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", partial(self._answer, name))
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            self._runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.addresses[name] = f"127.0.0.1:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def got(self, server: str) -> list[Told]:
        return [one for one in self.told if one.server == server]

    async def _answer(self, server: str, http: web.Request) -> web.StreamResponse:
        if http.headers.get("upgrade", "").lower() == "websocket":
            socket = web.WebSocketResponse()
            await socket.prepare(http)
            async for message in socket:
                await socket.send_str(f"{server}:{message.data}")
            return socket
        await asyncio.sleep(float(http.headers.get("x-delay", "0")))
        headers: dict[str, str] = {}
        for name, value in http.headers.items():
            key = name.lower()
            headers[key] = f"{headers[key]},{value}" if key in headers else value
        told = Told(server, http.method, http.raw_path, headers, (await http.read()).decode("latin-1"))
        failed = sum(1 for one in self.told if one.path == told.path)
        self.told.append(told)
        answer = {**msgspec.to_builtins(told), "usage": USAGE, "object": "chat.completion", "choices": []}
        return web.json_response(
            answer,
            status=503 if failed < int(http.headers.get("x-fail-first", "0")) else 200,
            headers={"x-server": server, "x-removed": "1", "x-added": "own"},
        )


async def answer_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that speaks HTTP/2 without TLS and nothing else."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    writer.write(connection.data_to_send())
    while data := await reader.read(65536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.StreamEnded):
                connection.send_headers(event.stream_id, [(":status", "200"), ("x-server", "http2")], end_stream=True)
        writer.write(connection.data_to_send())
    writer.close()


def document(kind: str, name: str, spec: Mapping[str, object], **metadata: object) -> dict[str, object]:
    version = KINDS.get(kind, API_VERSION)
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def ref(name: str, kind: str = "Backend", **more: object) -> dict[str, object]:
    return {"group": "attache.dev", "kind": kind, "name": name, **more}


def route(
    name: str,
    *rules: Mapping[str, object],
    hostnames: Sequence[str] = (),
    sections: Sequence[str] = (),
    created: str | None = None,
) -> dict[str, object]:
    refs = [{"name": "gateway", "sectionName": section} for section in sections]
    spec = {"parentRefs": refs, "hostnames": list(hostnames), "rules": list(rules)}
    return document("HTTPRoute", name, spec, **({} if created is None else {"creationTimestamp": created}))


def rule(
    path: str, *targets: object, kind: str = "PathPrefix", match: Mapping[str, object] | None = None, **more: object
) -> dict[str, object]:
    """Requests to ``path`` go to ``targets``. ``match``: more conditions of the one match."""
    one = {"path": {"type": kind, "value": path}, **(match or {})}
    return {"matches": [one], "backendRefs": list(targets), **more}


def backend(name: str, *addresses: str, **more: object) -> dict[str, object]:
    return document("Backend", name, {"endpoints": list(addresses), **more})


class Stand(msgspec.Struct, frozen=True):
    """``urls``: of Envoy by address of a listener. ``admin`` and ``metrics``: of Envoy and of extproc."""

    processes: Processes
    servers: Servers
    http: httpx.AsyncClient
    ports: Mapping[str, int]
    admin: str
    metrics: str
    config: Path
    bundle: Path

    async def ask(
        self,
        path: str,
        host: str = "any.test",
        *,
        port: str = "main",
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | str | None = None,
    ) -> httpx.Response:
        """The answer of Envoy. ``port``: the name of one of ``ports``."""
        url = f"http://127.0.0.1:{self.ports[port]}{path}"
        return await self.http.request(method, url, headers={"host": host, **(headers or {})}, content=content)

    async def served(
        self,
        path: str,
        *,
        port: str = "main",
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | str | None = None,
    ) -> Told:
        """What reached a server, of a request that must reach one."""
        answer = await self.ask(path, port=port, method=method, headers=headers, content=content)
        assert answer.status_code == 200, answer.text
        return msgspec.convert(answer.json(), Told)


@asynccontextmanager
async def stand(
    directory: Path,
    servers: Servers,
    documents: Sequence[Mapping[str, object]],
    gateway: Mapping[str, Any],
    ports: Sequence[str],
) -> AsyncIterator[Stand]:
    """``gateway``: the GatewayConfig; of its listeners, ``address`` is one of the names of ``ports``."""
    admin, extproc, metrics, *listen = free_ports(3 + len(ports))
    named = dict(zip(ports, listen, strict=True))
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir(parents=True)
    spec = {
        **gateway,
        "listeners": [{**one, "address": f"127.0.0.1:{named[one['address']]}"} for one in gateway.get("listeners", [])],
        "listen": f"127.0.0.1:{listen[0]}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
    }
    every = [*documents, document("GatewayConfig", "gateway", spec)]
    (config / "attache.yaml").write_text(yaml.safe_dump_all(every))
    write_bundle_once(load_directory(config), bundle, str(bundle.resolve()))
    command = [sys.executable, "-m", "extproc", "--config", str(config), "--listen", f"127.0.0.1:{extproc}"]
    async with (
        Processes(directory) as processes,
        aiohttp.ClientSession() as http,
        httpx.AsyncClient(timeout=20) as client,
    ):

        async def answers(url: str) -> bool:
            try:
                async with http.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await processes.start("extproc", [*command, "--metrics", f"127.0.0.1:{metrics}"])
        await processes.wait_ready("extproc", lambda: answers(f"http://127.0.0.1:{metrics}/readyz"))
        await processes.start("envoy", envoy_command(bundle))
        await processes.wait_ready("envoy", lambda: answers(f"http://127.0.0.1:{admin}/ready"))
        yield Stand(
            processes,
            servers,
            client,
            named,
            f"http://127.0.0.1:{admin}",
            f"http://127.0.0.1:{metrics}",
            config,
            bundle,
        )


def chat(text: str, model: str = "m") -> str:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}]})
