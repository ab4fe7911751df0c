# SPDX-License-Identifier: Apache-2.0
"""A request whose prefill has failed goes to a fallback of its rule, where its ModelServer would refuse it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.effects import Broadcast, CancelPrefill, OutcomeJoined, Prefill, RequestHeld
from extproc.core.request_record import Outcome
from extproc.core.request_states import RequestState
from tests.extproc.core.test_prefill_completion import (
    BUDGET,
    PRICED,
    SERVER,
    D,
    E,
    P,
    Pair,
    Scene,
    config,
    decision,
    fields,
    leg,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.effects import Effect

SPARE: Final = "default/spare"
S: Final = "10.0.1.1:8000"
TARGETS: Final = b"targetModels: [{modelServerName: llama}]"


def with_fallback(
    group: str = "onPrefillFailure: Fail",
    *,
    spare: str = f"endpoints: [{{address: {S}}}]",
    fallback: str = "fallback: [{modelServerName: spare}]",
    others: str = "",
    route: str = "",
    engines: Iterable[str] = (D,),
) -> bytes:
    before = config(group, others=others, route=route, engines=engines)
    return (
        before.replace(TARGETS, TARGETS + f", {fallback}".encode())
        + f"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: spare}}
spec: {{model: small, scrapeInterval: 0s, {spare}}}
""".encode()
    )


def in_flight(scene: Scene) -> dict[str, int]:
    """By address, as the pools count them and as autoscalers see them."""
    tables = [pool.table for pool in scene.core.pools.values()]
    found = {table.addresses[row]: int(table.in_flight[row]) for table in tables for row in table.active_rows}
    counted = {address: count for address, count in found.items() if count}
    servers = scene.core.meter.process_demand(scene.core.pools, 0.0).servers.values()
    assert counted == {
        name: one.in_flight for server in servers for name, one in server.engines.items() if one.in_flight
    }
    return counted


def refund(effects: Iterable[Effect]) -> list[OutcomeJoined]:
    return [one for one in effects if isinstance(one, OutcomeJoined)]


@pytest.mark.parametrize("failure", ["unreachable", "timeout", "not_asked"])
def test_the_fallback_answers(failure: str) -> None:
    scene = Scene(with_fallback())
    _, asked, _ = scene.arrive(max_tokens=20)
    effects = scene.answer(asked.ticket, 0.5, failure=failure)
    found = decision(effects)
    assert (found.server, found.history.fell_back_for) == (SPARE, "prefill")
    assert found.assignment.addresses == (S,)
    assert (found.history.leg, found.prefill_address, found.is_leased) == (None, "", False)
    assert (fields(found.body)["model"], fields(found.body)["max_tokens"]) == ("small", 20)
    assert "kv_transfer_params" not in fields(found.body)
    assert leg(effects).goes_on
    assert in_flight(scene) == {S: 1}
    (settled,) = refund(scene.core.on_outcome(Outcome(found.ticket, 200, S, 2.0, 1.0, 410, 6, 0), 2.0))
    assert settled.server == SPARE
    scene.core.on_stream_closed(found.ticket, 2.0)
    assert in_flight(scene) == {}
    assert not scene.core.records()


def test_so_it_does_if_no_decode_engine_is_left() -> None:
    scene = Scene(with_fallback("onPrefillFailure: Local"))
    _, asked, _ = scene.arrive()
    scene.core.apply(load_snapshot({"a.yaml": with_fallback(engines=())}), 0.1)
    assert decision(scene.answer(asked.ticket, 0.5)).server == SPARE
    assert in_flight(scene) == {S: 1}


def test_a_failure_after_which_the_decode_engine_computes_needs_no_fallback() -> None:
    scene = Scene(with_fallback("onPrefillFailure: Local"))
    _, asked, _ = scene.arrive()
    assert decision(scene.answer(asked.ticket, 0.5, failure="timeout")).server == SERVER


def test_what_the_prefill_engine_refuses_is_the_clients_and_not_asked_elsewhere() -> None:
    scene = Scene(with_fallback())
    _, asked, _ = scene.arrive()
    assert refusal(scene.answer(asked.ticket, 0.5, status=400, body=b"no")).status == 400
    assert in_flight(scene) == {}


def test_beyond_the_budget_of_the_fallback_its_client_gets_503() -> None:
    scene = Scene(with_fallback(fallback="fallback: [{modelServerName: spare}], retry: {minConcurrency: 1}"))
    _, first, _ = scene.arrive()
    _, second, _ = scene.arrive(0.1)
    assert decision(scene.answer(first.ticket, 0.5, failure="unreachable")).server == SPARE
    assert refusal(scene.answer(second.ticket, 0.5, failure="unreachable")).code == "prefill_failed"
    assert in_flight(scene) == {S: 1}


def test_without_a_fallback_that_can_have_it_its_client_gets_503() -> None:
    scene = Scene(with_fallback(spare="endpoints: []"))
    _, asked, _ = scene.arrive()
    effects = scene.answer(asked.ticket, 0.5, failure="unreachable")
    assert refusal(effects).code == "prefill_failed"
    assert not leg(effects).goes_on
    assert in_flight(scene) == {}


