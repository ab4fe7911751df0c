# SPDX-License-Identifier: Apache-2.0
"""Providers through a real Envoy: what reaches them, what comes back, and who is tried next."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.loopback_stack import FileReady, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.usage.rows import UsageRow, parse_usage_line
from extproc.wire_names import REQUEST_ID
from tests.certificates import Authority
from tests.waiting import eventually
from tests.with_envoy.test_fallback import document, route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
APIS: Final = ["ChatCompletions", "Messages"]
KEY: Final = "sk-of-the-gateway-0123456789"
PREFIX: Final = "/api/openai"
CHAT_ANSWER: Final = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
}
MESSAGE: Final = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 10, "output_tokens": 4},
}
CHAT_EVENTS: Final = (
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hel"}}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": CHAT_ANSWER["usage"]},
)
MESSAGE_EVENTS: Final = (
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    {"type": "message_stop"},
)


class Attempt(NamedTuple):
    """What reached a server."""

    server: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Server:
    """An engine or a provider. ``status``, ``headers``, ``text``, ``is_chunked``: of its answers, if they are not good
    ones.
    """

    def __init__(self, name: str, log: list[Attempt]) -> None:
        self.name = name
        self._log = log
        self.port = 0
        self.be_good()

    def be_good(self) -> None:
        self.status, self.headers, self.text, self.is_chunked = 200, dict[str, str](), "", False

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        app = web.Application(client_max_size=32 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.port = runner.addresses[0][1]
        yield
        await runner.cleanup()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        if http.method != "POST":
            self._log.append(Attempt(self.name, http.path_qs, {}, {}))
            return web.Response(status=404)
        body = await http.json()
        headers = {name.lower(): value for name, value in http.headers.items()}
        self._log.append(Attempt(self.name, http.path_qs, headers, body))
        if self.status != 200 and self.is_chunked:
            refused = web.StreamResponse(status=self.status, headers=self.headers)
            await refused.prepare(http)
            await refused.write(self.text.encode())
            return refused
        if self.status != 200:
            return web.Response(status=self.status, text=self.text, headers=self.headers)
        is_message = http.path.endswith(MESSAGES)
        if not body.get("stream"):
            return web.json_response(MESSAGE if is_message else CHAT_ANSWER, headers=self.headers)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", **self.headers})
        await answer.prepare(http)
        for event in MESSAGE_EVENTS if is_message else CHAT_EVENTS:
            if is_message:
                await answer.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            else:
                chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", **event}
                await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if not is_message:
            await answer.write(b"data: [DONE]\n\n")
        return answer


class Gateway:
    """``log``: what reached which server, in the order of attempts. ``names``: of ModelServers that are healed."""

    def __init__(
        self,
        directory: Path,
        servers: Mapping[str, Server],
        log: list[Attempt],
        names: Sequence[str] = ("a", "p", "c", "q", "retried"),
    ) -> None:
        self._names = names
        self.directory = directory
        self.servers = servers
        self.log = log
        self.pids: dict[str, int] = {}
        # requests that reached some server since all were healed, and answers that extproc counts: of some, more
        self.served = 0
        self.told = self.told_at_heal = 0.0
        self.processes: Processes
        ports = dict(zip(("envoy", "admin", "extproc", "metrics"), free_ports(4), strict=True))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self.url, self.admin, self.metrics = (f"http://{self.addresses[one]}" for one in ("envoy", "admin", "metrics"))
        self.http = httpx.AsyncClient(timeout=30)

    async def ask(self, model: str, path: str = CHAT, headers: Mapping[str, str] | None = None) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        return await self.post(path, body, headers)

    async def post(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        self.log.clear()
        answer = await self.http.post(self.url + path, json=body, headers=headers)
        self.served += bool(self.log)
        return answer

    async def tried(self, model: str, path: str = CHAT) -> list[str]:
        """The servers of a request that is served in the end, in order."""
        answer = await self.ask(model, path)
        assert answer.status_code == 200, answer.text
        return [one.server for one in self.log]

    async def heal(self) -> None:
        """All answer well, and no breaker is open."""
        for one in self.servers.values():
            one.be_good()

        async def all_told() -> bool:
            page = (await self.http.get(f"{self.metrics}/metrics")).text
            counts = [
                line.rpartition(" ")[2] for line in page.splitlines() if line.startswith("attache_answers_total{")
            ]
            before, self.told = self.told, sum(map(float, counts))
            return self.told >= self.told_at_heal + self.served and self.told == before

        # what an outcome says later would count again
        await eventually(all_told, pause_s=0.1)
        self.told_at_heal, self.served = self.told, 0
        for name in self._names:
            answer = await self.http.post(f"{self.metrics}/breakers/reset?server=default/{name}")
            assert answer.status_code == 200, answer.text


# One attempt each, and what Envoy ejects is for other tests.
POLICY: Final = {"outlierDetection": {"consecutiveFailures": 1000}, "retry": {"attempts": 0}, "connectTimeout": "10s"}


def model_server(name: str, **spec: object) -> dict[str, object]:
    return document("ModelServer", name, {"model": f"{name}-model", "trafficPolicy": POLICY, **spec})


def engine(name: str, at: Server) -> dict[str, object]:
    return model_server(name, endpoints=[{"address": f"127.0.0.1:{at.port}"}], scrapeInterval="0s")


def hosted(name: str, at: Server, more: Mapping[str, object], **spec: object) -> dict[str, object]:
    """Another ModelServer, of a provider."""
    return model_server(name, apis=APIS, provider=provider(at, **more), **spec)


def chain(*names: str) -> dict[str, object]:
    rule: dict[str, object] = {"targetModels": [{"modelServerName": names[0]}]}
    if names[1:]:
        rule["fallback"] = [{"modelServerName": name} for name in names[1:]]
    return route("-".join(names), rule)


@asynccontextmanager
async def running(
    gateway: Gateway, documents: Sequence[Mapping[str, object]], spec: Mapping[str, object]
) -> AsyncIterator[Gateway]:
    """With a bundle that follows changes of keys."""
    config, bundle = gateway.directory / "config", gateway.directory / "envoy"
    config.mkdir()
    listen, admin, extproc, metrics = gateway.addresses.values()
    spec = {"listen": listen, "admin": admin, "extproc": extproc, **spec}
    (config / "attache.yaml").write_text(yaml.safe_dump_all([*documents, document("GatewayConfig", "gateway", spec)]))
    python = [sys.executable, "-m"]
    commands = {
        "extproc": [*python, "extproc", "--config", str(config), "--listen", extproc, "--metrics", metrics],
        "bundle": [*python, "controller", "bundle", "--config", str(config), "--out", str(bundle), "--watch"],
    }

    async def answers(url: str) -> bool:
        try:
            return (await gateway.http.get(url)).status_code == 200
        except httpx.TransportError:
            return False

    async with gateway.http, Processes(gateway.directory) as processes:
        gateway.processes = processes
        for name, command in commands.items():
            gateway.pids[name] = await processes.start(name, command)
        await processes.wait_ready("extproc", lambda: answers(f"{gateway.metrics}/readyz"))
        await processes.wait_ready("bundle", FileReady(bundle / "bootstrap.json"))
        gateway.pids["envoy"] = await processes.start("envoy", envoy_command(bundle))
        await processes.wait_ready("envoy", lambda: answers(f"{gateway.url}/v1/models"))
        yield gateway


def tls_of(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Of a server called localhost, and the file of its authority."""
    authority = Authority("providers")
    ca = folder / "ca.pem"
    ca.write_bytes(authority.cert)
    files = authority.issue(dns=["localhost"]).write(folder, "provider")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certFile"], files["keyFile"])
    return context, ca


