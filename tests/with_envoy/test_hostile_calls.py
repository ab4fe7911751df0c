# SPDX-License-Identifier: Apache-2.0
"""Clients and engines of gRPC that try something, and what becomes of others meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

import grpc.aio
import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports
from controller.usage.rows import parse_usage_line
from tests.certificates import Authority
from tests.hostile_calls import ANSWERS, HUGE_BYTES, REACTIONS, Headers, RawClient, RawEngine
from tests.model_calls import INFER, V2, Engine, framed, infer
from tests.waiting import eventually
from tests.with_envoy.test_calls import FUTURE_S, route, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


pytestmark = pytest.mark.asyncio(loop_scope="module")

Status = grpc.StatusCode
MOST_BYTES: Final = 2**20
GRPC: Final = [("content-type", "application/grpc"), ("te", "trailers")]
NAMES: Final = [*ANSWERS, *REACTIONS, "huge"]


class Site(msgspec.Struct, frozen=True):
    """``innocent``: a channel of its own, to the model ``good`` of ``engine``. ``http``: for pages of extproc."""

    stack: Stack
    engine: Engine
    raw_engine: RawEngine
    innocent: grpc.aio.Channel
    http: httpx.AsyncClient
    log: Path
    secure: str
    authority: Authority

    async def good(self) -> None:
        """An innocent call; raises AioRpcError if it fails or takes long."""
        answer = await self.innocent.unary_unary(INFER)(infer("good", 1.0).SerializeToString(), timeout=10)
        assert V2["ModelInferResponse"].FromString(answer).outputs[0].contents.fp64_contents == [1.0]

    async def raw(self, body: bytes, headers: Headers = GRPC, trailers: Headers | None = None) -> str:
        """The outcome of a raw call."""
        client = await RawClient.connect(self.stack.url)
        try:
            answer = await client.call(INFER, body, headers, trailers)
        finally:
            await client.close()
        return answer.outcome if answer.reset is None else f"{answer.outcome} reset {answer.reset}"

    def rows(self, model: str) -> list[int]:
        lines = self.log.read_bytes().splitlines() if self.log.exists() else []
        return [row.status for row in (parse_usage_line(line, FUTURE_S) for line in lines) if row.model == model]

    async def nothing_left(self) -> None:
        async def is_over() -> bool:
            return await self.in_flight() == 0

        await eventually(is_over)

    async def in_flight(self) -> float:
        text = (await self.http.get(f"{self.stack.metrics}/metrics")).text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("attache_in_flight{")
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    log = tmp_path_factory.mktemp("usage") / "usage.jsonl"
    authority, (plain, port) = Authority("servers"), free_ports(2)
    certificate = authority.issue(dns=["gateway.example.com"]).write(tmp_path_factory.mktemp("tls"), "server")
    # the address at which the stack asks
    listeners = [{"name": "plain", "address": f"127.0.0.1:{plain}"}]
    secure = {"name": "secure", "address": f"127.0.0.1:{port}", "tls": {"certificates": [certificate]}}
    gateway = {
        "maxBodySize": "1Mi",
        "usageLog": {"path": str(log)},
        "listen": f"127.0.0.1:{plain}",
        "listeners": [*listeners, secure],
    }
    async with AsyncExitStack() as exits:
        engine = await exits.enter_async_context(Engine())
        raw = await exits.enter_async_context(RawEngine())
        flags = EngineFlags(count=1)
        stack = await exits.enter_async_context(
            running_stack(tmp_path_factory.mktemp("stack"), flags, watch=True, gateway=gateway)
        )
        models = [
            *(server(name, "V2-gRPC", name, raw.address) for name in NAMES),
            *(route(name, **{name: 1}) for name in NAMES),
            server("good-one", "V2-gRPC", "good", engine.address),
            route("good", **{"good-one": 1}),
        ]
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(f"{file.read_text()}\n---\n{yaml.safe_dump_all(models)}")
        new.replace(file)
        address = stack.url.removeprefix("http://")

        async def is_served() -> bool:
            async with grpc.aio.insecure_channel(address) as channel:
                try:
                    await channel.unary_unary(INFER)(infer("good", 1.0).SerializeToString(), timeout=10)
                except grpc.aio.AioRpcError:
                    return False
                return True

        await eventually(is_served)
        innocent = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        http = await exits.enter_async_context(httpx.AsyncClient(timeout=60))
        yield Site(stack, engine, raw, innocent, http, log, f"127.0.0.1:{port}", authority)


# By the name of the model: what a client gets, and the status in its usage row.
OUTCOMES: Final = {
    "fine": ("200/0", 200),
    "no-trailers": ("200/-", 500),
    "no-body": ("200/-", 500),
    "status-99": ("200/99", 500),
    "status-abc": ("200/abc", 500),
    "status-negative": ("200/-1", 500),
    "status-empty": ("200/", 500),
    "status-long": ("200/" + "9" * 5000, 500),
    "status-repeated": ("200/0,13", 500),
    "status-in-headers-alone": ("200/13", 500),
    "message-long": ("200/13", 500),
    "message-odd": ("200/13", 500),
    "two-messages": ("200/0", 200),
    "half-a-message": ("200/0", 200),
    "html": ("200/-", 500),
    "http-503": ("503/-", 503),
    "http-404": ("404/-", 404),
    "http-302": ("502/-", 502),
    "forged": ("200/0", 200),
    "forged-in-headers-alone": ("200/13", 500),
    "reset": ("200/14", 503),
    "reset-refused": ("200/14", 503),
    "reset-no-error": ("200/14", 503),
    "reset-after-head": ("200/- reset 2", 500),
    "go-away": ("200/14", 503),
    "http1": ("200/13", 500),
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_answer_that_is_none_ends_one_call_with_one_row(site: Site, name: str) -> None:
    outcome, status = OUTCOMES[name]
    assert await site.raw(framed(infer(name).SerializeToString())) == outcome
    await site.good()
    await eventually(lambda: site.rows(name) == [status])
    await site.nothing_left()


@pytest.mark.parametrize("name", ["forged", "forged-in-headers-alone"])
async def test_what_only_the_gateway_may_say_is_in_neither_headers_nor_trailers(site: Site, name: str) -> None:
    client = await RawClient.connect(site.stack.url)
    answer = await client.call(INFER, framed(infer(name, 1.0).SerializeToString()), GRPC)
    await client.close()
    assert "grpc-status" in answer.headers
    assert not [one for one in answer.headers if one.startswith(("x-attache-", "x-ratelimit-", "x-envoy-"))]


async def test_an_answer_beyond_all_buffers_arrives_whole(site: Site) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(site.stack.url.removeprefix("http://"), options=options) as channel:
        answer = await channel.unary_unary(INFER)(infer("huge").SerializeToString(), timeout=60)
    assert len(answer) == HUGE_BYTES
    await site.good()


async def test_a_call_whose_client_leaves_is_cancelled_at_the_engine(site: Site) -> None:
    calls = [site.innocent.unary_unary(INFER)(infer("nothing").SerializeToString()) for _ in range(20)]
    await eventually(lambda: site.raw_engine.calls.count("nothing") == 20)
    assert await site.in_flight() == 20
    for one in calls:
        one.cancel()
    await eventually(lambda: site.raw_engine.cut.count("nothing") == 20)
    await site.nothing_left()
    await eventually(lambda: len(site.rows("nothing")) == 20)
    await site.good()


BAD_HEADERS: Final = {
    "no te": GRPC[:1],
    "no type": GRPC[1:],
    "another type": [("content-type", "application/grpc-web"), GRPC[1]],
    "no time": [*GRPC, ("grpc-timeout", "garbage")],
    "a negative time": [*GRPC, ("grpc-timeout", "-1S")],
    "two times": [*GRPC, ("grpc-timeout", "5S"), ("grpc-timeout", "garbage")],
}


@pytest.mark.parametrize("what", BAD_HEADERS)
async def test_headers_that_engines_fail_at_do_not_reach_them(site: Site, what: str) -> None:
    body = framed(infer("good", 1.0).SerializeToString())
    came = len(site.engine.seen)
    outcomes = {await site.raw(body, BAD_HEADERS[what]) for _ in range(20)}
    assert outcomes == ({"400/-"} if "type" in what else {"200/3"})
    assert len(site.engine.seen) == came
    await site.good()


async def test_tensors_that_a_model_rejects_shut_nobody_out(site: Site) -> None:
    """INTERNAL is what MLServer and KServe's SDK answer to them."""
    for status in (Status.INVALID_ARGUMENT, Status.INTERNAL, Status.UNKNOWN):
        for number in range(120):
            if number % 4:
                site.engine.fails.append((status, "shape"))
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await site.good()
                assert found.value.code() is status
            else:
                await site.good()


