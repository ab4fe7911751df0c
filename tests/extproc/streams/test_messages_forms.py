# SPDX-License-Identifier: Apache-2.0
"""The messages that each kind of gateway sends, over gRPC to our server, and what it reads of each answer.

Taken from the gateways' code: Envoy's ext_proc filter as Istio, kgateway and Envoy Gateway set it up, agentgateway's
client, and the shim of NGINX Gateway Fabric (``cmd/gateway/endpoint_picker.go``). A real Envoy plays the first ones in
``tests/with_envoy``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.request_states import RequestState
from extproc.listen_sockets import listen
from extproc.llmd.picker_builder import PickerFactory
from extproc.metrics.request_metrics import Metrics
from extproc.rpc.server import RpcCall
from extproc.scheduling.sessions import session_token
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from extproc.streams.server import GrpcServer
from tests.extproc.conftest import shell
from tests.extproc.runtime.test_app import PROCESS, free_port

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Iterable, Mapping

    Stream = grpc.aio.StreamStreamCall[ProcessingRequest, ProcessingResponse]

ENGINES = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
POOL = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: pool}}
spec:
  model: base
  scrapeInterval: 0s
  pickerConfig: epp.yaml
  endpoints: [{", ".join(f'{{address: "{one}"}}' for one in ENGINES)}]
""".encode()
EPP = b"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: session-affinity-filter
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 4}
"""
CHAT = json.dumps({"model": "base", "messages": [{"role": "user", "content": "hello " * 500}]}).encode()
ANSWER = b'{"choices": [], "usage": {"prompt_tokens": 500, "completion_tokens": 7}}'
ENVOYS = {
    ":authority": "llm.example",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "content-type": "application/json",
    "x-request-id": "17",
}
BUFFERED, FULL_DUPLEX = 2, 4


class Server:
    """Our server in this process, and a gateway's connection to it."""

    def __init__(self, core: Core, metrics: Metrics, channel: grpc.aio.Channel) -> None:
        self.core, self.metrics, self._channel = core, metrics, channel
        self.table = core.pools["default/pool"].table

    def stream(self) -> Stream:
        return self._channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    def count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


async def never(*_: object) -> Any:  # noqa: ANN401 - nothing is waited for here
    raise AssertionError("no request of these has to wait")


@asynccontextmanager
async def served(answer_to: Any = never, *, pool: bytes = POOL, **options: object) -> AsyncIterator[Server]:  # noqa: ANN401
    core = Core(
        load_snapshot({"pool.yaml": pool, "epp.yaml": EPP}),
        rng=random.Random(0),
        ticket_prefix="t",
        make_picker=PickerFactory(),
    )
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
    context = shell(core, metrics, pool="default/pool", **options)

    server = GrpcServer(
        context,
        new_exchange=lambda of_stream, trusts, origin: Exchange(
            of_stream, DuplexExchange, is_trusted=trusts, origin=origin
        ),
        answer_to=answer_to,
    )
    address = f"127.0.0.1:{free_port()}"
    await server.start(listen(address))
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Server(core, metrics, channel)
    finally:
        await server.stop(drain_s=1.0, hurry=asyncio.Event())


def headers(given: Mapping[str, str], *, body_mode: int | None = None, raw: bool = True) -> ProcessingRequest:
    """``body_mode``: None where the gateway does not say. ``raw``: Envoy's way, else Go's."""
    message = ProcessingRequest()
    message.request_headers.SetInParent()
    for key, value in given.items():
        header = message.request_headers.headers.headers.add(key=key)
        if raw:
            header.raw_value = value.encode()
        else:
            header.value = value
    if body_mode is not None:
        message.protocol_config.request_body_mode = body_mode
        message.protocol_config.response_body_mode = FULL_DUPLEX if body_mode == FULL_DUPLEX else 0
    return message


def body(piece: bytes, *, end: bool) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = piece, end
    return message


def answer_headers(status: int = 200, served_by: str = "") -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
    if served_by:
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served_by
    return message


