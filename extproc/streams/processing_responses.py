# SPDX-License-Identifier: Apache-2.0
"""Decisions, refusals and lists of models as serialized ext_proc answers.

Frequent ones are written in protobuf's wire format directly. Such an answer is mostly constant. Built from message
objects it costs about as much as the pick that it carries, because every object on the way to a field is allocated and
looked up. So the constant parts are serialized once, from message objects, and an answer is one concatenation of those
parts, lengths, and the strings that vary.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.limit_refusals import headers_of_grants
from extproc.refusals import (
    ErrorForm,
    StoredAnswer,
    anthropic_status,
    grpc_status,
    to_anthropic_body,
    to_openai_body,
    to_plain_error_body,
)
from extproc.request.grpc_call import encode_varint
from extproc.streams.message_order import BodyMode
from extproc.streams.messages import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ProcessingMode,
    ProcessingResponse,
    StreamedBodyResponse,
    Struct,
    TrailersResponse,
    Value,
)
from extproc.translate.directive import encode_directive
from extproc.wire_names import (
    ACCEPT_ENCODING,
    CACHE,
    CLAMPS,
    DEGRADED_SERVERS,
    DESTINATION,
    DETAILS_PREFIX,
    DROPPED_REASON,
    ENGINE_HEADERS,
    EXTPROC_CLUSTER,
    GROUPS,
    HIDES_USAGE,
    LB_NAMESPACE,
    LONGEST_MESSAGE_TIMEOUT_S,
    MIRROR,
    NAMESPACE,
    POLICY_HEADER,
    PREFILLER,
    REQUEST_ID,
    RESPONSE_MODEL,
    ROUTE_NAMESPACE,
    SALT,
    SCORES,
    SERVER_CLUSTER,
    SERVER_HEADER,
    SIDECAR_HEADERS,
    SPLICE,
    SUBSET,
    TICKET,
    TRACE_NAMESPACE,
    TRANSLATE,
    USAGE_CONTEXT,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.message import Message

    from extproc.api.usage_log import UsageContext
    from extproc.core.effects import Decision
    from extproc.core.request_record import PlannedAttempts
    from extproc.core.trace import Trace
    from extproc.refusals import Refusal
    from extproc.routing.routing_table import ListedModel
    from extproc.streams.messages import ProcessingRequest
    from extproc.translate.directive import TranslationDirective

# The value of the field that varies, in the message that a Template is made of.
MARK: Final = "<varies>"
# Of the wire types, the lowest three bits of what stands before a field's value: a length and so many bytes.
_LENGTH_DELIMITED: Final = 2
# Of the value of an entry of a map.
_ENTRY_VALUE_TAG: Final = encode_varint(2 << 3 | _LENGTH_DELIMITED)
# Heads are kept for values up to this size.
_KEPT_SIZES: Final = 1024
# Of how full engines are: more would show single requests of others.
_LOAD_STEPS: Final = 100
# HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_OVERWRITE: Final = 2
# Envoy takes streamed bodies in messages of up to 64 KB.
MOST_BODY_BYTES: Final = 62_000
CONTINUE_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS: Final = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY: Final = ProcessingResponse(response_body=BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: Final = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
# Let an answer's headers pass, and have its body sent, piece by piece.
SEND_ANSWER: Final = ProcessingResponse(
    response_headers=HeadersResponse(), mode_override=ProcessingMode(response_body_mode=BodyMode.STREAMED)
).SerializeToString()
_CONTINUE: Final = {
    "response_headers": CONTINUE_RESPONSE_HEADERS,
    "response_body": CONTINUE_RESPONSE_BODY,
    "response_trailers": CONTINUE_RESPONSE_TRAILERS,
}
_HIDES_MEMBER: Final = {
    False: b"",
    True: Struct(fields={HIDES_USAGE: Value(string_value="1")}).SerializeToString(),
}
_encode_usage: Final = msgspec.json.Encoder().encode
_CLEAR_ROUTE_CACHE: Final = CommonResponse(clear_route_cache=True).SerializeToString()
# Control headers that a client may have forged: removed unless the answer sets them. By whether it names a prefiller.
# Usage cannot be read in compressed answers.
_REMOVE_FORGED: Final = {
    has_prefiller: HeaderMutation(
        remove_headers=[
            name
            for name in (*SIDECAR_HEADERS, *ENGINE_HEADERS, SUBSET, SERVER_HEADER, ACCEPT_ENCODING)
            if not (has_prefiller and name == PREFILLER)
        ]
    ).SerializeToString()
    for has_prefiller in (False, True)
}
# For gateways that do not remove what clients forge: should trailers follow and no body, Envoy sends the request on and
# may send no further message.
CONTINUE_FOREIGN_HEADERS: Final = ProcessingResponse(
    request_headers=HeadersResponse(
        response=CommonResponse(
            header_mutation=HeaderMutation(
                remove_headers=[DESTINATION, *SIDECAR_HEADERS, *ENGINE_HEADERS, SUBSET, SERVER_HEADER, ACCEPT_ENCODING]
            )
        )
    )
).SerializeToString()


def field_tag(message: type[Message], name: str) -> bytes:
    """The tag of the field ``name``, which holds a message, a string or bytes."""
    return encode_varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED)


def encode_field(tag: bytes, value: bytes, *, more: int = 0) -> bytes:
    """A field with ``value``; or, of a field whose value has so many bytes ``more``, all that stands before these.

    So a message may end with a long value that is not copied into each of the fields around it.
    """
    return tag + encode_varint(len(value) + more) + value


class MessageTemplate:
    """A serialized message but for one string, which may be at any depth."""

    def __init__(self, message: Message) -> None:
        """``message`` has MARK as the value of the string that varies."""
        self._levels = _levels_around_mark(message.SerializeToString(deterministic=True))
        self._tail = b"".join(behind for _, behind in reversed(self._levels))
        self._heads: dict[int, bytes] = {}

    def fill(self, value: bytes) -> tuple[bytes, bytes, bytes]:
        """The message with ``value``, in parts."""
        size = len(value)
        return self.bytes_before_value(size), value, self._tail

    def bytes_before_value(self, size: int) -> bytes:
        """All that stands before a value of ``size`` bytes: only the lengths of the fields around it depend on it."""
        return self._heads.get(size) or self._made_head(size)

    def _made_head(self, size: int) -> bytes:
        head, behind_size = b"", 0
        for before, behind in reversed(self._levels):
            head = before + encode_varint(len(head) + size + behind_size) + head
            behind_size += len(behind)
        if size < _KEPT_SIZES:
            self._heads[size] = head
        return head


def _levels_around_mark(message: bytes) -> list[tuple[bytes, bytes]]:
    """For every field around the mark, outermost first: what its message has before its length, and behind its
    value.
    """
    levels = []
    while message != MARK.encode():
        length_at, start, end = _field_with_mark(message)
        levels.append((message[:length_at], message[end:]))
        message = message[start:end]
    return levels


def _field_with_mark(message: bytes) -> tuple[int, int, int]:
    """Where the field's length begins, its value begins, and its value ends. Fixed-width numbers are not supported."""
    end = 0
    while True:
        key, length_at = _read_varint(message, end)
        number, start = _read_varint(message, length_at)
        is_number = key & 7 != _LENGTH_DELIMITED
        end = start if is_number else start + number
        if not is_number and MARK.encode() in message[start:end]:
            return length_at, start, end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    number = shift = 0
    while data[at] >= 0x80:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