def provider(at: Server, **more: object) -> dict[str, object]:
    return {"host": "localhost", "port": at.port, **more}


# What begins with /team goes to the provider, without it.
TEAM: Final = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "team"},
    "spec": {
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/team"}}],
                "filters": [
                    {
                        "type": "URLRewrite",
                        "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}},
                    },
                    {
                        "type": "RequestHeaderModifier",
                        "requestHeaderModifier": {"set": [{"name": "x-anything", "value": "1"}]},
                    },
                ],
                "backendRefs": [{"group": "attache.dev", "kind": "ModelServer", "name": "p"}],
            }
        ]
    },
}


@asynccontextmanager
async def stack(folder: Path, spec: Mapping[str, object]) -> AsyncIterator[Gateway]:
    """Own engines ``a`` and ``c``, a provider ``p`` with a key, ``q`` with none, whose authority the machine trusts.

    At ``p`` are three more: ``lost`` has no address, ``forged`` expects another certificate, and ``retried`` is tried
    again.
    """
    log: list[Attempt] = []
    servers = {name: Server(name, log) for name in ("a", "p", "c", "q")}
    context, ca = tls_of(folder)
    (folder / "provider.key").write_text(f"{KEY}\n")
    async with AsyncExitStack() as started:
        started.enter_context(pytest.MonkeyPatch.context()).setenv("SSL_CERT_FILE", str(ca))
        for name, one in servers.items():
            await started.enter_async_context(one.running(context if name in "pq" else None))
        keyed = {"tls": {"caFile": str(ca)}, "apiKeyFile": str(folder / "provider.key")}
        price = [{"perMillion": {"input": "100000", "output": "200000"}}]
        documents = [
            engine("a", servers["a"]),
            engine("c", servers["c"]),
            hosted("p", servers["p"], {"pathPrefix": PREFIX}, connection=keyed, pricing=price),
            hosted("q", servers["q"], {}),
            hosted(
                "forged",
                servers["p"],
                {"host": "127.0.0.1"},
                connection={**keyed, "tls": {"caFile": str(ca), "serverName": "other.example"}},
            ),
            hosted(
                "retried",
                servers["p"],
                {"pathPrefix": PREFIX},
                connection=keyed,
                trafficPolicy={"outlierDetection": {"consecutiveFailures": 1000}, "retry": {"attempts": 2}},
            ),
            hosted("lost", servers["p"], {"host": "nowhere.invalid"}, connection=keyed),
            TEAM,
            *map(chain, ("p", "q", "lost", "forged", "retried")),
            *(chain(*names) for names in (("a", "p", "c"), ("p", "c"), ("p", "q"), ("q", "p"), ("lost", "c"))),
        ]
        gateway = Gateway(folder / "stack", servers, log)
        gateway.directory.mkdir()
        async with running(gateway, documents, spec) as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Own engines get a cache salt, which no provider knows."""
    folder = tmp_path_factory.mktemp("providers")
    spec = {"cacheIsolation": "Tenant", "usageLog": {"path": str(folder / "usage.log")}}
    async with stack(folder, spec) as found:
        yield found


async def test_a_provider_gets_its_host_its_path_and_the_key_of_its_api(gateway: Gateway) -> None:
    await gateway.heal()
    host = f"localhost:{gateway.servers['p'].port}"
    # beside the name that was asked for
    assert (await gateway.ask("p")).json() == {**CHAT_ANSWER, "model": "p"}
    (chat,) = gateway.log
    assert (chat.path, chat.headers["host"]) == (f"{PREFIX}{CHAT}", host)
    assert chat.headers["authorization"] == f"Bearer {KEY}"
    assert "x-api-key" not in chat.headers
    assert chat.body["model"] == "p-model"
    assert (await gateway.ask("p", f"{MESSAGES}?beta=true")).json() == {**MESSAGE, "model": "p"}
    (message,) = gateway.log
    assert (message.path, message.headers["host"]) == (f"{PREFIX}{MESSAGES}?beta=true", host)
    assert message.headers["x-api-key"] == KEY
    assert message.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in message.headers
    assert "cache_salt" not in chat.body
    assert "cache_salt" not in message.body


@pytest.mark.parametrize(
    "query", ["?key=of-the-client", "?beta=trueish&xbeta=true&beta", "?a=/../v1/files&api-version=1"]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_the_clients_query_does_not_reach_a_provider(gateway: Gateway, path: str, query: str) -> None:
    await gateway.heal()
    assert (await gateway.ask("p", path + query)).status_code == 200
    assert [one.path for one in gateway.log] == [PREFIX + path]
    assert (await gateway.ask("p", f"{path}{query}&beta=true")).status_code == 200
    assert [one.path for one in gateway.log] == [PREFIX + path + "?beta=true" * (path == MESSAGES)]
    # an engine that is tried after it gets what the client sent
    gateway.servers["p"].status = 503
    assert await gateway.tried("p-c", path + query) == ["p", "c"]
    assert [one.path for one in gateway.log] == [PREFIX + path, path + query]


async def test_clients_of_openai_and_anthropic_read_its_answers_and_streams(gateway: Gateway) -> None:
    await gateway.heal()
    asked: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="of-the-client", max_retries=0) as client:
        whole = await client.chat.completions.create(model="p", messages=asked)
        assert whole.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(model="p", messages=asked, stream=True)
        assert "".join([one.choices[0].delta.content or "" async for one in stream if one.choices]) == "hello"
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="of-the-client", max_retries=0) as claude:
        message: Any = await claude.messages.create(model="p", messages=asked, max_tokens=9)
        assert message.content[0].text == "hello"
        async with claude.messages.stream(model="p", messages=asked, max_tokens=9) as events:
            assert await events.get_final_text() == "hello"
    gateway.served += 4
    sent = [one.headers.get("authorization", one.headers.get("x-api-key")) for one in gateway.log[-4:]]
    assert sent == [f"Bearer {KEY}", f"Bearer {KEY}", KEY, KEY]


FORGED: Final = {
    "authorization": "Bearer sk-of-the-client",
    "x-api-key": "sk-of-the-client",
    "cookie": "session=1",
    "proxy-authorization": "Basic YTpi",
    "x-attache-tenant": "other",
    "x-attache-anything": "1",
    "x-forwarded-for": "192.0.2.1",
    "openai-organization": "org-of-the-client",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-anything": "1",
}


@pytest.mark.parametrize("name", ["p", "q"])
async def test_of_what_a_client_sends_only_known_headers_pass(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    passed = {"user-agent": "agent/1", "openai-beta": "b", "anthropic-beta": "c", "accept": "text/x"}
    for path, own in ((CHAT, "authorization"), (MESSAGES, "x-api-key")):
        assert (await gateway.ask(name, path, headers={**FORGED, **passed})).status_code == 200
        headers = gateway.log[-1].headers
        known = {*passed, "host", "content-type", "content-length", "x-request-id"}
        key = {own} if name == "p" else set()
        version = {"anthropic-version"} if path == MESSAGES else set()
        assert headers.keys() == known | key | version
        assert {header: headers[header] for header in passed} == passed
        assert "of-the-client" not in json.dumps(headers)


async def test_a_chain_has_its_own_path_host_and_key_at_each_attempt(gateway: Gateway) -> None:
    await gateway.heal()
    asked = gateway.url.removeprefix("http://")
    of_provider = f"localhost:{gateway.servers['p'].port}"
    for path, header, key in ((CHAT, "authorization", f"Bearer {KEY}"), (MESSAGES, "x-api-key", KEY)):
        for name in ("a", "p"):
            gateway.servers[name].status = 503
        assert await gateway.tried("a-p-c", path) == ["a", "p", "c"]
        own, other, last = gateway.log
        assert [one.path for one in gateway.log] == [path, PREFIX + path, path]
        assert [one.headers["host"] for one in gateway.log] == [asked, of_provider, asked]
        assert [one.headers.get(header) for one in gateway.log] == [None, key, None]
        assert [one.body["model"] for one in gateway.log] == ["a-model", "p-model", "c-model"]
        assert own.body["cache_salt"] == last.body["cache_salt"]
        assert other.body == {name: value for name, value in own.body.items() if name != "cache_salt"} | {
            "model": "p-model"
        }
        await gateway.heal()


@pytest.mark.parametrize("names", [("p", "q"), ("q", "p"), ("p", "c")])
async def test_a_providers_key_is_shown_to_no_other_one(gateway: Gateway, names: tuple[str, str]) -> None:
    await gateway.heal()
    gateway.servers[names[0]].status = 503
    assert await gateway.tried("-".join(names)) == list(names)
    found = [one.headers.get("authorization") for one in gateway.log]
    assert found == [f"Bearer {KEY}" if name == "p" else None for name in names]


@pytest.mark.parametrize("status", [401, 402, 403])
@pytest.mark.parametrize("text", [f"Incorrect API key provided: {KEY}", ""])
async def test_a_refused_key_is_502_without_the_providers_words(gateway: Gateway, status: int, text: str) -> None:
    for path in (CHAT, MESSAGES):
        await gateway.heal()
        gateway.servers["p"].status, gateway.servers["p"].text = status, text
        answer = await gateway.ask("p", path)
        assert answer.status_code == 502, (answer.text, answer.headers)
        assert KEY not in answer.text
        error = answer.json()["error"]
        if path == CHAT:
            assert (error["code"], error["type"]) == ("provider_refused_key", "server_error")
        else:
            assert error["type"] == "api_error"
        assert "does not accept the gateway's key" in error["message"]


async def test_so_is_one_of_unknown_length(gateway: Gateway) -> None:
    await gateway.heal()
    refusing = gateway.servers["p"]
    refusing.status, refusing.text, refusing.is_chunked = 403, f"the key {KEY}", True
    answer = await gateway.ask("p")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "provider_refused_key")


async def test_a_long_refusal_shows_nothing_either(gateway: Gateway) -> None:
    await gateway.heal()
    # longer than what Envoy keeps of an answer
    gateway.servers["p"].status, gateway.servers["p"].text = 401, f"the key {KEY} " * (1 << 20)
    answer = await gateway.ask("p")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "provider_refused_key")
    await gateway.heal()
    gateway.servers["p"].status, gateway.servers["p"].text = 401, f"the key {KEY} " * (1 << 20)
    assert await gateway.tried("p-c") == ["p", "c"]


async def test_a_refused_key_goes_on_to_the_fallback(gateway: Gateway) -> None:
    for status in (401, 402, 403):
        await gateway.heal()
        gateway.servers["p"].status = status
        assert await gateway.tried("p-c") == ["p", "c"]


async def test_refused_keys_open_the_breaker(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status = 401

    async def is_left_out() -> bool:
        return await gateway.tried("p-c") == ["c"]

    await eventually(is_left_out)


async def test_after_429_with_retry_after_nothing_is_sent_there(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status, gateway.servers["p"].headers = 429, {"retry-after": "600"}
    limited = await gateway.ask("p")
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "600")
    gateway.servers["p"].be_good()

    async def is_left_out() -> bool:
        return await gateway.tried("p-c") == ["c"]

    await eventually(is_left_out)
    # longer than any pause after a failure
    assert await gateway.tried("p-c") == ["c"]


async def test_it_is_left_out_as_well_after_a_fallback_has_answered_in_its_place(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status, gateway.servers["p"].headers = 429, {"retry-after": "600"}
    assert await gateway.tried("p-c") == ["p", "c"]
    gateway.servers["p"].be_good()

    async def is_left_out() -> bool:
        return await gateway.tried("p-c") == ["c"]

    await eventually(is_left_out)
    # no failure has done that
    page = (await gateway.http.get(f"{gateway.metrics}/metrics")).text
    states = [line for line in page.splitlines() if line.startswith("attache_breaker_state{") and "default/p" in line]
    assert states
    assert {line.rpartition(" ")[2] for line in states} == {"0.0"}


async def test_requests_of_other_apis_never_reach_it(gateway: Gateway) -> None:
    await gateway.heal()
    body = {"model": "p", "input": "hi", "prompt": "hi"}
    for path in ("/v1/embeddings", "/v1/responses", "/v1/completions"):
        answer = await gateway.post(path, body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_url"
        assert f"write to {CHAT}, {MESSAGES}" in answer.json()["error"]["message"]
        assert gateway.log == []


async def test_an_http_route_reaches_its_apis_and_nothing_else_of_it(gateway: Gateway) -> None:
    await gateway.heal()
    assert (await gateway.ask("any", f"/team{CHAT}", headers=FORGED)).status_code == 200
    (chat,) = gateway.log
    assert (chat.path, chat.headers["authorization"]) == (PREFIX + CHAT, f"Bearer {KEY}")
    assert "x-anything" not in chat.headers
    gateway.log.clear()
    for path in ("/v1/files", "/v1/organization/admin_api_keys", "/", "/v1/models", f"{CHAT}/1"):
        for method in ("GET", "POST", "DELETE"):
            answer = await gateway.http.request(method, f"{gateway.url}/team{path}", json={"model": "any"})
            assert answer.status_code == 404, (method, path, answer.text)
    assert (await gateway.http.get(f"{gateway.url}/team{CHAT}")).status_code == 404
    assert gateway.log == []


async def test_as_a_fallback_it_is_left_out_for_other_apis(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["a"].status = 503
    await gateway.post("/v1/completions", {"model": "a-p-c", "prompt": "hi"})
    assert [one.server for one in gateway.log] == ["a", "c"]


async def test_it_is_asked_for_nothing_but_inference(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.log.clear()
    assert await gateway.tried("p") == ["p"]
    assert {one.path for one in gateway.log} == {f"{PREFIX}{CHAT}"}


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308])
async def test_a_redirect_is_neither_followed_nor_passed_on(gateway: Gateway, status: int) -> None:
    await gateway.heal()
    there = f"http://127.0.0.1:{gateway.servers['c'].port}{CHAT}"
    gateway.servers["p"].status, gateway.servers["p"].headers = status, {"location": there}
    answer = await gateway.ask("p")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "provider_redirected")
    assert "location" not in answer.headers
    assert [one.server for one in gateway.log] == ["p"]


async def test_it_does_not_take_over_the_connection_of_a_client(gateway: Gateway) -> None:
    for model, got in (("p", 502), ("p-c", 200)):
        await gateway.heal()
        gateway.servers["p"].status = 101
        gateway.servers["p"].headers = {"upgrade": "websocket", "connection": "upgrade"}
        answer = await gateway.ask(model)
        assert answer.status_code == got
        assert not {"upgrade", "connection"} & answer.headers.keys()


async def test_endless_headers_are_a_failure(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].headers = {f"x-{number}": "x" * 1000 for number in range(200)}
    answer = await gateway.ask("p")
    assert answer.status_code == 502
    await gateway.heal()
    gateway.servers["p"].headers = {f"x-{number}": "x" * 1000 for number in range(200)}
    assert await gateway.tried("p-c") == ["p", "c"]


async def test_of_its_headers_only_known_ones_pass(gateway: Gateway) -> None:
    await gateway.heal()
    forged = {
        "x-attache-served-by": "default/other",
        "x-attache-cost-micros": "1",
        "x-ratelimit-remaining-requests": "7",
        "openai-organization": "org-of-the-gateway",
        "set-cookie": "a=b",
        "x-envoy-immediate-health-check-fail": "1",
        "request-id": "req_1",
    }
    gateway.servers["p"].headers = forged
    answer = await gateway.ask("p")
    assert answer.status_code == 200
    assert answer.headers["request-id"] == "req_1"
    assert not (forged.keys() - {"request-id"}) & answer.headers.keys()
    served = await gateway.ask("p-c")
    assert served.headers.get_list("x-attache-served-by") == ["default/p"]


async def test_a_server_with_another_certificate_gets_nothing(gateway: Gateway) -> None:
    await gateway.heal()
    assert (await gateway.ask("forged")).status_code == 503
    assert gateway.log == []


async def test_it_gets_the_same_when_it_is_tried_again(gateway: Gateway) -> None:
    for path, header, key in ((CHAT, "authorization", f"Bearer {KEY}"), (MESSAGES, "x-api-key", KEY)):
        await gateway.heal()
        gateway.servers["p"].status = 503
        assert (await gateway.ask("retried", path)).status_code == 503
        assert len(gateway.log) == 3
        assert {one.path for one in gateway.log} == {PREFIX + path}
        assert {one.headers[header] for one in gateway.log} == {key}
        first, *others = gateway.log
        assert all(one == first for one in others)


async def test_a_host_that_does_not_resolve_is_no_endpoint(gateway: Gateway) -> None:
    await gateway.heal()
    answer = await gateway.ask("lost")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoint")
    assert await gateway.tried("lost-c") == ["c"]


async def row_of_answer(gateway: Gateway, answer: httpx.Response) -> UsageRow:
    """What becomes of its line in the usage log."""
    file, found = gateway.directory.parent / "usage.log", list[UsageRow]()

    def is_written() -> bool:
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines() if file.exists() else []
        found[:] = [
            row
            for row in (parse_usage_line(line, 4e9) for line in whole)
            if row.request_id == answer.headers[REQUEST_ID]
        ]
        return bool(found)

    await eventually(is_written)
    (row,) = found
    return row


@pytest.mark.parametrize(
    ("model", "path", "api", "attempts"),
    [("p", CHAT, "CHAT", 1), ("p", MESSAGES, "MESSAGES", 1), ("a-p-c", CHAT, "CHAT", 2)],
)
async def test_its_answers_are_rows_with_its_price(
    gateway: Gateway, model: str, path: str, api: str, attempts: int
) -> None:
    await gateway.heal()
    gateway.servers["a"].status = 503
    row = await row_of_answer(gateway, await gateway.ask(model, path))
    assert (row.server, row.served_model, row.api, row.attempts) == ("default/p", "p-model", api, attempts)
    assert (row.input, row.output, row.is_estimated) == (10, 4, False)
    # 10 at 0.1 and 4 at 0.2
    assert (row.cost_micros, row.currency) == (1_800_000, "USD")


async def test_a_refused_key_costs_nothing(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status = 401
    row = await row_of_answer(gateway, await gateway.ask("p"))
    assert (row.server, row.status, row.cost_micros) == ("default/p", 502, 0)


async def test_a_new_key_is_used_without_a_restart(gateway: Gateway) -> None:
    await gateway.heal()
    file, before = gateway.directory.parent / "provider.key", gateway.pids["envoy"]
    file.write_text("sk-of-the-next-month")

    async def is_used() -> bool:
        await gateway.tried("p")
        return gateway.log[-1].headers["authorization"] == "Bearer sk-of-the-next-month"

    await eventually(is_used)
    os.kill(before, 0)
    file.write_text(KEY)

    async def is_back() -> bool:
        await gateway.tried("p")
        return gateway.log[-1].headers["authorization"] == f"Bearer {KEY}"

    await eventually(is_back)


def memory_of(pid: int) -> bytes:
    """What the process can read and write, as it is now."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()  # type: ignore[union-attr]
            if rights.startswith("rw"):
                memory.seek(int(start, 16))
                found.append(memory.read(int(end, 16) - int(start, 16)))
    return b"".join(found)