def answer_body(piece: bytes, *, end: bool) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = piece, end
    return message


def trailers_of(kind: str) -> ProcessingRequest:
    message = ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


def written(answer: ProcessingResponse) -> dict[str, str]:
    """The headers that an answer sets, of whatever kind."""
    kind = answer.WhichOneof("response")
    assert kind in {"request_headers", "request_body", "response_headers"}
    options = getattr(answer, kind).response.header_mutation.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in options}


def in_metadata(answer: ProcessingResponse) -> str:
    fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    return fields["x-gateway-destination-endpoint"].string_value


async def next_of(stream: Stream) -> ProcessingResponse:
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse), answer
    return answer


async def ask(
    stream: Stream, *, mode: int | None, more: Mapping[str, str] | None = None
) -> tuple[ProcessingResponse, bytes]:
    """An Envoy that streams: the headers, then the body in pieces without waiting. The headers' answer, and the
    body.
    """
    await stream.write(headers({**ENVOYS, **(more or {})}, body_mode=mode))
    for start in range(0, len(CHAT), 1000):
        await stream.write(body(CHAT[start : start + 1000], end=start + 1000 >= len(CHAT)))
    first, on = await next_of(stream), b""
    while True:
        piece = (await next_of(stream)).request_body.response.body_mutation.streamed_response
        on += piece.body
        if piece.end_of_stream:
            return first, on


async def tell(stream: Stream, *, served_by: str = "", status: int = 200) -> ProcessingResponse:
    """The answer of an engine on its way back: the answer to its headers."""
    await stream.write(answer_headers(status, served_by))
    first = await next_of(stream)
    assert first.WhichOneof("response") == "response_headers"
    for piece, end in ((ANSWER[:20], False), (ANSWER[20:], True)):
        await stream.write(answer_body(piece, end=end))
        passed = (await next_of(stream)).response_body.response.body_mutation.streamed_response
        assert (passed.body, passed.end_of_stream) == (piece, end)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    return first


# Envoys say how bodies come since the first message has a protocol_config; older ones, and older agentgateways, do not.
@pytest.mark.parametrize("mode", [FULL_DUPLEX, None])
async def test_envoy_with_original_dst_reads_one_address_in_the_header(mode: int | None) -> None:
    async with served() as server:
        stream = server.stream()
        first, sent_on = await ask(stream, mode=mode)
        address = written(first)["x-gateway-destination-endpoint"]
        assert address in ENGINES
        assert in_metadata(first) == address
        assert sent_on == CHAT
        assert server.table.in_flight.sum() == 1
        assert written(await tell(stream)) == {"x-session-token": session_token(address)}
        assert server.table.in_flight.sum() == 0
        assert server.count("attache_prompt_tokens_total", server="default/pool", endpoint=address) == 500


@pytest.mark.parametrize("mode", [FULL_DUPLEX, None])
async def test_istio_goes_down_a_list_in_metadata_and_says_who_served(mode: int | None) -> None:
    async with served(duplex_choices=3) as server:
        stream = server.stream()
        first, _ = await ask(stream, mode=mode)
        listed = in_metadata(first).split(",")
        assert sorted(listed) == ENGINES
        assert written(first)["x-gateway-destination-endpoint"] == in_metadata(first)
        # the first did not answer; the session is where the second did
        answered = await tell(stream, served_by=listed[1])
        token = written(answered)["x-session-token"]
        assert token == session_token(listed[1])
        again = server.stream()
        first, _ = await ask(again, mode=mode, more={"x-session-token": token})
        assert in_metadata(first) == listed[1]
        await tell(again, served_by=listed[1])


async def test_who_served_is_believed_only_if_we_have_named_it() -> None:
    async with served(duplex_choices=3) as server:
        stream = server.stream()
        first, _ = await ask(stream, mode=FULL_DUPLEX)
        answered = await tell(stream, served_by="10.9.9.9:1")
        assert written(answered)["x-session-token"] == session_token(in_metadata(first).split(",")[0])


