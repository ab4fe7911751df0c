# SPDX-License-Identifier: Apache-2.0
"""What Envoy gets to know of each kind of request and refusal, for its usage log."""

from __future__ import annotations

import json
import random
from typing import Final

import msgspec
import pytest

from extproc.admission.identity import ANONYMOUS_CALLER, ANONYMOUS_SUBJECT
from extproc.api.usage_log import UsageContext
from extproc.core.core import Core
from extproc.core.effects import RequestRefused
from extproc.core.request_record import RequestHead
from extproc.core.usage_log import usage_of_refusal, usage_of_unrouted_refusal
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import NoEndpoint
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from extproc.streams.processing_responses import refusal_answer
from tests.extproc.conftest import shell
from tests.extproc.scenes import CHAT, configuration

ENGINES: Final = "endpoints: [{address: '10.0.0.1:8000'}]"
GATEWAY: Final = {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {"name": "gateway"}}
LOG: Final = {"usageLog": {"path": "/var/lib/attache/usage.log"}}
KEYS: Final = {
    "authentication": {"apiKeys": [{"name": "web", "key": "sk-1234567890", "tenant": "acme", "user": "eve"}]}
}
CALLER: Final = {"x-attache-client": "web", "x-attache-tenant": "acme", "x-attache-user": "eve"}
# quotes, a control character, what ends a script, all planes of Unicode
HOSTILE: Final = 'a"b\\\u0001</script>é漢😀'


def core_of(*, server: str = ENGINES, route: str = "", **gateway: object) -> Core:
    document = json.dumps({**GATEWAY, "spec": gateway})
    snapshot = configuration(servers={"llama": server}, routes={"chat": f"modelName: chat\n{route}"}, others=document)
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def answer_to(core: Core, body: bytes, path: str = CHAT, *, method: str = "POST", **headers: str) -> ProcessingResponse:
    """The last answer to a request that comes whole, from our own bundle."""
    metrics = Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0)
    exchange = Exchange(shell(core, metrics), DuplexExchange, is_trusted=lambda: True)
    head, whole = ProcessingRequest(), ProcessingRequest()
    for name, value in {":method": method, ":path": path, **headers}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    head.request_headers.end_of_stream = not body
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    answers = exchange.receive(head)
    if body and not ProcessingResponse.FromString(answers[0]).HasField("immediate_response"):
        answers = exchange.receive(whole)
    return ProcessingResponse.FromString(answers[-1])


def own_metadata(answer: ProcessingResponse) -> dict[str, str]:
    fields = answer.dynamic_metadata.fields["attache"].struct_value.fields
    return {name: value.string_value for name, value in fields.items()}


def context_in(answer: ProcessingResponse) -> UsageContext:
    return msgspec.json.decode(own_metadata(answer)["usage"], type=UsageContext)


def test_a_decision_tells_who_asked_for_what_and_where_it_goes() -> None:
    core = core_of(**LOG, **KEYS)
    answer = answer_to(core, chat(stream=True, max_tokens=7), **CALLER)
    assert context_in(answer) == UsageContext(
        ticket="t-1",
        tenant="acme",
        user="eve",
        api_key="web",
        # of its digest
        key_id="581d30b4caec",
        route="default/chat",
        server="default/llama",
        model="chat",
        served_model="m",
        api="CHAT",
        streamed=True,
        input_tokens=3,
        output_tokens=7,
        most_output=7,
    )
    # what was there before is there still
    assert own_metadata(answer).keys() == {"ticket", "usage", "hides_usage", "response_model"}
    destination = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
    assert destination.string_value == "10.0.0.1:8000"