def _header(name: str) -> MessageTemplate:
    """Of a HeaderMutation: set ``name`` to a value that varies."""
    header = HeaderValue(key=name, raw_value=MARK.encode())
    return MessageTemplate(HeaderMutation(set_headers=[HeaderValueOption(header=header, append_action=_OVERWRITE)]))


def _metadata_of(namespace: str, values: Mapping[str, str]) -> Struct:
    fields = {name: Value(string_value=value) for name, value in values.items()}
    return Struct(fields={namespace: Value(struct_value=Struct(fields=fields))})


def _streamed(*, is_end: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=MARK.encode(), end_of_stream=is_end)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


_PATH: Final = _header(":path")
_TO_EXTPROC: Final = b"".join(_header(SERVER_HEADER).fill(EXTPROC_CLUSTER.encode()))
_SERVER: Final = _header(SERVER_HEADER)
_POLICY: Final = _header(POLICY_HEADER)
_DESTINATION: Final = _header(DESTINATION)
_TRANSLATE: Final = _header(TRANSLATE)
_MIRROR: Final = _header(MIRROR)
# The statuses that Envoy retries, beside those of its route.
_CHECKS_REFUSAL: Final = b"".join(_header("x-envoy-retriable-status-codes").fill(b"400,401,403,404,405,413,415,422"))
# Beyond the list of endpoints, Envoy would try any engine.
_MAX_RETRIES: Final = _header("x-envoy-max-retries")
_NO_RETRY: Final = b"".join(_MAX_RETRIES.fill(b"0"))
_REQUEST_ID: Final = _header(REQUEST_ID)
_PREFILLER: Final = _header(PREFILLER)
_CONTENT_LENGTH: Final = _header("content-length")
_DESTINATION_METADATA: Final = MessageTemplate(_metadata_of(LB_NAMESPACE, {DESTINATION: MARK}))
# by whether usage is hidden
_TICKET_METADATA: Final = {
    False: MessageTemplate(_metadata_of(NAMESPACE, {TICKET: MARK})),
    True: MessageTemplate(_metadata_of(NAMESPACE, {HIDES_USAGE: "1", TICKET: MARK})),
}
# by whether the body ends with the piece
_REQUEST_PIECE: Final = {
    end: MessageTemplate(ProcessingResponse(request_body=_streamed(is_end=end))) for end in (False, True)
}
RESPONSE_PIECE: Final = {
    end: MessageTemplate(ProcessingResponse(response_body=_streamed(is_end=end))) for end in (False, True)
}
_REQUEST_HEADERS_TAG: Final = field_tag(ProcessingResponse, "request_headers")
_REQUEST_BODY_TAG: Final = field_tag(ProcessingResponse, "request_body")
_METADATA_TAG: Final = field_tag(ProcessingResponse, "dynamic_metadata")
_RESPONSE_TAG: Final = field_tag(BodyResponse, "response")
_HEADERS_RESPONSE_TAG: Final = field_tag(HeadersResponse, "response")
_HEADER_MUTATION_TAG: Final = field_tag(CommonResponse, "header_mutation")
_BODY_MUTATION_TAG: Final = field_tag(CommonResponse, "body_mutation")
_BODY_TAG: Final = field_tag(BodyMutation, "body")
_FIELDS_TAG: Final = field_tag(Struct, "fields")
_STRUCT_TAG: Final = field_tag(Value, "struct_value")
# of an entry of a map: its key, 1, with this one
_OWN_KEY: Final = encode_field(encode_varint(1 << 3 | _LENGTH_DELIMITED), NAMESPACE.encode())
_ROUTE_KEY: Final = encode_field(encode_varint(1 << 3 | _LENGTH_DELIMITED), ROUTE_NAMESPACE.encode())