def test_a_fallback_that_has_no_room_at_once_does_not_hold_it_any_longer() -> None:
    queue = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}"
    scene = Scene(with_fallback(spare=f"endpoints: [{{address: {S}}}], {queue}"))
    _, first, _ = scene.arrive()
    _, second, _ = scene.arrive(0.1)
    assert decision(scene.answer(first.ticket, 0.5, failure="unreachable")).server == SPARE
    assert refusal(scene.answer(second.ticket, 0.5, failure="unreachable")).code == "prefill_failed"
    assert in_flight(scene) == {S: 1}


def test_it_is_charged_once_and_by_the_price_of_who_serves_it() -> None:
    spare = f"endpoints: [{{address: {S}}}], pricing: [{{perMillion: {{input: 3, output: 30}}}}]"
    scene = Scene(with_fallback(spare=spare, others=PRICED, route=BUDGET))
    scene.core.align_with_wall_clock(1_000_000.0, 0.0)
    _, asked, _ = scene.arrive(1.0, max_tokens=500)
    reserved = scene.spent()
    found = decision(scene.answer(asked.ticket, 1.5, failure="unreachable"))
    assert scene.spent() == reserved
    outcome = Outcome(found.ticket, 200, S, 2.0, 1.0, 410, 6, 0)
    (settled,) = refund(scene.core.on_outcome(outcome, 3.0))
    assert scene.spent() == {"input_tokens": 410, "output_tokens": 6, "requests": 1}
    assert settled.used.cost_micros == 3 * 410 + 30 * 6
    assert not refund(scene.core.on_outcome(outcome, 3.1))


def test_the_queue_goes_on_as_if_it_had_never_come() -> None:
    control = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}"
    scene = Scene(with_fallback(others=control))
    _, asked, _ = scene.arrive()
    waiting, _ = scene.enter(0.1)
    assert isinstance(waiting, RequestHeld)
    assert waiting.state is RequestState.QUEUED
    assert decision(scene.answer(asked.ticket, 0.5, failure="not_asked")).server == SPARE
    (second,) = [one for one in scene.core.tick(0.5) if isinstance(one, Prefill)]
    assert second.ticket == waiting.ticket
    assert [scene.load(one)[0] for one in (P, D)] == [1, 1]


@pytest.mark.parametrize("end", ["disconnect", "closed"])
def test_a_client_that_leaves_then_leaves_nothing(end: str) -> None:
    scene = Scene(with_fallback())
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5, failure="unreachable")
    verb = scene.core.on_disconnect if end == "disconnect" else scene.core.on_stream_closed
    assert not [one for one in verb(asked.ticket, 1.0) if isinstance(one, CancelPrefill)]
    scene.core.on_outcome(Outcome(asked.ticket, 0, S, 2.0, None, None, None, None, has_left=True), 2.0)
    assert in_flight(scene) == {}
    assert not scene.core.records()


def test_a_prefill_engine_of_the_fallback_may_compute_the_prompt() -> None:
    labels = [{"address": S, "labels": {"role": "prefill"}}, {"address": E, "labels": {"role": "decode"}}]
    group = "prefillLabels: {role: prefill}, decodeLabels: {role: decode}, decideBy: UncachedTokens, leg: Gateway"
    spare = f"pdGroup: {{{group}, minUncachedTokens: 100, connector: NixlConnector}}, endpoints: {json.dumps(labels)}"
    scene = Scene(with_fallback(spare=spare))
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5, failure="unreachable")
    assert scene.core.state_of(asked.ticket) is RequestState.PREFILLING
    found = decision(scene.answer(asked.ticket, 1.0))
    assert (found.server, found.prefill_address) == (SPARE, S)
    assert in_flight(scene) == {E: 1}
    scene.core.on_stream_closed(asked.ticket, 2.0)
    assert in_flight(scene) == {}


def test_the_other_processes_count_it_where_it_is_and_blame_nobody_else() -> None:
    pair = Pair(with_fallback())
    _, asked, effects = pair.one.arrive()
    pair.tell(effects, 0.0)
    effects = pair.one.answer(asked.ticket, 0.5, failure="unreachable")
    pair.tell(effects, 0.5)
    assert in_flight(pair.one) == {S: 1}
    spare, llama = (pair.other.core.pools[one].table for one in (SPARE, SERVER))
    assert (int(spare.in_flight.sum()), int(llama.in_flight.sum())) == (1, 0)
    found = Outcome(asked.ticket, 200, S, 2.0, 1.0, 410, 6, 0, served_by=SPARE, attempts=1)
    # whichever process gets the entry of the access log
    told = pair.other.core.on_outcome(found, 2.0)
    assert [one.server for one in refund(told)] == [SPARE]
    row = llama.row_of(D)
    assert row is not None
    assert (llama.healths[row].failed, int(llama.trips[row])) == (0, 0)
    assert any(isinstance(one, Broadcast) for one in told)
    pair.tell(pair.one.core.on_stream_closed(asked.ticket, 2.0), 2.0)
    assert int(spare.in_flight.sum()) == 0
    assert not pair.other.core.records()


def test_the_engines_of_the_pair_may_be_probed_by_the_next_request() -> None:
    """What the request had passed their breakers with is given back: it was never at the decode engine."""
    scene = Scene(with_fallback())
    row = scene.table.row_of(D)
    assert row is not None
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5, failure="unreachable")
    assert scene.table.breakers[row].trips == 0
    health = scene.table.healths[row]
    assert (health.answers, health.failed) == (0, 0)
    prefill = scene.table.row_of(P)
    assert scene.table.trips[prefill] == 1
