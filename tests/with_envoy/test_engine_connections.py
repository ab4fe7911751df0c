# SPDX-License-Identifier: Apache-2.0
"""Engines behind TLS that ask for a key, through a real Envoy; extproc reads their metrics in the same way."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from controller.gateway.compile.compiler import Compiler
from controller.gateway.directory_writer import DirectoryWriter
from tests.certificates import Authority, Pair
from tests.kube_objects import Object, resource, secret
from tests.waiting import eventually
from tests.with_envoy.test_admission import edit, spec_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
NAME: Final = "engine.example.com"
METRICS: Final = 'vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{model_name="m"} 0\n'


class Engine:
    """Serves over TLS whoever has the key, and notes what it was sent. Its certificate can change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority("engines")
        self.clients = Authority("gateways")
        self.key = "sk-engine-1"
        self.calls: list[tuple[str, str, str]] = []
        self.refused: list[str] = []
        self.server_names: list[str | None] = []
        self.ca = folder / "engines.pem"
        self.ca.write_bytes(self.authority.cert)
        self.key_file = folder / "engine.key.txt"
        self.key_file.write_text(f"{self.key}\n")
        self.client = self.clients.issue("gateway").write(folder, "gateway")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (folder / "gateways.pem").write_bytes(self.clients.cert)
        self.context.load_verify_locations(folder / "gateways.pem")
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.sni_callback = self._on_name
        self.show(self.authority.issue(dns=[NAME]))
        self.address = ""

    def show(self, pair: Pair) -> None:
        """From the next handshake on."""
        files = pair.write(self.folder, "engine")
        self.context.load_cert_chain(files["certFile"], files["keyFile"])

    def _on_name(self, _: object, name: str | None, __: object) -> None:
        self.server_names.append(name)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        sent = http.headers.get("authorization", "")
        if sent != f"Bearer {self.key}":
            self.refused.append(http.path)
            return web.Response(status=401)
        subject = dict(http.transport.get_extra_info("peercert")["subject"][0])["commonName"]  # type: ignore[union-attr]
        self.calls.append((http.path, sent, subject))
        if http.path == "/metrics":
            return web.Response(text=METRICS, content_type="text/plain")
        if http.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if http.path == "/tokenize":
            return web.json_response({"tokens": [1, 2, 3], "count": 3, "max_model_len": 10})
        # a new connection for each request: certificates are looked at in handshakes
        return web.json_response({"choices": [], "usage": {}}, headers={"connection": "close"})

    def paths(self) -> set[str]:
        return {path for path, _, _ in self.calls}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    one = Engine(tmp_path_factory.mktemp("engine"))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", one.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=one.context).start()
    one.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield one
    await runner.cleanup()


