# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker protocol (Gateway API Inference Extension, docs/proposals/004), case by case, through a real
Envoy.

From its text: the pick in a header and in metadata, always both and equal; a list of fallbacks where the gateway goes
down it; the subset hint, present and empty, 503; no ready endpoint, 503; the served endpoint read back; bodies and
answers of any length in pieces; trailers; requests without a body; health services.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.waiting import eventually
from tests.with_envoy.gateways import IN_PIECES, WHOLE_BODIES, Gateway, engines, gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT = "/v1/chat/completions"


def chat(size: int, *, stream: bool = False) -> bytes:
    messages = [{"role": "user", "content": "z" * size}]
    return json.dumps({"model": "base", "messages": messages, "stream": stream}).encode()


class Standard:
    """A gateway of each kind over the same two engines."""

    def __init__(self, addresses: list[str], made: Gateway) -> None:
        self.addresses, self.url, self.metrics = addresses, made.url, made.metrics
        self.extproc = made.extproc


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["original_dst", "override_host"])
async def standard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standard]:
    """Two engines behind a gateway that reads one address from the header, or a list from metadata."""
    flags = ["--duplex-choices", "3"] if request.param == "override_host" else []
    async with engines(2) as addresses:
        directory = tmp_path_factory.mktemp(request.param)
        async with gateway(directory, addresses, kind=request.param, flags=flags) as made:
            yield Standard(addresses, made)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def metric(standard: Standard, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{standard.metrics}/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


@pytest.mark.parametrize("size", [0, 1, 2_000, 61_999, 62_000, 62_001, 124_000, 400_000, 10_000_000])
async def test_bodies_of_any_length_arrive_as_they_were_sent(standard: Standard, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    async with httpx.AsyncClient(timeout=60) as http:
        told = (await http.post(standard.url + "/v1/anything", content=body)).json()
    assert told["bytes"] == size
    assert told["digest"] == hashlib.sha256(body).hexdigest()
    assert told["served"] in standard.addresses
    # header and engine agree: the pick is where it went
    assert told["headers"]["x-gateway-destination-endpoint"].split(",")[0] == told["served"]


async def test_ten_megabytes_of_prompt_are_read_and_routed(standard: Standard) -> None:
    body = chat(10_000_000)
    async with httpx.AsyncClient(timeout=60) as http:
        told = (await http.post(standard.url + CHAT, content=body)).json()
    assert told["bytes"] == len(body)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_requests_without_a_body_get_an_endpoint(standard: Standard, method: str) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.request(method, standard.url + "/v1/models")
    assert answer.status_code == 200


@pytest.mark.parametrize(("pieces", "size"), [(1, 10), (200, 40), (20, 61_990), (8, 200_000)])
async def test_streamed_answers_pass_unchanged(standard: Standard, pieces: int, size: int) -> None:
    headers = {"x-pieces": str(pieces), "x-piece-bytes": str(size)}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(standard.url + CHAT, content=chat(100, stream=True), headers=headers)
    events = answer.content.split(b"\n\n")
    assert [event for event in events if event][:-2] == [b"data: %d " % n + b"x" * size for n in range(pieces)]
    assert events[-2] == b"data: [DONE]"


async def test_what_a_client_forged_does_not_reach_the_engine(standard: Standard) -> None:
    forged = {
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-encoder-hosts-ports": "127.0.0.1:1",
        "x-data-parallel-host-port": "127.0.0.1:1",
        "x-gateway-destination-endpoint-subset": "127.0.0.1:1",
    }
    async with httpx.AsyncClient(timeout=60) as http:
        told = (await http.post(standard.url + CHAT, content=chat(10), headers=forged)).json()
    assert told["served"] in standard.addresses
    left = {name.lower() for name in told["headers"]} & set(forged)
    assert left == {"x-gateway-destination-endpoint"}, "ours"


async def test_usage_and_the_served_endpoint_are_read_on_the_way(standard: Standard) -> None:
    before = await metric(standard, "attache_prompt_tokens_total")
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(5):
            await http.post(standard.url + CHAT, content=chat(10, stream=True), headers={"x-pieces": "3"})

    async def is_counted() -> bool:
        return await metric(standard, "attache_prompt_tokens_total") == before + 50

    await eventually(is_counted)
    assert await metric(standard, 'attache_answers_total{first_choice="no"') == 0


async def test_many_at_once_are_all_served_and_all_let_go(standard: Standard) -> None:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=50)) as http:

        async def one(number: int) -> int:
            stream = number % 2 == 0
            headers = {"x-pieces": "20"} if stream else {}
            body = chat(1000 * (number % 90), stream=stream)
            return (await http.post(standard.url + CHAT, content=body, headers=headers)).status_code

        assert set(await asyncio.gather(*(one(number) for number in range(200)))) == {200}

    async def is_idle() -> bool:
        return await metric(standard, "attache_in_flight") == 0 and await metric(standard, "attache_open_streams") == 0

    await eventually(is_idle)


