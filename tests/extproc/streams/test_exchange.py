# SPDX-License-Identifier: Apache-2.0
"""One request's messages, without a network."""

from __future__ import annotations

import json
import random

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld, RequestRefused
from extproc.core.request_states import RequestState
from extproc.metrics.request_metrics import Metrics
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.message_order import BodyMode, IllegalMessage
from extproc.streams.messages import ImmediateResponse, ProcessingRequest, ProcessingResponse
from tests.extproc.conftest import CONFIG, in_some_state, shell

CHAT = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()


class Conversation:
    """Envoy's side of one stream."""

    def __init__(self, core: Core, *, is_trusted: bool = False) -> None:
        self.metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
        self.exchange = Exchange(shell(core, self.metrics), DuplexExchange, is_trusted=lambda: is_trusted)

    def send_headers(
        self, path: str = "/v1/chat/completions", *, method: str = "POST", end: bool = False
    ) -> ProcessingResponse:
        message = ProcessingRequest()
        message.request_headers.end_of_stream = end
        for key, value in ((":method", method), (":path", path), ("x-odd", "caf\u00e9")):
            header = message.request_headers.headers.headers.add()
            header.key, header.raw_value = key, value.encode()
        (answer,) = self.exchange.receive(message)
        return ProcessingResponse.FromString(answer)

    def send_body(self, body: bytes, *, end: bool = True) -> ProcessingResponse:
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = body, end
        (answer,) = self.exchange.receive(message)
        return ProcessingResponse.FromString(answer)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def conversation(core: Core) -> Conversation:
    return Conversation(core)


def test_headers_pass_and_the_body_brings_the_decision(conversation: Conversation, core: Core) -> None:
    assert conversation.send_headers("/v1/chat/completions?x=1").WhichOneof("response") == "request_headers"
    answer = conversation.send_body(CHAT)

    common = answer.request_body.response
    assert common.clear_route_cache
    headers = {option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers}
    metadata = {name: value.struct_value.fields for name, value in answer.dynamic_metadata.fields.items()}
    destination = metadata["envoy.lb"]["x-gateway-destination-endpoint"].string_value
    length = str(len(common.body_mutation.body))
    assert headers == {
        "x-attache-server": "server/default/llama",
        "x-gateway-destination-endpoint": destination,
        "content-length": length,
    }
    assert len(destination.split(",")) == 3
    assert metadata["attache"]["ticket"].string_value == "t-1"
    assert json.loads(common.body_mutation.body)["model"] == "llama-3.1-8b"
    conversation.exchange.on_stream_closed()
    assert core.pools["default/llama"].table.in_flight.sum() == 0
    assert conversation.sample("attache_requests_total", outcome="picked") == 1


def test_a_body_that_need_not_change_is_not_sent_back(conversation: Conversation) -> None:
    conversation.send_headers()

    answer = conversation.send_body(CHAT.replace(b'"chat"', b'"sql"'))
    assert not answer.request_body.response.HasField("body_mutation")


def refusal_of(answer: ProcessingResponse) -> tuple[int, dict[str, object]]:
    immediate: ImmediateResponse = answer.immediate_response
    headers = {o.header.key: o.header.raw_value for o in immediate.headers.set_headers}
    # only some are told llm-d's reason
    assert headers.pop("x-llm-d-request-dropped-reason", b"rejected-internal") == b"rejected-internal"
    assert headers == {"content-type": b"application/json"}
    return immediate.status.code, json.loads(immediate.body)["error"]


def test_a_refusal_is_an_openai_error_object(conversation: Conversation) -> None:
    conversation.send_headers()
    status, error = refusal_of(conversation.send_body(CHAT.replace(b'"chat"', b'"gpt-9"')))

    assert status == 404
    assert error == {
        "message": "The model 'gpt-9' does not exist; GET /v1/models lists those that do.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert conversation.sample("attache_requests_total", outcome="unknown_model") == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/embeddings", 400),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_requests_without_a_body_are_refused_at_their_headers(
    conversation: Conversation, method: str, path: str, status: int
) -> None:
    assert refusal_of(conversation.send_headers(path, method=method, end=True))[0] == status


def test_models_are_listed_and_shown(conversation: Conversation, core: Core) -> None:
    listed = conversation.send_headers("/v1/models", method="GET", end=True).immediate_response
    shown = Conversation(core).send_headers("/v1/models/sql", method="GET", end=True).immediate_response

    assert listed.status.code == 200
    assert [model["id"] for model in json.loads(listed.body)["data"]] == ["chat", "sql"]
    assert json.loads(shown.body) == {
        "id": "sql",
        "created": 77,
        "parent": "chat",
        "object": "model",
        "owned_by": "attache",
    }