def decision_answer(decision: Decision, *, on_headers: bool = False, removes_forged: bool = False) -> bytes:
    """Answer a whole body: endpoints in order as header and ``envoy.lb`` metadata, server, ticket, and the changed
    body or path.

    ``on_headers``: the request has no body. ``removes_forged``: the gateway does not remove what clients forge, as our
    bundle does.
    """
    forged = _REMOVE_FORGED[bool(decision.sidecar_prefill_address)] if removes_forged else b""
    if on_headers:
        return _decision_answer(decision, _CLEAR_ROUTE_CACHE, _REQUEST_HEADERS_TAG, _HEADERS_RESPONSE_TAG, forged)
    return _decision_answer(decision, _CLEAR_ROUTE_CACHE, _REQUEST_BODY_TAG, _RESPONSE_TAG, forged)


def envoy_routed_decision_answer(decision: Decision, *, on_headers: bool) -> bytes:
    """The same where Envoy has chosen the server: its route stays. ``on_headers``: the request has no body."""
    if on_headers:
        return _decision_answer(decision, b"", _REQUEST_HEADERS_TAG, _HEADERS_RESPONSE_TAG)
    return _decision_answer(decision, b"", _REQUEST_BODY_TAG, _RESPONSE_TAG)


def _decision_answer(
    decision: Decision, common: bytes, answer_tag: bytes, response_tag: bytes, forged: bytes = b""
) -> bytes:
    """``common``: what the CommonResponse begins with. The tags: of the answer and of its response. ``forged``: what
    removes headers.
    """
    attempts, body = decision.attempts, decision.body
    addresses = decision.assignment.addresses if attempts is None else attempts.addresses
    destination = ",".join(addresses).encode()
    server = (SERVER_CLUSTER + decision.server).encode()
    headers = b"".join((*_SERVER.fill(server), *_routing_headers(decision, destination), forged))
    if decision.translation is not None:
        headers += b"".join(_TRANSLATE.fill(encode_directive(_complete(decision.translation, decision))))
    policy = decision.policy if attempts is None else attempts.policy
    if policy:
        headers += b"".join(_POLICY.fill(policy.encode()))
    if attempts is not None:
        headers += b"".join(_MAX_RETRIES.fill(str(len(attempts.servers) - 1).encode()))
    if decision.mirror:
        headers += b"".join(_MIRROR.fill(b"1"))
    if decision.checks_refusal:
        headers += _CHECKS_REFUSAL
    if decision.path:
        headers += b"".join(_PATH.fill(decision.path.encode()))
    headers += _leg_headers(decision)
    common += encode_field(_HEADER_MUTATION_TAG, headers)
    size = 0
    if body is not None:
        size = len(body)
        common += encode_field(_BODY_MUTATION_TAG, encode_field(_BODY_TAG, b"", more=size), more=size)
    answer = encode_field(answer_tag, encode_field(response_tag, common, more=size), more=size)
    # the body comes last, and is copied once
    route = b"" if attempts is None else _route_metadata(attempts)
    return b"".join((_metadata(decision, destination), route, answer, body or b""))


