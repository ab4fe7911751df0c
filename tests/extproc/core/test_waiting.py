# SPDX-License-Identifier: Apache-2.0
"""Requests that are held, let go, given up, moved: as function calls, with the time passed in."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from extproc.api.load import load
from extproc.core.core import Core
from extproc.core.effects import Decision, Effect, Hold, Left, Refused
from extproc.core.record import Head, Outcome
from extproc.core.states import State
from extproc.errors import NoEndpoint, QueueFull, QueueTimeout, RateLimited, Shed
from extproc.protocol import Api

FLOW_CONTROL = """
  flowControl:
    saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}
    timeout: 30s
    noEndpointTimeout: 10s
"""
SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [%s]
%s
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: m
  rules: [{targetModels: [{modelServerName: llama}], priority: %d}]
  rateLimits: [{unit: hour, requests: 10, outputTokens: 1000}]
"""
ONE = '{address: "10.0.0.1:8000"}'


class Scene:
    """A core before one engine that takes one request at a time."""

    def __init__(self, *, flow_control: str = FLOW_CONTROL, endpoints: str = ONE, priority: int = 0) -> None:
        self.priority = priority
        # of the requests' bodies, beyond the usual ones
        self.fields: dict[str, object] = {}
        files = self._files(flow_control, endpoints)
        self.core = Core(load(files), rng=random.Random(0), ticket_prefix="t")

    def _files(self, flow_control: str, endpoints: str) -> dict[str, bytes]:
        return {"all.yaml": (SERVER % (endpoints, flow_control, self.priority)).encode()}

    def apply(self, *, flow_control: str = FLOW_CONTROL, endpoints: str = ONE) -> None:
        self.core.apply(load(self._files(flow_control, endpoints)), 0.0)

    def enter(self, tenant: str = "acme", now: float = 0.0) -> Decision | Hold:
        """Raises what its client would be told."""
        head = Head("POST", "/v1/chat/completions", {"x-attache-tenant": tenant}, has_body=True, is_trusted=True)
        fields = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi " * 200}], **self.fields}
        own, _ = self.core.arrive(self.core.intake.receive(Api.CHAT, head, json.dumps(fields).encode()), now)
        if isinstance(own, Refused):
            raise own.refusal
        assert isinstance(own, Decision | Hold)
        return own

    def held(self, tenant: str = "acme", now: float = 0.0) -> str:
        """Its ticket."""
        found = self.enter(tenant, now)
        assert isinstance(found, Hold)
        return found.ticket

    def sent(self, tenant: str = "acme", now: float = 0.0) -> Decision:
        found = self.enter(tenant, now)
        assert isinstance(found, Decision)
        return found

    def release(self, now: float) -> list[Decision | Refused]:
        return ends(self.core.tick(now))

    def requests_left(self, tenant: str = "acme") -> float:
        buckets = self.core.admission.limits._buckets
        return round(buckets[f"default/chat/0/requests/{tenant}"].level)


def ends(effects: list[Effect]) -> list[Decision | Refused]:
    """The waits that end."""
    return [one for one in effects if isinstance(one, Decision | Refused)]


def outcome(ticket: str, *, completion_tokens: int | None = 7) -> Outcome:
    return Outcome(ticket, 200, "10.0.0.1:8000", 1.0, 0.5, 150, completion_tokens, None)


def test_the_second_request_waits_for_the_first_to_end() -> None:
    scene = Scene()
    first, second = scene.sent(), scene.held()
    assert scene.release(0.5) == []
    scene.core.finish(first.ticket, 1.0)
    (released,) = scene.release(1.0)
    assert isinstance(released, Decision)
    assert released.ticket == second
    assert released.waited_s == 1.0


def test_who_leaves_while_waiting_frees_the_place_and_what_was_granted() -> None:
    scene = Scene()
    first = scene.sent()
    held = scene.held()
    assert scene.requests_left() == 8
    assert isinstance(scene.core.leave(held, 0.5)[0], Left)
    assert scene.requests_left() == 9
    scene.core.finish(first.ticket, 1.0)
    assert scene.release(1.0) == []
    assert not scene.core.count(State.QUEUED)


def test_who_leaves_in_the_moment_of_release_does_not_hold_the_engine() -> None:
    scene = Scene()
    first, held, third = scene.sent(), scene.held(), scene.held()
    scene.core.finish(first.ticket, 1.0)
    (released,) = scene.release(1.0)
    assert released.ticket == held
    scene.core.leave(held, 1.0)
    assert scene.core.state_of(held) is State.ABSENT
    assert scene.requests_left() == 8
    (released,) = scene.release(1.0)
    assert released.ticket == third
    # its flow was charged for nothing that it did not have
    gate = scene.core.admission.gates["default/llama"]
    assert gate.queue.bands[2].flows.running.sum() == 2