def connection(engine: Engine, **tls: object) -> dict[str, object]:
    fields = {"caFile": str(engine.ca), "serverName": NAME, "clientCertificate": engine.client, **tls}
    return {"tls": fields, "apiKeyFile": str(engine.key_file)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> AsyncIterator[Stack]:
    more = {"endpoints": [{"address": engine.address}], "connection": connection(engine)}
    async with running_stack(
        tmp_path_factory.mktemp("connections") / "stack", EngineFlags(count=1), more=more, watch=True
    ) as running:
        yield running


async def ask(stack: Stack, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as http:
        return await http.post(f"{stack.url}/v1/chat/completions", json=ASKED, headers=headers)


async def test_requests_and_reports_use_tls_and_the_engines_key(stack: Stack, engine: Engine) -> None:
    answer = await ask(stack, authorization="Bearer sk-of-the-client")
    assert answer.status_code == 200, answer.text
    await eventually(lambda: {"/v1/chat/completions", "/metrics", "/v1/models"} <= engine.paths())
    assert {sent for _, sent, _ in engine.calls} == {"Bearer sk-engine-1"}
    assert {subject for _, _, subject in engine.calls} == {"gateway"}
    assert not engine.refused
    assert set(engine.server_names) == {NAME}


async def test_the_key_is_in_no_file_that_others_can_read_and_on_no_page(stack: Stack, engine: Engine) -> None:
    bundle = stack.directory / "envoy"
    readable = [file for file in bundle.rglob("*.json") if file.stat().st_mode & 0o077]
    async with httpx.AsyncClient(timeout=60) as http:
        dump = (await http.get(f"{stack.admin}/config_dump?include_eds")).text
    text = "".join(file.read_text() for file in readable) + dump
    assert "credential_injector" in text
    assert engine.key not in text
    assert "c2stZW5naW5lLTE" not in text  # base64, however it is aligned with "Bearer "


async def test_a_new_key_is_used_without_a_restart(stack: Stack, engine: Engine) -> None:
    engine.key = "sk-engine-2"
    engine.key_file.write_text(engine.key)
    engine.calls.clear()

    async def is_served() -> bool:
        return (await ask(stack)).status_code == 200

    await eventually(is_served)
    await eventually(lambda: "/metrics" in engine.paths())
    assert {sent for _, sent, _ in engine.calls} == {"Bearer sk-engine-2"}


def bad_pairs(engine: Engine) -> dict[str, Pair]:
    return {
        "another name": engine.authority.issue(NAME, dns=["other.example.com"]),
        "another authority": Authority("nobody").issue(dns=[NAME]),
    }


@pytest.mark.parametrize("fault", ["another name", "another authority"])
async def test_an_engine_with_a_bad_certificate_gets_nothing(stack: Stack, engine: Engine, fault: str) -> None:
    engine.show(bad_pairs(engine)[fault])

    async def is_refused() -> bool:
        return (await ask(stack)).status_code == 503

    await eventually(is_refused)
    engine.calls.clear()
    assert (await ask(stack)).status_code == 503
    assert "/v1/chat/completions" not in engine.paths()
    engine.show(engine.authority.issue(dns=[NAME]))

    async def is_served() -> bool:
        return (await ask(stack)).status_code == 200

    # Envoy takes an engine that cannot be reached out for some seconds
    await eventually(is_served)


async def test_verification_can_be_given_up(stack: Stack, engine: Engine) -> None:
    engine.show(bad_pairs(engine)["another name"])
    before: Any = spec_of(stack, "ModelServer")["connection"]
    unsafe = {name: value for name, value in before["tls"].items() if name not in {"caFile", "serverName"}}
    edit(stack, "ModelServer", connection={**before, "tls": {**unsafe, "insecureSkipVerify": True}})
    engine.calls.clear()

    async def is_served() -> bool:
        return (await ask(stack)).status_code == 200

    await eventually(is_served)
    await eventually(lambda: "/metrics" in engine.paths())
    edit(stack, "ModelServer", connection=before)


def as_the_gateway_role_would(stack: Stack, engine: Engine, *secrets: Object) -> None:
    """Put what a cluster's ModelServer comes to into the directory: its files, then the fields that it decides."""
    tls = {"serverName": NAME, "caCertificateRef": {"name": "ca"}, "clientCertificateRef": {"name": "client"}}
    spec = {
        "model": "m",
        # objects of a cluster may not name an address of this machine, where the engine is
        "endpoints": [{"address": "10.0.0.1:8000"}],
        "connection": {"tls": tls, "apiKeyRef": {"name": "keys"}},
    }
    compiler = Compiler()
    authorities = {"kind": "PointedConfigMap", "metadata": {}, "data": {"ca.crt": engine.ca.read_text()}}
    compiler.update_object("PointedConfigMap", "default/ca", authorities)
    for one in secrets:
        compiler.update_object("Secret", f"default/{one['metadata']['name']}", one)
    compiler.update_object("ModelServer", "default/llama", resource("ModelServer", "llama", spec))
    files = compiler.compile().files
    DirectoryWriter(stack.config).write(
        {name: content for name, content in files.items() if name.startswith(("secret.", "configmap."))}
    )
    made = json.loads(files["modelserver.default.llama.json"])["spec"]
    endpoints = [{**one, "address": engine.address} for one in made["endpoints"]]
    edit(stack, "ModelServer", endpoints=endpoints, connection=made.get("connection", {}))


async def test_a_clusters_secrets_are_used_and_without_them_nothing_reaches_the_engine(
    stack: Stack, engine: Engine
) -> None:
    client = {f"tls.{end}": (engine.folder / f"gateway.{end}").read_text() for end in ("crt", "key")}
    both = secret("client", client), secret("keys", {"api-key": "sk-of-a-secret"})

    async def answers(status: int) -> None:
        async def is_so() -> bool:
            return (await ask(stack, authorization="Bearer sk-of-the-client")).status_code == status

        await eventually(is_so)

    as_the_gateway_role_would(stack, engine, both[0])
    await answers(503)
    engine.key = "sk-of-a-secret"
    engine.calls.clear()
    engine.refused.clear()
    engine.show(engine.authority.issue(dns=[NAME]))
    as_the_gateway_role_would(stack, engine, *both)
    await answers(200)
    assert {sent for _, sent, _ in engine.calls} == {"Bearer sk-of-a-secret"}
    as_the_gateway_role_would(stack, engine, both[0])
    await answers(503)
    await eventually(lambda: not list((stack.directory / "envoy" / "secrets").glob("*.json")))
    assert (await ask(stack)).status_code == 503
    # nothing has come without the key, or with the client's own
    assert not engine.refused