def _complete(directive: TranslationDirective, decision: Decision) -> TranslationDirective:
    """With the headers of this answer that the request has lost when it comes back translated."""
    headers = {
        DESTINATION: ",".join(decision.assignment.addresses),
        SERVER_HEADER: SERVER_CLUSTER + decision.server,
        POLICY_HEADER: decision.policy,
        PREFILLER: decision.sidecar_prefill_address,
    }
    return msgspec.structs.replace(directive, headers={name: value for name, value in headers.items() if value})


@lru_cache(maxsize=4096)
def _groups(
    servers: tuple[str, ...],
    degraded: tuple[str, ...],
    shorter: tuple[str, ...],
    refusals: tuple[tuple[str, tuple[str, ...]], ...],
) -> bytes:
    """Of a Struct: the cluster of each attempt, whose answers are marked, and who takes what others refuse."""
    found = Struct()
    groups = found.fields[GROUPS].list_value
    for number, server in enumerate(servers):
        group = groups.values.add().struct_value.fields
        group["name"].string_value = str(number)
        cluster = group["clusters"].list_value.values.add().struct_value.fields
        cluster["cluster_name"].string_value = SERVER_CLUSTER + server
        cluster["weight"].number_value = 1
    for server in {*degraded, *shorter}:
        how = ", ".join((*("model",) * (server in degraded), *("max_tokens",) * (server in shorter)))
        found.fields[DEGRADED_SERVERS].struct_value.fields[server].string_value = how
    for kind, takes in refusals:
        for server in takes:
            found.fields[kind].struct_value.fields[SERVER_CLUSTER + server].bool_value = True
    return found.SerializeToString()


def _route_metadata(attempts: PlannedAttempts) -> bytes:
    """Of a ProcessingResponse, beside ``_metadata``: of one message's two values of a field, the parts are merged."""
    members = _groups(attempts.servers, attempts.degraded, attempts.shorter, attempts.refusals)
    for name, place in ((SPLICE, attempts.splice), (SALT, attempts.salt)):
        members += b"".join(_member(name).fill(place.encode())) if place else b""
    if attempts.edits:
        edits = Struct(fields={server: Value(string_value=text) for server, text in attempts.edits})
        members += Struct(fields={CLAMPS: Value(struct_value=edits)}).SerializeToString()
    return encode_field(
        _METADATA_TAG,
        encode_field(_FIELDS_TAG, _ROUTE_KEY + encode_field(_ENTRY_VALUE_TAG, encode_field(_STRUCT_TAG, members))),
    )


