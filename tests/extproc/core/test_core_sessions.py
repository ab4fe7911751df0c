# SPDX-License-Identifier: Apache-2.0
"""Requests of a session stay on one endpoint: by a token that answers carry, or by an id that the client names."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.session_affinity import session_token_headers
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision
from extproc.core.peer_events import EventBatch, RequestStarted
from extproc.core.request_record import GatewayProperties, RequestHead
from extproc.llmd.picker_builder import PickerFactory
from extproc.scheduling.sessions import SessionBindings, TenantSessions, session_token
from tests.extproc.breakers import trip
from tests.extproc.conftest import CONFIG

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

BODY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()
SERVER = CONFIG.replace(b"model: llama-3.1-8b", b"model: llama-3.1-8b\n  pickerConfig: epp.yaml")
TOKENS = """
- type: session-affinity-filter
- type: random-picker
"""
IDS = """
- type: session-affinity-scorer
  parameters:
    strategy: session_id
    sessionIdConfig: {sources: [{header: X-Session-Id}, {attribute: agent-identity}], evictionTtlSeconds: 60}
- type: max-score-picker
"""


def snapshot_of(plugins: str, config: bytes = SERVER) -> Snapshot:
    epp = f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:{plugins}"
    return load_snapshot({"all.yaml": config, "epp.yaml": epp.encode()})


def core_of(plugins: str, *, seed: int = 0, machine: str | None = None) -> Core:
    return Core(
        snapshot_of(plugins),
        rng=random.Random(seed),
        ticket_prefix=f"t{seed}",
        make_picker=PickerFactory(),
        machine=machine,
    )


def sent(core: Core, now: float = 0.0, *, is_trusted: bool = False, **headers: str) -> Decision:
    """Of a request that has ended at once."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    head = RequestHead("POST", "/v1/chat/completions", named, has_body=True, is_trusted=is_trusted)
    own, _ = core.arrive(core.builder.build_by_model(head, BODY), now)
    assert isinstance(own, Decision)
    core.on_disconnect(own.ticket, now)
    return own


def where(core: Core, now: float = 0.0, *, is_trusted: bool = False, **headers: str) -> str:
    return sent(core, now, is_trusted=is_trusted, **headers).assignment.endpoint.address


def test_a_token_brings_each_request_back() -> None:
    core = core_of(TOKENS)
    for _ in range(5):
        first = sent(core)
        (note,) = first.assignment.sessions
        assert (note.header, note.address) == ("x-session-token", first.assignment.endpoint.address)
        again = [sent(core, x_session_token=note.token()) for _ in range(8)]
        assert {one.assignment.endpoint.address for one in again} == {note.address}
        assert {one.assignment.sessions for one in again} == {(note,)}


@pytest.mark.parametrize(
    "token",
    [
        session_token("10.9.9.9:22"),
        session_token("169.254.169.254:80"),
        session_token(""),
        session_token("default/engine-0"),
        "not base64!",
        "gICAgA==",  # no text
        "A" * 60_000,
    ],
)
def test_a_token_of_none_of_our_endpoints_counts_as_none(token: str) -> None:
    core = core_of(TOKENS)
    assert {where(core, x_session_token=token) for _ in range(40)} == {f"10.0.0.{n}:8000" for n in (1, 2, 3)}


def test_a_token_of_an_endpoint_that_has_left_counts_as_none() -> None:
    core, token = core_of(TOKENS), session_token("10.0.0.2:8000")
    assert where(core, x_session_token=token) == "10.0.0.2:8000"
    core.apply(snapshot_of(TOKENS, SERVER.replace(b', {address: "10.0.0.2:8000"}', b"")), 1.0)
    assert {where(core, 1.0, x_session_token=token) for _ in range(30)} == {"10.0.0.1:8000", "10.0.0.3:8000"}


