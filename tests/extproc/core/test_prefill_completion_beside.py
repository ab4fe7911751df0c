# SPDX-License-Identifier: Apache-2.0
"""The life of a request that two engines of SGLang have at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from msgspec.structs import replace

from extproc.api.config_loader import load_snapshot
from extproc.core.effects import (
    AbortDecode,
    CancelPrefill,
    Decision,
    OutcomeJoined,
    Prefill,
    PrefillEnded,
    RequestHeld,
)
from extproc.core.peer_events import EventBatch, RequestStarted
from extproc.core.request_record import Outcome
from extproc.core.request_states import RequestState
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import BadRequest
from extproc.streams.messages import ProcessingResponse
from extproc.streams.processing_responses import decision_answer, duplex_decision_answer
from tests.extproc.core.setting import told
from tests.extproc.core.test_prefill_completion import (
    FAILURES,
    SERVER,
    D,
    E,
    P,
    Pair,
    Q,
    Scene,
    config,
    fields,
    in_flight,
    leg,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.effects import Effect

OK: Final = {"body": b'{"choices": [], "usage": {"prompt_tokens": 410}}'}
BEFORE: Final = {name: FAILURES[name] for name in ("error", "overloaded", "unreachable", "timeout", "unreadable")}


def sglang(group: str = "", *, engines: Iterable[str] = (D,), prefill: Iterable[str] = (P,), others: str = "") -> bytes:
    others = f"engine: SGLang\n  {others}"
    return config(group, connector="bootstrap_room", engines=engines, prefill=prefill, others=others)


def arrive(scene: Scene, now: float = 0.0, **body: object) -> tuple[Decision, Prefill, list[Effect]]:
    own, effects = scene.enter(now, **body)
    assert isinstance(own, Decision)
    (asked,) = [one for one in effects if isinstance(one, Prefill)]
    return own, asked, effects


def aborted(effects: Iterable[Effect]) -> AbortDecode:
    (found,) = [one for one in effects if isinstance(one, AbortDecode)]
    return found


def test_both_engines_have_the_request_at_once_and_count_it() -> None:
    scene = Scene(sglang("transferPort: 9001", engines=(D, E)))
    found, asked, _ = arrive(scene, stream=True, max_tokens=70)
    assert scene.core.state_of(found.ticket) is RequestState.RUNNING
    assert (asked.address, asked.path, asked.timeout_s, asked.is_beside) == (P, "/v1/chat/completions", 60.0, True)
    told, sent = fields(asked.body), fields(found.body)
    assert (told["stream"], told["max_tokens"], told["model"]) == (False, 70, "llama")
    assert (sent["stream"], sent["max_tokens"], sent["model"]) == (True, 70, "llama")
    assert sent["stream_options"] == {"include_usage": True}
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"):
        assert told[name] == sent[name]
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("10.0.0.1", 9001)
    assert (found.history.waits, found.history.was_held, found.prefill_address) == ({}, False, P)
    assert found.history.leg is not None
    assert (found.history.leg.outcome, found.history.leg.address) == ("beside", P)
    # the prefill engine meets the first one alone
    (decode,) = found.assignment.addresses
    assert scene.load(P)[0] == scene.load(decode)[0] == 1
    assert scene.load(P)[1] > scene.load(decode)[1] == 0
    effects = scene.answer(asked.ticket, 0.5, **OK)
    assert (leg(effects).leg.outcome, leg(effects).leg.took_s, leg(effects).goes_on) == ("prefilled", 0.5, True)
    assert not [one for one in effects if isinstance(one, Decision | AbortDecode)]
    assert scene.load(P) == (0, 0.0)
    assert scene.load(decode) == (1, 0.0)
    assert not [one for one in scene.core.on_stream_closed(found.ticket, 2.0) if isinstance(one, CancelPrefill)]
    (settled,) = [
        one
        for one in scene.core.on_outcome(Outcome(found.ticket, 200, decode, 2.0, 0.5, 410, 6, 400), 2.0)
        if isinstance(one, OutcomeJoined)
    ]
    assert settled.leg == leg(effects).leg
    assert settled.waited_s == 0
    assert scene.is_free
    assert not scene.core.records()


def test_a_decode_engine_that_answers_has_decoded_a_prefill_though_it_reports_no_cached_tokens() -> None:
    scene, metrics = Scene(sglang()), Metrics(list, lambda: 0.0, lambda: 0.0)
    found, asked, _ = arrive(scene)
    scene.answer(asked.ticket, 0.5, **OK)
    for one in scene.core.on_outcome(Outcome(found.ticket, 200, D, 2.0, 0.5, 410, 6, 0), 2.0):
        metrics.count_effect(one)
    labels = {"server": SERVER, "outcome": "decoded"}
    assert metrics.registry.get_sample_value("attache_prefilled_answers_total", labels) == 1


def test_autoscalers_see_a_request_at_both_engines_until_its_prefill_has_ended() -> None:
    scene = Scene(sglang())
    found, asked, _ = arrive(scene)
    assert in_flight(scene) == {P: 1, D: 1}
    scene.answer(asked.ticket, 0.5, **OK)
    assert in_flight(scene) == {D: 1}
    scene.core.on_stream_closed(found.ticket, 1.0)
    assert in_flight(scene) == {}


def test_envoy_tries_no_other_engine_and_no_sidecar_is_asked() -> None:
    found, _, _ = arrive(Scene(sglang(engines=(D, E))))
    for answer in (
        ProcessingResponse.FromString(decision_answer(found)).request_body,
        ProcessingResponse.FromString(duplex_decision_answer(found)).request_headers,
    ):
        sent = {one.header.key: one.header.raw_value for one in answer.response.header_mutation.set_headers}
        assert sent["x-envoy-max-retries"] == b"0"
        assert "x-prefiller-host-port" not in sent


@pytest.mark.parametrize("name", BEFORE)
def test_a_prefill_that_fails_has_the_decode_engine_end_the_request(name: str) -> None:
    # a second one would not help: the decode engine meets the first one
    scene = Scene(sglang(prefill=(P, Q)))
    found, asked, _ = arrive(scene)
    effects = scene.answer(asked.ticket, 0.5, **BEFORE[name])
    assert leg(effects).leg.outcome == {"overloaded": "error"}.get(name, name)
    assert not leg(effects).goes_on
    call = aborted(effects)
    assert (call.ticket, call.server, call.address) == (found.ticket, SERVER, D)
    assert [fields(one)["rid"] for one in call.bodies] == [fields(found.body)["rid"]]
    assert not [one for one in effects if isinstance(one, Prefill)]
    assert scene.load(asked.address) == (0, 0.0)
    assert scene.load(D) == (1, 0.0)
    # it is asked until the request is over
    assert CancelPrefill(found.ticket) in scene.core.on_stream_closed(found.ticket, 1.0)
    # what it answers then is not its fault
    for _ in range(20):
        scene.core.on_outcome(Outcome(found.ticket, 500, D, 1.0, 1.0, None, None, None), 1.0)
    row = scene.table.row_of(D)
    assert (scene.table.trips[row], scene.table.retry_at_s[row]) == (0, 0)
    assert scene.is_free
    assert not scene.core.records()


def test_a_prefill_engine_that_fails_is_avoided() -> None:
    scene = Scene(sglang(prefill=(P, Q)))
    _, first, _ = arrive(scene)
    scene.answer(first.ticket, 0.1, failure="unreachable")
    row = scene.table.row_of(first.address)
    assert scene.table.retry_at_s[row] > 0.1
    _, second, _ = arrive(scene, 0.2)
    assert {first.address, second.address} == {P, Q}


def test_what_the_prefill_engine_refuses_ends_the_request_too() -> None:
    scene = Scene(sglang())
    _, asked, _ = arrive(scene)
    effects = scene.answer(asked.ticket, 0.1, status=400, body=b'{"message": "too long"}')
    assert (leg(effects).leg.outcome, leg(effects).leg.detail) == ("refused", "too long")
    assert aborted(effects).address == D
    assert not scene.table.trips.any()


def test_our_own_bounds_are_no_fault_of_the_engine() -> None:
    scene = Scene(sglang())
    _, asked, _ = arrive(scene)
    effects = scene.answer(asked.ticket, 0.0, failure="not_asked")
    assert leg(effects).leg.outcome == "not_asked"
    assert aborted(effects).address == D
    assert not scene.table.trips.any()


@pytest.mark.parametrize("verb", ["on_disconnect", "on_stream_closed"])
@pytest.mark.parametrize("end", [OK, {"failure": "left"}, {"failure": "unreachable"}])
def test_a_request_that_is_over_gives_its_prefill_a_second(verb: str, end: dict[str, object]) -> None:
    scene = Scene(sglang())
    found, asked, _ = arrive(scene)
    effects = getattr(scene.core, verb)(found.ticket, 0.2)
    assert CancelPrefill(found.ticket, after_s=1.0) in effects
    assert not [one for one in effects if isinstance(one, PrefillEnded)]
    assert scene.is_free
    effects = scene.answer(asked.ticket, 0.3, **end)
    assert leg(effects).leg.outcome == end.get("failure", "prefilled")
    # nobody waits for it at the decode engine
    assert not [one for one in effects if isinstance(one, AbortDecode)]
    assert scene.is_free
    assert not scene.core._dispatcher.beside
    # and once
    assert not scene.answer(asked.ticket, 0.4, **end)


def test_an_outcome_may_come_before_the_prefill_has_ended() -> None:
    scene = Scene(sglang())
    found, asked, _ = arrive(scene, stream=True)
    scene.core.on_outcome(Outcome(found.ticket, 400, D, 0.1, 0.1, None, None, None), 0.1)
    effects = scene.answer(asked.ticket, 0.2, status=400)
    # the decode engine has answered
    assert not [one for one in effects if isinstance(one, AbortDecode)]
    assert not [one for one in scene.core.on_stream_closed(found.ticket, 0.3) if isinstance(one, CancelPrefill)]
    assert scene.is_free
    assert not scene.core.records()


def test_a_prefill_that_ends_late_leaves_another_process_its_request_of_that_ticket() -> None:
    pair = Pair(sglang())
    found, asked, effects = arrive(pair.one)
    pair.one.core.on_stream_closed(found.ticket, 0.2)
    pair.one.core.on_outcome(Outcome(found.ticket, 200, D, 0.1, 0.1, None, None, None), 0.2)
    assert pair.one.is_free
    _, _, started = arrive(pair.other, 0.3)
    # of a process that made the same ticket
    events = [replace(one, ticket=found.ticket) for one in told(started) if isinstance(one, RequestStarted)]
    pair.one.core.apply_peer_batch(EventBatch("b", events), 0.3)
    effects = pair.one.answer(asked.ticket, 0.4, failure="timeout")
    assert leg(effects).leg.outcome == "timeout"
    assert not [one for one in effects if isinstance(one, AbortDecode)]
    assert pair.one.core.state_of(found.ticket) is RequestState.RUNNING


def test_what_is_learned_of_the_prefill_engine_is_its_own_time() -> None:
    scene = Scene(sglang())
    found, asked, _ = arrive(scene, stream=True)
    prefill, decode = scene.table.row_of(P), scene.table.row_of(D)
    rates = scene.table.prefill_rate.copy()
    scene.answer(asked.ticket, 0.5, **OK)
    assert scene.table.prefill_rate[prefill] != rates[prefill]
    rates = scene.table.prefill_rate.copy()
    scene.core.on_outcome(Outcome(found.ticket, 200, D, 2.0, 0.75, 410, 6, 400), 2.0)
    assert scene.table.tpot_s[decode] == pytest.approx(0.25)
    assert (scene.table.prefill_rate == rates).all()
    transfers = scene.core.pools[SERVER].transfers
    assert transfers is not None
    # it cannot be told from the prefill
    assert not transfers.has_factors


def test_it_waits_for_its_turn_and_not_for_its_prefill() -> None:
    control = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}"
    scene = Scene(sglang(others=control))
    first, asked, _ = arrive(scene)
    waiting, _ = scene.enter(0.1)
    assert isinstance(waiting, RequestHeld)
    scene.answer(asked.ticket, 0.2, **OK)
    assert scene.core.state_of(waiting.ticket) is RequestState.QUEUED
    scene.core.on_stream_closed(first.ticket, 0.5)
    effects = scene.core.tick(0.5)
    (second,) = [one for one in effects if isinstance(one, Decision)]
    assert second.ticket == waiting.ticket
    assert second.history.waits == {RequestState.QUEUED: pytest.approx(0.4)}
    (asked,) = [one for one in effects if isinstance(one, Prefill)]
    # all of its time, however long it has waited
    assert asked.timeout_s == 60


def test_what_one_engine_must_serve_is_refused_as_none_can() -> None:
    own, _ = Scene(sglang()).enter(n=2)
    assert isinstance(refusal([own]), BadRequest)
    assert "several answers" in str(refusal([own]))


def test_a_prefill_that_cannot_be_freed_leaves_the_request_running(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(sglang())
    _, asked, _ = arrive(scene)
    with monkeypatch.context() as patch:
        patch.setattr(scene.core.pools[SERVER], "end_prefill", None)
        effects = scene.answer(asked.ticket, 0.5, **OK)
    assert leg(effects).leg.outcome == "prefilled"
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


@pytest.mark.parametrize("end", [OK, {"failure": "timeout"}])
def test_the_other_processes_count_both_engines_as_this_one_does(end: dict[str, object]) -> None:
    pair = Pair(sglang(prefill=(P, Q)))
    found, asked, effects = arrive(pair.one, stream=True)
    pair.tell(effects, 0.0)
    for address in (P, Q, D):
        assert pair.one.load(address) == pair.other.load(address)
    pair.tell(pair.one.answer(asked.ticket, 0.5, **end), 0.5)
    assert pair.other.load(asked.address) == (0, 0.0)
    status = 500 if end.get("failure") else 200
    pair.tell(pair.one.core.on_outcome(Outcome(found.ticket, status, D, 2.0, 0.75, 410, 6, 400), 2.0), 2.0)
    pair.tell(pair.one.core.on_stream_closed(found.ticket, 2.0), 2.0)
    for column in ("ttft_s", "tpot_s", "prefill_rate", "trips", "retry_at_s"):
        assert getattr(pair.one.table, column).tolist() == getattr(pair.other.table, column).tolist(), column
    assert pair.one.is_free
    assert pair.other.is_free


def test_a_server_may_leave_the_configuration_meanwhile() -> None:
    scene = Scene(sglang())
    found, asked, _ = arrive(scene)
    scene.core.apply(load_snapshot({"a.yaml": sglang().replace(b"llama", b"other")}), 0.1)
    assert aborted(scene.answer(asked.ticket, 0.2, status=500)).address == D
    scene.core.on_stream_closed(found.ticket, 0.3)
    assert scene.is_free


def test_legs_beside_are_counted_until_they_end() -> None:
    scene = Scene(sglang())
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0)

    def value(effects: Iterable[Effect], name: str, **labels: str) -> float | None:
        for one in effects:
            metrics.count_effect(one)
        return metrics.registry.get_sample_value(name, {"server": SERVER, **labels})

    found, asked, effects = arrive(scene)
    assert value(effects, "attache_prefill_legs_in_flight") == 1
    assert value(scene.core.on_stream_closed(found.ticket, 0.1), "attache_prefill_legs_in_flight") == 1
    assert value(scene.answer(asked.ticket, 0.2, failure="left"), "attache_prefill_legs_in_flight") == 0
    assert value([], "attache_prefill_legs_total", outcome="left") == 1
