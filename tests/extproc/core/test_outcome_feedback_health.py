# SPDX-License-Identifier: Apache-2.0
"""Ill engines by what becomes of their requests."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.api.model_server import RetryPolicy
from extproc.core.effects import Decision, HealthChanged
from extproc.core.request_record import GatewayProperties, Outcome
from extproc.endpoints.health import EngineFailure
from tests.extproc.core.test_core import HEAD, arrive, chat

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.core import Core
    from extproc.core.effects import Effect

GOOD = Outcome("", 200, "", 0.2, 0.1, 600, 10, 0)
SECOND_S = 1 / 30


class Drill:
    """Thirty requests a second, each over after ``took_s``; the engine that the first request met is ill."""

    def __init__(
        self, core: Core, illness: Callable[[str, tuple[str, ...]], dict[str, Any] | None], *, took_s: float = 0.2
    ) -> None:
        """``illness``: by ticket and addresses, what is wrong with the outcome; None: there is none."""
        self.took_s = took_s
        self.core = core
        self.illness = illness
        self.now = 0.0
        self.ill = ""
        self.number = 0
        self.effects: list[Effect] = []
        self.running: list[tuple[float, str, tuple[str, ...]]] = []

    def run(self, requests: int) -> float:
        """The share of ``requests`` that went to the ill engine first."""
        met = 0
        for _ in range(requests):
            self.now += SECOND_S
            self.number += 1
            while self.running and self.running[0][0] <= self.now:
                self._end(*self.running.pop(0)[1:])
            body = chat(f"{self.number} is another question", model="chat")
            arrival = self.core.builder.build_by_model(HEAD, body)
            decision, effects = self.core.arrive(arrival, self.now)
            assert isinstance(decision, Decision)
            self.effects += effects
            addresses = decision.assignment.addresses
            self.ill = self.ill or addresses[0]
            met += addresses[0] == self.ill
            self.running.append((self.now + self.took_s, decision.ticket, addresses))
        return met / requests

    def _end(self, ticket: str, addresses: tuple[str, ...]) -> None:
        changes: dict[str, Any] | None = {}
        if addresses[0] == self.ill:
            changes = self.illness(ticket, addresses)
        if changes is None:
            return
        outcome = msgspec.structs.replace(GOOD, ticket=ticket, served=addresses[0])
        self.effects += self.core.on_outcome(msgspec.structs.replace(outcome, **changes), self.now)
        self.effects += self.core.on_stream_closed(ticket, self.now)

    @property
    def warnings(self) -> list[EngineFailure | None]:
        return [one.failure for one in self.effects if isinstance(one, HealthChanged)]


NO_USAGE: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"status": 500, **NO_USAGE}, EngineFailure.ERROR),
        ({"status": 400, **NO_USAGE}, EngineFailure.REFUSED),
        (NO_USAGE, EngineFailure.NO_USAGE),
        ({"was_cut": True, **NO_USAGE}, EngineFailure.CUT),
    ],
)
def test_an_engine_that_fails_while_the_others_serve_is_avoided_and_warned_of_once(
    core: Core, changes: dict[str, Any], failure: EngineFailure
) -> None:
    drill = Drill(core, lambda _ticket, _addresses: changes)
    drill.run(150)
    assert drill.run(600) < 0.01
    assert drill.warnings == [failure]


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_asks_for_a_pause_gets_it_and_that_is_no_failure(core: Core, status: int) -> None:
    drill = Drill(core, lambda _ticket, _addresses: {"status": status, "retry_after_s": 60.0, **NO_USAGE})
    drill.run(100)
    assert drill.run(600) == 0
    assert not drill.warnings
    table = core.pools["default/llama"].table
    row = table.row_of(drill.ill)
    assert row is not None
    assert (table.healths[row].failed, table.breakers[row].generation) == (0, 0)
    assert table.breakers[row].not_before_s > drill.now + 30


def test_if_all_engines_ask_for_a_pause_all_get_requests(core: Core) -> None:
    pool, first = core.pools["default/llama"], Counter[str]()
    for number in range(300):
        decision = arrive(core, chat(f"{number} is a question", model="chat"), number / 10)
        addresses = decision.assignment.addresses
        first[addresses[0]] += 1
        busy = msgspec.structs.replace(GOOD, ticket=decision.ticket, status=429, served=addresses[0], retry_after_s=9.0)
        core.on_outcome(busy, number / 10 + 0.02)
        core.on_stream_closed(decision.ticket, number / 10 + 0.02)
    assert len(first) == len(pool.table)
    assert pool.breaker.generation == 0


def test_an_engine_whose_answers_are_encoded_is_not_avoided(core: Core) -> None:
    drill = Drill(core, lambda _ticket, _addresses: {"is_encoded": True, **NO_USAGE})
    drill.run(150)
    assert drill.run(600) > 0.1
    assert not drill.warnings


def refusing(core: Core, *tenants: str, refuses: Callable[[str, tuple[str, ...]], bool]) -> list[EngineFailure | None]:
    """What is reported of engines while each of ``tenants`` asks in turn. ``refuses``: a tenant, by addresses.

    A tenant's prompts have a long beginning in common, so each tenant has an engine.
    """
    effects: list[Effect] = []
    for number in range(900):
        now, tenant = number / 30, tenants[number % len(tenants)]
        head = msgspec.structs.replace(HEAD, headers={"x-attache-tenant": tenant}, is_trusted=True)
        arrival = core.builder.build_by_model(head, chat(f"{tenant * 500}, and then {number}?", model="chat"))
        decision, _ = core.arrive(arrival, now)
        assert isinstance(decision, Decision)
        addresses = decision.assignment.addresses
        changes = {"status": 400, **NO_USAGE} if refuses(tenant, addresses) else {}
        outcome = msgspec.structs.replace(GOOD, ticket=decision.ticket, served=addresses[0], **changes)
        effects += core.on_outcome(outcome, now + 0.02)
        effects += core.on_stream_closed(decision.ticket, now + 0.02)
    return [one.failure for one in effects if isinstance(one, HealthChanged)]


def test_a_tenant_whose_requests_are_all_refused_makes_no_engine_avoided(core: Core) -> None:
    assert refusing(core, "acme", "evil", "bell", "evil", refuses=lambda tenant, _: tenant == "evil") == []


def test_an_engine_that_refuses_what_several_tenants_ask_is_avoided(core: Core) -> None:
    ill: list[str] = []

    def refuses(_: str, addresses: tuple[str, ...]) -> bool:
        ill.append(addresses[0])
        return addresses[0] == ill[0]

    assert EngineFailure.REFUSED in refusing(core, *(f"tenant-{number}" for number in range(12)), refuses=refuses)


class Retrying:
    """Clients behind our own Envoy: it tries what an endpoint refuses at the next one, where extproc asks for that."""

    def __init__(self, core: Core, refuses: Callable[[str, str], bool]) -> None:
        """``refuses``: whether an address refuses a text."""
        self.core = core
        self.refuses = refuses
        self.number = 0
        # requests that met each address first, refusals that clients saw, what was asked of engines
        self.met: Counter[str] = Counter()
        self.refused = self.tries = 0
        self.warnings: list[EngineFailure | None] = []

    def ask(self, text: str) -> str:
        """The address that the request met first."""
        now = self.number * SECOND_S
        self.number += 1
        decision = arrive(self.core, chat(text, model="chat"), now)
        first, *others = decision.assignment.addresses
        tried = [first]
        if decision.checks_refusal and self.refuses(first, text):
            tried += others[:1]
        self.met[first] += 1
        self.tries += len(tried)
        changes = {"status": 400, **NO_USAGE} if self.refuses(tried[-1], text) else {}
        self.refused += bool(changes)
        outcome = msgspec.structs.replace(GOOD, ticket=decision.ticket, served=tried[-1], **changes)
        effects = self.core.on_outcome(outcome, now) + self.core.on_stream_closed(decision.ticket, now)
        self.warnings += [one.failure for one in effects if isinstance(one, HealthChanged)]
        return first


@pytest.mark.parametrize("prompts", [4, 10_000], ids=["repeated prompts", "other prompts"])
def test_what_an_engine_alone_refuses_is_served_by_another_and_the_engine_is_avoided(core: Core, prompts: int) -> None:
    ill: list[str] = []

    def refuses(address: str, _: str) -> bool:
        ill.append(address)
        return address == ill[0]

    clients = Retrying(core, refuses)
    for number in range(300):
        clients.ask(f"{number % prompts} is a question, and a long one " * 30)
    assert clients.refused == 1, "the first, which nobody had reason to check"
    # prompts that come again are cached where they were served, and so go there at once
    assert prompts == 4 or clients.warnings == [EngineFailure.REFUSED]
    met = clients.met[ill[0]]
    for number in range(300):
        clients.ask(f"{number % prompts} is a question, and a long one " * 30)
    assert clients.met[ill[0]] - met < 6, "but for probes"


def test_bad_requests_of_one_caller_make_no_engine_avoided_and_each_second_one_is_checked(core: Core) -> None:
    """Their common beginning brings them all to the endpoint that has it cached."""
    clients = Retrying(core, lambda _, text: "bad" in text)
    for number in range(200):
        clients.ask("a long beginning " * 200 + f"bad {number}")
    assert (clients.refused, clients.warnings) == (200, [])
    assert clients.tries <= 300, "each second one is checked"
    assert sum(one.failed for one in core.pools["default/llama"].table.healths) == 0


def test_bad_requests_do_not_hide_an_engine_that_refuses_good_ones(core: Core) -> None:
    ill: list[str] = []

    def refuses(address: str, text: str) -> bool:
        ill.append(address)
        return address == ill[0] or "bad" in text

    clients = Retrying(core, refuses)
    for number in range(900):
        clients.ask(f"{number} is a {'bad' if number % 3 else 'good'} question")
    assert EngineFailure.REFUSED in clients.warnings


def test_nothing_is_tried_twice_where_retries_are_off_or_the_gateway_is_not_ours(core: Core) -> None:
    pool = core.pools["default/llama"]
    for health in pool.table.healths:
        health.start_refusal_check(0.0)
    decision, _ = core.arrive(core.builder.build_by_model(HEAD, chat("hello", model="chat")), 0.0)
    assert isinstance(decision, Decision)
    assert decision.checks_refusal
    arrival = core.builder.build_by_model(HEAD, chat("hello", model="chat"))
    decision, _ = core.arrive(arrival, 0.0, attachment=GatewayProperties(is_bundle=False))
    assert isinstance(decision, Decision)
    assert not decision.checks_refusal
    policy = msgspec.structs.replace(pool.spec.traffic_policy, retry=RetryPolicy(attempts=0))
    pool.spec = msgspec.structs.replace(pool.spec, traffic_policy=policy)
    decision, _ = core.arrive(core.builder.build_by_model(HEAD, chat("hello", model="chat")), 0.0)
    assert isinstance(decision, Decision)
    assert not decision.checks_refusal


def test_an_engine_whose_requests_go_on_to_the_next_is_avoided(core: Core) -> None:
    drill = Drill(core, lambda _ticket, addresses: {"served": addresses[1]})
    drill.run(150)
    assert drill.run(600) < 0.02


def test_an_engine_that_never_answers_is_avoided(core: Core) -> None:
    drill = Drill(core, lambda _ticket, _addresses: None, took_s=2.0)
    drill.run(600)
    assert drill.run(600) < 0.01
    assert drill.warnings == [EngineFailure.SILENT]


@pytest.mark.parametrize(
    "got", [{"status": 0, "ttfb_s": None}, {"status": 200, "ttfb_s": 0.1, "answer_bytes": 8}], ids=["nothing", "drips"]
)
def test_clients_that_gave_up_on_a_silent_engine_count_against_it(core: Core, got: dict[str, Any]) -> None:
    drill = Drill(core, lambda _ticket, _addresses: {"has_left": True, "duration_s": 8.0, **NO_USAGE, **got})
    drill.run(150)
    assert drill.run(600) < 0.01


def test_a_client_that_leaves_a_long_answer_says_nothing_of_its_engine(core: Core) -> None:
    left: dict[str, Any] = {"has_left": True, "duration_s": 60.0, "ttfb_s": 0.1, "answer_bytes": 90_000, **NO_USAGE}
    drill = Drill(core, lambda _ticket, _addresses: left)
    drill.run(150)
    assert drill.run(300) > 0.1
    assert drill.warnings == []


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_time_limit_that_ends_an_answer_in_its_middle_says_nothing_of_the_engine(
    core: Core, *, has_usage: bool
) -> None:
    ended: dict[str, Any] = {"has_timed_out": True, "duration_s": 60.0, "answer_bytes": 90_000}
    drill = Drill(core, lambda _ticket, _addresses: ended | ({} if has_usage else NO_USAGE))
    drill.run(150)
    assert drill.run(300) > 0.1
    assert drill.warnings == []
    table = core.pools["default/llama"].table
    row = table.row_of(drill.ill)
    assert row is not None
    assert (table.healths[row].answers, table.healths[row].served_at_s) == (0, 0)


@pytest.mark.parametrize("got", [{"status": 504, "ttfb_s": None}, {"answer_bytes": 8}], ids=["nothing", "drips"])
def test_an_engine_that_answers_nothing_until_the_limit_of_its_route_is_avoided(
    core: Core, got: dict[str, Any]
) -> None:
    """However short the limit is: whoever wrote it knows the engines."""
    silent: dict[str, Any] = {"has_timed_out": True, "duration_s": 3.0, **NO_USAGE, **got}
    drill = Drill(core, lambda _ticket, _addresses: silent)
    drill.run(150)
    assert drill.run(600) < 0.01


def test_a_request_that_reaches_the_limit_of_its_route_while_its_engine_serves_others_is_no_failure(core: Core) -> None:
    late: dict[str, Any] = {"status": 504, "ttfb_s": None, "has_timed_out": True, "duration_s": 3.0, **NO_USAGE}
    turns = itertools.cycle(({}, late))
    drill = Drill(core, lambda _ticket, _addresses: next(turns), took_s=2.0)
    drill.run(150)
    assert drill.run(600) > 0.1
    assert drill.warnings == []


def test_a_limit_that_a_client_sets_for_its_call_says_no_more_than_its_leaving(core: Core) -> None:
    hasty: dict[str, Any] = {"status": 504, "ttfb_s": None, "has_timed_out": True, "duration_s": 0.05, **NO_USAGE}
    drill = Drill(core, lambda _ticket, _addresses: hasty | {"is_own_limit": True})
    drill.run(150)
    assert drill.run(300) > 0.1
    assert drill.warnings == []
    drill.illness = lambda _ticket, _addresses: hasty | {"is_own_limit": True, "duration_s": 8.0}
    drill.run(150)
    assert drill.run(600) < 0.01


def test_an_engine_before_one_that_was_silent_until_the_limit_may_have_been_busy(core: Core) -> None:
    """Of both, the one that had the time is silent; of the one before it, nobody knows what it answered."""
    decision = arrive(core, chat(model="chat"), 1.0)
    first, second = decision.assignment.addresses[:2]
    silent = msgspec.structs.replace(GOOD, ticket=decision.ticket, served=second, status=504, ttfb_s=None)
    core.on_outcome(msgspec.structs.replace(silent, has_timed_out=True, duration_s=3.0, **NO_USAGE), 4.0)
    table = core.pools["default/llama"].table
    failed = {table.addresses[row]: health.failed for row, health in enumerate(table.healths) if health.failed}
    assert failed == {first: 1, second: 1}
    assert table.trips.sum() == 0


def test_an_engine_that_is_well_again_gets_its_part_again(core: Core) -> None:
    illness: dict[str, Any] = {"status": 500, **NO_USAGE}
    drill = Drill(core, lambda _ticket, _addresses: illness)
    drill.run(100)
    illness.clear()
    drill.run(300)
    assert drill.run(300) > 0.2
    assert drill.warnings == [EngineFailure.ERROR, None]


def test_a_bad_request_that_is_sent_again_and_again_makes_no_engine_a_suspect(core: Core) -> None:
    warnings = []
    for number in range(400):
        now = number * SECOND_S
        is_bad = number % 2 == 0
        decision = arrive(
            core, chat("too long a prompt " * 50 if is_bad else f"{number} is a question", model="chat"), now
        )
        outcome = msgspec.structs.replace(GOOD, ticket=decision.ticket, served=decision.assignment.addresses[0])
        if is_bad:
            outcome = msgspec.structs.replace(outcome, status=400, **NO_USAGE)
        effects = core.on_outcome(outcome, now)
        core.on_stream_closed(decision.ticket, now)
        warnings += [one for one in effects if isinstance(one, HealthChanged)]
    assert warnings == []


def test_clients_that_leave_say_nothing_of_engines(core: Core) -> None:
    drill = Drill(core, lambda _ticket, _addresses: {"has_left": True, **NO_USAGE})
    drill.run(100)
    assert drill.run(300) > 0.1
    assert drill.warnings == []


def test_streams_that_were_not_asked_for_usage_may_end_without(core: Core) -> None:
    """A client that wants none may have all its requests at one engine."""
    warnings = []
    for number in range(300):
        now = number * SECOND_S
        options = {"stream": True, "stream_options": {"include_usage": False}} if number % 2 else {}
        decision = arrive(core, chat(f"{number} is a question", model="chat", **options), now)
        served = decision.assignment.addresses[0]
        outcome = msgspec.structs.replace(GOOD, ticket=decision.ticket, served=served)
        if number % 2:
            outcome = msgspec.structs.replace(outcome, **NO_USAGE)
        warnings += [one for one in core.on_outcome(outcome, now) if isinstance(one, HealthChanged)]
        core.on_stream_closed(decision.ticket, now)
    assert warnings == []
    assert sum(health.failed for health in core.pools["default/llama"].table.healths) == 0
