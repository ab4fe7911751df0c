# SPDX-License-Identifier: Apache-2.0
"""Requests that are held, let go, given up, moved: as function calls, with the time passed in."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.admission_pipeline import usage_to_reserve
from extproc.core.core import Core
from extproc.core.effects import ClientLeft, Decision, RequestRefused
from extproc.core.request_record import Outcome
from extproc.core.request_states import RequestState
from extproc.refusals import NoEndpoint, QueueFull, QueueTimeout, RateLimited, Shed
from tests.extproc.scenes import ONE_AT_A_TIME, Scene, configuration, ends, request

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot
    from extproc.core.request_record import Arrival

FLOW_CONTROL = f"""
flowControl:
  {ONE_AT_A_TIME}
  timeout: 30s
  noEndpointTimeout: 10s
"""
ONE = '{address: "10.0.0.1:8000"}'


def one_engine(*, flow_control: str = FLOW_CONTROL, engines: str = ONE, priority: int = 0) -> Snapshot:
    """It takes one request at a time."""
    route = f"rules: [{{targetModels: [{{modelServerName: llama}}], priority: {priority}}}]\n"
    route += "rateLimits: [{unit: hour, requests: 10, outputTokens: 1000}]"
    return configuration(servers={"llama": f"endpoints: [{engines}]\n{flow_control}"}, routes={"chat": route})


def scene_of(snapshot: Snapshot | None = None, **fields: object) -> Scene:
    core = Core(snapshot or one_engine(), rng=random.Random(0), ticket_prefix="t")
    return Scene(core, max_tokens=50, **fields)


def outcome(ticket: str, *, completion_tokens: int | None = 7) -> Outcome:
    return Outcome(ticket, 200, "10.0.0.1:8000", 1.0, 0.5, 150, completion_tokens, None)


def test_the_second_request_waits_for_the_first_to_end() -> None:
    scene = scene_of()
    first, second = scene.sent(), scene.held()
    assert scene.release(0.5) == []
    scene.core.on_stream_closed(first.ticket, 1.0)
    (released,) = scene.release(1.0)
    assert isinstance(released, Decision)
    assert released.ticket == second
    assert released.history.waits[RequestState.QUEUED] == 1.0


def test_who_leaves_while_waiting_frees_the_place_and_what_was_granted() -> None:
    scene = scene_of()
    first = scene.sent()
    held = scene.held()
    assert round(scene.level("requests")) == 8
    assert isinstance(scene.core.on_disconnect(held, 0.5)[0], ClientLeft)
    assert round(scene.level("requests")) == 9
    scene.core.on_stream_closed(first.ticket, 1.0)
    assert scene.release(1.0) == []
    assert not scene.core.count_requests(RequestState.QUEUED)


def test_who_leaves_in_the_moment_of_release_does_not_hold_the_engine() -> None:
    scene = scene_of()
    first, held, third = scene.sent(), scene.held(), scene.held()
    scene.core.on_stream_closed(first.ticket, 1.0)
    (released,) = scene.release(1.0)
    assert released.ticket == held
    scene.core.on_disconnect(held, 1.0)
    assert scene.core.state_of(held) is RequestState.ABSENT
    assert round(scene.level("requests")) == 8
    (released,) = scene.release(1.0)
    assert released.ticket == third
    # its flow was charged for nothing that it did not have
    gate = scene.core.admission.gates["default/llama"]
    assert gate.queue.bands[2].flows.running.sum() == 2


def test_who_has_waited_long_enough_is_told_and_gets_back_what_was_granted() -> None:
    scene = scene_of()
    scene.sent()
    scene.held(now=1.0)
    assert scene.core.admission.wake_at_s(1.0) is not None
    (released,) = scene.release(31.0)
    assert isinstance(released, RequestRefused)
    assert isinstance(released.refusal, QueueTimeout)
    assert released.refusal.retry_after_s is not None
    assert round(scene.level("requests")) == 9


def test_a_full_queue_refuses_and_gives_back() -> None:
    scene = scene_of(one_engine(flow_control=FLOW_CONTROL + "  maxRequests: 1\n"))
    scene.sent()
    scene.held()
    with pytest.raises(QueueFull) as caught:
        scene.enter()
    assert caught.value.retry_after_s is not None
    assert round(scene.level("requests")) == 8


def test_what_was_not_written_comes_back_when_the_outcome_is_known() -> None:
    scene = scene_of()
    first = scene.sent()
    assert scene.level("output_tokens") == 950
    scene.core.on_stream_closed(first.ticket, 1.0)
    scene.core.on_outcome(outcome(first.ticket), 1.0)
    assert scene.level("output_tokens") == pytest.approx(993, abs=0.5)


def hung_up(scene: Scene, *, after_s: float, ttfb_s: float | None = 0.5, status: int = 200) -> float:
    """Output tokens that a stream of at most 50 costs whose client hangs up, on an engine that writes 100 a second."""
    scene.core.pools["default/llama"].table.tpot_s[:] = 0.01
    first = scene.sent()
    scene.core.on_stream_closed(first.ticket, 1.0)
    gone = Outcome(first.ticket, status, "10.0.0.1:8000", after_s, ttfb_s, None, None, None, has_left=status == 200)
    scene.core.on_outcome(gone, 1.0)
    return spent(scene)


def spent(scene: Scene) -> float:
    """Output tokens that the tenant's limit has been charged."""
    return 1000 - scene.level("output_tokens")


