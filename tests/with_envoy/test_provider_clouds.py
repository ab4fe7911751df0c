# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/providers.md for clouds, through a real Envoy, with doubles of their servers; and HTTP/2."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.envoy.clusters import UPSTREAM_OPTIONS
from tests.hostile_calls import RawClient
from tests.waiting import eventually
from tests.with_envoy.test_providers import (
    CHAT,
    CHAT_ANSWER,
    FORGED,
    KEY,
    MESSAGES,
    POLICY,
    Attempt,
    Gateway,
    Server,
    chain,
    children_of,
    engine,
    hosted,
    memory_of,
    running,
    tls_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"
# What AWS's own documentation has as examples.
KEY_ID, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "IQoJb3JpZ2luX2VjE=="
ENVIRONMENT: Final = {"AWS_ACCESS_KEY_ID": "AKIDOFENVOY", "AWS_SECRET_ACCESS_KEY": "of-the-environment-of-envoy"}
PROFILE: Final = f"""[default]
aws_access_key_id = {KEY_ID}
aws_secret_access_key = {SECRET}
aws_session_token = {TOKEN}
"""
# Their signatures are checked where they arrive.
SIGNED: Final = {"authorization", "x-amz-content-sha256", "x-amz-date"}


class Shown(NamedTuple):
    """``asked``: by a client. ``path``: that its server gets. ``headers``: those that show who asks."""

    asked: str
    path: str
    headers: Collection[str]
    key: str = ""
    signed_for: str = ""


# The examples of the page by name.
SHOWN: Final = {
    "azure": Shown(CHAT, "/openai/v1/chat/completions", {"api-key"}, KEY),
    "azure-deployment": Shown(
        CHAT, "/openai/deployments/my-deployment/chat/completions?api-version=2024-10-21", {"api-key"}, KEY
    ),
    "azure-entra": Shown(MESSAGES, "/anthropic/v1/messages", {"authorization"}, f"Bearer {KEY}"),
    "bedrock": Shown(
        CHAT,
        "/openai/v1/chat/completions",
        {*SIGNED, "x-amz-security-token"},
        signed_for=f"{KEY_ID}/us-east-1/bedrock",
    ),
    "bedrock-identity": Shown(CHAT, CHAT, SIGNED, signed_for="AKIDOFENVOY/us-east-1/bedrock-mantle"),
    "bedrock-key": Shown(MESSAGES, "/anthropic/v1/messages", {"x-api-key"}, KEY),
    "vertex": Shown(
        CHAT,
        "/v1/projects/my-project/locations/us-central1/endpoints/openapi/chat/completions",
        {"authorization"},
        f"Bearer {KEY}",
    ),
}
# By which clients, or other attempts, would be known there.
CREDENTIALS: Final = {*SIGNED, "api-key", "x-api-key", "x-amz-security-token", "cookie"}
_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([^/]+)/([^/]+)/aws4_request, "
    r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})"
)


class Aws(Server):
    """Refuses what is not signed as AWS would have it, by AWS's own library. ``signed_for``: of the last request."""

    signed_for = ""

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body, headers = await http.read(), http.headers
        found = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if found is None or headers["x-amz-content-sha256"] != hashlib.sha256(body).hexdigest():
            self.signed_for = "nobody"
            return web.Response(status=403, text="Missing Authentication Token")
        key_id, region, service, names, signature = found.groups()
        secrets = {
            KEY_ID: (SECRET, TOKEN),
            ENVIRONMENT["AWS_ACCESS_KEY_ID"]: (ENVIRONMENT["AWS_SECRET_ACCESS_KEY"], None),
        }
        signer = SigV4Auth(Credentials(key_id, *secrets[key_id]), service, region)
        signed = {name: headers[name] for name in names.split(";")}
        request = AWSRequest("POST", f"https://{headers['host']}{http.path_qs}", signed, body)
        request.context["timestamp"] = headers["x-amz-date"]
        expected = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
        late_s = (
            datetime.now(UTC) - datetime.strptime(f"{headers['x-amz-date']}+0000", "%Y%m%dT%H%M%SZ%z")
        ).total_seconds()
        if signature != expected or abs(late_s) > 300:
            return web.Response(status=403, text="The request signature we calculated does not match")
        self.signed_for = f"{key_id}/{region}/{service}"
        return await super()._answer(http)


