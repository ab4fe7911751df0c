# SPDX-License-Identifier: Apache-2.0
"""V2 and TensorFlow Serving over gRPC, from a client through Envoy to an engine and back."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import httpx
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, running_stack
from controller.usage.rows import parse_usage_line
from extproc.api.spec import API_VERSION
from extproc.wire_names import LIVE_CALL, METADATA_CALL, READY_CALL, REPOSITORY_CALLS, V2_SERVICE
from tests.model_calls import (
    CLASSIFY,
    GET_METADATA,
    GET_STATUS,
    INFER,
    MODEL_METADATA,
    MODEL_READY,
    PREDICT,
    REGRESS,
    TENSORFLOW,
    V2,
    Engine,
    framed,
    infer,
)
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from google.protobuf.message import Message

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

Status = grpc.StatusCode
# Of clocks: later than any row.
FUTURE_S: Final = 1e10


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def server(name: str, protocol: str, model: str, *engines: str, **more: object) -> dict[str, object]:
    listed = [{"address": one} for one in engines]
    return document("ModelServer", name, model=model, protocol=protocol, endpoints=listed, **more)


def route(model: str, rate_limits: object = None, **weights: int) -> dict[str, object]:
    targets = [{"modelServerName": one, "weight": weight} for one, weight in weights.items()]
    limits = {} if rate_limits is None else {"rateLimits": rate_limits}
    return document("ModelRoute", model, modelName=model, rules=[{"targetModels": targets}], **limits)


class Served:
    """``engines``: two, which serve every model."""

    def __init__(self, stack: Stack, engines: tuple[Engine, Engine], channel: grpc.aio.Channel, log: Path) -> None:
        self.stack = stack
        self.log = log
        self.engines = engines
        self.channel = channel

    async def call(
        self,
        path: str,
        message: Message | bytes,
        answer: Any = bytes,  # noqa: ANN401 - a class that was made
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:  # noqa: ANN401 - of that class
        """The answer; raises AioRpcError."""
        body = message if isinstance(message, bytes) else message.SerializeToString()
        raw = await self.channel.unary_unary(path)(body, timeout=60, metadata=metadata)
        return raw if answer is bytes else answer.FromString(raw)

    async def infer(self, model: str, *values: float) -> Any:  # noqa: ANN401 - likewise
        return await self.call(INFER, infer(model, *values), V2["ModelInferResponse"])

    async def refused(self, path: str, message: Message | bytes) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await self.call(path, message)
        return found.value

    def heal(self) -> None:
        for one in self.engines:
            one.fails.clear()
            one.seen.clear()


def models(first: str, second: str, rest: str) -> list[dict[str, object]]:
    return [
        # as a Model has them: two ModelServers of the same pods
        server("iris-default", "V2", MODEL, rest),
        server("iris-default.grpc", "V2-gRPC", MODEL, first, second),
        route("both", **{"iris-default": 100, "iris-default.grpc": 100}),
        server("v2", "V2-gRPC", "iris-1", first, second),
        server("other", "V2-gRPC", "a-much-longer-name-of-the-second-version", first, second),
        server("tf", "TensorFlow-gRPC", "half-plus-two", first, second),
        server("away", "V2-gRPC", "iris-1", "127.0.0.1:1", trafficPolicy={"retry": {"attempts": 0}}),
        server("half", "V2-gRPC", "iris-1", "127.0.0.1:1", second),
        server("rest", "V2", "iris-1", "127.0.0.1:1"),
        server("once", "V2-gRPC", "iris-1", first, second, trafficPolicy={"retry": {"attempts": 0}}),
        route("iris", v2=3, other=1),
        route("same", v2=1),
        route("plus", tf=1),
        route("away", away=1),
        route("half", half=1),
        route("rest", rest=1),
        route("once", once=1),
        route("few", [{"requests": 2, "unit": "day", "per": "Route"}], v2=1),
    ]


@pytest_asyncio.fixture(params=["Close", "Open"], scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    log = tmp_path_factory.mktemp("usage") / "usage.jsonl"
    gateway = {"failureMode": request.param, "maxBodySize": "8Mi", "usageLog": {"path": str(log)}}
    directory, flags = tmp_path_factory.mktemp("stack"), EngineFlags(count=1)
    async with (
        Engine() as first,
        Engine() as second,
        running_stack(directory, flags, watch=True, gateway=gateway) as stack,
    ):
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(
            f"{file.read_text()}\n---\n{yaml.safe_dump_all(models(first.address, second.address, stack.engines[0].removeprefix('http://')))}"
        )
        new.replace(file)

        async def is_served() -> bool:
            # a connection of its own: the last one may be of the listener before
            async with _channel(stack) as channel:
                try:
                    await channel.unary_unary(INFER)(infer("half", 1.0).SerializeToString(), timeout=10)
                except grpc.aio.AioRpcError:
                    return False
                return True

        await eventually(is_served)
        async with _channel(stack) as channel:
            yield Served(stack, (first, second), channel, log)


def _channel(stack: Stack) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        stack.url.removeprefix("http://"), options=[("grpc.max_receive_message_length", -1)]
    )


async def test_one_name_serves_rest_and_grpc_from_the_ports_of_its_pods(served: Served) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(10):
            assert (await served.infer("both", 1.0)).model_name == MODEL
            answer = await http.post(f"{served.stack.url}/v2/models/both/infer", json={"inputs": [tensor]})
            assert (answer.status_code, answer.json()["outputs"]) == (200, [tensor])


async def test_calls_go_by_the_name_in_the_message_and_versions_share_by_weight(served: Served) -> None:
    answers = [await served.call(INFER, infer("iris", 1.5, 2.0, id="42"), V2["ModelInferResponse"]) for _ in range(40)]
    assert {(one.id, tuple(one.outputs[0].contents.fp64_contents)) for one in answers} == {("42", (1.5, 2.0))}
    # as the engines call them
    by_name = Counter(one.model_name for one in answers)
    assert by_name.keys() == {"iris-1", "a-much-longer-name-of-the-second-version"}
    assert by_name["iris-1"] > by_name["a-much-longer-name-of-the-second-version"]


async def test_what_the_client_sends_beside_the_name_arrives_byte_for_byte(served: Served) -> None:
    raw = os.urandom(3_000_000)
    message = infer("iris", model_version="7", raw_input_contents=[raw])
    answer = await served.call(INFER, message, V2["ModelInferResponse"], metadata=(("x-own", "1"),))
    assert (answer.model_version, answer.raw_output_contents) == ("7", [raw])
    assert any(metadata.get("x-own") == "1" for one in served.engines for _, _, metadata in one.seen)
    # with the name behind everything else
    backwards = infer("", 1.0).SerializeToString() + b"\x0a\x04iris"
    assert (await served.call(INFER, backwards, V2["ModelInferResponse"])).outputs[0].name == "x"


async def test_metadata_comes_from_an_engine(served: Served) -> None:
    answer = await served.call(MODEL_METADATA, V2["ModelMetadataRequest"](name="same"), V2["ModelMetadataResponse"])
    assert answer is not None
    refused = await served.refused(MODEL_METADATA, V2["ModelMetadataRequest"](name="none"))
    assert refused.code() is Status.NOT_FOUND


@pytest.mark.parametrize("path", [PREDICT, CLASSIFY, REGRESS, GET_METADATA, GET_STATUS])
async def test_tensorflow_serving_goes_by_the_name_in_the_model_spec(served: Served, path: str) -> None:
    spec = TENSORFLOW["ModelSpec"](name="plus", signature_name="serving_default", version_label="stable")
    message = TENSORFLOW["PredictRequest"](model_spec=spec, output_filter=["y"])
    answer = await served.call(path, message, TENSORFLOW["PredictResponse"])
    assert answer.model_spec.name == "half-plus-two"
    body = next(body for one in served.engines for body in one.bodies if b"half-plus-two" in body)
    seen = TENSORFLOW["PredictRequest"].FromString(body)
    assert (seen.model_spec.version_label, seen.output_filter) == ("stable", ["y"])


async def test_health_is_answered_from_readiness(served: Served) -> None:
    async def ready(name: str) -> bool:
        message = V2["ModelReadyRequest"](name=name)
        return bool((await served.call(MODEL_READY, message, V2["ModelReadyResponse"])).ready)

    came = sum(len(one.seen) for one in served.engines)
    assert (await served.call(LIVE_CALL, b"", V2["ServerLiveResponse"])).live
    assert (await served.call(READY_CALL, b"", V2["ServerReadyResponse"])).ready
    assert (await served.call(METADATA_CALL, b"", V2["ServerMetadataResponse"])).name == "attache"
    assert await ready("iris")
    assert sum(len(one.seen) for one in served.engines) == came
    for unknown in ("none", "rest"):
        refused = await served.refused(MODEL_READY, V2["ModelReadyRequest"](name=unknown))
        assert refused.code() is Status.NOT_FOUND

    async def is_known() -> bool:
        await served.refused(INFER, infer("away"))
        return not await ready("away")

    await eventually(is_known)
    # engines know their versions
    versioned = V2["ModelReadyRequest"](name="iris", version="3")
    assert (await served.call(MODEL_READY, versioned, V2["ModelReadyResponse"])).ready
    assert sum(len(one.seen) for one in served.engines) == came + 1


async def test_clients_cannot_load_or_unload_models(served: Served) -> None:
    for path in REPOSITORY_CALLS:
        refused = await served.refused(path, b"")
        assert refused.code() is Status.PERMISSION_DENIED, path
    for path in (
        f"{V2_SERVICE}ModelStreamInfer",
        f"{V2_SERVICE}Other",
        "/tensorflow.serving.Session/Run",
    ):
        refused = await served.refused(path, infer("iris"))
        assert refused.code() is Status.UNIMPLEMENTED, path
    assert not {path for one in served.engines for path, _, _ in one.seen if "Repository" in path}


async def test_errors_are_those_of_grpc(served: Served) -> None:
    refused = {
        "unknown": await served.refused(INFER, infer("none, 100% naïve")),
        "of another protocol": await served.refused(INFER, infer("rest")),
        "no engine": await served.refused(INFER, infer("away")),
        "elsewhere": await served.refused("/some.Service/Method", b""),
    }
    assert {name: one.code() for name, one in refused.items()} == {
        "unknown": Status.NOT_FOUND,
        "of another protocol": Status.UNIMPLEMENTED,
        "no engine": Status.UNAVAILABLE,
        "elsewhere": Status.UNIMPLEMENTED,
    }
    assert "'none, 100% naïve' does not exist" in str(refused["unknown"].details())
    assert "/v2/models/rest/infer" in str(refused["of another protocol"].details())
    assert "{" not in "".join(str(one.details()) for one in refused.values())


async def test_a_limit_is_resource_exhausted(served: Served) -> None:
    for _ in range(2):
        await served.infer("few", 1.0)
    refused = await served.refused(INFER, infer("few"))
    assert refused.code() is Status.RESOURCE_EXHAUSTED
    assert dict(refused.trailing_metadata() or refused.initial_metadata() or ())["retry-after"]


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.CANCELLED])
async def test_a_call_that_fails_without_a_message_is_tried_at_the_next_engine(
    served: Served, status: grpc.StatusCode
) -> None:
    served.heal()
    served.engines[0].fails.append((status, "not now"))

    async def is_met() -> bool:
        """Nobody notices: it was avoided for a while for its failures before."""
        assert (await served.infer("same", 7.0)).outputs[0].contents.fp64_contents == [7.0]
        return not served.engines[0].fails

    await eventually(is_met)


async def test_what_the_request_may_be_the_reason_for_is_not_tried_again(served: Served) -> None:
    for one in served.engines:
        one.fails.append((Status.INVALID_ARGUMENT, "shape [1] is not [4], 50% off"))
    refused = await served.refused(INFER, infer("same"))
    assert (refused.code(), refused.details()) == (Status.INVALID_ARGUMENT, "shape [1] is not [4], 50% off")
    assert sum(len(one.fails) for one in served.engines) == 1
    served.heal()


async def test_the_clients_time_limit_holds_at_the_gateway(served: Served) -> None:
    for one in served.engines:
        one.holds.clear()
    try:
        # a client that says how long it waits, and does not keep to it
        answer = await raw_call(served, INFER, framed(infer("same").SerializeToString()), {"grpc-timeout": "1500m"})
        assert answer.headers["grpc-status"] == str(Status.DEADLINE_EXCEEDED.value[0])
        assert answer.elapsed.total_seconds() >= 1.5
        await eventually(lambda: sum(one.cancelled for one in served.engines) > 0)
    finally:
        for one in served.engines:
            one.holds.set()


def hostile() -> dict[str, tuple[bytes, int]]:
    """Bodies, each with the status that it gets."""
    fine = infer("iris").SerializeToString()
    bad, unimplemented = Status.INVALID_ARGUMENT.value[0], Status.UNIMPLEMENTED.value[0]
    return {
        "no message": (b"", bad),
        "half a prefix": (b"\0\0", bad),
        "an empty message": (framed(b""), bad),
        "a length beyond the body": (framed(fine, size=len(fine) + 1), bad),
        "the longest length": (framed(fine, size=2**32 - 1), bad),
        "garbage behind it": (framed(fine) + b"garbage", bad),
        "two messages": (framed(fine) * 2, bad),
        "compressed": (framed(gzip.compress(fine), flag=1), unimplemented),
        "a flag that there is not": (framed(fine, flag=2), bad),
        "no UTF-8": (framed(b"\x0a\x02\xff\xfe"), bad),
        "a name of a megabyte": (framed(b"\x0a\x80\x80\x40" + b"a" * 2**20), bad),
        "two names": (framed(fine + b"\x0a\x04half"), bad),
        "a name that is a number": (framed(b"\x08\x01"), bad),
        "a name beyond the message": (framed(b"\x0a\x7firis"), bad),
        "a length without an end": (framed(b"\x0a" + b"\xff" * 20), bad),
        "a key of 64 bits that ends as the name's": (framed(b"\x8a\x80\x80\x80\x80\x01\x04half" + fine), bad),
        "a group": (framed(b"\x0b\x0c" + fine), bad),
        "a hundred thousand fields": (framed(b"\x10\x01" * 100_000 + fine), bad),
        "another model's path": (framed(b"\x0a\x10../v2/repository"), Status.NOT_FOUND.value[0]),
        "a name with slashes": (framed(b"\x0a\x09iris/iris"), Status.NOT_FOUND.value[0]),
    }


@pytest.mark.parametrize("what", hostile())
async def test_a_hostile_message_gets_a_clear_error_and_others_are_served(served: Served, what: str) -> None:
    body, status = hostile()[what]
    came = sum(len(one.seen) for one in served.engines)
    answer = await raw_call(served, INFER, body)
    assert (answer.status_code, answer.headers["grpc-status"]) == (200, str(status)), answer.headers
    assert len(answer.headers["grpc-message"]) > 20
    assert sum(len(one.seen) for one in served.engines) == came
    assert (await served.infer("iris", 1.0)).outputs[0].contents.fp64_contents == [1.0]


async def test_a_message_beyond_the_limit_holds_up_nobody(served: Served) -> None:
    message = infer("iris", raw_input_contents=[bytes(9 * 2**20)])
    assert (await served.refused(INFER, message)).code() is Status.RESOURCE_EXHAUSTED

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield infer("iris", raw_input_contents=[bytes(2**16)]).SerializeToString()
            await served.infer("iris", 1.0)

    with pytest.raises(grpc.aio.AioRpcError) as found:
        await served.channel.stream_unary(INFER)(endless(), timeout=60)
    assert found.value.code() is Status.RESOURCE_EXHAUSTED


async def raw_call(served: Served, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """A call whose body no library of gRPC would send."""
    sent = {"content-type": "application/grpc", "te": "trailers", **(headers or {})}
    async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as http:
        return await http.post(f"{served.stack.url}{path}", content=content, headers=sent)


async def test_rows_have_the_status_of_the_call(served: Served) -> None:
    # the last client of the test before may still be asking
    for one in served.engines:
        one.fails.extend([(Status.INTERNAL, "broken")] * 20)
    await served.refused(INFER, infer("once"))
    await served.refused(INFER, infer("none"))
    served.heal()
    await served.infer("once", 1.0)

    def statuses() -> list[tuple[str, int]]:
        rows = [parse_usage_line(line, FUTURE_S) for line in served.log.read_bytes().splitlines()]
        return [(row.model, row.status) for row in rows if row.model in {"once", "none"}][-3:]

    await eventually(lambda: statuses() == [("once", 500), ("none", 404), ("once", 200)])


async def test_work_is_shared_by_what_is_in_flight(served: Served) -> None:
    for one in served.engines:
        one.seen.clear()
        one.holds.clear()
    calls = [asyncio.create_task(served.infer("once", 1.0)) for _ in range(20)]
    try:
        await eventually(lambda: sum(len(one.seen) for one in served.engines) == 20)
        assert {len(one.seen) for one in served.engines} == {10}
    finally:
        for one in served.engines:
            one.holds.set()
        await asyncio.gather(*calls)


async def test_an_engine_whose_calls_fail_is_avoided(served: Served) -> None:
    """With one attempt each, so that every failure reaches the client."""
    served.heal()
    served.engines[0].fails.extend([(Status.UNAVAILABLE, "gone")] * 1000)
    codes = list[object]()
    for _ in range(60):
        try:
            await served.infer("once", 1.0)
            codes.append(Status.OK)
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
    served.engines[0].fails.clear()
    assert codes.count(Status.UNAVAILABLE) < 15
    assert codes[-10:].count(Status.OK) >= 9


async def test_openais_clients_are_served_as_before(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.stack.url, timeout=60) as http:
        body = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        refused = await http.post(INFER, json={"model": "iris"})
        assert (refused.status_code, refused.headers["content-type"]) == (400, "text/plain")


async def test_without_extproc_nobody_knows_the_model(served: Served) -> None:
    """It is the last test: extproc does not come back."""
    await served.stack.processes.end("extproc")

    async def is_unavailable() -> bool:
        refused = await served.refused(INFER, infer("iris"))
        return refused.code() is Status.UNAVAILABLE and "{" not in str(refused.details())

    await eventually(is_unavailable, timeout_s=30)