def test_a_body_without_headers_is_named_as_the_mistake(conversation: Conversation) -> None:
    with pytest.raises(IllegalMessage, match=r"request_body is not legal .* request NOTHING .*; set request_header"):
        conversation.send_body(CHAT)


def test_a_second_body_is_no_second_request(conversation: Conversation, core: Core) -> None:
    conversation.send_headers()
    conversation.send_body(CHAT)
    for again in (conversation.send_body, lambda _: conversation.send_headers()):
        with pytest.raises(IllegalMessage, match="in state request END"):
            again(CHAT)
    assert core.pools["default/llama"].table.in_flight.sum() == 1
    conversation.exchange.on_stream_closed()
    assert core.pools["default/llama"].table.in_flight.sum() == 0


def test_a_body_that_trailers_follow_is_whole(conversation: Conversation) -> None:
    conversation.send_headers()
    assert conversation.send_body(CHAT, end=False).WhichOneof("response") == "request_body"


def test_a_failure_of_ours_refuses_the_request(conversation: Conversation, core: Core) -> None:
    conversation.send_headers()
    message = ProcessingRequest()
    message.request_body.end_of_stream = True
    (answer,) = conversation.exchange.fail(message)
    status, error = refusal_of(ProcessingResponse.FromString(answer))
    assert (status, error["code"]) == (500, "internal_error")
    assert conversation.sample("attache_requests_total", outcome="internal_error") == 1
    conversation.exchange.on_stream_closed()
    assert in_some_state(core) == 0


def test_what_clients_send_adds_no_series(conversation: Conversation, core: Core) -> None:
    before = len(list(conversation.metrics.registry.collect()))
    for number in range(50):
        one = Conversation(core)
        one.exchange = Exchange(shell(core, conversation.metrics), DuplexExchange, is_trusted=lambda: False)
        one.send_headers()
        one.send_body(CHAT.replace(b'"chat"', f'"model-{number}"'.encode()))

    samples = [
        s
        for family in conversation.metrics.registry.collect()
        for s in family.samples
        if s.name == "attache_requests_total"
    ]
    assert len(list(conversation.metrics.registry.collect())) == before
    assert {sample.labels["outcome"] for sample in samples} == {"picked", "unknown_model"}


TENANTS = CONFIG.replace(
    b"  scrapeInterval: 0s", b"  scrapeInterval: 0s\n  flowControl: {saturation: {maxRequests: 1}}"
)


def says_it_is_acme(core: Core, *, is_trusted: bool, duplex: bool) -> str:
    """The tenant that a request counts for whose headers say so."""
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0, gates=lambda: core.admission.gates)
    exchange = Exchange(shell(core, metrics), DuplexExchange, is_trusted=lambda: is_trusted)
    message = ProcessingRequest()
    if duplex:
        message.protocol_config.request_body_mode = 4
    headers = {":method": "POST", ":path": "/v1/chat/completions", "x-attache-tenant": "acme"}
    for key, value in headers.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    exchange.receive(message)
    body = ProcessingRequest()
    body.request_body.body, body.request_body.end_of_stream = CHAT, True
    exchange.receive(body)
    exchange.on_stream_closed()
    (sample,) = (
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "attache_tenant_requests_total"
    )
    return sample.labels["tenant"]


@pytest.mark.parametrize("duplex", [False, True])
def test_who_asks_is_read_only_where_a_gateway_vouches_for_it(core: Core, *, duplex: bool) -> None:
    core.apply(load_snapshot({"all.yaml": TENANTS}), 0.0)
    assert says_it_is_acme(core, is_trusted=False, duplex=duplex) == "anonymous"
    assert says_it_is_acme(core, is_trusted=True, duplex=duplex) == "acme"


RESTRICTED = (
    CONFIG
    + b"""
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec: {clients: Trusted, tenants: [{name: acme, models: [sql]}]}
"""
)


@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize(("model", "status"), [(b"sql", None), (b"chat", 403), (b"none", 403)])
def test_a_tenant_gets_its_own_models_alone(core: Core, model: bytes, status: int | None, *, duplex: bool) -> None:
    core.apply(load_snapshot({"all.yaml": RESTRICTED}), 0.0)
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
    exchange = Exchange(shell(core, metrics), DuplexExchange, is_trusted=lambda: True)
    message = ProcessingRequest()
    if duplex:
        message.protocol_config.request_body_mode = 4
    for key, value in {":method": "POST", ":path": "/v1/chat/completions", "x-attache-tenant": "acme"}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    exchange.receive(message)
    body = ProcessingRequest()
    body.request_body.body, body.request_body.end_of_stream = CHAT.replace(b"chat", model, 1), True
    first = ProcessingResponse.FromString(exchange.receive(body)[0])
    exchange.on_stream_closed()
    answered = first.immediate_response.status.code if first.HasField("immediate_response") else None
    assert answered == status