def test_who_hangs_up_pays_for_what_was_written_by_then() -> None:
    assert hung_up(scene_of(), after_s=0.7) == pytest.approx(20, abs=0.5)
    # and for no more than was asked for
    assert hung_up(scene_of(), after_s=60.0) == pytest.approx(50, abs=0.5)


def test_who_hangs_up_before_there_was_an_answer_pays_as_if_it_was_being_written() -> None:
    assert hung_up(scene_of(), after_s=0.3, ttfb_s=None, status=0) == pytest.approx(30, abs=0.5)


def test_a_request_that_no_engine_answered_costs_nothing() -> None:
    assert hung_up(scene_of(), after_s=0.3, ttfb_s=None, status=503) == pytest.approx(0, abs=0.5)


def test_who_hangs_up_on_several_answers_pays_for_all_of_them() -> None:
    scene = scene_of(n=4, stream=True)
    assert hung_up(scene, after_s=0.7) == pytest.approx(80, abs=0.5)
    scene = scene_of(n=4, stream=True)
    assert hung_up(scene, after_s=60.0) == pytest.approx(200, abs=0.5)


def test_who_asks_for_a_stream_without_usage_pays_what_was_reserved_or_written_by_then() -> None:
    scene = scene_of(n=4, stream=True, stream_options={"include_usage": False})
    first = scene.sent()
    scene.core.on_outcome(Outcome(first.ticket, 200, "10.0.0.1:8000", 0.7, 0.5, None, None, None), 1.0)
    assert spent(scene) == pytest.approx(200, abs=0.5)
    scene = scene_of(n=4, stream=True, stream_options={"include_usage": False})
    assert hung_up(scene, after_s=0.7) == pytest.approx(80, abs=0.5)


def settled(told: Outcome) -> float:
    """Output tokens that a plain request of at most 50 costs, on engines that write 100 a second."""
    scene = scene_of()
    scene.core.pools["default/llama"].table.tpot_s[:] = 0.01
    first = scene.sent()
    scene.core.on_stream_closed(first.ticket, 1.0)
    scene.core.on_outcome(msgspec.structs.replace(told, ticket=first.ticket), 1.0)
    return spent(scene)


def test_what_engines_report_above_the_limit_they_were_given_is_charged_as_far_as_there_was_time() -> None:
    told = outcome("", completion_tokens=900)
    # by a field that we do not read: it was written, and had
    assert settled(told) == pytest.approx(900, abs=0.5)
    # 5,000 tokens a second and 1,000 more than nobody writes
    invented = msgspec.structs.replace(told, completion_tokens=90_000_000)
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


def response(core: Core, **fields: object) -> Arrival:
    """To the responses API: of at most 50 tokens."""
    headers = {"x-attache-tenant": "acme"}
    path = "/v1/responses"
    return request(core, path=path, headers=headers, input="hi", max_output_tokens=50, **fields)


def test_what_runs_in_the_background_costs_what_was_reserved_though_its_client_leaves() -> None:
    scene = scene_of()
    scene.core.pools["default/llama"].table.tpot_s[:] = 0.01
    own, _ = scene.core.arrive(response(scene.core, background=True, stream=True), 0.0)
    assert isinstance(own, Decision)
    scene.core.on_stream_closed(own.ticket, 0.1)
    scene.core.on_outcome(Outcome(own.ticket, 200, "10.0.0.1:8000", 0.1, 0.1, None, None, None, has_left=True), 0.1)
    assert spent(scene) == pytest.approx(50, abs=0.5)


