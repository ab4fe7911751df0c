# SPDX-License-Identifier: Apache-2.0
"""Copies of requests: when there is one, what it is, and that nobody is charged for it."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestRefused
from extproc.core.request_record import GatewayProperties, RequestHead
from extproc.endpoints.engine_reports import apply_report
from extproc.engines.metrics import EngineReport
from extproc.refusals import BadRequest, NoEndpoint, Refusal
from extproc.routing.mirror import MirrorDirective, read_directive
from extproc.wire_names import MIRROR, MIRRORED_TENANT
from tests.extproc.scenes import configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.request_record import Arrival

SERVERS = {"a": endpoints("10.0.0.1:8000", "10.0.0.2:8000"), "shadow": "model: new\n" + endpoints("10.0.1.1:8000")}
PATH = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}


def routes(more: str = "", **mirror: object) -> dict[str, str]:
    rule = {"targetModels": [{"modelServerName": "a"}], "mirror": {"modelServerName": "shadow", **mirror}}
    return {"chat": f"rules: {json.dumps([rule])}\nloraAdapters: [sql]\n{more}"}


def mirrored(core: Core, arrival: Arrival, attachment: GatewayProperties | None = None) -> str:
    own, _ = core.arrive(arrival, 0.0, *([] if attachment is None else [attachment]))
    assert isinstance(own, Decision)
    return own.mirror


def copy(core: Core, directive: str, body: dict[str, Any] | bytes = BODY, path: str = PATH) -> Arrival:
    head = RequestHead("POST", path, {MIRROR: directive}, has_body=True, is_trusted=True)
    return core.builder.build_mirror_copy(head, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_every_request_has_a_copy_or_a_share_of_them() -> None:
    core = core_of(servers=SERVERS, routes=routes(maxOutputTokens=64))
    assert read_directive(mirrored(core, request(core))) == MirrorDirective("default/shadow", 64)
    for percent in (0, 25, 100):
        core = core_of(servers=SERVERS, routes=routes(percent=percent))
        drawn = sum(bool(mirrored(core, request(core))) for _ in range(400))
        assert abs(drawn / 400 - percent / 100) < 0.08


def test_what_cannot_be_copied_goes_alone() -> None:
    core = core_of(servers=SERVERS, routes=routes())
    assert mirrored(core, request(core, path="/v1/chat/completions"))
    assert not mirrored(core, request(core, model="sql"))
    # other gateways have no listener for copies
    assert not mirrored(core, request(core), GatewayProperties(1, None, is_bundle=False))
    assert "the request is for an adapter" in core.explain(request(core, model="sql"), now=0.0).mirror
    for server, why in (
        ("apis: [Embeddings]", "it does not serve this API"),
        ("activation: {}", "it has no usable endpoint"),
    ):
        field = "endpoints: []\n" if "activation" in server else endpoints("10.0.1.1:8000")
        core = core_of(servers={**SERVERS, "shadow": f"{server}\n{field}"}, routes=routes())
        assert not mirrored(core, request(core))
        assert why in core.explain(request(core), now=0.0).mirror


def test_engines_without_spare_capacity_get_no_copy() -> None:
    core = core_of(servers=SERVERS, routes=routes())
    pool = core.pools["default/shadow"]
    assert "copies of 100 % of such requests go to the mirror default/shadow" in core.explain(request(core), 0.0).mirror
    apply_report(pool.table, 0, EngineReport(waiting=50, running=50, kv_usage=0.99), 0.0)
    assert not mirrored(core, request(core))
    assert "no capacity to spare" in core.explain(request(core), 0.0).mirror
    # its own queue's limits count where it has one
    control = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}\n"
    core = core_of(servers={**SERVERS, "shadow": control + SERVERS["shadow"]}, routes=routes())
    directive = mirrored(core, request(core))
    own, _ = core.arrive(copy(core, directive), 0.0)
    assert isinstance(own, Decision)
    assert not mirrored(core, request(core))


def test_a_copy_is_a_request_of_nobody() -> None:
    limit = "rateLimits: [{requests: 1, per: Route}]"
    budget = """
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  usageLog: {path: /tmp/usage.jsonl}
  budgets: [{name: all, per: Tenant, window: Day, max: {requests: 1}}]
"""
    snapshot = configuration(servers=SERVERS, routes=routes(limit, maxOutputTokens=64), others=budget)
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    own, _ = core.arrive(request(core), 0.0)
    assert isinstance(own, Decision)
    assert own.grants
    for _ in range(20):
        arrival = copy(core, own.mirror)
        assert arrival.caller.tenant == MIRRORED_TENANT
        found, _ = core.arrive(arrival, 0.0)
        assert isinstance(found, Decision)
        assert (found.server, found.grants, found.usage, found.mirror) == ("default/shadow", (), None, "")
        assert json.loads(found.body or b"") == {**BODY, "model": "new", "max_tokens": 64}
    again, _ = core.arrive(request(core), 0.0)
    assert isinstance(again, RequestRefused)


def test_a_copy_is_sent_once_and_comes_behind_all_others() -> None:
    servers = {**SERVERS, "shadow": endpoints("10.0.1.1:8000", "10.0.1.2:8000", "10.0.1.3:8000")}
    core = core_of(servers=servers, routes=routes())
    arrival = copy(core, '{"server":"default/shadow"}')
    assert arrival.priority < -1_000_000
    own, _ = core.arrive(arrival, 0.0)
    assert isinstance(own, Decision)
    assert len(own.assignment.addresses) == 1
    assert own.is_leased
    core.on_stream_closed(own.ticket, 1.0)
    assert core.pools["default/shadow"].table.in_flight.sum() == 0


@pytest.mark.parametrize(
    ("directive", "body", "path", "refusal"),
    [
        ("", BODY, PATH, BadRequest),
        ("{}", BODY, PATH, BadRequest),
        ('{"server":5}', BODY, PATH, BadRequest),
        ('{"server":"default/shadow","most":"x"}', BODY, PATH, BadRequest),
        ("[" * 5000, BODY, PATH, BadRequest),
        ('{"server":"default/gone"}', BODY, PATH, NoEndpoint),
        ('{"server":"default/shadow"}', b"{", PATH, BadRequest),
        ('{"server":"default/shadow"}', {**BODY, "kv_transfer_params": {"a": 1}}, PATH, Refusal),
        ('{"server":"default/shadow"}', b"", "/v2/models/m/infer", BadRequest),
        ('{"server":"default/shadow"}', BODY, "/elsewhere", Refusal),
    ],
)
def test_a_copy_that_cannot_be_read_is_refused(directive: str, body: Any, path: str, refusal: type[Refusal]) -> None:  # noqa: ANN401
    core = core_of(servers=SERVERS, routes=routes())
    with pytest.raises(refusal):
        copy(core, directive, body, path)


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        ({"modelServerName": "a"}, "is a target of the rule"),
        ({"modelServerName": "nobody"}, r"mirror.modelServerName: no ModelServer is called 'nobody'"),
        ({"percent": 101}, "too large"),
        ({"percent": -1}, "too small"),
        ({"maxOutputTokens": 0}, "too small"),
    ],
)
def test_what_cannot_be_a_mirror_is_refused(mirror: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        configuration(servers=SERVERS, routes=routes(**mirror))