ONE_ENGINE = b', {address: "10.0.0.2:8000"}, {address: "10.0.0.3:8000"}'


def held_behind_another(core: Core, *, is_trusted: bool = False) -> tuple[Conversation, Conversation]:
    """Two requests before one engine that takes one at a time: the second waits."""
    core.apply(load_snapshot({"all.yaml": TENANTS.replace(ONE_ENGINE, b"")}), 0.0)
    first, second = Conversation(core), Conversation(core, is_trusted=is_trusted)
    first.send_headers()
    first.send_body(CHAT)
    second.send_headers()
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = CHAT, True
    assert second.exchange.receive(message) == []
    assert isinstance(second.exchange.pending, RequestHeld)
    return first, second


def test_our_bundle_is_asked_to_wait_for_a_held_request_as_long_as_it_may_be_held(core: Core) -> None:
    first, second = held_behind_another(core, is_trusted=True)
    asked = second.exchange.wait_extension()
    assert asked is not None
    # 60s for engines with room, and messageTimeout
    assert ProcessingResponse.FromString(asked).override_message_timeout.seconds == 65
    assert first.exchange.wait_extension() is None
    for one in (first, second):
        one.exchange.on_stream_closed()
    # whoever we do not configure may not know the message
    assert held_behind_another(core)[1].exchange.wait_extension() is None


@pytest.mark.parametrize(("now", "answer"), [(10.0, "request_body"), (1000.0, "immediate_response")])
def test_a_held_request_is_answered_when_its_wait_ends(core: Core, now: float, answer: str) -> None:
    first, second = held_behind_another(core)
    if answer == "request_body":
        first.exchange.on_stream_closed()
    (end,) = [one for one in core.tick(now) if isinstance(one, Decision | RequestRefused)]
    (told,) = second.exchange.resume(end)
    assert ProcessingResponse.FromString(told).WhichOneof("response") == answer
    assert second.exchange.pending is None
    # an answer that comes once more has nobody to go to
    assert second.exchange.resume(end) == []
    first.exchange.on_stream_closed()
    second.exchange.on_stream_closed()
    assert core.pools["default/llama"].table.in_flight.sum() == 0


def test_an_answer_for_a_stream_that_has_asked_nothing_goes_nowhere(conversation: Conversation) -> None:
    assert conversation.exchange.resume(None) == []
    conversation.send_headers()
    assert conversation.exchange.resume(None) == []


@pytest.mark.parametrize(("model", "status"), [("chat", "request_body"), ("of-no-route", "request_body")])
def test_a_gateway_with_one_pool_gets_a_pick_for_models_of_no_route(core: Core, model: str, status: str) -> None:
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
    one = Conversation(core)
    # it sends whole bodies, and does not say so
    context = shell(core, metrics, pool="default/llama", whole_bodies=True)
    one.exchange = Exchange(context, DuplexExchange, is_trusted=lambda: False)
    one.send_headers()
    assert one.send_body(CHAT.replace(b'"chat"', f'"{model}"'.encode())).WhichOneof("response") == status
    assert core.pools["default/llama"].table.in_flight.sum() == 1
    one.exchange.on_stream_closed()
    assert core.pools["default/llama"].table.in_flight.sum() == 0


def test_a_client_that_leaves_while_its_request_is_held_leaves_nothing_behind(core: Core) -> None:
    core.apply(
        load_snapshot(
            {
                "all.yaml": TENANTS.replace(b"10.0.0.2:8000", b"10.0.0.1:8001").replace(
                    b', {address: "10.0.0.3:8000"}', b""
                )
            }
        ),
        0.0,
    )
    conversations = [Conversation(core) for _ in range(3)]
    for one in conversations:
        one.send_headers()
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = CHAT, True
        one.exchange.receive(message)
    held = conversations[2].exchange
    assert isinstance(held.pending, RequestHeld)
    held.on_stream_closed()
    assert not core.count_requests(RequestState.QUEUED)
    for one in conversations[:2]:
        one.exchange.on_stream_closed()
    assert core.pools["default/llama"].table.in_flight.sum() == 0