def test_a_stored_prompt_costs_as_much_as_such_prompts_had() -> None:
    scene = scene_of()
    estimate = scene.core.pools["default/llama"].input_estimates.of_tenant("acme")

    def reserved(**fields: object) -> float:
        return usage_to_reserve(response(scene.core, **fields)).input_tokens

    plain = reserved()
    assert reserved(previous_response_id="resp_1") == pytest.approx(plain + 1_000, abs=10)
    own, _ = scene.core.arrive(response(scene.core, previous_response_id="resp_1"), 0.0)
    assert isinstance(own, Decision)
    scene.core.on_stream_closed(own.ticket, 1.0)
    told = outcome(own.ticket, completion_tokens=1)
    scene.core.on_outcome(msgspec.structs.replace(told, prompt_tokens=20_000), 1.0)
    assert estimate.stored_prompt_tokens == 20_000
    # nothing follows for prompts that are sent whole
    assert reserved() == plain
    usage = usage_to_reserve(response(scene.core, previous_response_id="resp_1"))
    assert usage.known is not None
    assert usage.known.input_tokens == pytest.approx(plain, abs=10)


def test_several_answers_teach_the_length_and_the_time_of_one() -> None:
    scene = scene_of(n=5, stream=True)
    caches = scene.core.pools["default/llama"].caches
    caches.output_tokens = 7.0
    first = scene.sent()
    scene.core.on_stream_closed(first.ticket, 1.0)
    scene.core.on_outcome(outcome(first.ticket, completion_tokens=35), 1.0)
    assert caches.output_tokens == pytest.approx(7.0)
    # 6 tokens after the first one, in half a second
    assert scene.core.pools["default/llama"].table.tpot_s.max() == pytest.approx(0.5 / 6, rel=0.01)


def test_without_a_time_per_token_what_was_reserved_counts() -> None:
    scene = scene_of()
    first = scene.sent()
    scene.core.on_stream_closed(first.ticket, 1.0)
    scene.core.on_outcome(outcome(first.ticket, completion_tokens=None), 1.0)
    assert scene.level("output_tokens") == pytest.approx(950, abs=0.5)


def test_a_request_over_the_limit_is_refused_before_it_waits() -> None:
    scene = scene_of()
    scene.sent()
    for _ in range(9):
        scene.held()
    with pytest.raises(RateLimited):
        scene.enter()
    assert len(scene.core.admission.gates["default/llama"].queue) == 9


def test_requests_of_a_model_without_engines_wait_and_go_in_fair_order() -> None:
    scene = scene_of(one_engine(engines=""))
    held = [scene.held(tenant) for tenant in ("acme", "acme", "bell")]
    assert scene.core.admission.gates["default/llama"].needs_engine
    assert scene.release(1.0) == []
    scene.core.apply(one_engine(), 0.0)
    order = []
    now = 2.0
    while scene.core.count_requests(RequestState.QUEUED):
        for one in scene.release(now):
            assert isinstance(one, Decision)
            order.append(one.ticket)
            scene.core.on_stream_closed(one.ticket, now)
        now += 1
    assert order == [held[0], held[2], held[1]]
    assert not scene.core.admission.gates["default/llama"].needs_engine


def test_who_is_held_may_go_to_engines_that_come_while_it_waits() -> None:
    leaving = '{address: "10.0.0.1:8000", draining: true}, {address: "10.0.0.2:8000"}'
    scene = scene_of(one_engine(engines=leaving))
    scene.sent()
    held = scene.held()
    # more engines than the table had rows for, and none of the old ones free
    more = ", ".join(f'{{address: "10.0.1.{number}:8000"}}' for number in range(20))
    scene.core.apply(one_engine(engines=f"{leaving}, {more}"), 0.0)
    (released,) = scene.release(1.0)
    assert released.ticket == held
    assert isinstance(released, Decision)
    assert released.assignment.addresses[0].startswith("10.0.1.")


def test_without_engines_nobody_waits_for_ever() -> None:
    scene = scene_of(one_engine(engines=""))
    scene.held(now=0.0)
    assert scene.release(9.9) == []
    (released,) = scene.release(10.0)
    assert isinstance(released, RequestRefused)
    assert isinstance(released.refusal, NoEndpoint)


def test_a_server_that_leaves_the_configuration_takes_its_queue_with_it() -> None:
    scene = scene_of()
    scene.sent()
    scene.held()
    (released,) = ends(scene.core.apply(load_snapshot({}), 1.0))
    assert isinstance(released, RequestRefused)
    assert isinstance(released.refusal, NoEndpoint)
    assert not scene.core.count_requests(RequestState.QUEUED)


def test_a_queue_that_is_taken_away_lets_everybody_go() -> None:
    scene = scene_of()
    scene.sent()
    held = [scene.held() for _ in range(3)]
    scene.core.apply(one_engine(flow_control=""), 0.0)
    released = scene.release(1.0)
    assert [one.ticket for one in released] == held
    assert all(isinstance(one, Decision) for one in released)


def test_requests_of_negative_priority_are_shed_by_chance_once_engines_are_full() -> None:
    scene = scene_of(one_engine(priority=-1, flow_control=FLOW_CONTROL + "  maxRequests: 5\n"))
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