@pytest.mark.parametrize("route", ["", "rateLimits: [{unit: minute, requests: 5}]"], ids=["frequent", "with limits"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_where_the_answer_is_written_directly_and_where_limits_add_to_it(route: str, *, stream: bool) -> None:
    answer = answer_to(core_of(route=route, **LOG), chat(stream=stream))
    assert context_in(answer).model == "chat"
    assert own_metadata(answer)["ticket"] == context_in(answer).ticket
    assert ("hides_usage" in own_metadata(answer)) == stream
    assert ("x-ratelimit-limit-requests" in own_metadata(answer)) == bool(route)


def test_without_a_usage_log_nothing_is_written() -> None:
    core = core_of(route="rateLimits: [{unit: hour, requests: 1}]")
    assert own_metadata(answer_to(core, chat())).keys() >= {"ticket"}
    for answer in (answer_to(core, chat()), answer_to(core, chat(model="none"))):
        assert answer.immediate_response.status.code in {404, 429}
        assert not answer.HasField("dynamic_metadata")


@pytest.mark.parametrize(
    ("body", "refused", "model"),
    [
        (chat(model="none"), "unknown_model", "none"),
        (chat(model=HOSTILE), "unknown_model", HOSTILE),
        (b'{"model": ', "bad_request", ""),
        (b"", "bad_request", ""),
    ],
)
def test_a_refusal_before_any_route_tells_the_caller_and_the_model(body: bytes, refused: str, model: str) -> None:
    answer = answer_to(core_of(**LOG, **KEYS), body, **CALLER)
    assert answer.HasField("immediate_response")
    expected = UsageContext(tenant="acme", user="eve", api_key="web", model=model, api="CHAT", refused=refused)
    assert context_in(answer) == expected


def test_a_refusal_by_a_limit_or_for_want_of_engines_tells_route_and_server() -> None:
    limited = core_of(route="rateLimits: [{unit: hour, requests: 1}]", **LOG)
    answer_to(limited, chat())
    for core, refused in ((limited, "rate_limited"), (core_of(server="endpoints: []", **LOG), "no_endpoint")):
        context = context_in(answer_to(core, chat()))
        assert (context.route, context.server, context.refused) == ("default/chat", "default/llama", refused)
        assert (context.input_tokens, context.output_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("route", "server", "found"),
    [
        ("slo: [{name: gold, ttft: 1s}]", "", "gold"),
        ("slo: [{name: gold, ttft: 1s}]", "flowControl: {bands: [{name: all, priority: 0, share: 1}]}", "gold"),
        ("", "flowControl: {bands: [{name: all, priority: 0, share: 1}]}", "all"),
        ("", "", ""),
    ],
)
def test_a_request_has_the_class_of_its_objectives_or_else_its_band(route: str, server: str, found: str) -> None:
    server = f"endpoints: [{{address: '10.0.0.1:8000'}}]\n{server}"
    core = core_of(route=f"{route}\nrateLimits: [{{unit: hour, requests: 1}}]", server=server, **LOG)
    sent, refused = context_in(answer_to(core, chat())), context_in(answer_to(core, chat()))
    assert (sent.service_class, refused.service_class) == (found, found)
    assert (sent.refused, refused.refused) == ("", "rate_limited")


def test_an_http_route_is_no_model_route_of_the_same_name() -> None:
    """Rows of it are not charged to budgets of that ModelRoute."""
    core = core_of(route="budgets: [{name: all, window: Day, max: {requests: 10}}]", **LOG)
    head = RequestHead("POST", CHAT, {}, has_body=True, http_route="default/chat")
    chosen = core.builder.build_for_server("default/llama", head, chat(model="other"))
    refusal = NoEndpoint("none")
    found = [
        usage_of_refusal(chosen, "t1", refusal, held_s=0.0, objectives=None),
        usage_of_unrouted_refusal(head, ANONYMOUS_SUBJECT, refusal),
        usage_of_refusal(core.builder.build_by_model(head, chat()), "t2", refusal, held_s=0.0, objectives=None),
    ]
    assert [None if one is None else one.route for one in found] == [
        "http:default/chat",
        "http:default/chat",
        "default/chat",
    ]
    calls = usage_of_unrouted_refusal(
        msgspec.structs.replace(head, http_route="grpc:default/chat"), ANONYMOUS_SUBJECT, refusal
    )
    assert calls is not None
    assert calls.route == "grpc:default/chat"
    of_route, of_other = (
        core.admission.budgets_of_route("default/chat"),
        core.admission.budgets_of_route("http:default/chat"),
    )
    assert [len(one.budgets_for(ANONYMOUS_CALLER)) for one in (of_route, of_other)] == [1, 0]


def test_time_in_the_queue_and_its_band_are_told() -> None:
    one_at_a_time = "saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}"
    core = core_of(server=f"{ENGINES}\nflowControl: {{timeout: 2s, {one_at_a_time}}}", **LOG)
    assert context_in(answer_to(core, chat())).band == "standard"
    held, _ = core.arrive(core.builder.build_by_model(RequestHead("POST", CHAT, {}, has_body=True), chat()), 10.0)
    (refused,) = (one for one in core.tick(12.5) if isinstance(one, RequestRefused))
    assert refused.ticket == held.ticket
    assert refused.usage is not None
    assert (refused.usage.refused, refused.usage.queued_ms) == ("queue_timeout", 2500.0)
    assert (
        context_in(ProcessingResponse.FromString(refusal_answer(refused.refusal, usage=refused.usage))) == refused.usage
    )


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/nothing", "POST"), (CHAT, "GET"), ("/v1/models/none", "GET"), ("/v1/models", "GET")]
)
def test_what_asks_for_no_inference_leaves_nothing(path: str, method: str) -> None:
    answer = answer_to(core_of(**LOG), b"", path, method=method)
    assert answer.HasField("immediate_response")
    assert not answer.HasField("dynamic_metadata")


def test_names_that_clients_make_up_are_bounded() -> None:
    context = context_in(answer_to(core_of(**LOG), chat(model="x" * 100_000)))
    assert len(context.model) == 128
