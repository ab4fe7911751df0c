# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker protocol, message by message."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.metrics.request_metrics import Metrics
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.message_order import IllegalMessage
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from extproc.streams.processing_responses import MOST_BODY_BYTES
from tests.extproc.conftest import CONFIG, shell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.request_record import Outcome

CHAT = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()
ALL = {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}


class Gateway:
    """A gateway's side of one stream; time stands still unless it is moved."""

    def __init__(self, core: Core, **options: object) -> None:
        self.now = 100.0
        self.core = core
        self.metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)
        self.exchange = Exchange(
            shell(core, self.metrics, lambda: self.now, **options), DuplexExchange, is_trusted=lambda: False
        )
        self._is_first = True

    def send(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._is_first:
            message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = 4
            self._is_first = False
        return [ProcessingResponse.FromString(answer) for answer in self.exchange.receive(message)]

    def headers(
        self,
        path: str = "/v1/chat/completions",
        *,
        method: str = "POST",
        end: bool = False,
        subset: object = None,
        **more: str,
    ) -> list[ProcessingResponse]:
        message = ProcessingRequest()
        message.request_headers.end_of_stream = end
        for key, value in ((":method", method), (":path", path), *((k.replace("_", "-"), v) for k, v in more.items())):
            message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        if subset is not None:
            fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
            value = fields["x-gateway-destination-endpoint-subset"]
            if isinstance(subset, str):
                value.string_value = subset
            else:
                value.list_value.SetInParent()
                for one in subset:  # type: ignore[attr-defined]
                    value.list_value.values.add(string_value=one)
        return self.send(message)

    def body(self, *pieces: bytes, end: bool = True) -> list[ProcessingResponse]:
        answers: list[ProcessingResponse] = []
        for number, piece in enumerate(pieces, 1):
            message = ProcessingRequest()
            message.request_body.body = piece
            message.request_body.end_of_stream = end and number == len(pieces)
            answers += self.send(message)
        return answers

    def answer(
        self, status: int, *pieces: bytes, served: str = "", trailers: bool = False, encoding: str = ""
    ) -> list[ProcessingResponse]:
        message = ProcessingRequest()
        message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
        message.response_headers.headers.headers.add(key="content-encoding", raw_value=encoding.encode())
        message.response_headers.end_of_stream = not pieces and not trailers
        if served:
            fields = message.metadata_context.filter_metadata["envoy.lb"].fields
            fields["x-gateway-destination-endpoint-served"].string_value = served
        answers = self.send(message)
        for number, piece in enumerate(pieces, 1):
            message = ProcessingRequest()
            message.response_body.body = piece
            message.response_body.end_of_stream = number == len(pieces) and not trailers
            answers += self.send(message)
        if trailers:
            message = ProcessingRequest()
            message.response_trailers.SetInParent()
            answers += self.send(message)
        return answers


def pick_of(answer: ProcessingResponse) -> list[str]:
    """The picked addresses: in the header and in the metadata, and equal."""
    options = answer.request_headers.response.header_mutation.set_headers
    headers = {option.header.key: option.header.raw_value.decode() for option in options}
    metadata = (
        answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
    )
    assert headers["x-gateway-destination-endpoint"] == metadata
    return metadata.split(",")


def sent_on(answers: Iterable[ProcessingResponse]) -> tuple[bytes, list[bool]]:
    """The body that goes to the engine, and which pieces end it."""
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    assert all(len(piece.body) <= MOST_BODY_BYTES for piece in pieces)
    return b"".join(piece.body for piece in pieces), [piece.end_of_stream for piece in pieces]


def test_the_end_of_the_body_brings_the_pick_and_then_the_body(core: Core) -> None:
    gateway = Gateway(core)
    assert gateway.headers() == []
    assert gateway.body(CHAT[:10], CHAT[10:20], end=False) == []
    head, *rest = gateway.body(CHAT[20:])
    (address,) = pick_of(head)
    assert address in ALL
    body, ends = sent_on(rest)
    assert json.loads(body)["model"] == "llama-3.1-8b"
    assert ends == [True]


def test_long_bodies_go_on_in_pieces_that_envoy_takes(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    long = json.dumps({"model": "sql", "messages": [{"role": "user", "content": "z" * 200_000}]}).encode()
    _, *rest = gateway.body(*(long[start : start + 7777] for start in range(0, len(long), 7777)))
    body, ends = sent_on(rest)
    assert body == long, "unchanged where nothing has to change"
    assert ends == [False, False, False, True]


def test_what_a_client_forged_is_removed(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers(x_prefiller_host_port="10.9.9.9:22", x_gateway_destination_endpoint="10.9.9.9:22")
    mutation = gateway.body(CHAT)[0].request_headers.response.header_mutation
    assert "x-prefiller-host-port" in mutation.remove_headers
    assert "x-gateway-destination-endpoint-subset" in mutation.remove_headers
    # overwritten, so not removed
    assert "x-gateway-destination-endpoint" not in mutation.remove_headers


def test_as_many_fallbacks_as_the_attachment_takes(core: Core) -> None:
    gateway = Gateway(core, duplex_choices=3)
    gateway.headers()
    assert set(pick_of(gateway.body(CHAT)[0])) == ALL


@pytest.mark.parametrize(
    "subset",
    [["10.0.0.2:8000"], "10.0.0.2:8000", " 10.0.0.2:8000 , 10.7.7.7:1", ["10.0.0.2"]],
)
def test_only_the_subset_is_picked_from(core: Core, subset: object) -> None:
    gateway = Gateway(core, duplex_choices=4)
    gateway.headers(subset=subset)
    assert pick_of(gateway.body(CHAT)[0]) == ["10.0.0.2:8000"]


@pytest.mark.parametrize("subset", [[], "", ["10.7.7.7:8000"], "10.0.0.2:8001"])
def test_a_subset_of_nobody_is_a_503(core: Core, subset: object) -> None:
    gateway = Gateway(core)
    gateway.headers(subset=subset)
    (answer,) = gateway.body(CHAT)
    assert answer.immediate_response.status.code == 503
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "no_endpoint"


def test_the_subset_may_come_with_the_body(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = CHAT, True
    fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    fields["x-gateway-destination-endpoint-subset"].string_value = "10.0.0.3:8000"
    assert pick_of(gateway.send(message)[0]) == ["10.0.0.3:8000"]


def test_trailers_end_a_body_too(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT, end=False)
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    answers = gateway.send(message)
    assert [answer.WhichOneof("response") for answer in answers] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert sent_on(answers[1:2])[1] == [False]


def test_answers_pass_unchanged_and_teach(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    (address,) = pick_of(
        gateway.body(CHAT.replace(b"{", b'{"stream": true, "stream_options": {"include_usage": true}, ', 1))[0]
    )
    table = core.pools["default/llama"].table
    row = table.row_of(address)
    assert row is not None
    assert table.in_flight[row] == 1
    gateway.now += 0.25
    stream = [
        b'data: {"choices": []}\n\nda',
        b'ta: {"choices": [], "usage": {"prompt_tokens": 40, "compl',
        b'etion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}}\n\n',
        b"data: [DONE]\n\n",
    ]
    answers = gateway.answer(200, *stream, served=address)
    assert [answer.WhichOneof("response") for answer in answers] == ["response_headers"] + ["response_body"] * 4
    streamed = [answer.response_body.response.body_mutation.streamed_response for answer in answers[1:]]
    assert [piece.body for piece in streamed] == stream
    assert [piece.end_of_stream for piece in streamed] == [False, False, False, True]
    assert (table.in_flight[row], table.prompt_tokens[row], table.cached_tokens[row]) == (0, 40, 16)
    assert table.ttft_s[row] == 0.25
    gateway.exchange.on_stream_closed()
    assert table.in_flight.sum() == 0


@pytest.mark.parametrize(("encoding", "failures"), [("", 1), ("identity", 1), ("gzip", 0)])
def test_an_answer_without_usage_is_no_failure_if_it_is_encoded(core: Core, encoding: str, failures: int) -> None:
    core.pools["default/llama"].reports_usage = True
    gateway = Gateway(core)
    gateway.headers()
    (address,) = pick_of(gateway.body(CHAT)[0])
    gateway.answer(200, b"\x1f\x8b", served=address, encoding=encoding)
    table = core.pools["default/llama"].table
    row = table.row_of(address)
    assert row is not None
    assert table.healths[row].failed == failures


def test_large_pieces_of_answers_are_cut_to_what_envoy_takes(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    answers = gateway.answer(200, b"z" * 150_000, trailers=True)
    streamed = [answer.response_body.response.body_mutation.streamed_response for answer in answers[1:-1]]
    assert [len(piece.body) for piece in streamed] == [62_000, 62_000, 26_000]
    assert not any(piece.end_of_stream for piece in streamed)
    assert answers[-1].WhichOneof("response") == "response_trailers"


def test_another_endpoint_that_served_is_noticed(core: Core) -> None:
    gateway = Gateway(core, duplex_choices=3)
    gateway.headers()
    first, second, _ = pick_of(gateway.body(CHAT)[0])
    gateway.answer(200, b"{}", served=second)
    table = core.pools["default/llama"].table
    assert table.trips[table.row_of(first)] == 1
    assert table.trips[table.row_of(second)] == 0


def test_a_client_that_leaves_teaches_nothing_and_frees_its_engine(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    gateway.exchange.on_stream_closed()
    table = core.pools["default/llama"].table
    assert table.in_flight.sum() == 0
    assert not table.has_failures


def test_a_pool_takes_what_no_route_knows() -> None:
    config = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: pool}
spec: {model: base, endpoints: [{address: "10.0.0.1:8000"}]}
"""
    core = Core(load_snapshot({"a.yaml": config}), rng=random.Random(0), ticket_prefix="t")
    for method, path, body in [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", b"not json"),
        ("POST", "/v1/audio/speech", b"\x00\x01"),
        ("POST", "/", b""),
        ("GET", "/anything", None),
    ]:
        gateway = Gateway(core, pool="default/pool")
        head, *rest = (
            gateway.headers(path, method=method, end=True)
            if body is None
            else (gateway.headers(path, method=method) + gateway.body(body))
        )
        assert pick_of(head) == ["10.0.0.1:8000"]
        assert sent_on(rest)[0] == (body or b"")
    core.apply(load_snapshot({"a.yaml": config.replace(b"name: pool", b"name: other")}), 0.0)
    gateway = Gateway(core, pool="default/pool")
    (answer,) = gateway.headers("/anything", method="GET", end=True)
    assert answer.immediate_response.status.code == 503


def test_a_body_that_cannot_be_read_gets_round_no_limit() -> None:
    limited = CONFIG.replace(b"modelName: chat", b"modelName: chat\n  rateLimits: [{requests: 1}]")
    core = Core(load_snapshot({"a.yaml": limited}), rng=random.Random(0), ticket_prefix="t")
    for body in (b"not json", CHAT.replace(b'"chat"', b'"chat", "max_tokens": -5')):
        gateway = Gateway(core, pool="default/llama")
        (answer,) = gateway.headers() + gateway.body(body)
        assert answer.immediate_response.status.code == 400


def test_without_a_pool_the_routes_decide(core: Core) -> None:
    gateway = Gateway(core)
    gateway.headers()
    (answer,) = gateway.body(CHAT.replace(b'"chat"', b'"other"'))
    assert answer.immediate_response.status.code == 404
    (models,) = Gateway(core).headers("/v1/models", method="GET", end=True)
    assert models.immediate_response.status.code == 200


def test_conformance_tests_choose_by_header_where_that_is_allowed(core: Core) -> None:
    gateway = Gateway(core, conformance=True)
    gateway.headers(test_epp_endpoint_selection="10.0.0.3")
    assert pick_of(gateway.body(CHAT)[0]) == ["10.0.0.3:8000"]
    gateway.exchange.on_stream_closed()
    picks = set()
    for _ in range(40):
        gateway = Gateway(core)
        gateway.headers(test_epp_endpoint_selection="10.0.0.3")
        picks.add(pick_of(gateway.body(CHAT)[0])[0])
        gateway.exchange.on_stream_closed()
    assert picks == ALL


def test_messages_out_of_order_are_named_as_the_mistake(core: Core) -> None:
    with pytest.raises(IllegalMessage, match="request_body is not legal"):
        Gateway(core).body(CHAT)
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    with pytest.raises(IllegalMessage, match="request_body is not legal while the stream is in state request END"):
        gateway.body(CHAT)


@pytest.mark.parametrize("is_whole", [True, False])
def test_only_an_answer_that_ended_without_usage_counts_against_its_engine(core: Core, *, is_whole: bool) -> None:
    pool = core.pools["default/llama"]
    pool.reports_usage = True
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    gateway.send(message)
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = b"<html>", is_whole
    gateway.send(message)
    gateway.exchange.on_stream_closed()
    assert sum(health.failed for health in pool.table.healths) == (1 if is_whole else 0)


@pytest.mark.parametrize(("status", "has_timed_out"), [(504, True), (503, False)])
def test_a_gateways_own_time_limit_is_known_by_its_status(
    core: Core, monkeypatch: pytest.MonkeyPatch, status: int, *, has_timed_out: bool
) -> None:
    outcomes: list[Outcome] = []
    settle = core.on_outcome
    monkeypatch.setattr(core, "on_outcome", lambda told, now: (outcomes.append(told), settle(told, now))[1])
    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    gateway.answer(status, b"upstream request timeout")
    gateway.exchange.on_stream_closed()
    assert [outcome.has_timed_out for outcome in outcomes] == [has_timed_out]


def test_a_fault_at_the_end_of_an_answer_keeps_no_engine_busy(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    gateway = Gateway(core)
    gateway.headers()
    gateway.body(CHAT)
    monkeypatch.setattr(core, "on_outcome", broken)
    with pytest.raises(RuntimeError):
        gateway.answer(200, b"{}")
    assert core.pools["default/llama"].table.in_flight.sum() == 0


REWRITES = CONFIG.replace(b"modelName: chat", b"modelName: routed")


@pytest.mark.parametrize("header", ["x_llm_d_model_name_rewrite", "x_gateway_model_name_rewrite"])
def test_a_trusted_gateway_names_the_engines_model(header: str) -> None:
    core = Core(load_snapshot({"a.yaml": REWRITES}), rng=random.Random(0), ticket_prefix="t")

    def asked(model: str, *, trusts: bool) -> str:
        gateway = Gateway(core, pool="default/llama", trusts_headers=trusts)
        gateway.headers(**{header: "llama-canary"})
        _, *rest = gateway.body(CHAT.replace(b'"chat"', json.dumps(model).encode()))
        sent: str = json.loads(sent_on(rest)[0])["model"]
        return sent

    assert asked("chat", trusts=True) == "llama-canary"
    assert asked("chat", trusts=False) == "chat", "a client's word"
    # a rule overrides it
    assert asked("routed", trusts=True) == "llama-3.1-8b"


def test_what_a_trusted_gateway_leaves_out_changes_nothing() -> None:
    core = Core(load_snapshot({"a.yaml": REWRITES}), rng=random.Random(0), ticket_prefix="t")
    gateway = Gateway(core, pool="default/llama", trusts_headers=True)
    gateway.headers(x_llm_d_model_name_rewrite="")
    _, *rest = gateway.body(CHAT)
    assert sent_on(rest)[0] == CHAT