def test_a_session_with_an_id_stays_until_it_is_not_used() -> None:
    core = core_of(IDS)
    places = {f"s{n}": where(core, x_session_id=f"s{n}") for n in range(30)}
    assert len(set(places.values())) == 3
    for now in (30.0, 89.0, 148.0):
        assert {name: where(core, now, x_session_id=name) for name in places} == places
    assert {name: where(core, 209.0, x_session_id=name) for name in places} != places
    # nothing is written on answers
    assert not any(note.header for note in sent(core, 210.0, x_session_id="s1").assignment.sessions)


def test_ids_are_read_from_the_first_source_that_has_one() -> None:
    core = core_of(IDS)
    by_agent = {f"a{n}": where(core, x_claude_code_session_id=f"a{n}") for n in range(20)}
    assert {name: where(core, x_session_id=" ", x_claude_code_session_id=name) for name in by_agent} == by_agent
    assert {name: where(core, x_session_id=name, x_claude_code_session_id="other") for name in by_agent} == by_agent
    assert len(core.pools["default/llama"].sessions) == 20
    for _ in range(50):
        where(core)
    assert len(core.pools["default/llama"].sessions) == 20, "no id, no session"


def test_tenants_that_use_the_same_id_have_two_sessions() -> None:
    core = core_of(IDS)
    tenants = [f"tenant-{n}" for n in range(20)]
    places = {name: where(core, is_trusted=True, x_session_id="1", x_attache_tenant=name) for name in tenants}
    assert len(set(places.values())) == 3
    assert {name: where(core, is_trusted=True, x_session_id="1", x_attache_tenant=name) for name in tenants} == places
    # a client that only says so is no tenant
    alone = {where(core, x_session_id="1", x_attache_tenant=name) for name in tenants}
    assert len(alone) == 1


def test_a_session_moves_when_its_endpoint_leaves_or_fails() -> None:
    core = core_of(IDS)
    place = where(core, x_session_id="s")
    table = core.pools["default/llama"].table
    row = table.row_of(place)
    assert row is not None
    trip(table, row, 5.0, times=6)
    moved = where(core, 10.0, x_session_id="s")
    assert moved != place
    assert {where(core, 51.0, x_session_id="s") for _ in range(10)} == {moved}, "it does not go back"


def test_a_session_that_a_scorer_passed_over_keeps_its_endpoint() -> None:
    plugins = IDS + "- type: queue-scorer\nschedulingProfiles:\n- name: default\n  plugins:\n"
    plugins += "  - {pluginRef: session-affinity-scorer, weight: 1}\n  - {pluginRef: queue-scorer, weight: 5}\n"
    plugins += "  - {pluginRef: max-score-picker}\n"
    core = core_of(plugins)
    place = where(core, x_session_id="s")
    table = core.pools["default/llama"].table
    row = table.row_of(place)
    table.waiting[row], table.reported_at_s[:] = 9, 1.0
    assert where(core, 1.0, x_session_id="s") != place
    table.waiting[row] = 0
    assert where(core, 1.0, x_session_id="s") == place


DISAGGREGATED = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: llama-3.1-8b
  scrapeInterval: 0s
  pickerConfig: epp.yaml
  endpoints:
  - {address: "10.0.0.1:8000", labels: {llm-d.ai/role: prefill}}
  - {address: "10.0.0.2:8000", labels: {llm-d.ai/role: prefill}}
  - {address: "10.0.0.3:8000", labels: {llm-d.ai/role: decode}}
  - {address: "10.0.0.4:8000", labels: {llm-d.ai/role: decode}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {modelName: chat, rules: [{targetModels: [{modelServerName: llama}]}]}
"""
PAIR = """
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: random-picker
- {name: stay-decode, type: session-affinity-filter}
- name: stay-prefill
  type: session-affinity-filter
  parameters: {profileName: prefill, encodedEndpointHeaderConfig: {header: X-Session-Token-Prefill}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: stay-prefill}, {pluginRef: random-picker}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: stay-decode}, {pluginRef: random-picker}]}