async def test_streams_that_trickle_hold_up_nobody(site: Site) -> None:
    client = await RawClient.connect(site.stack.url)
    body = framed(infer("good", raw_input_contents=[bytes(1000)]).SerializeToString())
    streams = [client.begin(INFER, GRPC) for _ in range(100)]
    for number in range(3):
        for one in streams:
            client.connection.send_data(one, body[number : number + 1])
        client.flush()
        await site.good()
        await site.nothing_left()
        await asyncio.sleep(1)
    await client.close()
    await site.good()


async def test_a_body_may_be_as_long_as_the_limit_and_no_longer(site: Site) -> None:
    head = len(framed(infer("good", raw_input_contents=[bytes(MOST_BYTES)]).SerializeToString())) - MOST_BYTES
    outcomes = list[str]()
    for extra in (0, 1):
        message = infer("good", raw_input_contents=[bytes(MOST_BYTES - head + extra)])
        body = framed(message.SerializeToString())
        assert len(body) == MOST_BYTES + extra
        outcomes.append(await site.raw(body))
    assert outcomes == ["200/0", f"200/{Status.RESOURCE_EXHAUSTED.value[0]}"]


@pytest.mark.parametrize("name", [b"a\0b", b"a\r\ngrpc-status: 0", b"100%", b"%0a%00", "é\u2028".encode(), b"\x7f"])
async def test_a_name_is_escaped_in_what_the_client_gets(site: Site, name: bytes) -> None:
    client = await RawClient.connect(site.stack.url)
    answer = await client.call(INFER, framed(b"\x0a" + bytes([len(name)]) + name), GRPC)
    await client.close()
    assert answer.outcome == f"200/{Status.NOT_FOUND.value[0]}"
    text = answer.headers["grpc-message"]
    assert text.isascii()
    assert text.isprintable()
    assert unquote_to_bytes(text).startswith(b"The model '" + name + b"'")


