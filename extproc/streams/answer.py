"""Decisions and refusals as ext_proc answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.errors import to_openai_body
from extproc.protocol import DESTINATION, DETAILS_PREFIX, LB_NAMESPACE, NAMESPACE, SERVER_HEADER, TICKET
from extproc.streams.messages import HeadersResponse, ProcessingResponse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.errors import Refusal
    from extproc.pipeline import Decision
    from extproc.routing.resolve import ListedModel

_OVERWRITE: Final = 2  # HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
CONTINUE_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()


def decision_answer(decision: Decision) -> bytes:
    """The endpoints in order as header and ``envoy.lb`` metadata, the server to route by, the ticket, and the body."""
    destination = ",".join(decision.assignment.addresses)
    answer = ProcessingResponse()
    common = answer.request_body.response
    common.clear_route_cache = True
    headers = {SERVER_HEADER: decision.server, DESTINATION: destination}
    if decision.body is not None:
        common.body_mutation.body = decision.body
        # Envoy refuses a changed body whose length is not the header's
        headers["content-length"] = str(len(decision.body))
    set_headers = common.header_mutation.set_headers
    for name, value in headers.items():
        option = set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()
    metadata = answer.dynamic_metadata.fields
    metadata[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
    metadata[NAMESPACE].struct_value.fields[TICKET].string_value = decision.ticket
    return answer.SerializeToString()


def refusal_answer(refusal: Refusal) -> bytes:
    """An OpenAI error object instead of an answer from an engine."""
    headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
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
