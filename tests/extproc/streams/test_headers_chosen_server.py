# SPDX-License-Identifier: Apache-2.0
"""Requests for which an HTTPRoute has chosen the ModelServer, and listeners with models of their own."""

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
from extproc.streams.headers import StreamOrigin
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from tests.extproc.conftest import CONFIG, shell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHAT = "/v1/chat/completions"
NO_HEADERS: Mapping[str, str] = {}
TO_OTHER = b"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: other}
spec: {model: other-model, scrapeInterval: 0s, endpoints: [{address: "10.0.0.9:8000"}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: all}
spec: {rules: [{backendRefs: [{group: attache.dev, kind: ModelServer, name: other}]}]}
"""
INSIDE = b"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: inside}
spec:
  modelName: inside
  parentRefs: [{name: gateway, sectionName: inside}]
  rules: [{targetModels: [{modelServerName: other}]}]
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  listeners: [{name: public, address: "127.0.0.1:8080"}, {name: inside, address: "127.0.0.1:8081"}]
"""
LIMIT = b"\n  rateLimits: [{requests: 1, unit: hour}]\n"


def core_of(text: bytes) -> Core:
    return Core(load_snapshot({"all.yaml": text}), rng=random.Random(0), ticket_prefix="t")


class Conversation:
    """The side of an Envoy whose metadata say ``origin``."""

    def __init__(self, core: Core, origin: StreamOrigin | Callable[[], StreamOrigin]) -> None:
        metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
        self.exchange = Exchange(
            shell(core, metrics),
            DuplexExchange,
            is_trusted=lambda: True,
            origin=(lambda: origin) if isinstance(origin, StreamOrigin) else origin,
        )

    def ask(
        self, path: str, body: bytes | None, method: str = "POST", *, headers: Mapping[str, str] = NO_HEADERS
    ) -> ProcessingResponse:
        message = ProcessingRequest()
        message.request_headers.end_of_stream = body is None
        for key, value in ((":method", method), (":path", path), *headers.items()):
            header = message.request_headers.headers.headers.add()
            header.key, header.raw_value = key, value.encode()
        (answer,) = self.exchange.receive(message)
        if body is not None and ProcessingResponse.FromString(answer).WhichOneof("response") == "request_headers":
            message = ProcessingRequest()
            message.request_body.body, message.request_body.end_of_stream = body, True
            (answer,) = self.exchange.receive(message)
        return ProcessingResponse.FromString(answer)


def chat(model: str) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()


def picked(answer: ProcessingResponse) -> str:
    return answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value


CHOSEN = StreamOrigin(http_route="default/all", server="default/other")


@pytest.mark.parametrize("path", [CHAT, "/team" + CHAT, "/metrics", "/"])
@pytest.mark.parametrize("body", [chat("anything"), b"{", b"\xff"])
def test_the_chosen_server_gets_whatever_comes_and_envoy_keeps_its_route(path: str, body: bytes) -> None:
    answer = Conversation(core_of(CONFIG + TO_OTHER), CHOSEN).ask(path, body)

    common = answer.request_body.response
    assert picked(answer) == "10.0.0.9:8000"
    assert not common.clear_route_cache
    assert not common.HasField("body_mutation")


def test_a_request_without_a_body_is_decided_by_its_headers() -> None:
    answer = Conversation(core_of(CONFIG + TO_OTHER), CHOSEN).ask("/health", None, "GET")

    assert answer.WhichOneof("response") == "request_headers"
    assert picked(answer) == "10.0.0.9:8000"
    headers = {one.header.key for one in answer.request_headers.response.header_mutation.set_headers}
    assert headers == {"x-attache-server", "x-gateway-destination-endpoint"}


def test_models_are_not_listed_for_a_chosen_server() -> None:
    answer = Conversation(core_of(CONFIG + TO_OTHER), CHOSEN).ask("/v1/models", None, "GET")

    assert picked(answer) == "10.0.0.9:8000"


def test_the_model_of_the_body_stays_though_a_route_would_rename_it() -> None:
    answer = Conversation(core_of(CONFIG + TO_OTHER), CHOSEN).ask(CHAT, chat("chat"))

    assert picked(answer) == "10.0.0.9:8000"
    assert not answer.request_body.response.HasField("body_mutation")


def test_limits_of_the_models_route_hold_and_unreadable_bodies_get_round_none() -> None:
    core = core_of(CONFIG.replace(b"  modelName: chat\n", b"  modelName: chat" + LIMIT) + TO_OTHER)

    statuses = [Conversation(core, CHOSEN).ask(CHAT, chat("chat")).immediate_response.status.code for _ in range(2)]
    broken = Conversation(core, CHOSEN).ask(CHAT, b"{")

    assert statuses == [0, 429]
    assert broken.immediate_response.status.code == 400


def test_a_server_that_is_gone_is_answered_503() -> None:
    gone = StreamOrigin(http_route="default/all", server="default/gone")

    answer = Conversation(core_of(CONFIG + TO_OTHER), gone).ask(CHAT, chat("chat"))

    assert answer.immediate_response.status.code == 503


def test_steering_fields_are_refused_here_too() -> None:
    body = chat("chat").replace(b"{", b'{"kv_transfer_params": {}, ', 1)

    answer = Conversation(core_of(CONFIG + TO_OTHER), CHOSEN).ask("/team" + CHAT, body)

    assert answer.immediate_response.status.code == 400


def test_where_nothing_depends_on_it_nobody_asks_where_a_stream_comes_from() -> None:
    def never() -> StreamOrigin:
        raise AssertionError("asked")

    assert picked(Conversation(core_of(CONFIG), never).ask(CHAT, chat("chat")))


def test_each_listener_serves_and_lists_the_models_that_are_attached_to_it() -> None:
    core = core_of(CONFIG + TO_OTHER + INSIDE)

    def listed(listener: str) -> list[str]:
        answer = Conversation(core, StreamOrigin(listener=listener)).ask("/v1/models", None, "GET")
        return [one["id"] for one in json.loads(answer.immediate_response.body)["data"]]

    def status(listener: str, model: str) -> int:
        code: int = (
            Conversation(core, StreamOrigin(listener=listener)).ask(CHAT, chat(model)).immediate_response.status.code
        )
        return code

    assert (listed("public"), listed("inside")) == (["chat", "sql"], ["chat", "sql", "inside"])
    assert [status("public", "chat"), status("public", "inside")] == [0, 404]
    assert [status("inside", "chat"), status("inside", "inside")] == [0, 0]
    assert status("gone", "chat") == 404


def test_the_order_of_a_copy_is_believed_on_the_listener_for_copies_alone() -> None:
    server, _, _ = TO_OTHER.partition(b"---\napiVersion: gateway")
    rules = b"rules: [{mirror: {modelServerName: other}, targetModels:"
    text = CONFIG.replace(b"rules: [{targetModels:", rules) + server
    order = {"x-attache-mirror": '{"server":"default/other"}'}
    there = "10.0.0.9:8000"
    assert picked(Conversation(core_of(text), StreamOrigin(mirror="1")).ask(CHAT, chat("chat"), headers=order)) == there
    assert picked(Conversation(core_of(text), StreamOrigin()).ask(CHAT, chat("chat"), headers=order)) != there