async def test_a_client_that_leaves_frees_its_engine(standard: Standard) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"x-pieces": "5000", "x-piece-bytes": "50000"}
        async with http.stream("POST", standard.url + CHAT, content=chat(10, stream=True), headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                break

    async def is_idle() -> bool:
        return await metric(standard, "attache_in_flight") == 0

    await eventually(is_idle)


SUBSETS = {
    "the second engine": ("{1}", 200),
    "a list with the second engine": (["{1}"], 200),
    "an unknown one and the second engine": (["127.0.0.1:1", "{1}"], 200),
    "an empty list": ([], 503),
    "an empty text": ("", 503),
    "an unknown one": (["127.0.0.1:1"], 503),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hinting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[list[str], Gateway]]:
    """Three engines behind a gateway that has a URL for each of the subset hints."""
    async with engines(3) as addresses:
        hints = [json.loads(json.dumps(hint).replace("{1}", addresses[1])) for hint, _ in SUBSETS.values()]
        async with gateway(tmp_path_factory.mktemp("hinting"), addresses, hints=hints) as made:
            yield addresses, made


@pytest.mark.parametrize("subset", SUBSETS)
async def test_the_subset_hint_is_obeyed(hinting: tuple[list[str], Gateway], subset: str) -> None:
    addresses, made = hinting
    url, expected = made.urls[list(SUBSETS).index(subset)], SUBSETS[subset][1]
    async with httpx.AsyncClient(timeout=60) as http:
        answers = [await http.post(url + CHAT, content=chat(10)) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {expected}
    if expected == 200:
        assert {answer.json()["served"] for answer in answers} == {addresses[1]}
    else:
        assert answers[0].json()["error"]["code"] == "no_endpoint"


async def test_without_endpoints_there_is_a_503(tmp_path: Path) -> None:
    async with gateway(tmp_path, []) as made, httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(made.url + CHAT, content=chat(10))
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable_error"


async def test_a_dead_first_choice_costs_a_retry_where_the_gateway_goes_down_the_list(tmp_path: Path) -> None:
    async with engines(1) as addresses:
        both = [*addresses, "127.0.0.1:1"]
        flags = ["--duplex-choices", "2"]
        async with (
            gateway(tmp_path, both, kind="override_host", flags=flags) as made,
            httpx.AsyncClient(timeout=60) as http,
        ):
            served = [(await http.post(made.url + CHAT, content=chat(10))).json()["served"] for _ in range(12)]
    assert set(served) == set(addresses)


async def test_conformance_tests_choose_by_header(tmp_path: Path) -> None:
    async with (
        engines(3) as addresses,
        gateway(tmp_path, addresses, flags=["--conformance"]) as made,
        httpx.AsyncClient(timeout=60) as http,
    ):
        for address in addresses * 2:
            headers = {"test-epp-endpoint-selection": address}
            answer = await http.post(made.url + CHAT, content=chat(10), headers=headers)
            assert answer.json()["served"] == address


async def test_a_gateway_may_keep_the_bodies_of_answers_to_itself(tmp_path: Path) -> None:
    """By its own ``response_body_mode``: Envoy takes no ``mode_override`` where a body comes in pieces."""
    headers = {"x-pieces": "300"}
    for mode, is_seen in ((IN_PIECES, True), ({**IN_PIECES, "response_body_mode": "NONE"}, False)):
        async with (
            engines(2) as addresses,
            gateway(tmp_path / mode["response_body_mode"], addresses, mode=mode) as made,
            httpx.AsyncClient(timeout=60) as http,
        ):
            answer = await http.post(made.url + CHAT, content=chat(10, stream=True), headers=headers)
            assert answer.content.count(b"data: ") == 302
            standard = Standard(addresses, made)

            async def is_idle(at: Standard = standard) -> bool:
                return await metric(at, "attache_in_flight") == 0

            await eventually(is_idle)
            assert (await metric(standard, "attache_prompt_tokens_total") > 0) is is_seen


# with retries, Envoy 1.40 sends a body that ends with trailers twice, whatever the ext_proc server is
@pytest.mark.parametrize("standard", ["original_dst"], indirect=True)
async def test_a_body_that_ends_with_trailers_arrives_whole(standard: Standard) -> None:
    body = chat(100_000)
    answer = await ask_with_trailers(standard.url, body)
    assert answer.startswith(b"HTTP/1.1 200")
    told = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    assert told["digest"] == hashlib.sha256(body).hexdigest()


async def ask_with_trailers(url: str, body: bytes) -> bytes:
    """The whole answer to a chunked request in two parts."""
    half = len(body) // 2
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
        writer.write(f"{head}trailer: x-end\r\n\r\n".encode())
        for part in (body[:half], body[half:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\nx-end: 1\r\n\r\n")
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_health_services_answer_as_the_protocol_says(standard: Standard) -> None:
    async with grpc.aio.insecure_channel(standard.extproc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_kgateways_whole_bodies_go_to_the_one_address_in_the_header(tmp_path: Path) -> None:
    async with (
        engines(2) as addresses,
        gateway(tmp_path, addresses, flags=["--buffered-choices", "1"], mode=WHOLE_BODIES) as made,
        httpx.AsyncClient(timeout=30) as http,
    ):
        for size in (10, 100_000):
            body = chat(size)
            told = (await http.post(made.url + CHAT, content=body)).json()
            assert told["digest"] == hashlib.sha256(body).hexdigest()
            assert told["headers"]["x-gateway-destination-endpoint"] == told["served"]
            assert told["served"] in addresses
        # what is no API of ours goes to the pool all the same
        for method, path, content in (
            ("POST", CHAT, b"not json"),
            ("POST", "/other", b"1"),
            ("GET", "/v1/models", None),
        ):
            told = (await http.request(method, made.url + path, content=content)).json()
            assert (told["path"], told["headers"]["x-gateway-destination-endpoint"]) == (path, told["served"])


async def test_bodies_that_wait_for_extproc_do_not_break_the_connection_that_all_requests_share(tmp_path: Path) -> None:
    """Envoy lets 10,000 frames wait on a connection; the bodies have more."""
    body = chat(900_000)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    whole = head.encode() + body
    async with (
        engines(1) as addresses,
        gateway(tmp_path, addresses, mode=WHOLE_BODIES) as made,
        httpx.AsyncClient(timeout=30) as http,
    ):
        host, _, port = made.url.removeprefix("http://").partition(":")

        async def all_received() -> bool:
            name = "http.gateway.downstream_cx_rx_bytes_total"
            text = (await http.get(f"{made.admin}/stats", params={"filter": name})).text
            return int(text.rpartition(":")[2]) >= 200 * len(whole)

        os.kill(made.pid, signal.SIGSTOP)
        try:
            clients = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
            for _, writer in clients:
                writer.write(whole)
            await eventually(all_received)
        finally:
            os.kill(made.pid, signal.SIGCONT)
        answers = Counter([(await reader.readline()).strip() for reader, _ in clients])
        for _, writer in clients:
            writer.close()
    assert answers == {b"HTTP/1.1 200 OK": 200}


REPORTER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: random-picker
- type: request-attribute-reporter
  parameters:
    attributes:
    - key: {namespace: envoy.lb, name: x-gateway-inference-request-cost}
      expression: usage.prompt_tokens + 3 * usage.completion_tokens
"""


async def test_envoy_learns_what_a_request_cost(tmp_path: Path) -> None:
    log = tmp_path / "envoy.log"
    async with (
        engines(1) as addresses,
        gateway(tmp_path, addresses, picker=REPORTER) as made,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await http.post(made.url + CHAT, content=chat(10, stream=True), headers={"x-pieces": "3"})

        async def is_told() -> bool:
            return "cost=16 status=200" in log.read_text()

        await eventually(is_told)