# kgateway's Envoy sends whole bodies and skips answers; an older one does not say so, and extproc is told by a flag
@pytest.mark.parametrize(("mode", "options"), [(BUFFERED, {}), (None, {"whole_bodies": True})])
async def test_kgateway_waits_for_the_headers_answer_then_sends_a_whole_body(
    mode: int | None, options: dict[str, object]
) -> None:
    async with served(buffered_choices=1, **options) as server:
        stream = server.stream()
        await stream.write(headers(ENVOYS, body_mode=mode))
        passed = await next_of(stream)
        assert passed.WhichOneof("response") == "request_headers"
        # should no body follow, as before trailers, Envoy asks no more
        assert "x-gateway-destination-endpoint" in passed.request_headers.response.header_mutation.remove_headers
        await stream.write(body(CHAT, end=True))
        decided = await next_of(stream)
        assert decided.WhichOneof("response") == "request_body"
        address = written(decided)["x-gateway-destination-endpoint"]
        assert address in ENGINES
        assert in_metadata(decided) == address
        # it picks the cluster anew, and sends the body that it has
        assert decided.request_body.response.clear_route_cache
        forged = {"x-prefiller-host-port", "x-kv-transfer-params", "x-data-parallel-rank"}
        assert forged <= set(decided.request_body.response.header_mutation.remove_headers)
        assert not decided.request_body.response.HasField("body_mutation")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


@pytest.mark.parametrize("has_trailers", [False, True])
async def test_envoy_ai_gateway_sends_whole_bodies_both_ways_with_trailers(*, has_trailers: bool) -> None:
    """Where the pool's annotation asks for ``buffered``: each message waits for the answer to the one before."""
    async with served(buffered_choices=1) as server:
        stream = server.stream()
        asked = headers(ENVOYS, body_mode=BUFFERED)
        asked.protocol_config.response_body_mode = BUFFERED
        await stream.write(asked)
        assert (await next_of(stream)).WhichOneof("response") == "request_headers"
        await stream.write(body(CHAT, end=not has_trailers))
        decided = await next_of(stream)
        if has_trailers:
            await stream.write(trailers_of("request_trailers"))
            assert (await next_of(stream)).WhichOneof("response") == "request_trailers"
        address = written(decided)["x-gateway-destination-endpoint"]
        assert address in ENGINES
        assert "x-prefiller-host-port" in decided.request_body.response.header_mutation.remove_headers
        assert server.table.in_flight.sum() == 1
        await stream.write(answer_headers())
        assert written(await next_of(stream)) == {"x-session-token": session_token(address)}
        await stream.write(answer_body(ANSWER, end=not has_trailers))
        passed = await next_of(stream)
        assert passed.WhichOneof("response") == "response_body"
        # Envoy sends the body that it has; a streamed one would be an error in this mode
        assert not passed.response_body.response.body_mutation.HasField("streamed_response")
        if has_trailers:
            await stream.write(trailers_of("response_trailers"))
            assert (await next_of(stream)).WhichOneof("response") == "response_trailers"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert server.table.in_flight.sum() == 0
        assert server.count("attache_prompt_tokens_total", server="default/pool", endpoint=address) == 500


@pytest.mark.parametrize(("method", "path", "content"), [("GET", "/v1/models", None), ("POST", "/other", b"\x00")])
async def test_kgateway_gets_an_endpoint_for_whatever_it_asks(method: str, path: str, content: bytes | None) -> None:
    async with served(buffered_choices=1) as server:
        stream = server.stream()
        asked = headers({**ENVOYS, ":method": method, ":path": path}, body_mode=BUFFERED)
        asked.request_headers.end_of_stream = content is None
        await stream.write(asked)
        answer = await next_of(stream)
        if content is not None:
            await stream.write(body(content, end=True))
            answer = await next_of(stream)
        assert answer.WhichOneof("response") == ("request_headers" if content is None else "request_body")
        assert written(answer)["x-gateway-destination-endpoint"] in ENGINES