def children_of(pid: int) -> list[int]:
    own = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(one for child in own for one in children_of(child))]


async def test_the_key_is_nowhere_to_be_read(gateway: Gateway) -> None:
    await gateway.heal()
    gateway.servers["p"].status, gateway.servers["p"].text = 401, f"Incorrect API key provided: {KEY}"
    await gateway.ask("p")
    await gateway.heal()
    await gateway.ask("a-p-c")
    # where it must be, it is found
    assert KEY.encode() in await asyncio.to_thread(memory_of, gateway.pids["envoy"])
    for pid in children_of(gateway.pids["extproc"]):
        assert KEY.encode() not in await asyncio.to_thread(memory_of, pid)
    dump = (await gateway.http.get(f"{gateway.admin}/config_dump", params={"include_eds": ""})).text
    assert "attache.provider" in dump
    files = [one for one in gateway.directory.rglob("*") if one.is_file()]
    readable = [one for one in files if one.stat().st_mode & 0o077 and one.suffix != ".key"]
    texts = [dump, *(one.read_text(errors="replace") for one in [*readable, gateway.directory.parent / "usage.log"])]
    assert not [text[:100] for text in texts if KEY in text or "c2stb2YtdGhlLWdhdGV3YXk" in text]


async def test_it_is_the_same_without_extproc(tmp_path: Path) -> None:
    async with stack(tmp_path, {"failureMode": "Open", "usageLog": {"path": str(tmp_path / "usage.log")}}) as gateway:
        await gateway.processes.end("extproc")

        async def is_served() -> bool:
            return (await gateway.ask("p")).status_code == 200

        await eventually(is_served)
        assert gateway.log[-1].path == PREFIX + CHAT
        assert gateway.log[-1].headers["authorization"] == f"Bearer {KEY}"
        assert gateway.log[-1].body["model"] == "p-model"
        row = await row_of_answer(gateway, await gateway.ask("p"))
        assert (row.server, row.api, row.output) == ("default/p", "CHAT", 4)
        for name in ("a", "p"):
            gateway.servers[name].status = 401 if name == "p" else 503
        assert await gateway.tried("a-p-c") == ["a", "p", "c"]
        assert [one.path for one in gateway.log] == [CHAT, PREFIX + CHAT, CHAT]
        assert [one.headers.get("authorization") for one in gateway.log] == [None, f"Bearer {KEY}", None]
        for path in ("/team/v1/files", "/team/v1/models"):
            assert (await gateway.http.get(gateway.url + path)).status_code == 404
        answer = await gateway.post("/v1/embeddings", {"model": "p", "input": "hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert gateway.log == []