def _leg_headers(decision: Decision) -> bytes:
    """Of a request whose prompt extproc has had prefilled."""
    no_retry = _NO_RETRY if decision.is_leased and decision.attempts is None else b""
    return no_retry + (b"".join(_REQUEST_ID.fill(decision.request_id.encode())) if decision.request_id else b"")


def scores_metadata(decision: Decision) -> bytes:
    """What is appended to an answer: the total score of each endpoint of the profile that chose, as llm-d sends it.

    Repeated metadata of one answer are one: of a namespace that both have, the later one counts.
    """
    explanation = decision.history.explanation
    if explanation is None or not explanation.profiles:
        return b""
    chosen = decision.assignment.endpoint.address
    profiles = [one for one in explanation.profiles if any(each.address == chosen for each in one.endpoints)]
    scores = Struct()
    for one in (profiles or explanation.profiles)[-1].endpoints:
        scores.fields[one.address].number_value = one.total
    of_namespace = Struct()
    of_namespace.fields[DESTINATION].string_value = ",".join(decision.assignment.addresses)
    of_namespace.fields[SCORES].struct_value.CopyFrom(scores)
    metadata = Struct()
    metadata.fields[LB_NAMESPACE].struct_value.CopyFrom(of_namespace)
    return encode_field(_METADATA_TAG, metadata.SerializeToString())


def trace_metadata(trace: Trace | None) -> bytes:
    """What is appended to an answer: what the gateway's own spans say of a sampled request; nothing of others."""
    if trace is None:
        return b""
    of_namespace = Struct()
    for name, value in trace.tags.items():
        if isinstance(value, str):
            of_namespace.fields[name].string_value = value
        else:
            of_namespace.fields[name].number_value = value
    metadata = Struct()
    metadata.fields[TRACE_NAMESPACE].struct_value.CopyFrom(of_namespace)
    return encode_field(_METADATA_TAG, metadata.SerializeToString())


def duplex_decision_answer(decision: Decision, *, scores: bool = False) -> bytes:
    """Answer headers whose body follows in pieces: endpoints as header and metadata; headers that a client forged
    removed. ``scores``: of all endpoints, too.
    """
    destination = ",".join(decision.assignment.addresses).encode()
    forged = _REMOVE_FORGED[bool(decision.sidecar_prefill_address)]
    headers = b"".join((*_routing_headers(decision, destination), forged))
    headers += _leg_headers(decision)
    answer = encode_field(
        _REQUEST_HEADERS_TAG, encode_field(_HEADERS_RESPONSE_TAG, encode_field(_HEADER_MUTATION_TAG, headers))
    )
    more = scores_metadata(decision) if scores else b""
    return answer + _metadata(decision, destination) + more


def response_headers_answer(headers: Mapping[str, str]) -> bytes:
    """Let the answer's headers pass, with ``headers`` written into them."""
    if not headers:
        return CONTINUE_RESPONSE_HEADERS
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
        for name, value in headers.items()
    ]
    common = CommonResponse(header_mutation=HeaderMutation(set_headers=options))
    return ProcessingResponse(response_headers=HeadersResponse(response=common)).SerializeToString()


def passing_answers(message: ProcessingRequest, kind: str, mode: BodyMode) -> list[bytes]:
    """Let a part of an answer pass unchanged. ``mode``: how the answer's body comes, and so must go on."""
    if kind == "response_body" and mode is BodyMode.FULL_DUPLEX_STREAMED:
        # the gateway has kept no copy
        body = message.response_body
        return response_body_answers(body.body, is_end=body.end_of_stream)
    return [_CONTINUE[kind]]


def request_body_answers(body: bytes, *, is_end: bool) -> list[bytes]:
    """A request's body in pieces that the gateway takes. ``is_end``: no trailers follow."""
    return [b"".join(_REQUEST_PIECE[is_end and is_last].fill(piece)) for piece, is_last in _pieces(body)]