"""


def test_prefill_and_decode_have_tokens_of_their_own() -> None:
    snapshot = snapshot_of(PAIR, DISAGGREGATED)
    assert session_token_headers(snapshot) == ("x-session-token", "x-session-token-prefill")
    core = Core(snapshot, rng=random.Random(3), ticket_prefix="t", make_picker=PickerFactory())
    seen = set()
    for _ in range(12):
        one = sent(core).assignment
        assert one.prefill is not None
        tokens = {note.header.replace("-", "_"): note.token() for note in one.sessions}
        assert tokens == {
            "x_session_token": session_token(one.endpoint.address),
            "x_session_token_prefill": session_token(one.prefill.address),
        }
        again = sent(core, **tokens).assignment
        assert again.prefill is not None
        assert (again.endpoint.address, again.prefill.address) == (one.endpoint.address, one.prefill.address)
        seen.add((one.endpoint.address, one.prefill.address))
    assert len(seen) > 2


def test_other_processes_learn_where_a_session_is() -> None:
    here, there = core_of(IDS, machine="m"), core_of(IDS, seed=1, machine="m")
    for number in range(20):
        head = RequestHead("POST", "/v1/chat/completions", {"x-session-id": f"s{number}"}, has_body=True)
        own, effects = here.arrive(here.builder.build_by_model(head, BODY), 5.0)
        assert isinstance(own, Decision)
        started = [one.event for one in effects if isinstance(one, Broadcast) and isinstance(one.event, RequestStarted)]
        there.apply_peer_batch(EventBatch("t0", list(started)), 1000.0)
        assert where(there, 1001.0, x_session_id=f"s{number}") == own.assignment.endpoint.address


def test_older_parameters_name_the_header_too() -> None:
    for given in ("header: X-Stay", "headerName: x-stay", "encodedEndpointHeaderConfig: {header: x-stay}"):
        plugins = f"\n- type: session-affinity-scorer\n  parameters: {{{given}}}\n"
        assert session_token_headers(snapshot_of(plugins)) == ("x-stay",)
    assert session_token_headers(snapshot_of(IDS)) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "strategy: cookie",
        "sessionIdConfig: {sources: [{header: a, attribute: b}]}",
        "sessionIdConfig: {sources: [{}]}",
        "sessionIdConfig: {evictionTtlSeconds: -1}",
        "encodedEndpointHeaderConfig: {header: 'a b'}",
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigInvalid):
        core_of(f"\n- type: session-affinity-scorer\n  parameters: {{{wrong}}}\n")


def test_explaining_binds_no_session() -> None:
    core = core_of(IDS)
    head = RequestHead("POST", "/v1/chat/completions", {"x-session-id": "s"}, has_body=True)
    core.explain(core.builder.build_by_model(head, BODY), 0.0)
    assert len(core.pools["default/llama"].sessions) == 0


FIRST, SECOND, THIRD = (f"10.0.0.{number}:8000" for number in (1, 2, 3))
LABELLED = SERVER
for _number, _owner in ((1, "acme"), (2, "acme"), (3, "other")):
    LABELLED = LABELLED.replace(
        f'{{address: "10.0.0.{_number}:8000"}}'.encode(),
        f'{{address: "10.0.0.{_number}:8000", labels: {{owner: {_owner}}}}}'.encode(),
    )
LABELLED_AFTER = """
- type: session-affinity-filter
- {type: by-label, parameters: {label: owner, validValues: [acme]}}
- type: random-picker
"""


def forged(core: Core, address: str, *, subset: tuple[str, ...] | None = None) -> str | None:
    """Where a request goes whose client wrote the token of ``address`` itself; None if it is refused or held."""
    head = RequestHead("POST", "/v1/chat/completions", {"x-session-token": session_token(address)}, has_body=True)
    own, _ = core.arrive(core.builder.build_by_model(head, BODY), 0.0, attachment=GatewayProperties(subset=subset))
    return own.assignment.endpoint.address if isinstance(own, Decision) else None


def test_a_forged_token_leads_to_no_endpoint_that_the_gateway_does_not_allow() -> None:
    core = core_of(TOKENS)
    assert {forged(core, THIRD, subset=(FIRST, SECOND)) for _ in range(20)} == {FIRST, SECOND}


def test_a_forged_token_leads_to_no_endpoint_that_drains() -> None:
    core = core_of(TOKENS)
    leaving = SERVER.replace(f'"{THIRD}"'.encode(), f'"{THIRD}", draining: true'.encode())
    core.apply(snapshot_of(TOKENS, leaving), 0.0)
    assert {forged(core, THIRD) for _ in range(20)} == {FIRST, SECOND}


def test_a_forged_token_leads_to_no_endpoint_that_is_avoided() -> None:
    core = core_of(TOKENS)
    table = core.pools["default/llama"].table
    row = table.row_of(THIRD)
    assert row is not None
    trip(table, row, 5.0, times=6)
    assert {forged(core, THIRD) for _ in range(20)} == {FIRST, SECOND}


def test_a_forged_token_leads_to_no_endpoint_of_another_server() -> None:
    both = (
        SERVER
        + b"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: secret}
spec: {model: other, scrapeInterval: 0s, endpoints: [{address: "10.0.7.7:8000"}]}
"""
    )
    core = Core(snapshot_of(TOKENS, both), rng=random.Random(0), ticket_prefix="t", make_picker=PickerFactory())
    assert {forged(core, "10.0.7.7:8000") for _ in range(40)} == {FIRST, SECOND, THIRD}


