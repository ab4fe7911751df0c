# SPDX-License-Identifier: Apache-2.0
"""Answers that are written directly are those that protobuf's own classes would write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.rate_limits import Charge, Grant
from extproc.admission.token_buckets import Limit, Reservation
from extproc.core.effects import Decision
from extproc.endpoints.table import EndpointRef
from extproc.refusals import (
    BadRequest,
    EngineStarting,
    InternalError,
    NoEndpoint,
    QueueFull,
    QueueTimeout,
    Refusal,
    Shed,
    UnknownModel,
)
from extproc.scheduling.pool import Assignment
from extproc.streams.messages import CommonResponse, ProcessingResponse
from extproc.streams.processing_responses import (
    MOST_BODY_BYTES,
    decision_answer,
    duplex_decision_answer,
    refusal_answer,
    request_body_answers,
    response_body_answers,
)

FORGEABLE = [
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    "x-data-parallel-rank",
    "x-session-token",
    "x-prefiller-url",
    "x-kv-transfer-params",
    *(f"x-override-{name}" for name in ("rid", "bootstrap-host", "bootstrap-port", "bootstrap-room")),
    *(f"x-override-{name}" for name in ("conversation-id", "routed-dp-rank", "disagg-prefill-dp-rank", "priority")),
    "x-gateway-destination-endpoint-subset",
    "x-attache-server",
    "accept-encoding",
]
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
addresses = st.lists(words, min_size=1, max_size=6).map(tuple)
bodies = st.none() | st.binary(max_size=20) | st.sampled_from([1, 127, 128, 16_384, 300_000]).map(bytes)


def decided(
    *,
    ticket: str = "t-1",
    server: str = "llama",
    addresses: tuple[str, ...] = ("10.0.0.1:8000", "10.0.0.2:8000"),
    prefill: str | None = None,
    body: bytes | None = None,
    grants: tuple[Grant, ...] = (),
    policy: str = "",
    response_model: str = "",
) -> Decision:
    assignment = Assignment(
        endpoint=EndpointRef(addresses[0], 0, 0),
        addresses=addresses,
        input_tokens=1.0,
        cached_tokens=0.0,
        indexed_tokens=0.0,
        last_used_at_s=None,
        tokens_ahead=0.0,
        cost_s=0.0,
        prefill=None if prefill is None else EndpointRef(prefill, 1, 0),
    )
    return Decision(
        ticket, server, "acme", assignment, body, grants=grants, policy=policy, response_model=response_model
    )


def set_header(common: CommonResponse, name: str, value: str) -> None:
    option = common.header_mutation.set_headers.add(append_action=2)
    option.header.key, option.header.raw_value = name, value.encode()


def expected(decision: Decision, *, is_duplex: bool) -> ProcessingResponse:
    """The answer, built from message objects."""
    answer = ProcessingResponse()
    common = answer.request_headers.response if is_duplex else answer.request_body.response
    destination = ",".join(decision.assignment.addresses)
    if not is_duplex:
        common.clear_route_cache = True
        set_header(common, "x-attache-server", f"server/{decision.server}")
    set_header(common, "x-gateway-destination-endpoint", destination)
    prefill = decision.assignment.prefill
    if prefill is not None:
        set_header(common, "x-prefiller-host-port", prefill.address)
    if decision.body is not None:
        set_header(common, "content-length", str(len(decision.body)))
        if not is_duplex:
            common.body_mutation.body = decision.body
    if decision.policy and not is_duplex:
        set_header(common, "x-attache-policy", decision.policy)
    if is_duplex:
        common.header_mutation.remove_headers.extend(FORGEABLE if prefill is None else FORGEABLE[1:])
    metadata = answer.dynamic_metadata.fields
    metadata["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value = destination
    metadata["attache"].struct_value.fields["ticket"].string_value = decision.ticket
    return answer


def check(answer: bytes, message: ProcessingResponse) -> None:
    """Equal as a message, and every field is written once: readers need not merge."""
    assert ProcessingResponse.FromString(answer) == message
    assert len(answer) == message.ByteSize()


@given(
    ticket=words,
    server=words,
    addresses=addresses,
    prefill=st.none() | words,
    body=bodies,
    policy=st.just("") | words,
)
def test_decisions_are_written_as_protobuf_writes_them(
    ticket: str, server: str, addresses: tuple[str, ...], prefill: str | None, body: bytes | None, policy: str
) -> None:
    decision = decided(ticket=ticket, server=server, addresses=addresses, prefill=prefill, body=body, policy=policy)

    check(decision_answer(decision), expected(decision, is_duplex=False))
    check(duplex_decision_answer(decision), expected(decision, is_duplex=True))


def test_what_limits_granted_stands_beside_the_ticket() -> None:
    ask = Charge("key", Limit(rate=1.0, capacity=10.0), "requests", 1.0)
    decision = decided(grants=(Grant([ask], [Reservation(1.0, 1.0, 0)], [9.0]),))
    message = expected(decision, is_duplex=False)
    own = message.dynamic_metadata.fields["attache"].struct_value.fields
    own["x-ratelimit-limit-requests"].string_value = "10"
    own["x-ratelimit-remaining-requests"].string_value = "9"
    own["x-ratelimit-reset-requests"].string_value = "1s"

    check(decision_answer(decision), message)


def test_the_name_that_was_asked_for_stands_beside_the_ticket() -> None:
    name = '"a \\" é"'
    message = expected(decided(), is_duplex=False)
    message.dynamic_metadata.fields["attache"].struct_value.fields["response_model"].string_value = name

    check(decision_answer(decided(response_model=name)), message)


@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize("size", [0, 1, MOST_BODY_BYTES, MOST_BODY_BYTES + 1, 3 * MOST_BODY_BYTES])
def test_bodies_pass_in_pieces_whose_last_says_so(size: int, is_end: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    asked = [ProcessingResponse.FromString(one).request_body for one in request_body_answers(body, is_end=is_end)]
    answered = [ProcessingResponse.FromString(one).response_body for one in response_body_answers(body, is_end=is_end)]

    for pieces in (asked, answered):
        streamed = [one.response.body_mutation.streamed_response for one in pieces]
        assert b"".join(one.body for one in streamed) == body
        assert all(len(one.body) <= MOST_BODY_BYTES for one in streamed)
        assert [one.end_of_stream for one in streamed] == [False] * (len(streamed) - 1) + [is_end]


LLM_DS_WORDS = {
    QueueFull: "rejected-saturated",
    Shed: "rejected-saturated",
    QueueTimeout: "rejected-ttl-expired",
    NoEndpoint: "rejected-no-endpoints",
    EngineStarting: "rejected-no-endpoints",
    BadRequest: None,
    UnknownModel: None,
}


@pytest.mark.parametrize("kind", LLM_DS_WORDS)
def test_a_refusal_says_in_llm_ds_words_why_the_request_was_dropped(kind: type[Refusal]) -> None:
    answer = ProcessingResponse.FromString(refusal_answer(kind("x")))
    headers = {one.header.key: one.header.raw_value.decode() for one in answer.immediate_response.headers.set_headers}
    assert headers.get("x-llm-d-request-dropped-reason") == LLM_DS_WORDS[kind]


def test_a_failure_of_ours_is_an_internal_reason() -> None:
    answer = ProcessingResponse.FromString(refusal_answer(InternalError()))
    headers = {one.header.key: one.header.raw_value.decode() for one in answer.immediate_response.headers.set_headers}
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-internal"
