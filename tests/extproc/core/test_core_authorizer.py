# SPDX-License-Identifier: Apache-2.0
"""Requests whose callers may not use every model: what they are answered, and what they learn from it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.request_record import RequestHead
from extproc.refusals import BadRequest, ModelNotAllowed, Refusal, UnknownModel

DIRECTORY = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: small}
spec: {model: small-1b, endpoints: [{address: "10.0.0.1:8000"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: large}
spec: {model: large-70b, endpoints: [{address: "10.0.0.2:8000"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules:
    - {modelMatch: {headers: {x-tier: {exact: large}}}, targetModels: [{modelServerName: large}]}
    - {modelMatch: {uri: {exact: /v1/completions}}, targetModels: [{modelServerName: large}]}
    - {targetModels: [{modelServerName: small}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: mixed}
spec:
  modelName: mixed
  rules:
    - modelMatch: {headers: {x-team: {exact: red}}}
      targetModels: [{modelServerName: small, weight: 1}, {modelServerName: large, weight: 99}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelAccessPolicy
metadata: {name: acme}
spec:
  rules:
    - {from: [{tenants: [acme]}], models: [chat, mixed], servers: [default/small]}
    - {from: [{tenants: [root]}]}
    - {from: [{claims: [{name: groups, values: [ml]}]}], models: [sql]}
"""


@pytest.fixture(scope="module")
def core() -> Core:
    return Core(load_snapshot({"a.yaml": DIRECTORY.encode()}), rng=random.Random(0), ticket_prefix="t")


def head(tenant: str, path: str = "/v1/chat/completions", **headers: str) -> RequestHead:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead("POST", path, {"x-attache-tenant": tenant, **named}, has_body=True, is_trusted=True)


def body(model: str, **fields: object) -> bytes:
    content = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
    return json.dumps({"model": model, **content, **fields}).encode()


def served_by(core: Core, asked: RequestHead, model: str = "chat") -> str:
    return core.builder.build_by_model(asked, body(model)).pool.name


def refusal(core: Core, asked: RequestHead, content: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        core.builder.build_by_model(asked, content)
    return caught.value


def test_a_caller_gets_what_it_may_use(core: Core) -> None:
    assert served_by(core, head("acme")) == "default/small"
    assert served_by(core, head("root", x_tier="large")) == "default/large"


@pytest.mark.parametrize(
    "asked", [head("acme", x_tier="large"), head("acme", "/v1/completions")], ids=["by header", "by path"]
)
def test_neither_header_nor_path_opens_another_server(core: Core, asked: RequestHead) -> None:
    assert isinstance(refusal(core, asked, body("chat")), ModelNotAllowed)


def test_an_adapter_is_a_model_by_itself(core: Core) -> None:
    assert isinstance(refusal(core, head("acme"), body("sql")), ModelNotAllowed)


def test_of_several_targets_the_ones_that_are_open_serve(core: Core) -> None:
    assert {served_by(core, head("acme", x_team="red"), "mixed") for _ in range(30)} == {"default/small"}


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "chat", "model": "sql", "messages": []}',
        b'{"model": "chat", "m\\u006fdel": "sql", "messages": []}',
        b'{"messages": [], "model": "s\\u0071l"}',
    ],
    ids=["twice", "escaped name", "escaped value"],
)
def test_what_is_decided_on_is_what_the_engine_reads(core: Core, content: bytes) -> None:
    assert isinstance(refusal(core, head("acme"), content), ModelNotAllowed)
    arrival = core.builder.build_by_model(head("root"), content)
    assert arrival.request.model == "sql"


def test_what_a_caller_may_not_use_and_what_does_not_exist_look_the_same(core: Core) -> None:
    for asked in (head("acme"), head("nobody")):
        hidden, unknown = (refusal(core, asked, body(model)) for model in ("sql", "gpt"))
        assert (hidden.status, hidden.code, hidden.param) == (403, "model_not_allowed", "model")
        assert (unknown.status, unknown.code) == (hidden.status, hidden.code)
        assert unknown.message == hidden.message.replace("'sql'", "'gpt'")
    # what would be refused for its fields is no different
    assert isinstance(refusal(core, head("nobody"), body("chat", kv_transfer_params={})), ModelNotAllowed)
    assert isinstance(refusal(core, head("root"), body("chat", kv_transfer_params={})), BadRequest)


def test_who_may_use_everything_is_told_what_does_not_exist(core: Core) -> None:
    assert isinstance(refusal(core, head("root"), body("gpt")), UnknownModel)


def test_who_may_use_a_model_is_told_that_no_rule_takes_the_request(core: Core) -> None:
    assert "No rule" in refusal(core, head("acme"), body("mixed")).message
    assert "No rule" not in refusal(core, head("nobody"), body("mixed")).message


def test_the_list_of_models_is_what_the_caller_may_use(core: Core) -> None:
    def listed(asked: RequestHead) -> list[str]:
        return sorted(one.name for one in core.builder.models_for(asked))

    assert listed(head("acme")) == ["chat", "mixed"]
    assert listed(head("root")) == ["chat", "mixed", "sql"]
    assert listed(head("nobody")) == []
    untrusted = RequestHead("GET", "/v1/models", {"x-attache-tenant": "root"}, has_body=False)
    assert listed(untrusted) == []


def test_claims_say_who_may(core: Core) -> None:
    with_claims: Any = {"headers": {"x-attache-tenant": "t"}, "has_body": True, "is_trusted": True}
    asked = RequestHead("POST", "/v1/chat/completions", claims={"groups": frozenset({"ml", "ops"})}, **with_claims)
    assert core.claims == {"groups"}
    assert served_by(core, asked, "sql") == "default/small"
    assert isinstance(refusal(core, asked, body("chat")), ModelNotAllowed)


def test_a_request_to_a_server_is_decided_by_its_body_and_the_server(core: Core) -> None:
    builder = core.builder
    own = builder.build_for_server("default/small", head("root"), body("another"), is_pool=True)
    assert own.pool.name == "default/small"
    for server, asked in (("default/large", "chat-2"), ("default/small", "chat-2")):
        with pytest.raises(ModelNotAllowed):
            builder.build_for_server(server, head("acme"), body(asked), is_pool=True)
    with pytest.raises(ModelNotAllowed, match="could not be read"):
        builder.build_for_server("default/small", head("acme"), b"{")
    assert builder.build_for_server("default/small", head("root"), b"{").pool.name == "default/small"
