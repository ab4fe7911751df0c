# SPDX-License-Identifier: Apache-2.0
"""Bodies that are changed: whose streams end with usage, and which model engines are asked for."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.api.model_server import ModelServerSpec
from extproc.core.core import Core
from extproc.core.dispatch import adds_usage_request
from extproc.core.effects import Decision
from extproc.core.request_record import BUNDLE, Arrival, GatewayProperties, RequestHead
from extproc.request.body_parser import parse_body
from extproc.routing.routing_table import Destination
from extproc.wire_names import Api
from tests.extproc.scenes import configuration

ELSEWHERE = GatewayProperties(is_bundle=False)


def asks(attachment: GatewayProperties, *, trusted: bool, spec: ModelServerSpec | None = None, **options: bool) -> bool:
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    if options:
        body["stream_options"] = options
    text = json.dumps(body).encode()
    pool: Any = SimpleNamespace(spec=spec or ModelServerSpec(model="m"))
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True, is_trusted=trusted)
    arrival = Arrival(parse_body(Api.CHAT, text), Destination("default/m", "m"), pool, head, text)
    return adds_usage_request(arrival, attachment)


@pytest.mark.parametrize("attachment", [BUNDLE, ELSEWHERE])
def test_usage_is_asked_for_where_the_client_said_nothing(attachment: GatewayProperties) -> None:
    assert asks(attachment, trusted=True)
    assert not asks(attachment, trusted=True, include_usage=True)
    as_requested = ModelServerSpec(model="m", stream_usage="AsRequested")
    assert not asks(attachment, trusted=True, spec=as_requested)


@pytest.mark.parametrize(
    ("attachment", "trusted", "is_asked"),
    [(BUNDLE, True, True), (BUNDLE, False, False), (ELSEWHERE, True, False), (ELSEWHERE, False, False)],
)
def test_a_client_that_declines_usage_would_not_see_it(
    attachment: GatewayProperties, trusted: bool, is_asked: bool
) -> None:
    """A gateway of somebody else may write trusted headers, and passes answers on as they are."""
    assert asks(attachment, trusted=trusted, include_usage=False) == is_asked


REWRITES = """
endpoints: [{address: "10.0.0.1:8000"}]
modelRewrites:
  - {models: [chat, gpt], targets: [{model: v1, weight: 9}, {model: canary, weight: 1}]}
  - {targets: [{model: base}]}
"""


def asked_of_engine(model: str, count: int = 1, headers: dict[str, str] | None = None) -> Counter[str]:
    """The models in the bodies that engines get."""
    core = Core(configuration(servers={"llama": REWRITES}, routes={}), rng=random.Random(0), ticket_prefix="t")
    head = RequestHead("POST", "/v1/chat/completions", headers or {}, has_body=True, is_trusted=True)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "a"}]}).encode()
    found = Counter[str]()
    for _ in range(count):
        own, _ = core.arrive(core.builder.build_for_server("default/llama", head, body, is_pool=True), 0.0, ELSEWHERE)
        assert isinstance(own, Decision)
        found[json.loads(own.body or body)["model"]] += 1
    return found


def test_a_pool_renames_models_by_weight_and_others_by_the_rule_for_all() -> None:
    drawn = asked_of_engine("gpt", 400)
    assert drawn.keys() == {"v1", "canary"}
    assert 15 <= drawn["canary"] <= 75
    assert asked_of_engine("whatever") == {"base": 1}


def test_a_rewrite_goes_before_the_gateways_header() -> None:
    assert asked_of_engine("else", headers={"x-llm-d-model-name-rewrite": "v7"}) == {"base": 1}