def response_body_answers(body: bytes, *, is_end: bool) -> list[bytes]:
    """One message's part of an answer, passed on unchanged in pieces that the gateway takes. ``is_end``: it is the
    last.
    """
    return [b"".join(RESPONSE_PIECE[is_end and is_last].fill(piece)) for piece, is_last in _pieces(body)]


def _pieces(body: bytes) -> list[tuple[bytes, bool]]:
    """At least one piece, each with whether it is the last."""
    if len(body) <= MOST_BODY_BYTES:
        return [(body, True)]
    starts = range(0, len(body), MOST_BODY_BYTES)
    return [(body[start : start + MOST_BODY_BYTES], start + MOST_BODY_BYTES >= len(body)) for start in starts]


def _routing_headers(decision: Decision, destination: bytes) -> list[bytes]:
    """Of a HeaderMutation: where the request goes, in parts."""
    headers = [*_DESTINATION.fill(destination)]
    if decision.sidecar_prefill_address:
        headers += _PREFILLER.fill(decision.sidecar_prefill_address.encode())
    if decision.body is not None:
        # Envoy refuses a changed body whose length is not the header's
        headers += _CONTENT_LENGTH.fill(str(len(decision.body)).encode())
    return headers


def _metadata(decision: Decision, destination: bytes) -> bytes:
    """Of a ProcessingResponse: where the request goes, its ticket, the answer's model, what its limits granted, and its
    session's token.
    """
    sessions = decision.assignment.sessions
    has_members = sessions or decision.grants or decision.usage or decision.response_model
    if not (has_members or decision.mirror or decision.cache_bytes):
        own = b"".join(_TICKET_METADATA[decision.adds_usage].fill(decision.ticket.encode()))
        return encode_field(_METADATA_TAG, b"".join((*_DESTINATION_METADATA.fill(destination), own)))
    members = [*_member(TICKET).fill(decision.ticket.encode()), _HIDES_MEMBER[decision.adds_usage]]
    if decision.response_model:
        members += _member(RESPONSE_MODEL).fill(decision.response_model.encode())
    if decision.mirror:
        members += _member(MIRROR).fill(decision.mirror.encode())
    if decision.cache_bytes:
        # another model may answer in the place of the one that was asked
        only = () if decision.attempts is None else decision.assignment.addresses
        members += _member(CACHE).fill(" ".join((str(decision.cache_bytes), *only)).encode())
    # the bundle's routes write them into the answer's headers
    for name, text in headers_of_grants(decision.grants).items() if decision.grants else ():
        members += _member(name).fill(text.encode())
    for note in sessions:
        members += _member(note.header).fill(note.token().encode()) if note.header else ()
    if decision.usage is not None:
        members += _member(USAGE_CONTEXT).fill(_encode_usage(decision.usage))
    return encode_field(_METADATA_TAG, b"".join((*_DESTINATION_METADATA.fill(destination), _own_metadata(members))))


@lru_cache(maxsize=256)
def _member(name: str) -> MessageTemplate:
    """Of a Struct: a field with a text. A message put together takes three times as long."""
    return MessageTemplate(Struct(fields={name: Value(string_value=MARK)}))


def _own_metadata(members: Iterable[bytes]) -> bytes:
    """Of a Struct of namespaces: ours, with these members."""
    return encode_field(
        _FIELDS_TAG, _OWN_KEY + encode_field(_ENTRY_VALUE_TAG, encode_field(_STRUCT_TAG, b"".join(members)))
    )


def longer_wait_answer(longest_s: float) -> bytes:
    """Extend the gateway's time limit for the answer to its last message, at most to Envoy's maximum."""
    answer = ProcessingResponse()
    answer.override_message_timeout.seconds = min(math.ceil(longest_s), LONGEST_MESSAGE_TIMEOUT_S)
    return answer.SerializeToString()


