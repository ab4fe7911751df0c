# SPDX-License-Identifier: Apache-2.0
"""What MLServer and KServe's SDK answer over gRPC through the gateway is what they answer directly."""

from __future__ import annotations

import struct
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from extproc.wire_names import LIVE_CALL, METADATA_CALL, READY_CALL
from tests.model_calls import INFER, MODEL_METADATA, MODEL_READY, V2
from tests.waiting import eventually
from tests.with_model_servers.conftest import gateway_to, route, server
from tests.with_model_servers.test_real_model_servers import CLASSES, FLOWERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

    from tests.with_model_servers.conftest import ModelServers

pytestmark = pytest.mark.asyncio(loop_scope="module")

Status = grpc.StatusCode
NUMBERS: Final = [one for row in FLOWERS for one in row]


def infer(model: str, numbers: list[float], columns: int, *, is_raw: bool = False) -> Message:
    """A request for rows of 32-bit numbers."""
    tensor = V2["InferInputTensor"](name="x", datatype="FP32", shape=[len(numbers) // columns, columns])
    raw = [struct.pack(f"<{len(numbers)}f", *numbers)] if is_raw else []
    if not is_raw:
        tensor.contents.fp32_contents.extend(numbers)
    made: Message = V2["ModelInferRequest"](model_name=model, id="42", inputs=[tensor], raw_input_contents=raw)
    return made


class Calls(msgspec.Struct, frozen=True):
    """``gateway``: a channel to it. ``direct``: to the servers by the name of the model at the gateway, whose own name
    is ``tree``.
    """

    gateway: grpc.aio.Channel
    direct: dict[str, grpc.aio.Channel]

    async def both(self, path: str, through: Message, direct: Message, name: str) -> tuple[object, object]:
        """Message, or status and text, of the answer through the gateway and of that of the server itself."""
        return await _outcome(self.gateway, path, through), await _outcome(self.direct[name], path, direct)


async def _outcome(channel: grpc.aio.Channel, path: str, message: Message) -> object:
    try:
        return await channel.unary_unary(path)(message.SerializeToString(), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calls(servers: ModelServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Calls]:
    """Two versions at MLServers behind one route, and a model of KServe's SDK."""
    await servers.start_mlserver("tree", "tree")
    await servers.start_mlserver("logistic", "logistic")
    await servers.start_kserve("kserve", "tree")
    at = servers.by_grpc
    documents = [
        server("ml", "V2-gRPC", "tree", at["tree"]),
        server("ml-two", "V2-gRPC", "logistic", at["logistic"]),
        server("ks", "V2-gRPC", "tree", at["kserve"]),
        route("mlserver", ml=1),
        route("versions", **{"ml": 3, "ml-two": 1}),
        route("kserve", ks=1),
    ]
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(gateway_to(tmp_path_factory.mktemp("stack"), *documents))

        async def is_served() -> bool:
            # a connection of its own: the last one may be of the listener before
            async with grpc.aio.insecure_channel(stack.url.removeprefix("http://")) as channel:
                return isinstance(await _outcome(channel, INFER, infer("kserve", NUMBERS, 4)), bytes)

        await eventually(is_served)
        addresses = {"gateway": stack.url.removeprefix("http://"), "mlserver": at["tree"], "kserve": at["kserve"]}
        channels = {
            name: await exits.enter_async_context(grpc.aio.insecure_channel(address))
            for name, address in addresses.items()
        }
        yield Calls(channels.pop("gateway"), channels)


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
@pytest.mark.parametrize("is_raw", [False, True])
async def test_tensors_are_answered_as_by_the_server_itself(calls: Calls, name: str, is_raw: bool) -> None:
    through, direct = await calls.both(
        INFER, infer(name, NUMBERS, 4, is_raw=is_raw), infer("tree", NUMBERS, 4, is_raw=is_raw), name
    )
    assert isinstance(direct, bytes), direct
    assert through == direct
    answer = V2["ModelInferResponse"].FromString(direct)
    assert (answer.model_name, answer.id) == ("tree", "42")
    assert _classes(answer) == CLASSES


def _classes(answer: Any) -> list[int]:  # noqa: ANN401 - a class that was made
    """KServe answers in the form of the request, MLServer in that of its settings."""
    if answer.raw_output_contents:
        (raw,) = answer.raw_output_contents
        return [one for (one,) in struct.iter_unpack("<q", raw)]
    return list(answer.outputs[0].contents.int64_contents)


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
async def test_metadata_is_that_of_the_server(calls: Calls, name: str) -> None:
    asked = V2["ModelMetadataRequest"]
    through, direct = await calls.both(MODEL_METADATA, asked(name=name), asked(name="tree"), name)
    assert isinstance(direct, bytes), direct
    assert through == direct


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
async def test_the_servers_own_error_reaches_the_client(calls: Calls, name: str) -> None:
    narrow = NUMBERS[:3]
    through, direct = await calls.both(INFER, infer(name, narrow, 3), infer("tree", narrow, 3), name)
    assert isinstance(direct, tuple), direct
    assert through == direct
    assert direct[0] is Status.INTERNAL


async def test_two_versions_share_by_weight(calls: Calls) -> None:
    counts = Counter[str]()
    for _ in range(120):
        answer = await _outcome(calls.gateway, INFER, infer("versions", NUMBERS, 4))
        assert isinstance(answer, bytes), answer
        counts[V2["ModelInferResponse"].FromString(answer).model_name] += 1
    assert counts.keys() == {"tree", "logistic"}
    # 30 of 120 expected, with a standard deviation of 4.7: 5 of them
    assert 7 <= counts["logistic"] <= 53


async def test_an_unknown_model_is_not_found(calls: Calls) -> None:
    for path, message in {
        INFER: infer("none", NUMBERS, 4),
        MODEL_METADATA: V2["ModelMetadataRequest"](name="none"),
        MODEL_READY: V2["ModelReadyRequest"](name="none"),
    }.items():
        outcome = await _outcome(calls.gateway, path, message)
        assert isinstance(outcome, tuple), outcome
        assert outcome[0] is Status.NOT_FOUND, path


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
async def test_health_is_as_at_the_server(calls: Calls, name: str) -> None:
    ready = V2["ModelReadyRequest"]
    asked = {
        LIVE_CALL: (V2["ServerLiveRequest"](),) * 2,
        READY_CALL: (V2["ServerReadyRequest"](),) * 2,
        MODEL_READY: (ready(name=name), ready(name="tree")),
    }
    for path, (to_gateway, to_server) in asked.items():
        through, direct = await calls.both(path, to_gateway, to_server, name)
        assert through == direct == b"\x08\x01", path
    metadata = await _outcome(calls.gateway, METADATA_CALL, V2["ServerMetadataRequest"]())
    assert isinstance(metadata, bytes)
    assert V2["ServerMetadataResponse"].FromString(metadata).name == "attache"
