# SPDX-License-Identifier: Apache-2.0
"""Requests whose path names the model: routed, renamed, limited and learned from without their bodies."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.spec import STEPS_LISTENER
from extproc.core.admission_pipeline import usage_to_reserve
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestRefused
from extproc.core.request_record import Outcome, RequestHead
from extproc.endpoints.learned_speeds import learn_service_time, service_times
from extproc.endpoints.table import EndpointTable
from extproc.refusals import (
    BadRequest,
    MethodNotAllowed,
    ModelNotAllowed,
    ModelRepositoryRefused,
    RateLimited,
    UnknownModel,
    UnknownPath,
)
from extproc.scheduling.builtin_pickers import LeastWork
from extproc.wire_names import Api
from tests.extproc.conftest import settle
from tests.extproc.scenes import configuration, core_of, endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.request_record import Arrival

V2 = "model: forest\nprotocol: V2\n" + endpoints("10.0.0.1:80", "10.0.0.2:80")
RULES = "rules: [{targetModels: [{modelServerName: v2}]}]"
IRIS = {"iris": f"modelName: iris\n{RULES}"}
INFER = "/v2/models/iris/infer"


def arrive(core: Core, path: str = INFER, method: str = "POST", headers: Mapping[str, str] | None = None) -> Arrival:
    head = RequestHead(method, path.partition("?")[0], {":path": path, **(headers or {})}, has_body=method == "POST")
    return core.builder.build_by_model(head, b"")


def decided(core: Core, path: str = INFER, now: float = 0.0) -> Decision:
    own, _ = core.arrive(arrive(core, path), now)
    assert isinstance(own, Decision)
    return own


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (INFER, "/v2/models/forest/infer"),
        ("/v2/models/iris/versions/3/infer?a=b&c=%2F", "/v2/models/forest/versions/3/infer?a=b&c=%2F"),
        ("/v2/models/%69ris/infer", "/v2/models/forest/infer"),
    ],
)
def test_the_engine_reads_its_own_name_in_the_path(path: str, sent: str) -> None:
    decision = decided(core_of(servers={"v2": V2}, routes=IRIS), path)
    assert (decision.path, decision.body, decision.server) == (sent, None, "default/v2")


def test_a_path_that_need_not_change_is_not_sent_back() -> None:
    core = core_of(servers={"v2": V2}, routes={"iris": f"modelName: forest\n{RULES}"})
    assert decided(core, "/v2/models/forest/infer").path == ""


def test_a_name_is_written_so_that_it_is_one_segment() -> None:
    server = 'model: "a b?#%"\nprotocol: V2\n' + endpoints("10.0.0.1:80")
    assert decided(core_of(servers={"v2": server}, routes=IRIS)).path == "/v2/models/a%20b%3F%23%25/infer"


def test_targets_of_another_protocol_get_no_request_of_this_one() -> None:
    servers = {"v2": V2, "v1": V2.replace("V2", "V1"), "chat": "model: forest\n" + endpoints("10.0.0.3:80")}
    targets = ", ".join(f"{{modelServerName: {name}, weight: 5}}" for name in servers)
    routes = {"iris": f"modelName: iris\nrules: [{{targetModels: [{targets}]}}]"}
    core = core_of(servers=servers, routes=routes)
    assert {arrive(core).destination.server for _ in range(20)} == {"default/v2"}
    predict = arrive(core, "/v1/models/iris:predict")
    assert (predict.destination.server, predict.request.api) == ("default/v1", Api.V1)
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    body = b'{"model": "iris", "messages": []}'
    assert {core.builder.build_by_model(head, body).destination.server for _ in range(20)} == {"default/chat"}
    # a request that is held moves among those alone
    core.apply(
        configuration(servers=servers, routes={"iris": f"modelName: iris\nrules: [{{targetModels: [{targets}]}}]"}), 1.0
    )
    assert [one.pool.name for one in core.builder.arrivals_at_tiers(predict)] == ["default/v1"]


@pytest.mark.parametrize(
    ("method", "path", "error", "message"),
    [
        ("POST", "/v2/models/none/infer", UnknownModel, "'none' does not exist"),
        ("POST", "/v1/models/iris:predict", UnknownPath, "write POST /v2/models/iris/infer"),
        ("GET", INFER, MethodNotAllowed, "takes POST"),
        ("POST", "/v2/models/iris", MethodNotAllowed, "takes GET"),
        ("POST", "/v2/models/iris/load", UnknownPath, "Nothing is served"),
        ("POST", "/v2/models/%00/infer", BadRequest, "no model's name"),
    ],
)
def test_what_no_engine_serves_is_refused(method: str, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arrive(core_of(servers={"v2": V2}, routes=IRIS), path, method)


def test_a_chat_for_such_a_model_says_where_it_is() -> None:
    core = core_of(servers={"v2": V2}, routes=IRIS)
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    with pytest.raises(UnknownPath, match="V2; write POST /v2/models/iris/infer"):
        core.builder.build_by_model(head, b'{"model": "iris", "messages": []}')


def test_it_is_limited_by_requests_and_counts_no_tokens() -> None:
    limits = "rateLimits: [{per: Route, unit: hour, requests: 1, inputTokens: 1, outputTokens: 1}]"
    core = core_of(servers={"v2": V2}, routes={"iris": f"modelName: iris\n{RULES}\n{limits}"})
    usage = usage_to_reserve(arrive(core))
    assert (usage.input_tokens, usage.output_tokens) == (0.0, 0.0)
    decision = decided(core)
    settled = settle(core, outcome(decision), 1.0)
    assert settled is not None
    assert (settled.used.input_tokens, settled.used.output_tokens) == (0.0, 0.0)
    own, _ = core.arrive(arrive(core), 1.0)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, RateLimited)


def test_a_server_that_an_http_route_chose_is_asked_as_the_client_wrote() -> None:
    core = core_of(servers={"v2": V2}, routes=IRIS)
    for path, api in (("/v2/models/other/infer", Api.V2), ("/v2/models/other/stats", None), ("/v1/completions", None)):
        head = RequestHead("POST", path, {":path": path}, has_body=True)
        assert not core.builder.reads_body(head, "default/v2")
        arrival = core.builder.build_for_server("default/v2", head, b"")
        assert arrival.request.api is api
        own, _ = core.arrive(arrival, 0.0)
        assert isinstance(own, Decision)
        assert (own.path, own.body) == ("", None)


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", "/team/v2//repository/models/x/unload", "/v2/%72epository", "/v2/repository"]
)
def test_repository_verbs_are_refused_whoever_chose_the_server(path: str) -> None:
    core = core_of(servers={"v2": V2}, routes=IRIS)
    with pytest.raises(ModelRepositoryRefused):
        core.builder.build_for_server("default/v2", RequestHead("POST", path, {}, has_body=True), b"")


def test_repository_verbs_are_refused_also_if_their_beginning_is_the_prefix_of_the_server() -> None:
    core = core_of(servers={"v2": f"pathPrefix: /v2\n{V2}"}, routes=IRIS)
    for path in ("/repository/index", "//repository/models/x/load", "/repository"):
        with pytest.raises(ModelRepositoryRefused):
            core.builder.build_for_server("default/v2", RequestHead("POST", path, {}, has_body=True), b"")


def test_a_caller_who_may_not_use_it_learns_nothing_of_its_protocol() -> None:
    policy = (
        "{apiVersion: attache.dev/v1alpha1, kind: ModelAccessPolicy, metadata: {name: p}, "
        "spec: {rules: [{models: [iris], from: [{tenants: [acme]}]}]}}"
    )
    snapshot = configuration(servers={"v2": V2}, routes=IRIS, others=policy)
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    for path in (INFER, "/v1/models/iris:predict", "/v2/models/none/infer"):
        with pytest.raises(ModelNotAllowed):
            arrive(core, path)


def outcome(decision: Decision, *, engine_s: float = 0.01) -> Outcome:
    served = decision.assignment.endpoint.address
    return Outcome(decision.ticket, 200, served, 1.0, 1.0, None, None, None, engine_s=engine_s)


def test_the_faster_engine_gets_more_of_the_work() -> None:
    core = core_of(servers={"v2": V2}, routes=IRIS)
    assert isinstance(core.pools["default/v2"].picker, LeastWork)
    served = {"10.0.0.1:80": 0, "10.0.0.2:80": 0}
    running: list[tuple[float, Decision]] = []
    free_at, sent_at, longest_s = dict.fromkeys(served, 0.0), dict[str, float](), 0.0
    # the second takes four times as long; each serves one after the other
    for step in range(400):
        now = step * 0.01
        for end_s, decision in [one for one in running if one[0] <= now]:
            running.remove((end_s, decision))
            core.on_stream_closed(decision.ticket, now)
        decision = decided(core, now=now)
        address = decision.assignment.endpoint.address
        served[address] += 1
        took_s = 0.0115 if address == "10.0.0.1:80" else 0.046
        began_s = max(now, free_at[address])
        free_at[address] = began_s + took_s
        sent_at[decision.ticket] = now
        running.append((free_at[address], decision))
        longest_s = max(longest_s, free_at[address] - now)
    assert 3 < served["10.0.0.1:80"] / served["10.0.0.2:80"] < 9
    # turns would make the slower one's queue grow by a second every two
    assert longest_s < 0.3


def test_what_was_learned_of_an_engine_without_work_is_forgotten() -> None:
    table = EndpointTable()
    table.replace_endpoints(["a", "b", "c"])
    assert service_times(table, 0.0)[:3].tolist() == [1.0, 1.0, 1.0]
    for row, seconds in ((0, 0.01), (1, 0.03)):
        learn_service_time(table, row, engine_s=seconds, in_flight=1, now=0.0)
    # the third is like the others; a half-life halves the difference
    assert service_times(table, 0.0)[:3] == pytest.approx([0.01, 0.03, 0.02])
    assert service_times(table, 10.0)[:3] == pytest.approx([0.015, 0.025, 0.02])
    learn_service_time(table, 0, engine_s=0.02, in_flight=4, now=10.0)
    assert table.service_s[0] == pytest.approx(0.01 + 0.1 * (0.005 - 0.01))


EXPLAINED = {
    "iris": "modelName: iris\nrules:\n"
    "- {modelMatch: {uri: {regex: '/v1/models/.*:explain'}}, targetModels: [{modelServerName: explainer}]}\n"
    "- targetModels: [{modelServerName: v1}]",
    "inner": "modelName: iris\ncallers: Steps\nrules: [{targetModels: [{modelServerName: inner}]}]",
}


def explained(predictor: str) -> Core:
    explainer = "model: iris\nprotocol: V1\n" + endpoints("10.0.0.3:80")
    servers = {"v1": f"model: iris\nprotocol: V1\n{predictor}", "explainer": explainer, "inner": V2}
    return core_of(servers=servers, routes=EXPLAINED)


@pytest.mark.parametrize(("predictor", "ready"), [(endpoints("10.0.0.1:80"), True), ("endpoints: []", False)])
def test_an_explainer_does_not_make_a_model_ready(predictor: str, ready: bool) -> None:
    head = RequestHead("GET", "/v1/models/iris", {}, has_body=False)
    assert explained(predictor).builder.is_ready("iris", "V1", head, 0.0) is ready


def test_clients_and_steps_have_routes_of_one_name() -> None:
    core = explained(endpoints("10.0.0.1:80"))
    assert [one.name for one in core.builder.models] == ["iris"]

    def server_of(path: str, listener: str = "") -> str:
        return core.builder.build_by_model(
            RequestHead("POST", path, {}, has_body=True, listener=listener), b""
        ).destination.server

    assert server_of("/v1/models/iris:predict") == "default/v1"
    assert server_of("/v1/models/iris:explain") == "default/explainer"
    assert server_of(INFER, STEPS_LISTENER) == "default/inner"
    with pytest.raises(UnknownPath):
        server_of(INFER)


def test_budgets_of_the_gateway_charge_clients_and_not_the_steps_that_work_for_them() -> None:
    gateway = """
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec: {steps: "127.0.0.1:8081", budgets: [{name: all, window: Month, max: {requests: 1}}]}
"""
    servers = {"v2": V2}
    routes = {**IRIS, "inner": f"modelName: iris\ncallers: Steps\n{RULES}"}
    core = Core(configuration(servers=servers, routes=routes, others=gateway), rng=random.Random(0), ticket_prefix="t")

    def ask(listener: str) -> object:
        head = RequestHead("POST", INFER, {":path": INFER}, has_body=True, listener=listener)
        return core.arrive(core.builder.build_by_model(head, b""), 0.0)[0]

    assert [type(ask(STEPS_LISTENER)) for _ in range(3)] == [Decision] * 3
    assert [type(ask("")) for _ in range(2)] == [Decision, RequestRefused]
