# SPDX-License-Identifier: Apache-2.0
"""Processes die while requests run: budgets are charged what the rows say, and reservations come back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from controller.usage.rows import make_usage_row
from extproc.admission.budget_recovery import UsageRollupRow
from extproc.api.usage_log import UsageCounts, UsageLine
from extproc.core.effects import Decision, SettleGrant
from extproc.core.orphaned_request_charges import OrphanedOutcome
from extproc.core.peer_events import HEARTBEAT_S, SILENCE_S
from extproc.core.request_record import Outcome
from extproc.feeds.saved_limits import SavedLimits
from tests.extproc.core.test_limit_accounting_budgets import Process

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.core.effects import Effect, RequestEffect

MOST = 1_000_000
BUDGET = f"{{name: b, window: Month, max: {{tokens: {MOST}}}}}"
LOGGED = "usageLog: {path: /var/log/usage.log}"
HISTORIES = 60


def process(name: str, wire: list[Process] | None = None, budget: str = BUDGET) -> Process:
    return Process(budget, gateway_spec=LOGGED, name=name, wire=wire)


def ended(decision: RequestEffect, output: int = 30, prompt: int = 10) -> OrphanedOutcome:
    """Its entry of the access log."""
    assert isinstance(decision, Decision)
    assert decision.usage is not None
    outcome = Outcome(decision.ticket, 200, decision.assignment.endpoint.address, 1.0, 0.1, prompt, output, None)
    return OrphanedOutcome(outcome, decision.usage, BEGAN_S)


BEGAN_S = process("any").began_s


def log(to: Process, entry: OrphanedOutcome, now: float) -> list[Effect]:
    """As the access log service does."""
    effects = to.core.on_outcome(entry.outcome, now)
    if to.core.has_no_record(entry.ticket):
        effects += to.core.on_orphaned_outcome(entry, now)
    return to.perform(effects, now)


def beat_for(processes: list[Process], seconds: float, now: float) -> float:
    for _ in range(int(seconds / HEARTBEAT_S)):
        now += HEARTBEAT_S
        for one in processes:
            one.perform(one.core.heartbeat(now), now)
    return now


def used_by_row(entry: OrphanedOutcome) -> int:
    """By the rule of the usage process."""
    counts = UsageCounts(entry.outcome.prompt_tokens, entry.outcome.completion_tokens)
    line = UsageLine("1", BEGAN_S, 200, usage=counts, served=entry.outcome.served, duration_ms=1000)
    row = make_usage_row(line, entry.context, BEGAN_S)
    return row.input + row.output


def test_a_process_that_is_alone_charges_what_its_predecessor_had_decided() -> None:
    before, after = process("x"), process("y")
    entry = ended(before.ask(0.0))
    log(after, entry, 5.0)
    assert after.left(5.0) == MOST - used_by_row(entry) == MOST - 40


def test_an_outcome_without_usage_is_charged_as_its_row_is() -> None:
    before, after = process("x"), process("y")
    found = ended(before.ask(0.0))
    cut = Outcome(found.ticket, 200, found.outcome.served, 1.0, 0.1, None, None, None, was_cut=True, answer_bytes=80)
    log(after, OrphanedOutcome(cut, found.context, BEGAN_S), 5.0)
    line = UsageLine("1", BEGAN_S, 200, served=cut.served, duration_ms=1000, first_byte_us=100_000, flags="UC",
                     answer_bytes=80)  # fmt: skip
    row = make_usage_row(line, found.context, BEGAN_S)
    assert row.is_estimated
    assert after.left(5.0) == MOST - row.input - row.output


def test_a_dead_workers_reservations_come_back_and_its_outcomes_are_charged_once() -> None:
    wire: list[Process] = []
    lives, dies = (process(name, wire) for name in "xy")
    entries = [ended(dies.ask(0.0)) for _ in range(3)]
    assert lives.left(0.0) < MOST - 300
    wire.remove(dies)
    # before anybody knows that it is dead, and after
    log(lives, entries[0], 0.5)
    now = beat_for([lives], SILENCE_S + 2 * HEARTBEAT_S, 0.5)
    assert lives.left(now) == MOST - 40
    log(lives, entries[1], now)
    assert lives.left(now) == MOST - 80


def test_an_outcome_that_a_living_worker_gets_for_another_is_charged_once() -> None:
    wire: list[Process] = []
    decides, hears = (process(name, wire) for name in "xy")
    log(hears, ended(decides.ask(0.0)), 0.5)
    now = beat_for([decides, hears], 10.0, 0.5)
    wire.remove(decides)
    now = beat_for([hears], 10.0, now)
    assert hears.left(now) == MOST - 40


def test_a_worker_that_was_silent_and_lives_takes_nothing_back_twice() -> None:
    wire: list[Process] = []
    one, pauses = (process(name, wire) for name in "xy")
    asked = pauses.ask(0.0)
    now = beat_for([one], 10.0, 0.0)
    assert one.left(now) == MOST
    log(pauses, ended(asked), now)
    assert (one.left(now), pauses.left(now)) == (MOST - 40, MOST - 40)


def test_a_worker_that_starts_is_not_told_what_dead_ones_have_reserved() -> None:
    wire: list[Process] = []
    lives, dies = (process(name, wire) for name in "xy")
    running = lives.ask(0.0)
    dies.ask(0.0)
    wire.remove(dies)
    starts = process("z", wire)
    starts.perform(starts.core.heartbeat(0.5), 0.5)
    # what the living one has reserved counts
    assert starts.left(0.5) < MOST - 100
    log(lives, ended(running), 1.0)
    now = beat_for([lives, starts], 10.0, 1.0)
    assert (lives.left(now), starts.left(now)) == (MOST - 40, MOST - 40)


def test_what_a_killed_process_had_reserved_is_not_in_its_file(tmp_path: Path) -> None:
    before = process("x")
    log(before, ended(before.ask(0.0)), 1.0)
    running = before.ask(1.0)

    def saved(one: Process) -> SavedLimits:
        limits = one.core.admission.limits
        return SavedLimits(limits, tmp_path, number=0, clock=lambda: 1.0, wall_clock=lambda: one.began_s)

    (tmp_path / "limits-0.json").touch()
    file = saved(before)
    before.core.admission.limits.changes += 1
    file.save()
    after = process("y")
    saved(after).load()
    assert after.left(1.0) == MOST - 40
    log(after, ended(running), 2.0)
    assert after.left(2.0) == MOST - 80


def test_what_is_in_rows_that_were_read_is_not_charged_again() -> None:
    wire: list[Process] = []
    dies, starts, other = (process(name, wire) for name in "xyz")
    entries = [ended(dies.ask(0.0)) for _ in range(2)]
    wire.remove(dies)
    now = beat_for([starts, other], 10.0, 0.0)
    starts.rebuild([UsageRollupRow("a", route="default/chat", requests=1, input_tokens=10, output_tokens=30)], now)
    starts.perform(starts.core.on_usage_rows_read(entries[0].ended_s + 0.5), now)
    log(other, entries[0], now)
    assert starts.left(now) == MOST - 40
    later = OrphanedOutcome(entries[1].outcome, entries[1].context, BEGAN_S + 60.0)
    log(other, later, now)
    assert starts.left(now) == MOST - 80


def test_a_global_budget_is_charged_in_the_store() -> None:
    budget = "{name: b, window: Month, max: {tokens: 1000}, scope: Global}"
    before, after = process("x"), process("y", budget=budget)
    (settled,) = (one for one in log(after, ended(before.ask(0.0)), 5.0) if isinstance(one, SettleGrant))
    assert settled.grant.is_global
    assert [one.amount for one in settled.grant.charges] == [one.amount for one in settled.grant.claims] == [0.0]
    assert settled.used is not None
    assert settled.used.amount_of("total_tokens") == 40


def test_without_a_usage_log_nobody_knows_whose_it_was() -> None:
    before, after = Process(BUDGET, name="x"), Process(BUDGET, name="y")
    own = before.ask(0.0)
    assert isinstance(own, Decision)
    assert own.usage is None
    outcome = Outcome(own.ticket, 200, own.assignment.endpoint.address, 1.0, 0.1, 10, 30, None)
    after.core.on_outcome(outcome, 1.0)
    assert after.left(1.0) == MOST


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_counters_equal_the_rows_after_kills_at_any_time(seed: int) -> None:
    """Three workers; each that dies is replaced. Every entry comes to one that lives. If that dies before it knows of
    the death of the one that has decided, the next reading of the rows counts the request.
    """
    chosen, wire, now, rows = random.Random(seed), list[Process](), 0.0, 0
    living = [process(f"p{number}", wire) for number in range(3)]
    running: list[RequestEffect] = []
    for number in range(3, 120):
        now += chosen.random() * 0.2
        match chosen.randrange(8):
            case 0:
                dies = chosen.choice(living)
                living.remove(dies)
                wire.remove(dies)
                starts = process(f"p{number}", wire)
                starts.perform(starts.core.heartbeat(now), now)
                living.append(starts)
            case 1:
                now = beat_for(living, chosen.choice([1.0, 5.0]), now)
            case 2 | 3 | 4 if running:
                entry = ended(running.pop(chosen.randrange(len(running))), chosen.randrange(200), chosen.randrange(50))
                rows += used_by_row(entry)
                log(chosen.choice(living), entry, now)
            case _:
                running.append(chosen.choice(living).ask(now))
    now = beat_for(living, 10.0, now)
    for one in running:
        entry = ended(one)
        rows += used_by_row(entry)
        log(chosen.choice(living), entry, now)
    now = beat_for(living, 10.0, now)
    assert min(one.left(now) for one in living) > MOST - rows - 0.001
    for one in living:
        one.rebuild([UsageRollupRow("a", route="default/chat", requests=1, output_tokens=rows)], now)
    assert [one.left(now) for one in living] == pytest.approx([MOST - rows] * 3, abs=0.001)