@pytest.mark.parametrize(("conformance", "choices"), [(True, ["10.0.0.3:8000"]), (False, None)])
def test_conformance_tests_choose_by_header_of_whole_requests_too(
    core: Core, *, conformance: bool, choices: list[str] | None
) -> None:
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
    exchange = Exchange(shell(core, metrics, conformance=conformance), DuplexExchange, is_trusted=lambda: False)
    message = ProcessingRequest()
    for key, value in (
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("test-epp-endpoint-selection", "10.0.0.3"),
    ):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    exchange.receive(message)
    body = ProcessingRequest()
    body.request_body.body, body.request_body.end_of_stream = CHAT, True
    (answer,) = exchange.receive(body)
    metadata = ProcessingResponse.FromString(answer).dynamic_metadata.fields["envoy.lb"].struct_value.fields
    named = metadata["x-gateway-destination-endpoint"].string_value.split(",")
    assert named == choices if choices else len(named) == 3


FOREST = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: forest}
spec:
  model: forest
  protocol: V2
  endpoints: [{address: "10.0.1.1:8000"}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: iris}
spec:
  modelName: iris
  rules: [{targetModels: [{modelServerName: forest}]}]
"""


def conversation_about_forests() -> Conversation:
    snapshot = load_snapshot({"all.yaml": CONFIG, "forest.yaml": FOREST})
    return Conversation(Core(snapshot, rng=random.Random(0), ticket_prefix="t"))


def headers_of(path: str, *, mode: str, end: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = BodyMode[mode]
    message.request_headers.end_of_stream = end
    for key, value in ((":method", "POST"), (":path", path)):
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = key, value.encode()
    return message


def test_a_path_that_names_the_model_brings_the_decision_without_the_body() -> None:
    one = conversation_about_forests()
    (answer,) = one.exchange.receive(headers_of("/v2/models/iris/infer?a=1", mode="NONE"))
    common = ProcessingResponse.FromString(answer).request_headers.response
    assert common.clear_route_cache
    headers = {option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers}
    assert headers == {
        "x-attache-server": "server/default/forest",
        "x-gateway-destination-endpoint": "10.0.1.1:8000",
        ":path": "/v2/models/forest/infer?a=1",
    }


def test_a_gateway_that_sends_the_body_all_the_same_gets_the_decision_with_it() -> None:
    one = conversation_about_forests()
    (answer,) = one.exchange.receive(headers_of("/v2/models/iris/infer", mode="BUFFERED"))
    assert not ProcessingResponse.FromString(answer).request_headers.response.header_mutation.set_headers
    common = one.send_body(b"\x00\xff" * 9).request_body.response
    headers = {option.header.key for option in common.header_mutation.set_headers}
    assert ":path" in headers
    assert not common.HasField("body_mutation")


def test_a_gateway_must_send_the_body_where_it_names_the_model() -> None:
    one = conversation_about_forests()
    with pytest.raises(IllegalMessage, match="request_body_mode BUFFERED"):
        one.exchange.receive(headers_of("/v1/chat/completions", mode="NONE"))


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v2", 200, {"name": "attache", "version": "", "extensions": ["binary_tensor_data"]}),
        ("GET", "/v2/health/live", 200, {"live": True}),
        ("HEAD", "/v2/health/ready", 200, {"ready": True}),
        ("GET", "/v2/models/iris/ready", 200, {"name": "iris", "ready": True}),
        ("POST", "/v2/health/live", 405, None),
        ("GET", "/v2/models/none/ready", 404, None),
        # of another protocol
        ("GET", "/v2/models/chat/ready", 404, None),
        ("POST", "/v2/repository/index", 403, None),
        ("GET", "/v2/models/%00/ready", 400, None),
    ],
)
def test_health_is_answered_here(method: str, path: str, status: int, body: object) -> None:
    answer = conversation_about_forests().send_headers(path, method=method, end=True).immediate_response
    assert answer.status.code == status
    found = json.loads(answer.body)
    assert found == body if body is not None else isinstance(found["error"], str) or path == "/v2"


def test_a_model_whose_engines_all_fail_is_not_ready() -> None:
    snapshot = load_snapshot({"all.yaml": CONFIG, "forest.yaml": FOREST})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    table = core.pools["default/forest"].table
    table.retry_at_s[table.active_rows] = 100.0
    for path in ("/v2/models/iris/ready", "/v2/health/ready"):
        assert Conversation(core).send_headers(path, method="GET", end=True).immediate_response.status.code == 503
    assert (
        Conversation(core).send_headers("/v2/health/live", method="GET", end=True).immediate_response.status.code == 200
    )