def refusal_answer(refusal: Refusal, form: ErrorForm = ErrorForm.OPENAI, usage: UsageContext | None = None) -> bytes:
    """Answer the client with an error object that it can read; no engine is asked. ``usage``: for the usage log."""
    headers = dict(refusal.headers)
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.dropped_reason is not None:
        headers[DROPPED_REASON] = refusal.dropped_reason
    status_of_call = None
    if isinstance(refusal, StoredAnswer):
        status, body = refusal.status, refusal.body
    elif form is ErrorForm.GRPC:
        # Envoy answers calls with trailers alone, and writes the body as grpc-message
        status, body, status_of_call = refusal.status, refusal.message.encode(), grpc_status(refusal)
    elif form is ErrorForm.ANTHROPIC:
        status, body = anthropic_status(refusal), to_anthropic_body(refusal)
    else:
        to_body = to_plain_error_body if form is ErrorForm.TEXT else to_openai_body
        status, body = refusal.status, to_body(refusal)
    answer = immediate_answer(
        status, body, headers, details=DETAILS_PREFIX + refusal.outcome, status_of_call=status_of_call
    )
    if usage is None:
        return answer
    return answer + encode_field(_METADATA_TAG, _own_metadata(_member(USAGE_CONTEXT).fill(_encode_usage(usage))))


def immediate_answer(
    status: int, body: bytes, headers: dict[str, str], *, details: str, status_of_call: int | None = None
) -> bytes:
    """Answer the client with ``body``; ``details``: its response code details in Envoy's log. ``status_of_call``: of
    gRPC, in whose form the answer is.
    """
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = details
    if status_of_call is not None:
        immediate.grpc_status.status = status_of_call
    kind = "application/json" if status_of_call is None else "text/plain"
    for name, value in {"content-type": kind, **headers}.items():
        header = immediate.headers.set_headers.add().header
        header.key, header.raw_value = name, value.encode()
    return answer.SerializeToString()


def reroute_to_extproc_answer(path: str) -> bytes:
    """Answer a whole body: extproc itself is to answer the call, which is for ``path`` then."""
    headers = encode_field(_HEADER_MUTATION_TAG, _TO_EXTPROC + b"".join(_PATH.fill(path.encode())))
    return encode_field(_REQUEST_BODY_TAG, encode_field(_RESPONSE_TAG, _CLEAR_ROUTE_CACHE + headers))


class _Model(msgspec.Struct):
    id: str
    created: int
    parent: str | None
    object: str = "model"
    owned_by: str = "attache"
    saturation: float | msgspec.UnsetType = msgspec.UNSET


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


class _AnthropicModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    type: str = "model"


class _AnthropicModels(msgspec.Struct):
    data: list[_AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def models_answer(models: Iterable[ListedModel], created: int, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    """OpenAI's list of models, in vLLM's form (``parent``: an adapter's base model), or Anthropic's. ``created``: Unix
    time in seconds.
    """
    if form is ErrorForm.ANTHROPIC:
        found = [_anthropic(model, created) for model in models]
        listed = _AnthropicModels(found, found[0].id if found else None, found[-1].id if found else None)
        return json_answer(listed, "models")
    return json_answer(_Models([_openai(model, created) for model in models]), "models")


def model_answer(
    model: ListedModel, created: int, form: ErrorForm = ErrorForm.OPENAI, load: float | None = None
) -> bytes:
    """One model of the list. ``load``: how full its engines are, if the caller may know; only in OpenAI's form."""
    if form is ErrorForm.ANTHROPIC:
        return json_answer(_anthropic(model, created), "model")
    found = _openai(model, created)
    # rounded down: 1 is full
    found.saturation = msgspec.UNSET if load is None else math.floor(load * _LOAD_STEPS) / _LOAD_STEPS
    return json_answer(found, "model")


def _openai(model: ListedModel, created: int) -> _Model:
    return _Model(model.name, created, model.parent)


def _anthropic(model: ListedModel, created: int) -> _AnthropicModel:
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _AnthropicModel(model.name, model.name, created_at)


def json_answer(body: object, what: str) -> bytes:
    """Answer the client with ``body`` in JSON. ``what``: for Envoy's log."""
    return immediate_answer(200, msgspec.json.encode(body), {}, details=DETAILS_PREFIX + what)
