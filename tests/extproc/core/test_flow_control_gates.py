# SPDX-License-Identifier: Apache-2.0
"""How a request stands in its queue, and which gates survive a change of configuration."""

from __future__ import annotations

import math
import random
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest

from extproc.admission.flow_queues import FlowKey
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, endpoints, request

if TYPE_CHECKING:
    from extproc.admission.flow_queues import QueuedRequest
    from extproc.api.config_snapshot import Snapshot

ENGINES = endpoints("10.0.0.1:8000", "10.0.0.2:8000")


def snapshot_of(more: str = "", rule: str = "", engines: str = ENGINES) -> Snapshot:
    route = f"modelName: chat\nloraAdapters: [sql]\nrules: [{{targetModels: [{{modelServerName: llama}}]{rule}}}]"
    return configuration(servers={"llama": f"scrapeInterval: 0s\n{engines}\n{more}"}, routes={"chat": route})


def core_of(flow_control: str = "{}", rule: str = "") -> Core:
    snapshot = snapshot_of(f"flowControl: {flow_control}" if flow_control else "", rule)
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def decided(core: Core, text: str = "hello", now: float = 0.0, *, model: str = "chat", **headers: str) -> Decision:
    trusted = {name.replace("_", "-"): value for name, value in headers.items()}
    own, _ = core.arrive(request(core, text, model=model, headers=trusted), now)
    assert isinstance(own, Decision)
    return own


def queued(core: Core, text: str = "hello", now: float = 0.0, *, model: str = "chat", **headers: str) -> QueuedRequest:
    entry = decided(core, text, now, model=model, **headers).history.queued
    assert entry is not None
    return entry


@pytest.mark.parametrize(
    ("flow_by", "flow"),
    [
        ("TenantAndModel", FlowKey("acme", "sql")),
        ("Tenant", FlowKey("acme")),
        ("User", FlowKey("acme", part="ann")),
        # the header's value, hashed
        ("Header", FlowKey("acme", part=blake2b(b"s-1", digest_size=16).hexdigest())),
    ],
)
def test_requests_share_a_flow_with_those_of_the_same_subject(flow_by: str, flow: FlowKey) -> None:
    core = core_of(f"{{flowBy: {flow_by}, sessionHeader: x-session}}")
    assert queued(core, model="sql", x_attache_tenant="acme", x_attache_user="ann", x_session="s-1").flow == flow


def test_without_a_target_there_is_no_deadline() -> None:
    assert queued(core_of(), now=5.0).deadline_at_s == math.inf


def test_the_rules_target_is_the_deadline_of_those_who_say_nothing() -> None:
    assert queued(core_of(rule=", ttftTarget: 2s"), now=5.0).deadline_at_s == 7.0


@pytest.mark.parametrize(
    ("headers", "deadline_at_s"),
    [
        ({"x_attache_deadline_ms": "500", "x_slo_ttft_ms": "900"}, 5.5),
        ({"x_slo_ttft_ms": "900"}, 5.9),
    ],
)
def test_what_the_caller_says_goes_before_the_rules_target(headers: dict[str, str], deadline_at_s: float) -> None:
    assert queued(core_of(rule=", ttftTarget: 2s"), now=5.0, **headers).deadline_at_s == pytest.approx(deadline_at_s)


def test_an_entry_says_how_much_of_the_prompt_is_cached_and_where() -> None:
    core, text = core_of(), "the same long beginning " * 300
    first = decided(core, text)
    assert first.history.queued is not None
    assert (first.history.queued.holders, first.history.queued.uncached_tokens) == (
        (),
        first.history.queued.input_tokens,
    )
    again = queued(core, text, now=1.0)
    ((row, tokens),) = again.holders
    assert row == first.assignment.endpoint.row
    assert again.uncached_tokens == pytest.approx(again.input_tokens - tokens)
    assert tokens > 0.9 * again.input_tokens


def test_a_gate_stays_as_long_as_its_flow_control_does() -> None:
    core = core_of("{timeout: 5s}")
    gate = core.admission.gates["default/llama"]
    core.apply(snapshot_of("flowControl: {timeout: 5s}", ", priority: 3"), 0.0)
    assert core.admission.gates["default/llama"] is gate
    core.apply(snapshot_of("flowControl: {timeout: 6s}", ""), 0.0)
    assert core.admission.gates["default/llama"] is not gate
    core.apply(snapshot_of("", ""), 0.0)
    assert core.admission.gates == {}


def test_routes_without_limits_charge_nothing() -> None:
    core = core_of("")
    own, _ = core.arrive(request(core, "hi", model="chat"), 0.0)
    assert isinstance(own, Decision)
    assert own.grants == ()
    assert core.admission.limits.bucket_count == 0


PAIRS = f"""
pdGroup: {{groupKey: group, prefillLabels: {{role: prefill}}, decodeLabels: {{role: decode}}}}
flowControl: {{{ONE_AT_A_TIME}}}
"""


def test_a_pair_needs_room_at_its_prefill_and_at_its_decode_endpoint() -> None:
    engines = "endpoints: [{address: '10.0.0.1:8000', labels: {role: prefill, group: a}}, "
    engines += "{address: '10.0.0.2:8000', labels: {role: decode, group: a}}]"
    core = Core(snapshot_of(PAIRS, engines=engines), rng=random.Random(0), ticket_prefix="t")
    first = decided(core, "hello " * 2000)
    assert first.assignment.prefill is not None
    own, _ = core.arrive(request(core, "another", model="chat"), 0.0)
    assert isinstance(own, RequestHeld)
    core.on_stream_closed(first.ticket, 1.0)
    (released,) = [one for one in core.tick(1.0) if isinstance(one, Decision)]
    assert released.ticket == own.ticket