GOS = {
    "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 2",
    "Content-Length": str(len(CHAT)),
    "X-Epp-Host": "attache-picker",
    "X-Epp-Port": "9002",
    "Accept-Encoding": "gzip",
}


async def nginx(server: Server, given: Mapping[str, str], content: bytes) -> tuple[str, ProcessingResponse | None]:
    """NGINX Gateway Fabric: names as Go writes them, no path and no method, one body message, the end. What it then
    reads: the endpoint in the headers' answer, or an immediate response.
    """
    stream = server.stream()
    await stream.write(headers({**GOS, **given}, raw=False))
    await stream.write(body(content, end=True))
    await stream.done_writing()
    endpoint, refused = "", None
    while (answer := await stream.read()) is not grpc.aio.EOF:
        assert isinstance(answer, ProcessingResponse)
        if answer.HasField("immediate_response"):
            refused = answer
        for one in answer.request_headers.response.header_mutation.set_headers:
            if one.header.key == "x-gateway-destination-endpoint":
                endpoint = one.header.raw_value.decode()
    assert await stream.code() == grpc.StatusCode.OK
    return endpoint, refused


@pytest.mark.parametrize("field", ["messages", "prompt", "input"])
async def test_nginx_gateway_fabric_gets_the_destination_by_the_prompt(field: str) -> None:
    async with served() as server:

        def asking(text: str) -> bytes:
            content = [{"role": "user", "content": text * 500}] if field == "messages" else text * 500
            return json.dumps({"model": "base", field: content}).encode()

        places = {}
        for text in ("one ", "two ", "three "):
            places[text], refused = await nginx(server, {}, asking(text))
            assert refused is None
        assert set(places.values()) <= set(ENGINES)
        for text, place in places.items():
            assert await nginx(server, {}, asking(text)) == (place, None), "where the prompt is cached"
        assert server.table.in_flight.sum() == 0
        # nothing is known of its answers, which is nobody's fault
        assert not server.table.has_failures


def claude(prompt: str, **fields: object) -> bytes:
    """A body of Anthropic's Messages API. Claude Code marks each request in the first block of ``system``."""
    mark = f"x-anthropic-billing-header: cch={prompt[:3]}"
    system = [{"type": "text", "text": mark}, {"type": "text", "text": "help " * 500}]
    content = [{"type": "text", "text": prompt, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": "base", "system": system, "messages": [{"role": "user", "content": content}]}
    return json.dumps(asked | fields).encode()


@pytest.mark.parametrize("version", [{"Anthropic-Version": "2023-06-01"}, {}])
async def test_nginx_gateway_fabric_gets_the_destination_of_anthropics_requests_by_the_prompt(
    version: Mapping[str, str],
) -> None:
    async with served() as server:
        place, refused = await nginx(server, version, claude("one", max_tokens=9))
        assert (place in ENGINES, refused) == (True, None)
        # a marking that changes with each request is no part of the prompt; read as chat, it is its beginning
        for prompt in ("two", "six", "ten", "odd", "old", "new"):
            assert await nginx(server, version, claude(prompt, max_tokens=9)) == (place, None)


async def test_nginx_gateway_fabric_reads_refusals_in_anthropics_form() -> None:
    async with served() as server:
        body = claude("one", max_tokens=9, kv_transfer_params={"remote_host": "10.9.9.9"})
        endpoint, refused = await nginx(server, {"Anthropic-Version": "2023-06-01"}, body)
        assert endpoint == ""
        assert refused is not None
        told = json.loads(refused.immediate_response.body)
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")


async def test_nginx_gateway_fabric_gets_a_destination_for_a_count_of_tokens() -> None:
    async with served() as server:
        endpoint, refused = await nginx(server, {"Anthropic-Version": "2023-06-01"}, claude("one"))
        assert (endpoint in ENGINES, refused) == (True, None)


async def test_nginx_gateway_fabrics_headers_are_read_whatever_their_case() -> None:
    async with served() as server:
        for address in ENGINES:
            assert await nginx(server, {"X-Session-Token": session_token(address)}, CHAT) == (address, None)


@pytest.mark.parametrize(
    "content", [b"\x00\x01", b"{}", b"[]", b'{"model": "base"}', b'{"model": "base", "input": [1, 2]}']
)
async def test_nginx_gateway_fabric_gets_a_destination_for_bodies_of_other_apis(content: bytes) -> None:
    async with served() as server:
        endpoint, refused = await nginx(server, {}, content)
        assert (endpoint in ENGINES, refused) == (True, None)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "hello", "bootstrap_host": "10.9.9.9"}',
        b'{"model": "base", "messages": [], "n": "two", "vllm_xargs": {"kv_transfer_params": "x"}}',
        b'{"model": "base", "messages": [], "top_p": NaN, "kv_transfer_params": {}}',
    ],
)
async def test_bodies_that_only_the_engine_can_read_steer_none(content: bytes) -> None:
    async with served() as server:
        endpoint, refused = await nginx(server, {}, content)
        assert endpoint == ""
        assert refused is not None
        assert refused.immediate_response.status.code == 400


