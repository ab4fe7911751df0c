# SPDX-License-Identifier: Apache-2.0
"""Requests that the gateway answers by itself: lists of models, and health in the protocols V1 and V2, also over gRPC.

Health comes from what is known of endpoints, so that probes reach no engine. A model is ready if one of its engines is.
The gateway is ready, in V2's sense, if a model is: one that fails must not take the others out of a load balancer.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from extproc.core.request_builder import refuse_repository_path
from extproc.refusals import MethodNotAllowed, ModelNotReady, UnknownModel
from extproc.request.grpc_call import read_call
from extproc.request.model_in_path import read_model_path
from extproc.streams.headers import error_form
from extproc.streams.processing_responses import (
    encode_field,
    json_answer,
    model_answer,
    models_answer,
    reroute_to_extproc_answer,
)
from extproc.wire_names import (
    ANSWERS_SERVICE,
    LIVE_PATH,
    METADATA_CALL,
    MODEL_READY_CALL,
    MODELS_PATH,
    READY_CALL,
    READY_PATH,
    READY_VERB,
    SERVER_CALLS,
    SERVER_ROOT,
    Api,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.request_record import RequestHead
    from extproc.request.inference_request import ModelPath
    from extproc.streams.stream_dependencies import StreamContext

# No other path is answered here.
_ROOTS: Final = (MODELS_PATH, SERVER_ROOT)
_SERVER_ANSWERS: Final = {
    SERVER_ROOT: {"name": "attache", "version": "", "extensions": ["binary_tensor_data"]},
    LIVE_PATH: {"live": True},
    READY_PATH: {"ready": True},
}
_CALLS: Final = Api.V2_GRPC.spec.protocol
OWN_CALLS: Final = frozenset({*SERVER_CALLS, MODEL_READY_CALL})
_YES, _NO, _OF_SERVER = (f"{ANSWERS_SERVICE}{name}" for name in ("Yes", "No", "Server"))
# Serialized messages: the first field is true, or it is not there; or it is the name.
OWN_MESSAGES: Final[Mapping[str, bytes]] = MappingProxyType(
    {_YES: b"\x08\x01", _NO: b"", _OF_SERVER: encode_field(b"\x0a", b"attache")}
)


def direct_response(context: StreamContext, head: RequestHead) -> bytes | None:
    """The answer of the gateway itself, None for requests that engines answer; raises a Refusal."""
    path = head.path
    if not path.startswith(_ROOTS):
        return None
    refuse_repository_path(path)
    if path in _SERVER_ANSWERS:
        return _of_server(context, head)
    named = read_model_path(path)
    if named is not None and (named.version or named.verb not in {"", READY_VERB}):
        return None
    if not path.startswith(SERVER_ROOT):
        return _of_models(context, head, named)
    return _readiness(context, head, named, "V2") if named is not None and named.verb == READY_VERB else None


def direct_grpc_response(context: StreamContext, head: RequestHead, body: bytes) -> bytes | None:
    """Likewise of OWN_CALLS, calls of gRPC whose answers are messages: extproc sends the call on to itself."""
    builder, now = context.core.builder, context.clock()
    if head.path == MODEL_READY_CALL:
        request = read_call(Api.V2_GRPC, body)
        if request.call is not None and request.call.has_version:
            # engines know their versions
            return None
        if _CALLS not in builder.protocols_of(request.model, head):
            raise _unknown(request.model)
        is_ready = builder.is_ready(request.model, _CALLS, head, now)
    else:
        is_ready = head.path != READY_CALL or builder.has_ready_engine(_CALLS, now)
    context.metrics.count_direct_response("health")
    return reroute_to_extproc_answer(_OF_SERVER if head.path == METADATA_CALL else _YES if is_ready else _NO)


def _of_server(context: StreamContext, head: RequestHead) -> bytes:
    """V2's metadata and health of the server, which is the gateway."""
    _check_is_read(head)
    if head.path == READY_PATH and not context.core.builder.has_ready_engine("V2", context.clock()):
        raise ModelNotReady("No engine of a model of protocol V2 is ready; try again soon.")
    context.metrics.count_direct_response("health")
    return json_answer(_SERVER_ANSWERS[head.path], "health")


def _check_is_read(head: RequestHead) -> None:
    # Envoy leaves the body of an answer to HEAD out
    if head.method not in {"GET", "HEAD"}:
        raise MethodNotAllowed(f"{head.path[:100]} takes GET, not {head.method[:20]}.")


def _readiness(context: StreamContext, head: RequestHead, named: ModelPath, protocol: str) -> bytes:
    _check_is_read(head)
    builder = context.core.builder
    if protocol not in builder.protocols_of(named.model, head):
        raise _unknown(named.model)
    if not builder.is_ready(named.model, protocol, head, context.clock()):
        raise ModelNotReady(_why_not_ready(named.model, is_on_demand=builder.is_on_demand(named.model, head)))
    context.metrics.count_direct_response("health")
    return json_answer({"name": named.model, "ready": True}, "health")


def _why_not_ready(model: str, *, is_on_demand: bool) -> str:
    if is_on_demand:
        return f"No engine has '{model[:100]}' loaded now. A request for it has an engine load it."
    return f"No engine of '{model[:100]}' is ready; try again soon."


def _of_models(context: StreamContext, head: RequestHead, named: ModelPath | None) -> bytes | None:
    """The list of models that the caller may use, or one of them, in the form of its protocol."""
    if head.path != MODELS_PATH and not head.path.startswith(MODELS_PATH + "/"):
        return None
    if named is not None:
        protocols = context.core.builder.protocols_of(named.model, head)
        if "OpenAI" not in protocols and "V1" in protocols:
            return _readiness(context, head, named, "V1")
        if "OpenAI" not in protocols and "TensorFlow" in protocols:
            # engines know the states of their versions
            return None
    _check_is_read(head)
    name = _unquoted(head.path.removeprefix(MODELS_PATH).removeprefix("/"))
    model = context.core.builder.model_for(head, name) if name else None
    if name and model is None:
        raise _unknown(name)
    context.metrics.count_direct_response("models_listed")
    form = error_form(head)
    if model is not None:
        return model_answer(
            model, context.started_s, form, context.core.load_fraction_for_caller(head, name, context.clock())
        )
    return models_answer(context.core.builder.models_for(head), context.started_s, form)


def _unquoted(name: str) -> str:
    """A model's name as a client wrote it, whose characters are the bytes that it sent."""
    return unquote_to_bytes(name.encode("latin-1", "replace")).decode(errors="replace")


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(
        f"The model '{name[:100]}' does not exist; GET {MODELS_PATH} lists those that do.", param="model"
    )
