# SPDX-License-Identifier: Apache-2.0
"""Where requests come in: how often their bodies are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.admission.identity import ANONYMOUS_CALLER
from extproc.core import request_builder as module
from extproc.core.request_record import RequestHead
from extproc.request.body_parser import parse_body
from extproc.wire_names import Api
from tests.extproc.scenes import configuration, core_of, endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.request.inference_request import InferenceRequest

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)


@pytest.mark.parametrize(("model", "sent"), [("chat", "llama-8b"), ("other", "other")])
def test_a_body_behind_a_pool_is_read_once_whoever_routes_it(
    monkeypatch: pytest.MonkeyPatch, model: str, sent: str
) -> None:
    read = list[bytes]()

    def counted(api: Api, body: bytes, headers: Mapping[str, str]) -> InferenceRequest:
        read.append(body)
        return parse_body(api, body, headers)

    monkeypatch.setattr(module, "parse_body", counted)
    core = core_of(
        servers={"llama": "model: llama-8b\n" + endpoints("10.0.0.1:8000")}, routes={"chat": "modelName: chat"}
    )
    body = f'{{"model": "{model}", "messages": []}}'.encode()
    assert core.builder.build_for_server("default/llama", HEAD, body, is_pool=True).destination.model == sent
    assert read == [body]


@pytest.mark.parametrize("path", ["/team/v1/chat/completions", ""])
def test_a_pools_request_is_read_under_a_path_that_its_gateway_changes_or_leaves_out(path: str) -> None:
    core = core_of(servers={"llama": endpoints("10.0.0.1:8000")})
    head = RequestHead("POST", path, {}, has_body=True)
    arrival = core.builder.build_for_server("default/llama", head, b'{"model": "m", "messages": []}', is_pool=True)
    assert arrival.request.api is Api.CHAT


def test_a_held_request_moves_by_the_rule_of_the_configuration_in_use() -> None:
    servers = {name: endpoints(f"10.0.0.{number}:8000") for number, name in enumerate(("one", "two", "three"), 1)}
    core = core_of(servers=servers, routes={"chat": rule("one", "two")})
    arrival = core.builder.build_by_model(HEAD, b'{"model": "m", "messages": []}')
    assert {one.pool.name for one in core.builder.arrivals_at_tiers(arrival)} == {"default/one", "default/two"}
    core.apply(configuration(servers=servers, routes={"chat": rule("one", "three")}), 1.0)
    assert {one.pool.name for one in core.builder.arrivals_at_tiers(arrival)} == {"default/one", "default/three"}
    moved = core.builder.move_to_other_server(arrival)
    assert moved is not None
    assert moved.candidates is not arrival.candidates
    assert moved.caller is arrival.caller


def rule(*servers: str) -> str:
    targets = ", ".join(f"{{modelServerName: {server}}}" for server in servers)
    return f"modelName: m\nrules: [{{targetModels: [{targets}]}}]"


def test_identity_headers_that_no_gateway_vouches_for_are_ignored() -> None:
    names = {"x-attache-tenant": "acme", "x-attache-client": "acme-1", "x-llm-d-inference-objective": "urgent"}
    goals = {"x-llm-d-inference-fairness-id": "acme", "x-llm-d-slo-ttft-ms": "5", "x-attache-deadline-ms": "5"}
    core = core_of(servers={"llama": endpoints("10.0.0.1:8000")})
    body = b'{"model": "m", "messages": []}'
    for is_trusted in (False, True):
        head = RequestHead("POST", "/v1/chat/completions", {**names, **goals}, has_body=True, is_trusted=is_trusted)
        assert (core.builder.build_by_model(head, body).caller == ANONYMOUS_CALLER) is not is_trusted
