# SPDX-License-Identifier: Apache-2.0
"""Messages of the Open Inference Protocol's and TensorFlow Serving's gRPC services as they are published, as far as
tests need them, and an engine that serves both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

import grpc.aio
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

_TYPES: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
}
# grpc_predict_v2.proto: by message, each field as "number type name", repeated ones with a star.
_V2: Final = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 string* extensions",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": "1 string name, 2 string* versions, 3 string platform",
    "InferTensorContents": "3 int64* int64_contents, 6 float* fp32_contents, 7 double* fp64_contents",
    "InferInputTensor": "1 string name, 2 string datatype, 3 int64* shape, 5 InferTensorContents contents",
    "InferOutputTensor": "1 string name, 2 string datatype, 3 int64* shape, 5 InferTensorContents contents",
    "ModelInferRequest": "1 string model_name, 2 string model_version, 3 string id, 5 InferInputTensor* inputs,"
    " 7 bytes* raw_input_contents",
    "ModelInferResponse": "1 string model_name, 2 string model_version, 3 string id, 5 InferOutputTensor* outputs,"
    " 6 bytes* raw_output_contents",
}
# tensorflow_serving/apis: model.proto, predict.proto, and what the others have in common with them.
_TENSORFLOW: Final = {
    "ModelSpec": "1 string name, 3 string signature_name, 4 string version_label",
    "PredictRequest": "1 ModelSpec model_spec, 3 string* output_filter",
    "PredictResponse": "2 ModelSpec model_spec",
}


def _field(text: str) -> FieldDescriptorProto:
    number, kind, name = text.split()
    label = FieldDescriptorProto.LABEL_REPEATED if kind.endswith("*") else FieldDescriptorProto.LABEL_OPTIONAL
    made = FieldDescriptorProto(name=name, number=int(number), label=label)
    kind = kind.removesuffix("*")
    if kind in _TYPES:
        made.type = _TYPES[kind]
    else:
        made.type, made.type_name = FieldDescriptorProto.TYPE_MESSAGE, kind
    return made


def _classes(package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        made = [_field(one) for one in fields.split(",")] if fields else []
        file.message_type.append(DescriptorProto(name=name, field=made))
    pool = DescriptorPool()
    pool.Add(file)
    found = GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: one for name, one in found.items()}


V2: Final = _classes("inference", _V2)
TENSORFLOW: Final = _classes("tensorflow.serving", _TENSORFLOW)
INFER, MODEL_METADATA, MODEL_READY = Api.V2_GRPC.spec.calls.paths if Api.V2_GRPC.spec.calls else ("", "", "")
PREDICT, CLASSIFY, REGRESS, GET_METADATA, GET_STATUS = (
    Api.TENSORFLOW_GRPC.spec.calls.paths if Api.TENSORFLOW_GRPC.spec.calls else ("",) * 5
)


def infer(model: str, *values: float, **more: object) -> Message:
    """A request for a tensor of numbers."""
    tensor = V2["InferInputTensor"](
        name="x", datatype="FP64", shape=[len(values)], contents=V2["InferTensorContents"](fp64_contents=values)
    )
    made: Message = V2["ModelInferRequest"](model_name=model, inputs=[tensor], **more)
    return made


def framed(message: bytes, *, flag: int = 0, size: int | None = None) -> bytes:
    """A message as it stands in a body."""
    return bytes([flag]) + (len(message) if size is None else size).to_bytes(4) + message


class Engine:
    """Gives tensors back. ``fails``: the statuses and details of the next calls. ``seen``: what came: the path, the
    model's name, and the metadata; ``bodies``: their messages. ``clients``: the names in clients' certificates.
    ``holds``: calls wait until it is set. ``credentials``: with which it serves over TLS.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.address = ""
        self.fails: deque[tuple[grpc.StatusCode, str]] = deque()
        self.seen: list[tuple[str, str, dict[str, str | bytes]]] = []
        self.bodies: deque[bytes] = deque(maxlen=100)
        self.holds = asyncio.Event()
        self.holds.set()
        self.cancelled = 0
        self.clients: set[bytes] = set()
        self._credentials = credentials
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))

    async def __aenter__(self) -> Self:
        add, free = self._server.add_insecure_port, "127.0.0.1:0"
        port = add(free) if self._credentials is None else self._server.add_secure_port(free, self._credentials)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def answer(self, path: str, body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """The serialized answer."""
        if path.startswith("/tensorflow"):
            name = TENSORFLOW["PredictRequest"].FromString(body).model_spec.name
        else:
            name = V2["ModelInferRequest"].FromString(body).model_name
        self.bodies.append(body)
        self.seen.append((path, name, dict(context.invocation_metadata() or ())))
        self.clients.update(context.auth_context().get("x509_common_name", ()))
        if self.fails:
            status, why = self.fails.popleft()
            await context.abort(status, why)
        try:
            await self.holds.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return _answer(path, name, body)


def _answer(path: str, name: str, body: bytes) -> bytes:
    if path.startswith("/tensorflow"):
        spec = TENSORFLOW["ModelSpec"](name=name)
        return bytes(TENSORFLOW["PredictResponse"](model_spec=spec).SerializeToString())
    if path == MODEL_METADATA:
        return bytes(V2["ModelMetadataResponse"](name=name, platform="double").SerializeToString())
    if path == MODEL_READY:
        return bytes(V2["ModelReadyResponse"](ready=True).SerializeToString())
    asked = V2["ModelInferRequest"].FromString(body)
    outputs = [V2["InferOutputTensor"].FromString(one.SerializeToString()) for one in asked.inputs]
    answer = V2["ModelInferResponse"](
        model_name=name,
        model_version=asked.model_version,
        id=asked.id,
        outputs=outputs,
        raw_output_contents=asked.raw_input_contents,
    )
    return bytes(answer.SerializeToString())


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        path = details.method

        async def answer(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return await self._engine.answer(path, body, context)

        return grpc.unary_unary_rpc_method_handler(answer)