async def test_nginx_gateway_fabric_reads_a_refusal() -> None:
    async with served() as server:
        nobody = POOL.replace(b"endpoints: [", b"endpoints: []  # [")
        server.core.apply(load_snapshot({"pool.yaml": nobody, "epp.yaml": EPP}), 0.0)
        endpoint, refused = await nginx(server, {}, CHAT)
        assert endpoint == ""
        assert refused is not None
        immediate = refused.immediate_response
        assert immediate.status.code == 503
        told = {one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers}
        assert told["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


def with_pseudo_headers_as_text(listed: Iterable[Any]) -> None:
    """In ``value``, as agentgateway has them; the others are in ``raw_value``."""
    for one in listed:
        if one.key.startswith(":"):
            one.value, one.raw_value = one.raw_value.decode(), b""


class AgentGateway:
    """agentgateway's endpoint picker client (``http/ext_proc.rs``): full duplex both ways, trailers sent, the body's
    frames without waiting for the headers' answer, and the served address on each message of the answer. It reads
    the header alone, as one socket address, and fails on anything else; dynamic metadata it only logs.
    """

    def __init__(self, server: Server) -> None:
        self._stream = server.stream()

    async def ask(
        self, frames: list[bytes], *, trailers: Mapping[str, str] | None = None, **more: str
    ) -> tuple[str, bytes]:
        """The destination, and the body that goes on to it."""
        asked = headers({**ENVOYS, **more}, body_mode=FULL_DUPLEX)
        asked.request_headers.end_of_stream = not frames
        with_pseudo_headers_as_text(asked.request_headers.headers.headers)
        await self._stream.write(asked)
        for frame in frames:
            await self._stream.write(body(frame, end=False))
        if trailers is not None:
            message = ProcessingRequest()
            message.request_trailers.SetInParent()
            for key, value in trailers.items():
                message.request_trailers.trailers.headers.add(key=key, raw_value=value.encode())
            await self._stream.write(message)
        elif frames:
            # hyper does not know that a frame is the last one: its end is a message of its own
            await self._stream.write(body(b"", end=True))
        answer, on = await next_of(self._stream), b""
        # it takes the request's headers from this answer only
        assert answer.WhichOneof("response") == "request_headers"
        destination = written(answer)["x-gateway-destination-endpoint"]
        is_over = not frames
        while not is_over:
            answer = await next_of(self._stream)
            kind = answer.WhichOneof("response")
            is_over = kind == "request_trailers"
            if not is_over:
                assert kind == "request_body"
                piece = answer.request_body.response.body_mutation.streamed_response
                on, is_over = on + piece.body, piece.end_of_stream
        return destination, on

    async def tell(self, frames: list[bytes], served_by: str, *, trailers: bool = False) -> bytes:
        """An engine's answer; what the client gets of it."""
        first_sent = answer_headers(served_by=served_by)
        with_pseudo_headers_as_text(first_sent.response_headers.headers.headers)
        sent = [first_sent, *(answer_body(frame, end=False) for frame in frames)]
        if trailers:
            message = ProcessingRequest()
            message.response_trailers.SetInParent()
            sent.append(message)
        elif frames:
            sent.append(answer_body(b"", end=True))
        else:
            sent[0].response_headers.end_of_stream = True
        for message in sent:
            message.metadata_context.CopyFrom(sent[0].metadata_context)
            await self._stream.write(message)
        first = await next_of(self._stream)
        assert first.WhichOneof("response") == "response_headers"
        on, is_over = b"", not frames
        while not is_over:
            answer = await next_of(self._stream)
            is_over = answer.WhichOneof("response") == "response_trailers"
            if not is_over:
                piece = answer.response_body.response.body_mutation.streamed_response
                on, is_over = on + piece.body, piece.end_of_stream
        await self.hang_up()
        return on

    async def hang_up(self) -> None:
        await self._stream.done_writing()
        assert await self._stream.read() is grpc.aio.EOF

    async def break_off(self) -> None:
        """Its client went away: the stream is reset."""
        self._stream.cancel()


FRAMES = [CHAT[:1000], CHAT[1000:]]


@pytest.mark.parametrize("trailers", [None, {"x-checksum": "1"}])
async def test_agentgateway_reads_one_address_and_the_body_to_its_end(trailers: Mapping[str, str] | None) -> None:
    async with served() as server:
        gateway = AgentGateway(server)
        destination, sent_on = await gateway.ask(FRAMES, trailers=trailers)
        assert destination in ENGINES
        assert sent_on == CHAT
        assert await gateway.tell([ANSWER[:20], ANSWER[20:]], destination, trailers=trailers is not None) == ANSWER
        assert server.table.in_flight.sum() == 0
        assert server.count("attache_prompt_tokens_total", server="default/pool", endpoint=destination) == 500


async def test_agentgateway_gets_an_endpoint_for_what_has_no_body() -> None:
    async with served() as server:
        for method, path in (("GET", "/health"), ("HEAD", "/v1/models"), ("DELETE", "/v1/responses/1")):
            gateway = AgentGateway(server)
            destination, _ = await gateway.ask([], **{":method": method, ":path": path})
            assert destination in ENGINES
            # a HEAD's answer ends with its headers
            assert await gateway.tell([], destination) == b""
        assert server.table.in_flight.sum() == 0


async def test_agentgateways_second_try_is_a_request_of_its_own() -> None:
    """Each attempt has a stream with the client's headers, so with the same request id."""
    async with served() as server:
        first, second = AgentGateway(server), AgentGateway(server)
        await first.ask(FRAMES)
        again, _ = await second.ask(FRAMES)
        assert server.table.in_flight.sum() == 2
        await first.hang_up()
        assert server.table.in_flight.sum() == 1
        assert await second.tell([ANSWER], again) == ANSWER
        assert server.table.in_flight.sum() == 0


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_client_that_hangs_up_leaves_nothing_behind(*, is_answered: bool) -> None:
    async with served() as server:
        gateway, is_asking = AgentGateway(server), server.stream()
        if is_answered:
            await gateway.ask(FRAMES)
            assert server.table.in_flight.sum() == 1
        # another has not even sent all of its body
        await is_asking.write(headers(ENVOYS, body_mode=FULL_DUPLEX))
        await is_asking.write(body(CHAT[:1000], end=False))
        await gateway.break_off()
        is_asking.cancel()
        for _ in range(500):
            if not server.table.in_flight.sum():
                break
            await asyncio.sleep(0.01)
        assert server.table.in_flight.sum() == 0
        assert not server.table.has_failures, "which is no engine's fault"


async def test_an_answers_early_headers_are_not_its_outcome() -> None:
    """Should a gateway send them: Envoy's filter lets 100 and 103 pass by."""
    async with served() as server:
        stream = server.stream()
        first, _ = await ask(stream, mode=FULL_DUPLEX)
        address = written(first)["x-gateway-destination-endpoint"]
        await stream.write(answer_headers(103))
        assert (await next_of(stream)).WhichOneof("response") == "response_headers"
        assert server.table.in_flight.sum() == 1
        assert written(await tell(stream)) == {"x-session-token": session_token(address)}
        assert server.table.in_flight.sum() == 0
        assert not server.table.has_failures


REPORTER = b"""
- type: request-attribute-reporter
  parameters:
    attributes:
    - key: {name: x-gateway-inference-request-cost}
      expression: usage.prompt_tokens + 3 * usage.completion_tokens
      condition: has(usage.completion_tokens)
"""


@pytest.mark.parametrize("has_trailers", [False, True])
async def test_the_last_message_of_an_answer_tells_its_cost(*, has_trailers: bool) -> None:
    async with served() as server:
        server.core.apply(load_snapshot({"pool.yaml": POOL, "epp.yaml": EPP + REPORTER}), 0.0)
        stream = server.stream()
        await ask(stream, mode=FULL_DUPLEX)
        await stream.write(answer_headers())
        await next_of(stream)
        costs = []
        for piece, end in ((ANSWER[:20], False), (ANSWER[20:], not has_trailers)):
            await stream.write(answer_body(piece, end=end))
            costs.append((await next_of(stream)).dynamic_metadata)
        if has_trailers:
            trailers = ProcessingRequest()
            trailers.response_trailers.SetInParent()
            await stream.write(trailers)
            costs.append((await next_of(stream)).dynamic_metadata)
        assert [len(one.fields) for one in costs[:-1]] == [0] * (len(costs) - 1)
        told = costs[-1].fields["envoy.lb"].struct_value.fields["x-gateway-inference-request-cost"]
        assert told.number_value == 500 + 3 * 7


async def test_an_answer_without_usage_tells_no_cost() -> None:
    async with served() as server:
        server.core.apply(load_snapshot({"pool.yaml": POOL, "epp.yaml": EPP + REPORTER}), 0.0)
        stream = server.stream()
        await ask(stream, mode=FULL_DUPLEX)
        await stream.write(answer_headers())
        await next_of(stream)
        await stream.write(answer_body(b"{}", end=True))
        assert not (await next_of(stream)).HasField("dynamic_metadata")


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("extproc")]


