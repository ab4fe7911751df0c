# SPDX-License-Identifier: Apache-2.0
"""Ill engines by what becomes of their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.core.effects import Decision, HealthChanged
from extproc.core.record import Outcome
from extproc.endpoints.health import Failure
from extproc.protocol import Api
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
            arrival = self.core.intake.receive(Api.CHAT, HEAD, body)
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
        self.effects += self.core.settle(msgspec.structs.replace(outcome, **changes), self.now)
        self.effects += self.core.finish(ticket, self.now)

    @property
    def warnings(self) -> list[Failure | None]:
        return [one.failure for one in self.effects if isinstance(one, HealthChanged)]


NO_USAGE: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"status": 500, **NO_USAGE}, Failure.ERROR),
        ({"status": 429, **NO_USAGE}, Failure.ERROR),
        ({"status": 400, **NO_USAGE}, Failure.REFUSED),
        (NO_USAGE, Failure.NO_USAGE),
        ({"was_cut": True, **NO_USAGE}, Failure.CUT),
    ],
)
def test_an_engine_that_fails_while_the_others_serve_is_avoided_and_warned_of_once(
    core: Core, changes: dict[str, Any], failure: Failure
) -> None:
    drill = Drill(core, lambda _ticket, _addresses: changes)
    drill.run(150)
    assert drill.run(600) < 0.01
    assert drill.warnings == [failure]


def test_an_engine_whose_requests_go_on_to_the_next_is_avoided(core: Core) -> None:
    drill = Drill(core, lambda _ticket, addresses: {"served": addresses[1]})
    drill.run(150)
    assert drill.run(600) < 0.02


def test_an_engine_that_never_answers_is_avoided(core: Core) -> None:
    drill = Drill(core, lambda _ticket, _addresses: None, took_s=2.0)
    drill.run(600)
    assert drill.run(600) < 0.01
    assert drill.warnings == [Failure.SILENT]


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


def test_an_engine_that_is_well_again_gets_its_part_again(core: Core) -> None:
    illness: dict[str, Any] = {"status": 500, **NO_USAGE}
    drill = Drill(core, lambda _ticket, _addresses: illness)
    drill.run(100)
    illness.clear()
    drill.run(300)
    assert drill.run(300) > 0.2
    assert drill.warnings == [Failure.ERROR, None]


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
        effects = core.settle(outcome, now)
        core.finish(decision.ticket, now)
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
        warnings += [one for one in core.settle(outcome, now) if isinstance(one, HealthChanged)]
        core.finish(decision.ticket, now)
    assert warnings == []
    assert sum(health.failed for health in core.pools["default/llama"].table.healths) == 0