def test_who_has_waited_long_enough_is_told_and_gets_back_what_was_granted() -> None:
    scene = Scene()
    scene.sent()
    scene.held(now=1.0)
    assert scene.core.admission.wake_at_s(1.0) is not None
    (released,) = scene.release(31.0)
    assert isinstance(released, Refused)
    assert isinstance(released.refusal, QueueTimeout)
    assert released.refusal.retry_after_s is not None
    assert scene.requests_left() == 9


def test_a_full_queue_refuses_and_gives_back() -> None:
    scene = Scene(flow_control=FLOW_CONTROL + "    maxRequests: 1\n")
    scene.sent()
    scene.held()
    with pytest.raises(QueueFull) as caught:
        scene.enter()
    assert caught.value.retry_after_s is not None
    assert scene.requests_left() == 8


def test_what_was_not_written_comes_back_when_the_outcome_is_known() -> None:
    scene = Scene()
    first = scene.sent()
    output = scene.core.admission.limits._buckets["default/chat/0/output_tokens/acme"]
    assert output.level == 950
    scene.core.finish(first.ticket, 1.0)
    scene.core.settle(outcome(first.ticket), 1.0)
    assert output.level == pytest.approx(993, abs=0.5)


def hung_up(scene: Scene, *, after_s: float, ttfb_s: float | None = 0.5, status: int = 200) -> float:
    """Output tokens that a stream of at most 50 costs whose client hangs up, on an engine that writes 100 a second."""
    first = scene.sent()
    scene.core.pools["default/llama"].table.tpot_s[:] = 0.01
    scene.core.finish(first.ticket, 1.0)
    gone = Outcome(first.ticket, status, "10.0.0.1:8000", after_s, ttfb_s, None, None, None, has_left=status == 200)
    scene.core.settle(gone, 1.0)
    return spent(scene)


def spent(scene: Scene) -> float:
    """Output tokens that the tenant's limit has been charged."""
    return float(1000 - scene.core.admission.limits._buckets["default/chat/0/output_tokens/acme"].level)


def test_who_hangs_up_pays_for_what_was_written_by_then() -> None:
    assert hung_up(Scene(), after_s=0.7) == pytest.approx(20, abs=0.5)
    # and for no more than was asked for
    assert hung_up(Scene(), after_s=60.0) == pytest.approx(50, abs=0.5)


def test_who_hangs_up_before_there_was_an_answer_pays_as_if_it_was_being_written() -> None:
    assert hung_up(Scene(), after_s=0.3, ttfb_s=None, status=0) == pytest.approx(30, abs=0.5)


def test_a_request_that_no_engine_answered_costs_nothing() -> None:
    assert hung_up(Scene(), after_s=0.3, ttfb_s=None, status=503) == pytest.approx(0, abs=0.5)


def test_who_hangs_up_on_several_answers_pays_for_all_of_them() -> None:
    scene = Scene()
    scene.fields = {"n": 4, "stream": True}
    assert hung_up(scene, after_s=0.7) == pytest.approx(80, abs=0.5)
    scene = Scene()
    scene.fields = {"n": 4, "stream": True}
    assert hung_up(scene, after_s=60.0) == pytest.approx(200, abs=0.5)


def test_who_asks_for_a_stream_without_usage_pays_what_was_reserved() -> None:
    scene = Scene()
    scene.fields = {"n": 4, "stream": True, "stream_options": {"include_usage": False}}
    assert hung_up(scene, after_s=0.7) == pytest.approx(200, abs=0.5)


def settled(told: Outcome) -> float:
    """Output tokens that a plain request of at most 50 costs, on engines that write 100 a second."""
    scene = Scene()
    first = scene.sent()
    scene.core.pools["default/llama"].table.tpot_s[:] = 0.01
    scene.core.finish(first.ticket, 1.0)
    scene.core.settle(msgspec.structs.replace(told, ticket=first.ticket), 1.0)
    return spent(scene)


def test_what_engines_report_above_the_limit_they_were_given_is_charged_as_far_as_there_was_time() -> None:
    told = outcome("", completion_tokens=900)
    # by a field that we do not read: it was written, and had
    assert settled(told) == pytest.approx(900, abs=0.5)
    # 5,000 tokens a second and 1,000 more than nobody writes
    invented = msgspec.structs.replace(told, completion_tokens=900_000_000)
    assert settled(invented) == pytest.approx(1_000 + 5_000 * told.duration_s, abs=0.5)
    # what was asked for is always believed
    assert settled(msgspec.structs.replace(told, completion_tokens=50, duration_s=0.0)) == pytest.approx(50, abs=0.5)


def test_what_runs_into_a_time_limit_of_the_gateway_costs_as_if_its_client_had_left() -> None:
    timed_out = Outcome("", 504, "10.0.0.1:8000", 0.3, None, None, None, None, has_timed_out=True)
    assert settled(timed_out) == pytest.approx(30, abs=0.5)
    assert settled(msgspec.structs.replace(timed_out, duration_s=60.0)) == pytest.approx(50, abs=0.5)
    # nobody had it, or an engine has answered so by itself
    assert settled(msgspec.structs.replace(timed_out, served="")) == pytest.approx(0, abs=0.5)
    assert settled(msgspec.structs.replace(timed_out, has_timed_out=False)) == pytest.approx(0, abs=0.5)