async def test_an_answer_to_a_request_that_never_came_passes(caplog: pytest.LogCaptureFixture) -> None:
    """A filter before ext_proc has refused: the gateway opens the stream with the refusal."""
    async with served() as server:
        for mode in (FULL_DUPLEX, BUFFERED):
            stream, first = server.stream(), answer_headers(403)
            first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = mode
            await stream.write(first)
            assert await next_of(stream) == ProcessingResponse(response_headers={})
            await stream.write(answer_body(b"RBAC: access denied", end=True))
            passed = (await next_of(stream)).response_body
            if mode == FULL_DUPLEX:
                piece = passed.response.body_mutation.streamed_response
                assert (piece.body, piece.end_of_stream) == (b"RBAC: access denied", True)
            else:
                assert not passed.HasField("response")
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() == grpc.StatusCode.OK
        assert server.core.count_requests(*RequestState) == 0
    assert logged(caplog) == []


HELD = POOL.replace(b"  scrapeInterval: 0s", b"  scrapeInterval: 0s\n  flowControl: {saturation: {maxRequests: 1}}")


async def test_a_held_request_that_the_gateway_answers_by_itself_leaves_the_queue() -> None:
    """Its own time limit, as of Envoy's stream_idle_timeout, may be shorter than the queue's."""
    holding = asyncio.Event()

    async def for_ever(*_: object) -> None:
        holding.set()
        await asyncio.Event().wait()

    async with served(for_ever, pool=HELD) as server:
        sent = [server.stream() for _ in ENGINES]
        for stream in sent:
            await ask(stream, mode=FULL_DUPLEX)
        held = server.stream()
        await held.write(headers(ENVOYS, body_mode=FULL_DUPLEX))
        await held.write(body(CHAT, end=True))
        await holding.wait()
        assert server.core.count_requests(RequestState.QUEUED) == 1
        await held.write(answer_headers(504))
        assert (await next_of(held)).WhichOneof("response") == "response_headers"
        assert server.core.count_requests(RequestState.QUEUED) == 0
        await held.write(answer_body(b"stream timeout", end=True))
        piece = (await next_of(held)).response_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (b"stream timeout", True)
        assert server.table.in_flight.sum() == len(ENGINES)
        assert not server.table.has_failures


