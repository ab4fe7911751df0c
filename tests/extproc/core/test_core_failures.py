# SPDX-License-Identifier: Apache-2.0
"""What goes wrong half-way: our mistakes, plugins', a configuration that changes. Nothing may be left behind."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace

from extproc.admission.local_limits import LocalLimits
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import (
    AskLimits,
    Decision,
    Effect,
    Fault,
    OutcomeJoined,
    RequestHeld,
    RequestRefused,
    SettleGrant,
    WakeAt,
)
from extproc.core.request_record import Outcome, RequestHead
from extproc.core.request_states import RequestState
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.refusals import BadRequest, InternalError, NoEndpoint
from extproc.scheduling.registry import PluginType
from tests.extproc.conftest import in_some_state

if TYPE_CHECKING:
    from extproc.core.effects import RequestEffect

SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [{address: "10.0.0.1:8000"}]
"""
FLOW_CONTROL = "  flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 2}}\n"
ROUTE = """
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: m
  rules: [{targetModels: [{modelServerName: llama}]}]
"""
LIMITED = ROUTE + "  rateLimits: [{unit: hour, requests: 10, outputTokens: 1000}]\n"
LIMITED_EVERYWHERE = ROUTE + "  rateLimits: [{unit: hour, requests: 10}, {unit: hour, requests: 10, scope: Global}]\n"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)


def core_of(text: str) -> Core:
    return Core(load_snapshot({"all.yaml": text.encode()}), rng=random.Random(0), ticket_prefix="t")


def arrive(core: Core, text: str = "hi", **fields: object) -> tuple[RequestEffect, list[Effect]]:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()
    return core.arrive(core.builder.build_by_model(HEAD, body), 0.0)


def levels(core: Core) -> list[float]:
    return [round(one.level) for one in core.admission.limits._buckets.values()]


