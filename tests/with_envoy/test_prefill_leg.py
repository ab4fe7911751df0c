# SPDX-License-Identifier: Apache-2.0
"""extproc makes the prefill leg: a prefill and a decode engine behind a real Envoy, with clients of both families."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from controller.usage.rows import parse_usage_line
from extproc.api.model_server import TRANSFER_PORTS
from extproc.api.usage_log import LEFT_SUFFIX
from extproc.request.prefill_protocols import PROTOCOLS
from tests.bench.engine.test_kv_exchange import Engine, Pair, running
from tests.certificates import Authority
from tests.waiting import eventually
from tests.with_envoy.gateways import Gateway as DuplexGateway
from tests.with_envoy.gateways import gateway as duplex_gateway
from tests.with_envoy.stand_in import Engine as StandIn
from tests.with_envoy.stand_in import Gateway, gateway_on, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from extproc.api.model_server import Connector

MODEL: Final = "llama"
# than any test
LATER_S: Final = 4e9
PROMPT: Final = "once upon a time " * 40
NIXL: Final = MappingProxyType({"connector": "NixlConnector"})
CHAT: Final = [{"role": "user", "content": PROMPT}]


class Scene:
    """A pair behind a gateway."""

    def __init__(self, pair: Pair, gateway: Gateway) -> None:
        self.pair = pair
        self.gateway = gateway
        self.openai = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.anthropic = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60)

    async def legs(self, outcome: str) -> float:
        """How many ended so."""
        return await self._metric(f'attache_prefill_legs_total{{outcome="{outcome}",server="default/llama"}}')

    async def legs_in_flight(self) -> float:
        return await self._metric('attache_prefill_legs_in_flight{server="default/llama"}')

    async def whole(self, reason: str) -> float:
        return await self._metric(f'attache_prefill_whole_requests_total{{reason="{reason}",server="default/llama"}}')

    async def _metric(self, name: str) -> float:
        text = (await self.gateway.http.get(f"{self.gateway.metrics}/metrics")).text
        lines = [{*line.rpartition(" ")[0].partition("{")[2].strip("}").split(","), line} for line in text.splitlines()]
        wanted = {*name.partition("{")[2].strip("}").split(",")}
        family = name.partition("{")[0]
        return sum(
            float(one.rpartition(" ")[2])
            for line, one in zip(lines, text.splitlines(), strict=True)
            if one.startswith(family + "{") and wanted <= line
        )

    def decisions(self) -> list[dict[str, Any]]:
        return self._lines("decision")

    async def outcome(self) -> dict[str, Any]:
        """Of the first request, when the access log has brought it."""

        async def is_there() -> bool:
            return bool(self._lines("outcome"))

        await eventually(is_there)
        return self._lines("outcome")[0]

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.gateway.decisions.read_text().splitlines()]
        return [one for one in lines if one["kind"] == kind]


def pairs(connector: str, **more: object) -> dict[str, object]:
    """Every prompt is prefilled by the other engine."""
    return {
        "prefillLabels": {"role": "prefill"},
        "decodeLabels": {"role": "decode"},
        "minUncachedTokens": 0,
        "decideBy": "UncachedTokens",
        "leg": "Gateway",
        "connector": connector,
        **more,
    }


@asynccontextmanager
async def scene_of(
    directory: Path,
    *,
    connector: Connector = "NixlConnector",
    speed: float = 1.0,
    decode: str = "",
    dead: str = "",
    **group: object,
) -> AsyncIterator[Scene]:
    """Every prompt is prefilled by the other engine. ``group``: see ``pairs``. ``decode``: decodes
    in place of the pair's, which then has no role. ``dead``: of a prefill engine that does not answer.
    """
    extra = {"shared_storage_path": str(directory / "store")}
    engine_name = {"context_first": "TensorRT-LLM", "bootstrap_room": "SGLang"}.get(connector, "vLLM")
    contract = connector if engine_name == "vLLM" else engine_name
    async with running(contract, speed=speed, extra=extra) as pair:
        endpoints: list[dict[str, object]] = [
            {"address": engine.url.removeprefix("http://"), "labels": {"role": role}}
            for engine, role in ((pair.prefill, "prefill"), (pair.decode, "decode"))
        ]
        if dead:
            endpoints.append({"address": dead, "labels": {"role": "prefill"}})
        if connector in TRANSFER_PORTS:
            group["transferPort"] = pair.prefill.side_port
        if decode:
            endpoints[1]["labels"] = {}
            endpoints.append({"address": decode, "labels": {"role": "decode"}})
        more: dict[str, object] = {"model": MODEL, "endpoints": endpoints, "pdGroup": pairs(connector, **group)}
        more |= {"engine": engine_name, "metricsPath": "/metrics"}
        log = {"usageLog": {"path": str(directory / "usage.log")}}
        async with gateway_on(directory, gateway=log, more=more) as gateway:
            scene = Scene(pair, gateway)
            async with scene.openai, scene.anthropic:
                yield scene


async def ask_openai(open_ai: openai.AsyncOpenAI) -> list[str]:
    """The texts of chats and completions, whole and streamed."""
    texts = list[str]()
    chat = await open_ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=6)  # type: ignore[arg-type]
    texts.append(chat.choices[0].message.content or "")
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 6
    streamed = await open_ai.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=6,
        stream=True,
    )
    texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in streamed if chunk.choices]))
    completion = await open_ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
    texts.append(completion.choices[0].text)
    pieces = await open_ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, stream=True)
    texts.append("".join([chunk.choices[0].text async for chunk in pieces if chunk.choices]))
    return texts


async def ask_all(open_ai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> list[str]:
    """The same, and of messages."""
    texts = await ask_openai(open_ai)
    message = await claude.messages.create(model=MODEL, max_tokens=6, messages=CHAT)  # type: ignore[arg-type]
    texts.append(message.content[0].text)  # type: ignore[union-attr]
    async with claude.messages.stream(model=MODEL, max_tokens=6, messages=CHAT) as stream:  # type: ignore[arg-type]
        texts.append("".join([text async for text in stream.text_stream]))
    return texts


async def whole_answers(engine: Engine) -> list[str]:
    """Of an engine that computes the prompts itself."""
    async with (
        openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=60) as one,
        anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", timeout=60) as other,
    ):
        return await ask_all(one, other)


@pytest.mark.parametrize(
    "connector",
    [
        "NixlConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "OffloadingConnector",
        "ExampleConnector",
        "MooncakeStoreConnector",
        "HF3FSKVConnector",
        "FlexKVConnectorV1",
    ],
)
async def test_answers_are_those_of_a_whole_engine_and_the_decode_engine_computes_no_prompt(
    tmp_path: Path, connector: Connector
) -> None:
    async with running("NixlConnector") as whole, scene_of(tmp_path, connector=connector) as scene:
        assert await ask_all(scene.openai, scene.anthropic) == await whole_answers(whole.decode)
        assert await scene.legs("prefilled") == 6
        computed = await scene.pair.decode.computed()
        if PROTOCOLS[connector].has_lease:
            assert computed == 0
            assert await scene.pair.decode.metric("vllm:nixl_bytes_transferred_count") == 6
        else:
            # its store holds whole blocks, and the last one of a prompt is not full
            assert computed < 6 * 16 + 6
        await scene.pair.are_free()
        first = scene.decisions()[0]
        assert first["prefill_leg"]["outcome"] == "prefilled"
        assert first["prefill_leg"]["address"] == scene.pair.prefill.url.removeprefix("http://")
        assert first["prefill_wait_s"] > 0


async def test_a_response_is_pushed_though_its_engines_do_not_read_the_header_for_its_id(tmp_path: Path) -> None:
    async with scene_of(tmp_path, connector="NixlPushConnector") as scene:
        answer = await scene.openai.responses.create(model=MODEL, input=PROMPT, max_output_tokens=6)
        assert answer.usage is not None
        assert answer.usage.output_tokens == 6
        assert await scene.legs("prefilled") == 1
        assert await scene.pair.decode.computed() == 0
        await scene.pair.are_free()


async def test_tensorrt_llms_context_comes_first(tmp_path: Path) -> None:
    async with running("NixlConnector") as whole, scene_of(tmp_path, connector="context_first") as scene:
        async with openai.AsyncOpenAI(base_url=f"{whole.decode.url}/v1", api_key="none", timeout=60) as one:
            assert await ask_openai(scene.openai) == await ask_openai(one)
        assert await scene.legs("prefilled") == 4
        assert await scene.pair.decode.computed() == 0
        await scene.pair.are_free()
        # an API that it does not take
        await scene.anthropic.messages.create(model=MODEL, max_tokens=6, messages=CHAT)  # type: ignore[arg-type]
        assert await scene.whole("api") == 1


async def test_requests_that_a_client_gives_the_same_id_get_their_own_prompts(tmp_path: Path) -> None:
    async with running("NixlConnector") as whole, scene_of(tmp_path, connector="NixlPushConnector") as scene:
        prompts = [f"{number} {PROMPT}" for number in range(8)]

        async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=6, extra_headers={"x-request-id": "the-same"}
            )
            return answer.choices[0].text

        found = await asyncio.gather(*[ask(scene.openai, prompt) for prompt in prompts])
        async with openai.AsyncOpenAI(base_url=f"{whole.decode.url}/v1", api_key="none", timeout=60) as one:
            # an engine draws its answers in the order in which requests arrive; what is not a prompt's own is garbage
            assert sorted(found) == sorted([await ask(one, prompt) for prompt in prompts])
        assert await scene.legs("prefilled") == 8
        assert await scene.pair.decode.computed() == 0
        await scene.pair.are_free()


async def test_headers_that_no_library_sends_are_no_fault_of_the_prefill_engine(tmp_path: Path) -> None:
    async with scene_of(tmp_path, connector="NixlPushConnector") as scene:
        host, port = scene.gateway.url.removeprefix("http://").split(":")
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2}).encode()

        async def ask(value: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = [b"%b: %b" % (name, value) for name in (b"authorization", b"tracestate", b"x-request-id")]
            lines += [b"host: a", b"connection: close", b"content-length: %d" % len(body)]
            writer.write(b"\r\n".join([b"POST /v1/completions HTTP/1.1", *lines, b"", body]))
            answer = await reader.read()
            writer.close()
            return answer.split(b" ", 2)[1]

        # Envoy refuses control characters itself
        assert [await ask(value) for value in (b"a\x01b", b"a\x7fb")] == [b"400", b"400"]
        assert [await ask(value) for value in (b"\xff", b"a\tb", "é".encode())] == [b"200"] * 3
        assert await scene.legs("prefilled") == 3
        assert await scene.pair.decode.computed() == 0
        await scene.pair.are_free()


async def test_mooncakes_engine_that_has_restarted_is_known_by_its_new_id(tmp_path: Path) -> None:
    async with scene_of(tmp_path, connector="MooncakeConnector") as scene:
        sent = 0

        async def ask() -> None:
            nonlocal sent
            sent += 1
            await scene.openai.completions.create(model=MODEL, prompt=f"{sent} {PROMPT}", max_tokens=2)

        await ask()
        assert await scene.legs("prefilled") == 1
        await scene.pair.prefill.stop()
        while not await scene.legs("unreachable"):
            await ask()
        await scene.pair.prefill.start()
        # it is avoided for a while
        while await scene.legs("prefilled") == 1:
            await ask()
        assert await scene.pair.decode.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert await scene.pair.decode.metric("vllm:nixl_bytes_transferred_count") == 2


async def test_a_prefill_that_mooncake_drops_lets_no_decode_engine_wait(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "nothing", "schema": {"type": "null"}}}
    async with scene_of(tmp_path, connector="MooncakeConnector") as scene:
        answer = await scene.openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=6, extra_body={"response_format": schema}
        )
        assert answer.choices[0].finish_reason == "stop"
        assert await scene.legs("no_parameters") == 1
        assert await scene.pair.decode.computed() > 0
        await scene.pair.are_free()


async def test_without_its_prefill_engine_the_decode_engine_computes(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        await scene.pair.prefill.stop()
        answer = await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        assert await scene.pair.decode.computed() > 0
        assert await scene.legs("unreachable") == 1
        assert scene.decisions()[0]["prefill_leg"]["outcome"] == "unreachable"
        await eventually(scene.pair.decode.is_free)


async def test_another_prefill_engine_takes_the_place_of_one_that_is_dead(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    async with scene_of(tmp_path, dead=f"127.0.0.1:{nobody}") as scene:
        asked = 0
        # equal engines are drawn
        while not await scene.legs("unreachable"):
            asked += 1
            await scene.openai.completions.create(model=MODEL, prompt=f"{asked}{PROMPT}", max_tokens=2)
        assert await scene.legs("prefilled") == asked
        assert await scene.pair.decode.computed() == 0
        assert scene.decisions()[-1]["prefill_leg"]["tries"] == 2
        await scene.pair.are_free()


async def test_a_prefill_engine_that_hangs_leaves_time_for_another(tmp_path: Path) -> None:
    asked = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with scene_of(tmp_path, dead=f"127.0.0.1:{port}", prefillTimeout="4s", onPrefillFailure="Fail") as scene:
            sent = 0
            # equal engines are drawn
            while not asked:
                sent += 1
                await scene.openai.completions.create(model=MODEL, prompt=f"{sent}{PROMPT}", max_tokens=2)
            assert await scene.legs("timeout") == 1
            assert await scene.legs("prefilled") == sent
            assert scene.decisions()[-1]["prefill_leg"]["tries"] == 2
            assert 2 <= scene.decisions()[-1]["prefill_wait_s"] < 4
            await scene.pair.are_free()


async def test_or_the_client_gets_503_if_the_server_wants_that(tmp_path: Path) -> None:
    async with scene_of(tmp_path, onPrefillFailure="Fail") as scene:
        await scene.pair.prefill.stop()
        with pytest.raises(openai.InternalServerError) as raised:
            await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert (raised.value.status_code, raised.value.code) == (503, "prefill_failed")
        assert await scene.pair.decode.computed() == 0
        assert await scene.legs("unreachable") == 1


async def test_what_the_prefill_engine_refuses_its_client_gets_in_its_own_form(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        long = "word " * 20_000
        with pytest.raises(openai.BadRequestError) as raised:
            await scene.openai.completions.create(model=MODEL, prompt=long, max_tokens=6)
        direct = await scene.pair.decode.complete(long)
        assert direct.status_code == 400
        assert raised.value.body["message"][:30] == direct.json()["error"]["message"][:30]  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError) as other:
            await scene.anthropic.messages.create(
                model=MODEL, max_tokens=6, messages=[{"role": "user", "content": long}]
            )
        assert other.value.body["type"] == "error"  # type: ignore[index]
        assert await scene.legs("refused") == 2
        await scene.pair.are_free()


async def test_what_is_kept_for_one_decode_engine_is_never_sent_to_another(tmp_path: Path) -> None:
    failing = StandIn()
    failing.is_plain, failing.status = True, 503
    async with served(failing) as address, scene_of(tmp_path, decode=address) as scene:
        with pytest.raises(openai.InternalServerError) as raised:
            await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert raised.value.status_code == 503
        assert failing.requests == 1
        assert "kv_transfer_params" in failing.asked
        assert await scene.pair.decode.metric("vllm:request_success_total") == 0
        assert await scene.legs("prefilled") == 1


async def test_several_answers_are_served_whole_and_counted(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        answer = await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, n=2)
        assert len(answer.choices) == 2
        assert await scene.whole("answers") == 1
        assert await scene.pair.decode.computed() > 0
        assert scene.decisions()[0]["stage"].startswith("served whole")


async def test_a_client_that_leaves_during_the_prefill_leaves_nothing(tmp_path: Path) -> None:
    async with scene_of(tmp_path, speed=0.02) as scene:
        asking = asyncio.create_task(
            scene.gateway.http.post(
                f"{scene.gateway.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 6}
            )
        )

        async def computes() -> bool:
            return not await scene.pair.prefill.is_free()

        await eventually(computes)
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.TransportError)):
            await asking

        async def left() -> bool:
            return await scene.legs("left") == 1

        await eventually(left)
        await scene.pair.are_free()
        assert await scene.pair.decode.metric("vllm:request_success_total") == 0
        # Envoy writes no line, and extproc one
        log = tmp_path / f"usage.log{LEFT_SUFFIX}"
        await eventually(lambda: log.exists() and log.stat().st_size > 0)
        (row,) = [parse_usage_line(line, LATER_S) for line in log.read_bytes().splitlines()]
        assert (row.ended, row.status, row.endpoint) == ("client", 0, scene.pair.prefill.url.removeprefix("http://"))
        assert row.duration_us > 0
        assert (row.input > 100, row.output, row.is_estimated, row.request_id != "") == (True, 0, True, True)
        answer = await scene.openai.completions.create(model=MODEL, prompt="short", max_tokens=1)
        assert answer.choices
        await eventually(lambda: (tmp_path / "usage.log").read_bytes().count(b"\n") == 1)


@asynccontextmanager
async def duplex_on(
    directory: Path, kind: str, prefill: str, decode: str, *, engine: str = "vLLM", group: Mapping[str, object] = NIXL
) -> AsyncIterator[DuplexGateway]:
    """A gateway that sends bodies in pieces, before the engines at these addresses. ``group``: see ``pairs``."""
    roles = (("prefill", prefill), ("decode", decode))
    server = {
        "model": MODEL,
        "scrapeInterval": "0s",
        "endpoints": [{"address": address, "labels": {"role": role}} for role, address in roles],
        "pdGroup": pairs(**group),
        "engine": engine,
    }
    pool = {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelServer", "metadata": {"name": "pool"}, "spec": server}
    flags = ["--duplex-choices", "3"] if kind == "override_host" else []
    async with duplex_gateway(
        directory, [prefill, decode], kind=kind, flags=flags, pool=json.dumps(pool), takes_envoy_headers=True
    ) as made:
        yield made


@pytest.mark.parametrize("kind", ["original_dst", "override_host"])
async def test_gateways_that_send_bodies_in_pieces_have_legs_too(tmp_path: Path, kind: str) -> None:
    async with running("NixlConnector") as whole, running("NixlConnector") as pair:
        addresses = [one.url.removeprefix("http://") for one in (pair.prefill, pair.decode)]
        async with (
            duplex_on(tmp_path, kind, *addresses) as made,
            openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60) as open_ai,
            anthropic.AsyncAnthropic(base_url=made.url, api_key="none", max_retries=0, timeout=60) as claude,
        ):
            assert await ask_all(open_ai, claude) == await whole_answers(whole.decode)
            # one that comes and goes in several pieces
            answer = await open_ai.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=6, extra_body={"metadata": {"long": "x" * 300_000}}
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 6
        assert await pair.decode.computed() == 0
        assert await pair.decode.metric("vllm:nixl_bytes_transferred_count") == 7
        await pair.are_free()


@pytest.mark.parametrize("kind", ["original_dst", "override_host"])
async def test_there_too_what_is_kept_for_one_decode_engine_is_never_sent_to_another(tmp_path: Path, kind: str) -> None:
    prefill, (nobody,) = StandIn(), free_ports(1)
    prefill.is_plain, prefill.pieces = True, (b'{"kv_transfer_params": {"a": 1}}',)
    async with served(prefill) as address, duplex_on(tmp_path, kind, address, f"127.0.0.1:{nobody}") as made:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{made.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT})
        assert answer.status_code == 503
        # the prefill alone: that gateway would ask any engine after a connection that fails
        assert prefill.requests == 1


class SecuredPair:
    """A prefill and a decode engine behind TLS, which ask for a client certificate and a key. ``calls``: by role, what
    came: the server's name in the handshake, the subject of the client's certificate, the key, and the body.
    """

    NAME: Final = "engine.example.com"
    KEY: Final = "sk-engine-1"

    def __init__(self, folder: Path, *, prefill_name: str = NAME) -> None:
        authority, clients = Authority("engines"), Authority("gateways")
        folder.mkdir()
        for name, content in (("ca", authority.cert), ("clients", clients.cert), ("key", self.KEY.encode())):
            (folder / name).write_bytes(content)
        tls = {"caFile": str(folder / "ca"), "serverName": self.NAME}
        tls["clientCertificate"] = clients.issue("gateway").write(folder, "gateway")
        self.connection = {"tls": tls, "apiKeyFile": str(folder / "key")}
        self.calls: dict[str, list[tuple[str | None, str, str, dict[str, Any]]]] = {"prefill": [], "decode": []}
        self.contexts = dict[str, ssl.SSLContext]()
        self._names = dict[str, str | None]()
        for role, name in (("prefill", prefill_name), ("decode", self.NAME)):
            context = self.contexts[role] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            files = authority.issue(name, dns=[name]).write(folder, role)
            context.load_cert_chain(files["certFile"], files["keyFile"])
            context.load_verify_locations(folder / "clients")
            context.verify_mode = ssl.CERT_REQUIRED
            context.sni_callback = partial(self._on_name, role)

    def _on_name(self, role: str, _: object, name: str | None, __: object) -> None:
        self._names[role] = name

    async def answer(self, role: str, http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        subject = dict(http.transport.get_extra_info("peercert")["subject"][0])["commonName"]
        self.calls[role].append((self._names[role], subject, http.headers["authorization"], await http.json()))
        return web.json_response({"choices": [], "kv_transfer_params": {"from": role}})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[list[dict[str, object]]]:
        """As endpoints of a ModelServer."""
        endpoints = list[dict[str, object]]()
        async with AsyncExitStack() as stack:
            for role, context in self.contexts.items():
                app = web.Application()
                app.router.add_post("/{path:.*}", partial(self.answer, role))
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
                endpoints.append({"address": f"127.0.0.1:{runner.addresses[0][1]}", "labels": {"role": role}})
            yield endpoints


@pytest.mark.parametrize("name", [SecuredPair.NAME, "another.example.com"])
async def test_a_leg_uses_the_tls_and_the_key_of_its_servers_connection(tmp_path: Path, name: str) -> None:
    secured = SecuredPair(tmp_path / "engines", prefill_name=name)
    async with secured.served() as endpoints:
        more = {"model": MODEL, "endpoints": endpoints, "connection": secured.connection}
        async with gateway_on(tmp_path, more={**more, "pdGroup": pairs("NixlConnector")}) as gateway:
            answer = await gateway.http.post(
                f"{gateway.url}/v1/completions",
                json={"model": MODEL, "prompt": PROMPT},
                headers={"authorization": "Bearer of-the-client"},
            )
            assert answer.status_code == 200
            (leg,) = await gateway.logged("prefill_leg")
    known = (SecuredPair.NAME, "gateway", f"Bearer {SecuredPair.KEY}")
    ((*how, body),) = secured.calls["decode"]
    assert tuple(how) == known
    if name == SecuredPair.NAME:
        assert leg["prefill_leg"]["outcome"] == "prefilled"
        ((*how, asked),) = secured.calls["prefill"]
        assert tuple(how) == known
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert body["kv_transfer_params"] == {"from": "prefill"}
    else:
        # its certificate is for another name: it gets nothing
        assert leg["prefill_leg"]["outcome"] == "unreachable"
        assert "certificate" in leg["prefill_leg"]["detail"].lower()
        assert not secured.calls["prefill"]
        assert "kv_transfer_params" not in body
