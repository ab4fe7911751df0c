# SPDX-License-Identifier: Apache-2.0
"""What is promised to a class of requests, and which requests have kept it, in virtual time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, OutcomeJoined, RequestHeld, RequestRefused, RequestSloJudged
from extproc.core.peer_events import EventBatch
from extproc.core.request_record import Outcome
from extproc.core.slo_verdicts import SloVerdict
from extproc.refusals import NoEndpoint, QueueTimeout, RateLimited, Refusal
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.effects import Effect, RequestEffect

SERVER = "endpoints: [{address: '10.0.0.1:8000'}]\nscrapeInterval: 0s\n"
HOLDS = f"flowControl: {{{ONE_AT_A_TIME.strip().rstrip(',')}, timeout: 5s, maxRequests: 2}}\n"
SLO = "slo: [{name: chat, ttft: 500ms, tpot: 50ms, e2e: 10s}]\n"
# what became of TTFT, TPOT and the end
GOOD, BAD, LEFT_OUT = True, False, None


def core_with(route: str = SLO, server: str = SERVER) -> Core:
    snapshot = configuration(servers={"llama": server}, routes={"chat": route})
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def ask(core: Core, now: float = 0.0, *, stream: bool = True, **fields: object) -> tuple[RequestEffect, list[Effect]]:
    return core.arrive(request(core, stream=stream, **fields), now)


def judged(effects: Iterable[Effect]) -> dict[str, bool | None]:
    """By objective, of the one request that is over."""
    found = [one for one in effects if isinstance(one, RequestSloJudged)]
    assert len(found) <= 1
    return {verdict.objective: verdict.is_met for one in found for verdict in one.verdicts}


def outcome(ticket: str, status: int = 200, took_s: float = 1.0, **fields: object) -> Outcome:
    """By default, an answer whose content began at 0.2 s, with 21 tokens: 0.04 s for each further one."""
    usual: dict[str, object] = {
        "served": "10.0.0.1:8000",
        "ttfb_s": 0.1,
        "first_content_s": 0.2,
        "prompt_tokens": 10,
        "completion_tokens": 21,
        "cached_tokens": None,
    }
    return Outcome(ticket=ticket, status=status, duration_s=took_s, **{**usual, **fields})  # type: ignore[arg-type]


NO_COUNT: dict[str, object] = {"prompt_tokens": None, "completion_tokens": None}
SILENT: dict[str, object] = {**NO_COUNT, "ttfb_s": None, "first_content_s": None}


@pytest.mark.parametrize(
    ("ended", "ttft", "tpot", "e2e"),
    [
        ({}, GOOD, GOOD, GOOD),
        ({"first_content_s": 0.5, "took_s": 1.5}, GOOD, GOOD, GOOD),
        ({"first_content_s": 0.51}, BAD, GOOD, GOOD),
        ({"took_s": 1.3}, GOOD, BAD, GOOD),
        ({"took_s": 10.5, "completion_tokens": 1000}, GOOD, GOOD, BAD),
        # a single token has no further one; and without the engine's count nobody knows
        ({"completion_tokens": 1}, GOOD, LEFT_OUT, GOOD),
        ({"completion_tokens": None}, GOOD, LEFT_OUT, GOOD),
        # a first event that has no content does not count, unless content is of another kind
        (
            {"status": 200, "took_s": 0.6, "has_left": True, **NO_COUNT, "first_content_s": None},
            BAD,
            LEFT_OUT,
            LEFT_OUT,
        ),
        ({"first_content_s": None, "ttfb_s": 0.3}, GOOD, GOOD, GOOD),
        ({"first_content_s": None, "ttfb_s": 0.6}, BAD, GOOD, GOOD),
        # an answer of nothing has kept what it has ended in
        (SILENT, BAD, LEFT_OUT, GOOD),
        # clocks were set meanwhile
        ({"first_content_s": 3600.0}, GOOD, GOOD, GOOD),
        ({"status": 503}, BAD, BAD, BAD),
        ({"status": 504, "has_timed_out": True, **SILENT}, BAD, BAD, BAD),
        ({"status": 429}, BAD, BAD, BAD),
        ({"status": 408}, BAD, BAD, BAD),
        ({"status": 400}, LEFT_OUT, LEFT_OUT, LEFT_OUT),
        ({"status": 404}, LEFT_OUT, LEFT_OUT, LEFT_OUT),
        # cut by the engine after the first content
        ({"was_cut": True, **NO_COUNT}, BAD, BAD, BAD),
        # the client left: before anything was late, and afterwards
        ({"status": 0, "took_s": 0.4, "has_left": True, **SILENT}, LEFT_OUT, LEFT_OUT, LEFT_OUT),
        ({"status": 0, "took_s": 0.6, "has_left": True, **SILENT}, BAD, LEFT_OUT, LEFT_OUT),
        ({"status": 200, "took_s": 0.6, "has_left": True, **SILENT}, BAD, LEFT_OUT, LEFT_OUT),
        ({"status": 200, "took_s": 2.0, "has_left": True, **NO_COUNT}, GOOD, LEFT_OUT, LEFT_OUT),
        ({"status": 200, "took_s": 12.0, "has_left": True, **NO_COUNT}, GOOD, LEFT_OUT, BAD),
        # by HTTP/2, a client leaves with a reset of its stream
        ({"status": 200, "took_s": 2.0, "is_cut": True, **NO_COUNT}, GOOD, LEFT_OUT, LEFT_OUT),
        # it left, and the engine counts as it writes
        ({"status": 200, "took_s": 3.0, "has_left": True}, GOOD, BAD, LEFT_OUT),
    ],
)
def test_a_streamed_answer_is_judged_by_what_its_client_saw(
    ended: dict[str, object], ttft: bool | None, tpot: bool | None, e2e: bool | None
) -> None:
    core = core_with()
    own, _ = ask(core)
    assert isinstance(own, Decision)
    effects = core.on_outcome(outcome(own.ticket, **ended), 20.0)  # type: ignore[arg-type]
    assert judged(effects) == {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    # once, whatever is reported again
    assert not judged(core.on_outcome(outcome(own.ticket, **ended), 21.0))  # type: ignore[arg-type]


def test_of_a_plain_answer_only_the_end_is_seen() -> None:
    core = core_with()
    own, _ = ask(core, stream=False)
    effects = core.on_outcome(outcome(own.ticket, took_s=4.0, first_content_s=None, ttfb_s=4.0), 20.0)
    assert judged(effects) == {"e2e": True}
    (settled,) = (one for one in effects if isinstance(one, OutcomeJoined))
    assert settled.times is not None
    assert (settled.times.ttft_s, settled.times.tpot_s, settled.times.e2e_s) == (None, None, 4.0)


def test_several_answers_at_once_are_written_side_by_side() -> None:
    core = core_with()
    own, _ = ask(core, n=2)
    assert judged(core.on_outcome(outcome(own.ticket, completion_tokens=42), 20.0))["tpot"] is True


def test_an_answer_in_the_background_is_no_promise() -> None:
    core = core_with()
    arrival = request(core, path="/v1/responses", input="hi", background=True)
    own, _ = core.arrive(arrival, 0.0)
    assert judged(core.on_outcome(outcome(own.ticket, took_s=0.01), 1.0)) == {"e2e": None}


def test_a_class_has_the_requests_from_its_priority_on() -> None:
    classes = "slo: [{name: rest, e2e: 60s}, {name: urgent, priority: 5, e2e: 1s}, {name: usual, priority: 0, e2e: 9s}]"
    for priority, name in ((7, "urgent"), (5, "urgent"), (4, "usual"), (0, "usual"), (-1, "rest")):
        rules = f"rules: [{{priority: {priority}, targetModels: [{{modelServerName: llama}}]}}]\n"
        core = core_with(rules + classes)
        own, _ = ask(core)
        (found,) = (one for one in core.on_outcome(outcome(own.ticket), 1.0) if isinstance(one, RequestSloJudged))
        assert found.objectives.name == name
        assert found.verdicts == (SloVerdict("e2e", is_met=True),)


def test_a_priority_below_all_classes_has_no_objective() -> None:
    core = core_with("slo: [{name: urgent, priority: 5, e2e: 1s}]")
    own, _ = ask(core)
    assert not judged(core.on_outcome(outcome(own.ticket), 1.0))
    assert core_with("").objective_classes() == []


def refusal_of(own: RequestEffect) -> Refusal:
    assert isinstance(own, RequestRefused)
    return own.refusal


def test_what_extproc_refuses_for_want_of_engines_is_missed() -> None:
    core = core_with(server="endpoints: []\n")
    own, effects = ask(core)
    assert isinstance(refusal_of(own), NoEndpoint)
    assert judged(effects) == {"ttft": False, "tpot": False, "e2e": False}


@pytest.mark.parametrize(("per", "counts"), [("Tenant", None), ("Route", False)])
def test_a_limit_of_the_caller_is_no_miss_and_one_that_all_share_is(per: str, counts: bool | None) -> None:
    core = core_with(SLO + f"rateLimits: [{{unit: hour, requests: 1, per: {per}}}]\n")
    ask(core)
    own, effects = ask(core)
    assert isinstance(refusal_of(own), RateLimited)
    assert judged(effects) == dict.fromkeys(("ttft", "tpot", "e2e"), counts)


def test_who_waits_in_vain_has_missed_and_who_leaves_early_does_not_count() -> None:
    core = core_with(server=SERVER + HOLDS)
    first, _ = ask(core)
    assert isinstance(first, Decision)
    waits, _ = ask(core, 0.0)
    assert isinstance(waits, RequestHeld)
    effects = core.tick(6.0)
    (refused,) = (one for one in effects if isinstance(one, RequestRefused))
    assert isinstance(refused.refusal, QueueTimeout)
    assert judged(effects) == {"ttft": False, "tpot": False, "e2e": False}
    for left_s, ttft in ((0.4, None), (0.6, False)):
        held, _ = ask(core, 10.0)
        assert isinstance(held, RequestHeld)
        assert judged(core.on_disconnect(held.ticket, 10.0 + left_s)) == {"ttft": ttft, "tpot": None, "e2e": None}


def test_a_client_that_leaves_as_its_engine_is_chosen_is_judged_once() -> None:
    core = core_with()
    own, _ = ask(core)
    assert judged(core.on_disconnect(own.ticket, 0.1)) == {"ttft": None, "tpot": None, "e2e": None}
    assert not judged(core.on_outcome(outcome(own.ticket), 1.0))


def test_a_request_of_another_process_is_judged_there_alone() -> None:
    here, there = (
        Core(
            configuration(servers={"llama": SERVER}, routes={"chat": SLO}),
            rng=random.Random(0),
            ticket_prefix=name,
            machine="m",
        )
        for name in ("a", "b")
    )
    own, effects = ask(here)
    there.apply_peer_batch(EventBatch("a", [one.event for one in effects if isinstance(one, Broadcast)]), 0.0)
    settled = there.on_outcome(outcome(own.ticket), 1.0)
    assert any(isinstance(one, OutcomeJoined) for one in settled)
    assert not judged(settled)
    heard = EventBatch("b", [one.event for one in settled if isinstance(one, Broadcast)])
    assert judged(here.apply_peer_batch(heard, 1.0)) == {"ttft": True, "tpot": True, "e2e": True}