def test_a_plain_answer_that_says_nothing_of_its_usage_costs_what_was_reserved() -> None:
    """As to ``background: true``, whose tokens are written when it has ended."""
    assert settled(Outcome("", 200, "10.0.0.1:8000", 0.01, 0.01, None, None, None)) == pytest.approx(50, abs=0.5)
    assert settled(Outcome("", 202, "10.0.0.1:8000", 0.01, 0.01, None, None, None)) == pytest.approx(50, abs=0.5)


def test_several_answers_teach_the_length_and_the_time_of_one() -> None:
    scene = Scene()
    scene.fields = {"n": 5, "stream": True}
    caches = scene.core.pools["default/llama"].caches
    caches.output_tokens = 7.0
    first = scene.sent()
    scene.core.finish(first.ticket, 1.0)
    scene.core.settle(outcome(first.ticket, completion_tokens=35), 1.0)
    assert caches.output_tokens == pytest.approx(7.0)
    # 6 tokens after the first one, in half a second
    assert scene.core.pools["default/llama"].table.tpot_s.max() == pytest.approx(0.5 / 6, rel=0.01)


def test_without_a_time_per_token_what_was_reserved_counts() -> None:
    scene = Scene()
    first = scene.sent()
    scene.core.finish(first.ticket, 1.0)
    scene.core.settle(outcome(first.ticket, completion_tokens=None), 1.0)
    output = scene.core.admission.limits._buckets["default/chat/0/output_tokens/acme"]
    assert output.level == pytest.approx(950, abs=0.5)


def test_a_request_over_the_limit_is_refused_before_it_waits() -> None:
    scene = Scene()
    scene.sent()
    for _ in range(9):
        scene.held()
    with pytest.raises(RateLimited):
        scene.enter()
    assert len(scene.core.admission.gates["default/llama"].queue) == 9


def test_requests_of_a_model_without_engines_wait_and_go_in_fair_order() -> None:
    scene = Scene(endpoints="")
    held = [scene.held(tenant) for tenant in ("acme", "acme", "bell")]
    assert scene.core.admission.gates["default/llama"].wants_engines
    assert scene.release(1.0) == []
    scene.apply()
    order = []
    now = 2.0
    while scene.core.count(State.QUEUED):
        for one in scene.release(now):
            assert isinstance(one, Decision)
            order.append(one.ticket)
            scene.core.finish(one.ticket, now)
        now += 1
    assert order == [held[0], held[2], held[1]]
    assert not scene.core.admission.gates["default/llama"].wants_engines


def test_who_is_held_may_go_to_engines_that_come_while_it_waits() -> None:
    leaving = '{address: "10.0.0.1:8000", draining: true}, {address: "10.0.0.2:8000"}'
    scene = Scene(endpoints=leaving)
    scene.sent()
    held = scene.held()
    # more engines than the table had rows for, and none of the old ones free
    more = ", ".join(f'{{address: "10.0.1.{number}:8000"}}' for number in range(20))
    scene.apply(endpoints=f"{leaving}, {more}")
    (released,) = scene.release(1.0)
    assert released.ticket == held
    assert isinstance(released, Decision)
    assert released.assignment.addresses[0].startswith("10.0.1.")


def test_without_engines_nobody_waits_for_ever() -> None:
    scene = Scene(endpoints="")
    scene.held(now=0.0)
    assert scene.release(9.9) == []
    (released,) = scene.release(10.0)
    assert isinstance(released, Refused)
    assert isinstance(released.refusal, NoEndpoint)


def test_a_server_that_leaves_the_configuration_takes_its_queue_with_it() -> None:
    scene = Scene()
    scene.sent()
    scene.held()
    (released,) = ends(scene.core.apply(load({}), 1.0))
    assert isinstance(released, Refused)
    assert isinstance(released.refusal, NoEndpoint)
    assert not scene.core.count(State.QUEUED)


def test_a_queue_that_is_taken_away_lets_everybody_go() -> None:
    scene = Scene()
    scene.sent()
    held = [scene.held() for _ in range(3)]
    scene.apply(flow_control="")
    released = scene.release(1.0)
    assert [one.ticket for one in released] == held
    assert all(isinstance(one, Decision) for one in released)


def test_requests_of_negative_priority_are_shed_by_chance_once_engines_are_full() -> None:
    scene = Scene(priority=-1, flow_control=FLOW_CONTROL + "    maxRequests: 5\n")
    scene.sent()
    shed = 0
    for number in range(60):
        try:
            scene.enter(f"t{number}")
        except Shed:
            shed += 1
        except QueueFull:
            break
    # the fuller the queue, the more: some before it is full, and some not
    assert shed > 0
    assert len(scene.core.admission.gates["default/llama"].queue) > 1
