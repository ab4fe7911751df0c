# SPDX-License-Identifier: Apache-2.0
"""GRPCRoutes through the real Envoy: which calls they take, what they change, and the statuses that clients get."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from bench.cluster.certificates import Authority
from tests.model_calls import INFER, V2, Engine, infer
from tests.waiting import eventually
from tests.with_envoy.http_stand import GATEWAY_API, Servers, backend, document, ref, stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from tests.with_envoy.http_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

Status = grpc.StatusCode
ECHO: Final = "/echo.Echo/Say"
STREAM: Final = "/echo.Echo/Stream"


class Echo:
    """A server of any service: answers its name, and each message of a stream. ``seen``: paths and metadata."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.seen: list[tuple[str, dict[str, str | bytes]]] = []
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Handlers(self),))

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def answer(self, path: str, body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        sent = dict(context.invocation_metadata() or ())
        self.seen.append((path, sent))
        if body == b"wait":
            await asyncio.sleep(30)
        await context.send_initial_metadata([("x-server", self.name), ("x-removed", "1")])
        return f"{self.name}:{body.decode()}".encode()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, echo: Echo) -> None:
        self._echo = echo

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        path = details.method

        async def answer(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return await self._echo.answer(path, body, context)

        async def each(bodies: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
            async for body in bodies:
                yield f"{self._echo.name}:{body.decode()}".encode()

        if path == STREAM:
            return grpc.stream_stream_rpc_method_handler(each)
        return grpc.unary_unary_rpc_method_handler(answer)


def calls(*targets: object, match: Mapping[str, object] | None = None, **more: object) -> dict[str, object]:
    matches = {} if match is None else {"matches": [match]}
    return {**matches, "backendRefs": list(targets), **more}


def method(service: str = "", name: str = "", kind: str = "Exact") -> dict[str, object]:
    return {"method": {"type": kind, "service": service, "method": name}}


def grpc_route(name: str, *rules: object, sections: Sequence[str]) -> dict[str, object]:
    spec = {"parentRefs": [{"name": "gateway", "sectionName": one} for one in sections], "rules": list(rules)}
    return {**document("GRPCRoute", name, spec), "apiVersion": GATEWAY_API}


def documents(a: str, b: str, engine: str) -> list[dict[str, Any]]:
    changed = {
        "type": "RequestHeaderModifier",
        "requestHeaderModifier": {"set": [{"name": "x-set", "value": "100%"}], "remove": ["x-gone"]},
    }
    answers = {"type": "ResponseHeaderModifier", "responseHeaderModifier": {"remove": ["x-removed"]}}
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": ref("b")}}
    rules = [
        calls(ref("a"), match=method("echo.Echo")),
        calls(ref("b"), match=method("echo.Echo", "Exact")),
        calls(ref("b"), match=method("", "Anywhere")),
        calls(ref("b"), match=method("echo[.]v[0-9]+[.]Echo", "Get.*", "RegularExpression")),
        calls(ref("b"), match={**method("echo.Echo", "Say"), "headers": [{"name": "X-Who", "value": "b"}]}),
        calls(ref("a"), match=method("changed.S"), filters=[changed, answers]),
        calls(ref("a"), match=method("copied.S"), filters=[mirror]),
        calls(ref("a", weight=1), ref("b", weight=3), match=method("shared.S")),
        calls(ref("a"), ref("gone"), match=method("half.S")),
        calls(ref("gone"), match=method("gone.S")),
        calls(match=method("none.S")),
        calls(ref("nobody"), match=method("empty.S")),
        calls(ref("away"), match=method("away.S")),
        calls(ref("forest", "ModelServer"), match=method("inference.GRPCInferenceService")),
    ]
    deny = {"targetRefs": [{"kind": "GRPCRoute", "group": "gateway.networking.k8s.io", "name": "closed"}], "rules": []}
    return [
        backend("a", a, protocol="H2C"),
        backend("b", b, protocol="H2C"),
        backend("gone", unresolved=True),
        backend("nobody", protocol="H2C"),
        backend("away", "127.0.0.1:1", protocol="H2C"),
        document("ModelServer", "forest", {"model": "m", "protocol": "V2-gRPC", "endpoints": [{"address": engine}]}),
        document("ModelAccessPolicy", "nobody", deny),
        grpc_route("open", *rules, sections=["main", "tls"]),
        grpc_route("closed", calls(ref("forest", "ModelServer")), sections=["closed"]),
    ]


class Running:
    """``a`` and ``b``: servers; ``engine``: of the ModelServer. ``root``: who signed Envoy's certificate."""

    def __init__(self, stand: Stand, a: Echo, b: Echo, engine: Engine, root: bytes) -> None:
        self.stand = stand
        self.a, self.b, self.engine, self.root = a, b, engine, root
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{stand.ports['main']}")

    async def call(self, path: str, body: bytes = b"x", timeout_s: float = 20.0, **metadata: str) -> str:
        sent = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        answer: bytes = await self.channel.unary_unary(path)(body, timeout=timeout_s, metadata=sent)
        return answer.decode()

    async def refused(self, path: str, body: bytes = b"x", timeout_s: float = 20.0) -> tuple[Status, str]:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await self.call(path, body, timeout_s)
        return found.value.code(), found.value.details() or ""


@pytest_asyncio.fixture(params=["Close", "Open"], scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    directory: Path = tmp_path_factory.mktemp("calls")
    authority = Authority(datetime.now(UTC))
    crt, key = authority.issue("gateway", names=("localhost",))
    (directory / "crt.pem").write_text(crt)
    (directory / "key.pem").write_text(key)
    tls = {"certificates": [{"certFile": str(directory / "crt.pem"), "keyFile": str(directory / "key.pem")}]}
    listeners = [
        {"name": "main", "address": "main"},
        {"name": "tls", "address": "tls", "tls": tls},
        {"name": "closed", "address": "closed"},
    ]
    async with Echo("a") as a, Echo("b") as b, Engine() as engine:
        found = documents(a.address, b.address, engine.address)
        if request.param == "Open":
            # policies close a gateway
            found = [one for one in found if one["kind"] != "ModelAccessPolicy"]
        gateway = {"listeners": listeners, "failureMode": request.param}
        async with stand(directory, Servers(), found, gateway, ("main", "tls", "closed")) as one:
            made = Running(one, a, b, engine, authority.certificate.encode())
            yield made
            await made.channel.close()


@pytest.mark.parametrize(
    ("path", "metadata", "server"),
    [
        (ECHO, {}, "a"),
        ("/echo.Echo/Exact", {}, "b"),
        ("/echo.Echo/Exacter", {}, "a"),
        ("/other.S/Anywhere", {}, "b"),
        ("/echo.Echo/Anywhere", {}, "a"),
        ("/echo.v2.Echo/GetIt", {}, "b"),
        (ECHO, {"x_who": "b"}, "b"),
        (ECHO, {"x_who": "c"}, "a"),
    ],
)
async def test_the_most_specific_match_decides(
    running: Running, path: str, metadata: dict[str, str], server: str
) -> None:
    assert await running.call(path, **metadata) == f"{server}:x"


@pytest.mark.parametrize("path", ["/echo.Echoes/Say", "/echo.v2.Echo/Say", "/a.b.c/Anywhere/More", "/"])
async def test_calls_that_no_route_takes_are_not_implemented(running: Running, path: str) -> None:
    assert await running.refused(path) == (Status.UNIMPLEMENTED, "No such service and method is served here.")


async def test_requests_that_are_no_calls_are_not_taken(running: Running) -> None:
    url = f"http://127.0.0.1:{running.stand.ports['main']}{ECHO}"
    async with httpx.AsyncClient() as http:
        answer = await http.post(url, headers={"content-type": "application/json"}, content=b"{}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_headers_are_changed_both_ways(running: Running) -> None:
    call = running.channel.unary_unary("/changed.S/M")(b"x", metadata=[("x-set", "old"), ("x-gone", "1")], timeout=20)
    answered = dict(await call.initial_metadata())
    await call
    path, sent = running.a.seen[-1]
    assert path == "/changed.S/M"
    assert (sent["x-set"], "x-gone" in sent) == ("100%", False)
    assert (answered["x-server"], "x-removed" in answered) == ("a", False)


async def test_copies_reach_the_mirror(running: Running) -> None:
    assert await running.call("/copied.S/M") == "a:x"
    await eventually(lambda: any(path == "/copied.S/M" for path, _ in running.b.seen))


async def test_calls_are_shared_by_weight(running: Running) -> None:
    answers = await asyncio.gather(*(running.call("/shared.S/M") for _ in range(200)))
    shares = Counter(answers)
    assert set(shares) == {"a:x", "b:x"}
    assert 100 < shares["b:x"] < 190


async def test_backends_that_are_not_there_are_unavailable(running: Running) -> None:
    for path in ("/gone.S/M", "/none.S/M"):
        assert await running.refused(path) == (
            Status.UNAVAILABLE,
            "The route has no backend that exists; its owner must mend its backendRefs.",
        )
    for path in ("/empty.S/M", "/away.S/M"):
        status, details = await running.refused(path)
        assert status is Status.UNAVAILABLE
        assert "{" not in details
    codes = Counter[Any]()
    for _ in range(60):
        try:
            codes[await running.call("/half.S/M")] += 1
        except grpc.aio.AioRpcError as error:
            codes[error.code()] += 1
    assert set(codes) == {"a:x", Status.UNAVAILABLE}
    assert 10 < codes["a:x"] < 50


async def test_streams_go_both_ways_message_by_message(running: Running) -> None:
    stream = running.channel.stream_stream(STREAM)(timeout=20)
    for number in range(3):
        await stream.write(str(number).encode())
        assert await stream.read() == f"a:{number}".encode()
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_clients_wait_as_long_as_they_say(running: Running) -> None:
    url = f"http://127.0.0.1:{running.stand.ports['main']}{ECHO}"
    # Envoy ends it, whatever the client does
    async with httpx.AsyncClient(http1=False, http2=True, timeout=20) as http:
        headers = {"content-type": "application/grpc", "te": "trailers", "grpc-timeout": "300m"}
        answer = await http.post(url, headers=headers, content=b"\0\0\0\0\4wait")
    assert (answer.status_code, answer.headers["grpc-status"]) == (200, str(Status.DEADLINE_EXCEEDED.value[0]))


async def test_a_tls_listener_takes_calls(running: Running) -> None:
    credentials = grpc.ssl_channel_credentials(running.root)
    options = [("grpc.ssl_target_name_override", "localhost")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{running.stand.ports['tls']}", credentials, options) as channel:
        assert await channel.unary_unary(ECHO)(b"x", timeout=20) == b"a:x"


async def test_calls_of_models_reach_the_engine_that_extproc_picks(running: Running) -> None:
    raw = await running.channel.unary_unary(INFER)(infer("forest", 1.0, 2.0).SerializeToString(), timeout=20)
    answer = V2["ModelInferResponse"].FromString(raw)
    assert list(answer.outputs[0].contents.fp64_contents) == [1.0, 2.0]
    # the message as it came
    assert running.engine.seen[-1][:2] == (INFER, "forest")


async def test_a_policy_of_the_route_is_obeyed(running: Running) -> None:
    seen = len(running.engine.seen)
    is_closed = any("ModelAccessPolicy" in one.read_text() for one in running.stand.config.iterdir())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.stand.ports['closed']}") as channel:
        call = channel.unary_unary(INFER)(infer("forest", 1.0).SerializeToString(), timeout=20)
        assert await call.code() is (Status.PERMISSION_DENIED if is_closed else Status.OK)
    assert len(running.engine.seen) == seen + (not is_closed)