async def test_trailers_of_a_client_change_nothing(site: Site) -> None:
    body = framed(infer("good", 1.0).SerializeToString())
    late = [("grpc-status", "13"), ("x-attache-server", "default/fine")]
    assert await site.raw(body, trailers=late) == "200/0"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS"])
async def test_a_call_is_a_post(site: Site, method: str) -> None:
    client = await RawClient.connect(site.stack.url)
    answer = await client.answer(client.begin(INFER, GRPC, method=method, ends=True))
    await client.close()
    assert answer.outcome == f"200/{Status.UNIMPLEMENTED.value[0]}"


async def test_a_model_of_grpc_alone_is_not_served_by_rest(site: Site) -> None:
    body = {"model": "good", "messages": []}
    for path in ("/v2/models/good/infer", "/v1/chat/completions"):
        answer = await site.http.post(f"{site.stack.url}{path}", json=body)
        assert answer.status_code == 404
        assert INFER in answer.text


async def test_a_client_uses_tls(site: Site) -> None:
    credentials = grpc.ssl_channel_credentials(site.authority.cert)
    options = [("grpc.ssl_target_name_override", "gateway.example.com")]
    async with grpc.aio.secure_channel(site.secure, credentials, options=options) as channel:
        raw = await channel.unary_unary(INFER)(infer("good", 2.5).SerializeToString(), timeout=30)
    assert V2["ModelInferResponse"].FromString(raw).outputs[0].contents.fp64_contents == [2.5]