def examples() -> dict[str, dict[str, Any]]:
    """The page's ModelServers of clouds, by name."""
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = {one["metadata"]["name"]: one for text in texts for one in yaml.safe_load_all(text)}
    others = {"chat", "own", "elsewhere", "west"}
    return {name: one for name, one in found.items() if name not in others}


def server_of(name: str) -> str:
    return "aws" if name in SHOWN and SHOWN[name].signed_for else "cloud"


def at_double(document: dict[str, Any], folder: Path, servers: Mapping[str, Server]) -> dict[str, Any]:
    """The example with another host, and its key elsewhere."""
    spec, double = document["spec"], server_of(document["metadata"]["name"])
    spec["provider"] |= {"host": "localhost", "port": servers[double].port}
    if "connection" in spec:
        spec["connection"] = {"apiKeyFile": str(folder / f"{double}.key")}
    spec["trafficPolicy"] = POLICY
    return document


async def answer_with_trailers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server of one good answer, behind which there are headers that are none of the list."""
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps(CHAT_ANSWER).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    trailers = b"x-ratelimit-remaining: 7\r\nopenai-organization: org-of-the-gateway\r\n"
    writer.write(head + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers))
    await writer.drain()
    # what is left of the request
    await reader.read()
    writer.close()


def front(port: int, server: int, folder: Path, protocols: Sequence[str]) -> str:
    """The configuration of an Envoy that ends TLS before a server, with these protocols, and names the one in use."""

    def address(port: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    types = "type.googleapis.com/envoy.extensions"
    certificate = {
        name: {"filename": str(folder / f"provider.{suffix}")}
        for name, suffix in (("certificate_chain", "crt"), ("private_key", "key"))
    }
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}},
        ],
        "route_config": {
            "request_headers_to_add": [{"header": {"key": "x-came-by", "value": "%PROTOCOL%"}}],
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "server"}}],
                }
            ],
        },
    }
    socket = {
        "@type": f"{types}.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {"alpn_protocols": protocols, "tls_certificates": [certificate]},
    }
    chain = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
        "transport_socket": {"name": "tls", "typed_config": socket},
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(server)}}]}]
    protocol = {
        "@type": f"{types}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {"enable_trailers": True}},
    }
    cluster = {
        "name": "server",
        "load_assignment": {"cluster_name": "server", "endpoints": endpoints},
        "typed_extension_protocol_options": {UPSTREAM_OPTIONS: protocol},
    }
    return json.dumps(
        {
            "static_resources": {
                "listeners": [{"name": "front", "address": address(port), "filter_chains": [chain]}],
                "clusters": [cluster],
            }
        }
    )


@asynccontextmanager
async def stack(folder: Path, **spec: object) -> AsyncIterator[Gateway]:
    """Own engines ``a`` and ``c``, and servers ``cloud`` and ``aws``, at which all examples are. ``h2`` and ``h1`` are
    at a server that offers HTTP/2 and at one that does not.
    """
    log: list[Attempt] = []
    servers = {name: Server(name, log) for name in ("a", "c", "cloud", "behind")}
    servers["aws"] = Aws("aws", log)
    context, ca = tls_of(folder)
    (folder / "cloud.key").write_text(f"{KEY}\n")
    (folder / "aws.key").write_text(PROFILE)
    fronts = dict(zip(("h2", "h1", "late"), free_ports(3), strict=True))
    async with AsyncExitStack() as started:
        patch = started.enter_context(pytest.MonkeyPatch.context())
        for name, text in {**ENVIRONMENT, "SSL_CERT_FILE": str(ca)}.items():
            patch.setenv(name, text)
        for name, one in servers.items():
            await started.enter_async_context(one.running(context if name in {"cloud", "aws"} else None))
        keyed = {"apiKeyFile": str(folder / "cloud.key")}
        documents = [
            *(engine(name, servers[name]) for name in "ac"),
            *(at_double(one, folder, servers) for one in examples().values()),
            *(hosted(name, servers["behind"], {"port": port}, connection=keyed) for name, port in fronts.items()),
            *(chain(*names) for name in (*SHOWN, *fronts) for names in ((name,), ("a", name, "c"))),
        ]
        gateway = Gateway(folder / "stack", servers, log, names=("a", "c", *SHOWN, *fronts))
        gateway.directory.mkdir()
        processes = await started.enter_async_context(Processes(folder))
        late = await started.enter_async_context(await asyncio.start_server(answer_with_trailers, "127.0.0.1", 0))
        for name, port in fronts.items():
            (folder / name).mkdir()
            protocols = ["http/1.1"] if name == "h1" else ["h2", "http/1.1"]
            behind = late.sockets[0].getsockname()[1] if name == "late" else servers["behind"].port
            (folder / name / "bootstrap.json").write_text(front(port, behind, folder, protocols))
            await processes.start(name, envoy_command(folder / name))
        async with running(gateway, documents, spec) as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with stack(tmp_path_factory.mktemp("clouds")) as found:
        yield found


async def test_each_example_of_the_page_is_tried() -> None:
    assert examples().keys() == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
async def test_a_cloud_gets_its_path_and_key_and_nothing_of_the_client(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    shown = SHOWN[name]
    forged = {**FORGED, **dict.fromkeys(CREDENTIALS, "of-the-client")}
    answer = await gateway.ask(name, f"{shown.asked}?api-version=of-the-client", headers=forged)
    assert answer.status_code == 200, answer.text
    (asked,) = gateway.log
    assert asked.path == shown.path
    assert asked.headers["host"] == f"localhost:{gateway.servers[server_of(name)].port}"
    assert CREDENTIALS & asked.headers.keys() == shown.headers
    assert "of-the-client" not in str(asked)
    if shown.signed_for:
        assert signed_for(gateway) == shown.signed_for
    else:
        assert {asked.headers[header] for header in shown.headers} == {shown.key}


def signed_for(gateway: Gateway) -> str:
    aws = gateway.servers["aws"]
    assert isinstance(aws, Aws)
    return aws.signed_for


@pytest.mark.parametrize("name", SHOWN)
async def test_other_attempts_have_neither_its_path_nor_its_key(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    shown = SHOWN[name]
    for one in ("a", server_of(name)):
        gateway.servers[one].status = 503
    assert await gateway.tried(f"a-{name}-c", shown.asked) == ["a", server_of(name), "c"]
    assert [one.path for one in gateway.log] == [shown.asked, shown.path, shown.asked]
    assert [CREDENTIALS & one.headers.keys() for one in gateway.log] == [set(), shown.headers, set()]


@pytest.mark.parametrize("name", SHOWN)
async def test_a_refused_key_is_502_and_goes_on_to_a_fallback(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    cloud = gateway.servers[server_of(name)]
    cloud.status, cloud.text = 403, f"no such key: {KEY}"
    answer = await gateway.ask(name, SHOWN[name].asked)
    assert answer.status_code == 502
    assert KEY not in answer.text
    await gateway.heal()
    cloud.status, gateway.servers["a"].status = 403, 503
    assert await gateway.tried(f"a-{name}-c", SHOWN[name].asked) == ["a", cloud.name, "c"]


@pytest.mark.parametrize("name", ["azure-deployment", "bedrock", "vertex", "h2", "h1"])
async def test_openais_client_reads_streams(gateway: Gateway, name: str) -> None:
    await gateway.heal()
    asked: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="of-the-client", max_retries=0) as client:
        stream = await client.chat.completions.create(model=name, messages=asked, stream=True)
        assert "".join([one.choices[0].delta.content or "" async for one in stream if one.choices]) == "hello"
    gateway.served += 1


@pytest.mark.parametrize("model", ["bedrock", "a-bedrock-c", "h2"])
async def test_the_largest_body_is_signed_and_sent(gateway: Gateway, model: str) -> None:
    await gateway.heal()
    gateway.servers["a"].status = 503
    text = "x" * (159 * 1024 * 1024 // 10)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    answer = await gateway.post(CHAT, body)
    assert answer.status_code == 200, answer.text[:1000]
    assert gateway.log[-1].server == ("behind" if model == "h2" else "aws")
    assert gateway.log[-1].body["messages"][0]["content"] == text
    body["messages"] = [{"role": "user", "content": text + text[: 1 << 20]}]
    refused = await gateway.post(CHAT, body)
    assert (refused.status_code, gateway.log) == (413, [])


@pytest.mark.parametrize(("name", "protocol"), [("h2", "HTTP/2"), ("h1", "HTTP/1.1")])
async def test_a_provider_chooses_its_protocol(gateway: Gateway, name: str, protocol: str) -> None:
    await gateway.heal()
    assert (await gateway.ask(name)).json() == {**CHAT_ANSWER, "model": name}
    (asked,) = gateway.log
    assert asked.headers["x-came-by"] == protocol
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    for status, code in ((401, "provider_refused_key"), (302, "provider_redirected")):
        await gateway.heal()
        gateway.servers["behind"].status = status
        answer = await gateway.ask(name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, code)
        await gateway.heal()
        gateway.servers["a"].status, gateway.servers["behind"].status = 503, status
        assert await gateway.tried(f"a-{name}-c") == ["a", "behind", "c"]


async def test_nothing_comes_behind_its_answer(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway.url)
    body = json.dumps({"model": "late", "messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = await client.call(CHAT, body, [("content-type", "application/json")])
    await client.close()
    assert answer.headers[":status"] == "200"
    assert json.loads(answer.body)["usage"] == CHAT_ANSWER["usage"]
    assert not {"x-ratelimit-remaining", "openai-organization"} & answer.headers.keys()


async def test_what_is_rewritten_is_used_without_a_restart(gateway: Gateway) -> None:
    await gateway.heal()
    folder = gateway.directory.parent
    for token, profile in (("eyJ.of-the-next-hour", PROFILE.replace(KEY_ID, "AKIDOFENVOY")), (KEY, PROFILE)):
        for name, text in (("cloud", token), ("aws", profile)):
            # as a program beside the gateway does it
            draft = folder / f"{name}.draft"
            draft.write_text(text)
            draft.replace(folder / f"{name}.key")

        async def is_used(token: str = token) -> bool:
            await gateway.ask("azure-entra", MESSAGES)
            return gateway.log[-1].headers["authorization"] == f"Bearer {token}"

        await eventually(is_used)

        async def is_refused(wanted: int = 200 if profile == PROFILE else 502) -> bool:
            await gateway.heal()
            return (await gateway.ask("bedrock")).status_code == wanted

        # AWS knows the other key with another secret
        await eventually(is_refused)


async def test_what_signs_is_nowhere_to_be_read(gateway: Gateway) -> None:
    await gateway.heal()
    assert (await gateway.ask("bedrock")).status_code == 200
    for pid in children_of(gateway.pids["extproc"]):
        memory = await asyncio.to_thread(memory_of, pid)
        assert not [one for one in (SECRET, TOKEN, KEY) if one.encode() in memory]
    dump = (await gateway.http.get(f"{gateway.admin}/config_dump", params={"include_eds": ""})).text
    assert "aws_request_signing" in dump
    files = [one for one in gateway.directory.rglob("*") if one.is_file()]
    readable = [one for one in files if one.stat().st_mode & 0o077]
    texts = [dump, *(one.read_text(errors="replace") for one in readable)]
    assert not [text[:100] for text in texts for one in (SECRET, TOKEN, KEY_ID, KEY) if one in text]


async def test_it_is_the_same_without_extproc(tmp_path: Path) -> None:
    async with stack(tmp_path, failureMode="Open") as gateway:
        await gateway.processes.end("extproc")

        async def is_served() -> bool:
            return (await gateway.ask("azure")).status_code == 200

        await eventually(is_served)
        for name, shown in SHOWN.items():
            answer = await gateway.ask(name, shown.asked)
            assert answer.status_code == 200
            assert gateway.log[-1].path == shown.path
            assert CREDENTIALS & gateway.log[-1].headers.keys() == shown.headers