class BrokenPicker:
    """Raises at every pick whose prompt is long; else picks as ``inner`` does."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def pick(self, view: object, *, rng: random.Random) -> object:
        if view.request.input_tokens > 100:  # type: ignore[attr-defined]
            raise ZeroDivisionError("a plugin's mistake")
        return self.inner.pick(view, rng=rng)  # type: ignore[attr-defined]


@pytest.mark.parametrize("flow_control", ["", FLOW_CONTROL])
def test_a_mistake_of_ours_leaves_no_record_no_load_and_no_grant(flow_control: str) -> None:
    core = core_of(SERVER + flow_control + LIMITED)
    pool = core.pools["default/llama"]
    pool.picker = BrokenPicker(pool.picker)  # type: ignore[assignment]
    own, _ = arrive(core, "long " * 200)

    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, InternalError)
    assert isinstance(own.refusal.__cause__, ZeroDivisionError)
    assert in_some_state(core) == 0
    assert pool.table.in_flight.sum() == 0
    assert levels(core) == [10, 1000]


class Raises(msgspec.Struct, frozen=True):
    """A plugin of another package; it fails wherever it is asked."""

    profile_name: str = ""

    def score(self, *_: object) -> object:
        raise ZeroDivisionError("a plugin's mistake")

    note = admit = score


@pytest.mark.parametrize("flow_control", ["", FLOW_CONTROL])
def test_a_request_goes_without_the_plugins_that_fail_and_each_is_told(flow_control: str) -> None:
    core = core_of(SERVER + flow_control + LIMITED)
    pool = core.pools["default/llama"]
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: scores}, {type: admits}]\n"
    known = {
        **BUILT_IN,
        "scores": PluginType("scorer", Raises, is_external=True),
        "admits": PluginType("admitter", Raises, is_external=True),
    }
    pool.update(pool.spec, picker_from_text("epp.yaml", text, known).picker)
    own, effects = arrive(core)

    assert isinstance(own, Decision)
    assert own.assignment.addresses == ("10.0.0.1:8000",)
    faults = [one for one in effects if isinstance(one, Fault)]
    # each at one place, though what their sessions keep fails, too
    assert [(one.server, one.plugin) for one in faults] == [("default/llama", "admits"), ("default/llama", "scores")]
    assert all(isinstance(one.error, ZeroDivisionError) for one in faults)
    assert core.explain(core.builder.build_by_model(HEAD, BODY), 0.0).failed.keys() == {"admits", "scores"}
    core.on_stream_closed(own.ticket, 1.0)
    core.on_outcome(replace(OUTCOME, ticket=own.ticket), 1.0)
    assert in_some_state(core) == 0
    assert pool.table.in_flight.sum() == 0


def test_a_failure_before_the_pick_gives_back_what_was_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(SERVER + FLOW_CONTROL + LIMITED_EVERYWHERE)
    own, _ = arrive(core)
    assert isinstance(own, AskLimits)
    grant = LocalLimits().reserve(own.charges, 0.0)

    def fail(*_: object, **__: object) -> None:
        raise OverflowError

    monkeypatch.setattr(core.admission, "queue_entry", fail)
    refused, _ = core.resume(own.ticket, grant, 0.0)

    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.refusal, InternalError)
    assert in_some_state(core) == 0
    assert 10 in levels(core)


def test_a_held_request_whose_pick_fails_is_refused_and_those_behind_it_go() -> None:
    core = core_of(SERVER + FLOW_CONTROL + ROUTE)
    pool = core.pools["default/llama"]
    running = [arrive(core, f"{number}")[0].ticket for number in range(2)]
    broken, fine = arrive(core, "long " * 200)[0], arrive(core, "short")[0]
    assert isinstance(broken, RequestHeld)
    pool.picker = BrokenPicker(pool.picker)  # type: ignore[assignment]
    for ticket in running:
        core.on_stream_closed(ticket, 1.0)
    effects = core.tick(1.0)

    ends = {one.ticket: type(one) for one in effects if isinstance(one, Decision | RequestRefused)}
    assert ends == {broken.ticket: RequestRefused, fine.ticket: Decision}


def test_a_server_that_goes_while_its_freed_requests_wait_for_their_turn_refuses_each_once() -> None:
    core = core_of(SERVER + FLOW_CONTROL + ROUTE)
    for number in range(2):
        arrive(core, f"{number}")
    held = arrive(core)[0].ticket
    core.apply(load_snapshot({"all.yaml": (SERVER + ROUTE).encode()}), 1.0)
    (refused,) = [one for one in core.apply(load_snapshot({}), 1.0) if isinstance(one, RequestRefused)]

    assert refused.ticket == held
    assert not [one for one in core.tick(1.0) if not isinstance(one, WakeAt)]
    assert core.count_requests(RequestState.QUEUED) == 0


@pytest.mark.parametrize("flow_control", ["", FLOW_CONTROL])
def test_a_request_whose_server_was_replaced_while_it_asked_for_limits_is_refused(flow_control: str) -> None:
    text = SERVER + flow_control + LIMITED_EVERYWHERE
    core = core_of(text)
    own, _ = arrive(core)
    assert isinstance(own, AskLimits)
    grant = LocalLimits().reserve(own.charges, 0.0)
    core.apply(load_snapshot({}), 1.0)
    core.apply(load_snapshot({"all.yaml": text.replace("10.0.0.1", "10.0.0.2").encode()}), 2.0)
    refused, _ = core.resume(own.ticket, grant, 3.0)

    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.refusal, NoEndpoint)
    assert in_some_state(core) == 0
    assert 10 in levels(core)


def test_a_global_grant_of_a_request_that_is_not_served_any_more_goes_back_to_its_store() -> None:
    core = core_of(SERVER + LIMITED_EVERYWHERE)
    own, _ = arrive(core)
    assert isinstance(own, AskLimits)
    grant = replace(LocalLimits().reserve(own.charges, 0.0), is_global=True)
    core.apply(load_snapshot({}), 1.0)
    _, effects = core.resume(own.ticket, grant, 1.0)

    assert [one.grant for one in effects if isinstance(one, SettleGrant)] == [grant]


def test_a_negative_output_limit_neither_fills_nor_drains_a_bucket() -> None:
    core = core_of(SERVER + LIMITED)
    arrive(core)
    before = levels(core)
    with pytest.raises(BadRequest, match="max_tokens"):
        arrive(core, max_tokens=-1_000_000_000)

    assert levels(core) == before
    assert core.pools["default/llama"].table.in_flight.sum() == 1


def test_what_runs_keeps_neither_the_body_nor_the_tokens_of_its_prompt() -> None:
    core = core_of(SERVER.replace("  endpoints", "  kvEvents: {port: 5557}\n  endpoints") + LIMITED_EVERYWHERE)
    core.pools["default/llama"].caches.partial_feeds = 1
    own, _ = arrive(core)
    own, _ = core.resume(own.ticket, LocalLimits().reserve(own.charges, 0.0), 0.0)  # type: ignore[union-attr]
    own, _ = core.resume(own.ticket, list(range(10_000)), 0.0)  # type: ignore[union-attr]
    assert isinstance(own, Decision)

    record = core._records[own.ticket]
    assert (record.arrival, record.tokens) == (None, None)


OUTCOME = Outcome("", 200, "10.0.0.1:8000", 1.0, 0.5, 30, 20, 0)


@pytest.mark.parametrize("function", ["record_endpoint_outcome", "update_estimates"])
def test_an_outcome_that_cannot_be_learned_from_is_settled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    core = core_of(SERVER + FLOW_CONTROL + LIMITED)
    own, _ = arrive(core, max_tokens=100)
    assert levels(core) == [9, 900]
    core.on_stream_closed(own.ticket, 0.0)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"extproc.core.running_requests.{function}", fail)
    effects = core.on_outcome(replace(OUTCOME, ticket=own.ticket), 0.0)

    assert levels(core) == [9, 980]
    assert in_some_state(core) == 0
    (fault,) = [one for one in effects if isinstance(one, Fault)]
    assert isinstance(fault.error, ZeroDivisionError)
    assert [one.outcome.ticket for one in effects if isinstance(one, OutcomeJoined)] == [own.ticket]


def test_a_queue_that_fails_loses_nothing_that_was_decided_before(monkeypatch: pytest.MonkeyPatch) -> None:
    two = SERVER + FLOW_CONTROL + "---" + (SERVER + FLOW_CONTROL).replace("name: llama", "name: other")
    routes = ROUTE + ROUTE.replace("name: chat", "name: other").replace("modelName: m", "modelName: o").replace(
        "modelServerName: llama", "modelServerName: other"
    )
    core = core_of(two + routes)
    running = [arrive(core, f"{number}", model=model)[0].ticket for number in range(2) for model in "mo"]
    held = {model: [arrive(core, "held", model=model)[0].ticket for _ in range(2)] for model in "mo"}
    gates = core.admission.gates
    gate, serves = gates["default/llama"], gates["default/llama"].pop_next
    for ticket in running:
        core.on_stream_closed(ticket, 1.0)
    calls: list[float] = []

    def fails_second(now: float) -> object:
        calls.append(now)
        if len(calls) == 2:
            raise KeyError("a policy's mistake")
        return serves(now)

    monkeypatch.setattr(gate, "pop_next", fails_second)
    effects = core.tick(1.0)

    # one of the queue that failed, and both of the other, whichever comes first
    decided = [one.ticket for one in effects if isinstance(one, Decision)]
    assert decided == [held["m"][0], *held["o"]]
    assert [one.what for one in effects if isinstance(one, Fault)] == ["the queue of a server could not be served"]
    # it is tried again, but not at once
    assert [one.at_s for one in effects if isinstance(one, WakeAt)] == [2.0]
    assert [one.ticket for one in core.tick(2.0) if isinstance(one, Decision)] == [held["m"][1]]