class Watched:
    """A message: those of protobuf do not show whether they are kept."""

    def __init__(self, message: ProcessingRequest) -> None:
        self._message = message

    def __getattr__(self, name: str) -> object:
        return getattr(self._message, name)


async def test_while_a_request_is_held_its_messages_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its body once more."""
    holding, messages = asyncio.Event(), list[weakref.ref[Watched]]()

    async def for_ever(*_: object) -> None:
        holding.set()
        await asyncio.Event().wait()

    def parsed(message: bytes | None) -> Watched | None:
        found = None if message is None else Watched(ProcessingRequest.FromString(message))
        if found is not None:
            messages.append(weakref.ref(found))
        return found

    monkeypatch.setattr("extproc.streams.server._parsed", parsed)
    async with served(for_ever, pool=HELD) as server:
        streams = [server.stream() for _ in [*ENGINES, "held"]]
        for stream in streams[:-1]:
            await ask(stream, mode=FULL_DUPLEX)
        await streams[-1].write(headers(ENVOYS, body_mode=FULL_DUPLEX))
        await streams[-1].write(body(CHAT, end=True))
        await holding.wait()
        assert messages
        assert [one() for one in messages] == [None] * len(messages)


async def test_a_good_answer_passes_where_our_own_code_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:

        def broken(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr("extproc.streams.usage_reader.UsageReader.feed", broken)
        for _ in range(3):
            stream = server.stream()
            await ask(stream, mode=FULL_DUPLEX)
            # each part comes back, and the stream ends well
            await tell(stream)
            assert await stream.code() == grpc.StatusCode.OK
        assert server.table.in_flight.sum() == 0
        assert server.count("attache_requests_total", outcome="internal_error") is None
    assert len(logged(caplog)) == 1, "the first of its kind"


async def test_a_gateway_that_is_set_up_wrongly_is_told_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:
        for _ in range(3):
            stream, first = server.stream(), body(CHAT, end=True)
            first.protocol_config.request_body_mode = BUFFERED
            await stream.write(first)
            refused = (await next_of(stream)).immediate_response
            assert (refused.status.code, json.loads(refused.body)["error"]["code"]) == (500, "internal_error")
            assert await stream.read() is grpc.aio.EOF
    (record,) = logged(caplog)
    assert "request_body is not legal while the stream" in record.getMessage()
    assert "set request_header_mode SEND" in record.getMessage()
    assert record.exc_info is None


async def test_an_illegal_message_replaces_no_answer_that_has_begun() -> None:
    async with served() as server:
        stream = server.stream()
        await stream.write(answer_headers(200))
        await next_of(stream)
        await stream.write(headers(ENVOYS))
        # no ImmediateResponse: the gateway learns of it as of any broken stream
        with pytest.raises(grpc.aio.AioRpcError, match="request_headers is not legal") as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_call_is_freed_when_it_ends_and_does_not_wait_for_the_collector() -> None:
    """Else its memory stays, some 40 KB where a prompt has 40 KB, until hundreds of others have ended."""

    def calls() -> int:
        return sum(type(one) is RpcCall for one in gc.get_objects())

    async with served() as server:
        gc.collect()
        # those of other tests, which something may keep
        before = calls()
        gc.disable()
        try:
            for _ in range(5):
                stream = server.stream()
                await stream.write(headers(ENVOYS, body_mode=BUFFERED))
                await stream.write(body(CHAT, end=True))
                await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
                assert await stream.code() is grpc.StatusCode.OK
            for _ in range(100):
                if calls() <= before:
                    break
                await asyncio.sleep(0.01)
            assert calls() <= before
        finally:
            gc.enable()