def test_a_forged_token_leads_past_no_filter_behind_it() -> None:
    core = Core(
        snapshot_of(LABELLED_AFTER, LABELLED), rng=random.Random(0), ticket_prefix="t", make_picker=PickerFactory()
    )
    assert {forged(core, SECOND) for _ in range(20)} == {SECOND}
    # refused: filters apply in their order, and nothing is left
    assert {forged(core, THIRD) for _ in range(20)} == {None}


def test_a_forged_token_leads_past_no_queue() -> None:
    full = b"model: llama-3.1-8b\n  flowControl:"
    full += b" {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}"
    core = Core(
        snapshot_of(TOKENS, SERVER.replace(b"model: llama-3.1-8b", full)),
        rng=random.Random(0),
        ticket_prefix="t",
        make_picker=PickerFactory(),
    )
    assert forged(core, THIRD) == THIRD
    assert {forged(core, THIRD), forged(core, THIRD)} == {FIRST, SECOND}
    assert forged(core, THIRD) is None


def test_a_tenant_with_many_ids_drops_its_own_sessions_and_nobody_elses() -> None:
    bindings = SessionBindings(most=100)
    many, few = TenantSessions(bindings, "many"), TenantSessions(bindings, "few")
    kept = [few.session_key("", f"s{number}") for number in range(10)]
    for key in kept:
        bindings.bind(key, "10.0.0.1:8000", 0.0, 60.0)
    for number in range(1000):
        bindings.bind(many.session_key("", f"s{number}"), "10.0.0.2:8000", 1.0, 60.0)
    assert len(bindings) == 100
    assert [bindings.address_of(key, 1.0) for key in kept] == ["10.0.0.1:8000"] * 10
    assert bindings.address_of(many.session_key("", "s999"), 1.0) == "10.0.0.2:8000"
    assert bindings.address_of(many.session_key("", "s0"), 1.0) is None
    # and whoever has less than its share gets a place of theirs
    for number in range(10, 30):
        bindings.bind(few.session_key("", f"s{number}"), "10.0.0.1:8000", 2.0, 60.0)
    assert len(bindings) == 100
    assert bindings.address_of(kept[0], 2.0) == "10.0.0.1:8000"


def test_sessions_of_tenants_that_have_gone_are_forgotten() -> None:
    bindings = SessionBindings()
    for number in range(50):
        bindings.bind(TenantSessions(bindings, f"t{number}").session_key("", "s"), "10.0.0.1:8000", 0.0, 60.0)
    for _ in range(50):
        bindings.bind(TenantSessions(bindings, "here").session_key("", "s"), "10.0.0.1:8000", 60.0, 60.0)
    assert len(bindings) == 1
