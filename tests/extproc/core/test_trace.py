# SPDX-License-Identifier: Apache-2.0
"""Steps of a sampled request, as data."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.core.core import Core
from extproc.core.effects import AskLimits, AskPromptTokens, Decision, LoadAdapter, RequestHeld, RequestRefused
from extproc.core.request_record import AdapterLoadResult, RequestHead
from extproc.core.request_states import RequestState
from extproc.core.trace import Trace, TraceParent, TraceStep, parse_trace_parent
from extproc.core.trace_attributes import decision_tags, pick_attributes, request_tags
from tests.extproc.core.setting import ACTIVATIONS, GATES, LIMITS, ONE, SERVER, body, prefilled, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.effects import Effect, RequestEffect

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = TraceParent(TRACE, SPAN)


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", PARENT),
        # further flags, and a later version with more behind them
        (f"00-{TRACE}-{SPAN}-03", PARENT),
        (f"01-{TRACE}-{SPAN}-01-more", PARENT),
        (f"00-{TRACE}-{SPAN}-00", None),
        (f"00-{TRACE}-{SPAN}-02", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        ("", None),
    ],
)
def test_the_parent_is_read_if_it_is_sampled(value: str, parent: TraceParent | None) -> None:
    assert parse_trace_parent([("x-request-id", "1"), ("traceparent", value)]) == parent


def test_a_stream_without_a_parent_is_not_sampled() -> None:
    assert parse_trace_parent([("x-attache-bundle", "1")]) is None


def test_each_step_ends_where_the_next_begins() -> None:
    trace = Trace(PARENT, 1.0)
    trace.start_step("parse", 1.0)
    trace.enter_state(RequestState.ASKING_LIMITS, 1.5)
    trace.enter_state(RequestState.AWAITING_ENGINE, 2.0)
    trace.enter_state(RequestState.LOADING, 3.0)
    trace.enter_state(RequestState.QUEUED, 4.5)
    trace.on_refusal("queue_timeout", 6.0)
    assert trace.steps == [
        TraceStep("parse", 1.0, 1.5),
        TraceStep("limits", 1.5, 2.0),
        TraceStep("engine", 2.0, 3.0),
        TraceStep("adapter", 3.0, 4.5),
        TraceStep("queue", 4.5, 6.0),
    ]
    assert (trace.error, trace.ended_s, trace.tags["queue_ms"]) == ("queue_timeout", 6.0, 5000)


def test_a_request_that_never_rests_keeps_a_bounded_number_of_steps() -> None:
    trace = Trace(PARENT, 0.0)
    for second in range(1000):
        trace.enter_state(RequestState.LOADING if second % 2 else RequestState.QUEUED, float(second))
    trace.on_refusal("no_endpoint", 1000.0)
    assert len(trace.steps) == 32


def test_the_core_notes_what_a_request_waits_for() -> None:
    core = Core(snapshot(ONE, gate=GATES[1], limits=LIMITS[2]), rng=random.Random(1), ticket_prefix="t")
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    arrivals = [core.builder.build_by_model(head, body(5, stream=False)) for _ in range(2)]
    first, _ = core.arrive(arrivals[0], 0.0)
    sent, _ = core.resume(first.ticket, None, 0.5)
    assert isinstance(sent, Decision)
    trace = Trace(PARENT, 1.0, request_tags(arrivals[1]))
    own, _ = core.arrive(arrivals[1], 1.0, wants_reasons=True, trace=trace)
    assert isinstance(own, AskLimits)
    held, _ = core.resume(own.ticket, None, 1.5)
    assert isinstance(held, RequestHeld)
    effects = [*core.on_stream_closed(first.ticket, 4.0), *core.tick(4.0)]
    (decision,) = [one for one in effects if isinstance(one, Decision)]
    trace.on_decision(pick_attributes(decision), decision_tags(decision), 4.25)
    assert [(one.name, one.start_s, one.end_s) for one in trace.steps] == [
        ("limits", 1.0, 1.5),
        ("queue", 1.5, 4.0),
        ("pick", 4.0, 4.25),
    ]
    assert trace.steps[-1].attributes["attache.pick.endpoint"] == "10.0.0.1:8000"
    best = trace.steps[-1].attributes["attache.pick.best"]
    assert isinstance(best, tuple)
    assert [one.partition(" ")[0] for one in best] == ["10.0.0.1:8000"]
    assert (trace.tags["name"], trace.tags["queue_ms"]) == ("chat m", 2500)
    assert decision.history.explanation is not None
    assert decision.history.explanation.trace_id == TRACE
    assert "word" not in repr((trace.tags, trace.steps))


def begun(core: Core, *, model: str = "m") -> tuple[RequestEffect, list[Effect], Trace]:
    """A sampled request that arrives at 0."""
    trace = Trace(PARENT, 0.0)
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    own, effects = core.arrive(core.builder.build_by_model(head, body(5, stream=False, model=model)), 0.0, trace=trace)
    return own, effects, trace


def steps_of(trace: Trace, effects: Iterable[Effect | RequestEffect | None], now: float) -> list[TraceStep]:
    """Without the attributes of the pick. The request is sent at ``now``."""
    (decision,) = [one for one in effects if isinstance(one, Decision)]
    trace.on_decision(pick_attributes(decision), decision_tags(decision), now)
    return [TraceStep(one.name, one.start_s, one.end_s) for one in trace.steps]


def test_a_tokenizer_that_is_asked_is_a_step() -> None:
    core = Core(snapshot(ONE), rng=random.Random(1), ticket_prefix="t")
    core.pools[SERVER].caches.set_feed_state(0, is_whole=True)
    own, _, trace = begun(core)
    assert isinstance(own, AskPromptTokens)
    sent, _ = core.resume(own.ticket, list(range(100)), 0.5)
    assert steps_of(trace, [sent], 0.6) == [TraceStep("tokenize", 0.0, 0.5), TraceStep("pick", 0.5, 0.6)]


def test_the_wait_for_a_first_engine_is_a_step() -> None:
    core = Core(snapshot("", activation=ACTIVATIONS[1]), rng=random.Random(1), ticket_prefix="t")
    own, _, trace = begun(core)
    assert isinstance(own, RequestHeld)
    effects = [*core.apply(snapshot(ONE, activation=ACTIVATIONS[1]), 3.0), *core.tick(3.0)]
    assert steps_of(trace, effects, 3.1) == [TraceStep("engine", 0.0, 3.0), TraceStep("pick", 3.0, 3.1)]


def test_the_wait_for_an_engine_that_never_comes_ends_with_the_refusal() -> None:
    core = Core(snapshot("", activation=ACTIVATIONS[1]), rng=random.Random(1), ticket_prefix="t")
    _, _, trace = begun(core)
    (refused,) = [one for one in core.tick(8.5) if isinstance(one, RequestRefused)]
    trace.on_refusal(refused.refusal.outcome, 8.5)
    assert trace.steps == [TraceStep("engine", 0.0, 8.5)]
    assert (trace.error, trace.ended_s) == (refused.refusal.outcome, 8.5)


def test_the_load_of_an_adapter_is_a_step() -> None:
    core = Core(snapshot(ONE), rng=random.Random(1), ticket_prefix="t")
    own, effects, trace = begun(core, model="sql")
    assert isinstance(own, RequestHeld)
    (load,) = [one for one in (*effects, *core.tick(0.0)) if isinstance(one, LoadAdapter)]
    ended = core.on_work_result(AdapterLoadResult(load.server, load.address, load.adapter), 2.0)
    assert steps_of(trace, [*ended, *core.tick(2.0)], 2.1) == [
        TraceStep("adapter", 0.0, 2.0),
        TraceStep("pick", 2.0, 2.1),
    ]


def test_a_prefill_elsewhere_is_a_step_after_the_pick_and_before_that_of_its_engine() -> None:
    core = Core(snapshot(ONE, pairs="Fail"), rng=random.Random(1), ticket_prefix="t")
    own, _, trace = begun(core)
    assert isinstance(own, RequestHeld)
    effects = core.on_work_result(prefilled(own.ticket, 1.5), 1.5)
    found = steps_of(trace, effects, 1.6)
    assert found == [TraceStep("prefill", 0.0, 1.5), TraceStep("pick", 1.5, 1.6)]
    # the pick is explained by the engine that decodes
    assert trace.steps[-1].attributes["attache.pick.endpoint"] == "10.0.0.1:8000"
