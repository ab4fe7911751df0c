"""Decisions and refusals as ext_proc answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.limits import granted_headers
from extproc.errors import to_openai_body
from extproc.protocol import (
    DESTINATION,
    DETAILS_PREFIX,
    LB_NAMESPACE,
    NAMESPACE,
    PREFILLER,
    SERVER_HEADER,
    SIDECAR_HEADERS,
    SUBSET,
    TICKET,
)
from extproc.streams.messages import HeadersResponse, ProcessingResponse, TrailersResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.core.effects import Decision
    from extproc.errors import Refusal
    from extproc.routing.resolve import ListedModel
    from extproc.streams.messages import BodyResponse, CommonResponse

_OVERWRITE: Final = 2  # HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
# Of ProcessingMode, as numbers: header and trailer modes SEND and SKIP, body modes NONE and FULL_DUPLEX_STREAMED.
_SEND, _SKIP, _NONE = 1, 2, 0
FULL_DUPLEX: Final = 4
# Envoy takes streamed bodies in messages of up to 64 KB.
MOST_BODY_BYTES: Final = 62_000

CONTINUE_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS: Final = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: Final = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
# Headers of the gateway's that a client may have forged: removed, unless we set them ourselves.
_CONTROL_HEADERS: Final = (*SIDECAR_HEADERS, SUBSET, SERVER_HEADER)


def decision_answer(decision: Decision) -> bytes:
    """To a whole body: the endpoints in order as header and ``envoy.lb`` metadata, the server to route by, the ticket, the body."""
    answer = ProcessingResponse()
    common = answer.request_body.response
    common.clear_route_cache = True
    headers = {SERVER_HEADER: decision.server, **_routing_headers(decision)}
    if decision.body is not None:
        common.body_mutation.body = decision.body
    _set_headers(common, headers)
    _set_metadata(answer, decision)
    return answer.SerializeToString()


def duplex_decision_answer(decision: Decision, *, overrides_mode: bool) -> bytes:
    """To headers whose body follows in pieces: the endpoints as header and metadata, and nothing left that a client forged."""
    answer = ProcessingResponse()
    common = answer.request_headers.response
    headers = _routing_headers(decision)
    _set_headers(common, headers)
    common.header_mutation.remove_headers.extend([name for name in _CONTROL_HEADERS if name not in headers])
    _set_metadata(answer, decision)
    if overrides_mode:
        mode = answer.mode_override
        mode.request_header_mode = mode.request_trailer_mode = mode.response_header_mode = _SEND
        mode.request_body_mode, mode.response_body_mode = FULL_DUPLEX, _NONE
        mode.response_trailer_mode = _SKIP
    return answer.SerializeToString()


def request_body_answers(body: bytes, *, is_end: bool) -> Iterator[bytes]:
    """A request's body in pieces that the gateway takes."""
    for piece, is_last in _pieces(body):
        answer = ProcessingResponse()
        _stream(answer.request_body, piece, is_end=is_end and is_last)
        yield answer.SerializeToString()


def response_body_answers(body: bytes, *, is_end: bool) -> Iterator[bytes]:
    """A piece of an answer, sent on as it came, in pieces that the gateway takes."""
    for piece, is_last in _pieces(body):
        answer = ProcessingResponse()
        _stream(answer.response_body, piece, is_end=is_end and is_last)
        yield answer.SerializeToString()


def _pieces(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """At least one, and which is the last."""
    for start in range(0, max(len(body), 1), MOST_BODY_BYTES):
        # slicing all of it copies nothing
        yield body[start : start + MOST_BODY_BYTES], start + MOST_BODY_BYTES >= len(body)


def _stream(side: BodyResponse, piece: bytes, *, is_end: bool) -> None:
    streamed = side.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = piece, is_end


def _routing_headers(decision: Decision) -> dict[str, str]:
    assignment = decision.assignment
    headers = {DESTINATION: ",".join(assignment.addresses)}
    if assignment.prefill is not None:
        headers[PREFILLER] = assignment.prefill.address
    if decision.body is not None:
        # Envoy refuses a changed body whose length is not the header's
        headers["content-length"] = str(len(decision.body))
    return headers


def _set_headers(common: CommonResponse, headers: Mapping[str, str]) -> None:
    set_headers = common.header_mutation.set_headers
    for name, value in headers.items():
        option = set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()


def _set_metadata(answer: ProcessingResponse, decision: Decision) -> None:
    metadata = answer.dynamic_metadata.fields
    destination = ",".join(decision.assignment.addresses)
    metadata[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
    own = metadata[NAMESPACE].struct_value.fields
    own[TICKET].string_value = decision.ticket
    if decision.grants:
        # the bundle's routes write them into the answer's headers
        for name, value in granted_headers(decision.grants).items():
            own[name].string_value = value


def refusal_answer(refusal: Refusal) -> bytes:
    """An OpenAI error object instead of an answer from an engine."""
    headers = dict(refusal.headers)
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return _immediate(refusal.status, to_openai_body(refusal), headers, details=DETAILS_PREFIX + refusal.outcome)


class _Model(msgspec.Struct):
    id: str
    created: int
    parent: str | None
    object: str = "model"
    owned_by: str = "attache"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


def models_answer(models: Iterable[ListedModel], created: int) -> bytes:
    """OpenAI's list of models, in vLLM's form (``parent``: an adapter's base model). ``created``: Unix time in seconds."""
    listed = _Models([_Model(model.name, created, model.parent) for model in models])
    return _immediate(200, msgspec.json.encode(listed), {}, details=DETAILS_PREFIX + "models")


def model_answer(model: ListedModel, created: int) -> bytes:
    """One model of the list."""
    body = msgspec.json.encode(_Model(model.name, created, model.parent))
    return _immediate(200, body, {}, details=DETAILS_PREFIX + "model")


def _immediate(status: int, body: bytes, headers: dict[str, str], *, details: str) -> bytes:
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = details
    for name, value in {"content-type": "application/json", **headers}.items():
        header = immediate.headers.set_headers.add().header
        header.key, header.raw_value = name, value.encode()
    return answer.SerializeToString()
