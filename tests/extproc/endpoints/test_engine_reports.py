"""What engines say: believed while it is fresh, mixed with what we know when it grows old."""

from __future__ import annotations

import numpy as np
import pytest

from extproc.endpoints.engine_reports import EngineState, belief, foreign, kv_usage, report, running, waiting
from extproc.endpoints.ledger import charge, release
from extproc.endpoints.table import EndpointTable, Loras


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace(f"e{number}:1" for number in range(count))
    return table


def test_a_fresh_report_is_taken_as_it_is() -> None:
    table = table_of(2)
    report(table, 0, EngineState(waiting=3, running=16, kv_usage=0.5), 10.0)
    assert waiting(table, 10.5)[0] == 3
    assert running(table, 10.5)[0] == 16
    assert kv_usage(table, 10.5)[0] == 0.5


def test_what_was_sent_since_counts_until_the_next_report() -> None:
    table = table_of(1)
    report(table, 0, EngineState(waiting=0, running=4, kv_usage=0.1), 0.0)
    place = charge(table, 0, prefill_tokens=10, now=0.1)
    assert running(table, 0.2)[0] == 5
    release(table, place, 0.3)
    assert running(table, 0.2)[0] == 4
    report(table, 0, EngineState(waiting=2, running=4, kv_usage=0.1), 0.3)
    charge(table, 0, prefill_tokens=10, now=0.4)
    assert waiting(table, 0.5)[0] == 3, "behind those that already wait"
    assert running(table, 0.5)[0] == 4


def test_an_old_report_gives_way_to_our_own_count() -> None:
    table = table_of(1)
    report(table, 0, EngineState(waiting=50, running=10, kv_usage=0.9), 0.0)
    for _ in range(12):
        charge(table, 0, prefill_tokens=1, now=0.0)
    estimates = [float(waiting(table, now)[0]) for now in (1.0, 3.0, 6.0, 60.0)]
    assert estimates[0] == 62
    assert estimates == sorted(estimates, reverse=True)
    # 12 in flight where 10 were seen to run
    assert estimates[-1] == pytest.approx(2, abs=0.01)
    assert running(table, 60.0)[0] == pytest.approx(12, abs=0.01)


def test_belief_is_whole_for_two_seconds_and_then_halves_every_three() -> None:
    table = table_of(1)
    report(table, 0, EngineState(waiting=1), 100.0)
    assert [belief(table, now)[0] for now in (100.0, 102.0, 105.0, 108.0)] == pytest.approx([1, 1, 0.5, 0.25])


def test_a_silent_engine_counts_as_full_as_the_fullest() -> None:
    table = table_of(2)
    report(table, 0, EngineState(kv_usage=0.2), 0.0)
    report(table, 0, EngineState(kv_usage=0.2), 60.0)
    report(table, 1, EngineState(kv_usage=0.1), 0.0)
    assert kv_usage(table, 60.0)[:2] == pytest.approx([0.2, 0.2], abs=1e-6)


def test_without_any_report_our_own_count_is_all_there_is() -> None:
    table = table_of(2)
    charge(table, 1, prefill_tokens=5, now=1000.0)
    assert waiting(table, 1000.0)[:2].tolist() == [0, 1]
    assert running(table, 1000.0)[:2].tolist() == [0, 1]
    assert np.isfinite(kv_usage(table, 1000.0)).all()


def test_requests_that_are_not_ours_are_seen() -> None:
    table = table_of(2)
    charge(table, 0, prefill_tokens=5, now=0.0)
    report(table, 0, EngineState(waiting=0, running=1), 0.5)
    assert not table.has_foreign
    report(table, 1, EngineState(waiting=3, running=8), 0.5)
    assert table.has_foreign
    assert foreign(table, 1.0)[:2].tolist() == [0, 11]


def test_what_an_engine_does_not_say_stays_as_it_was() -> None:
    table = table_of(1)
    report(table, 0, EngineState(waiting=3, running=2, kv_usage=0.5, loras=Loras(served=frozenset({"a"}))), 0.0)
    report(table, 0, EngineState(running=4, loras=Loras(active=frozenset({"a"}), most=2)), 0.1)
    assert (table.waiting[0], table.running[0], table.kv_usage[0]) == (3, 4, 0.5)
    assert table.loras[0] == Loras(frozenset({"a"}), most=2, served=frozenset({"a"}))


def test_a_new_endpoint_in_an_old_row_starts_unknown() -> None:
    table = table_of(1)
    report(table, 0, EngineState(waiting=9, ttft_s=2.0, loras=Loras(served=frozenset({"a"}))), 5.0)
    table.replace(["other:1"])
    assert waiting(table, 5.0)[0] == 0
    assert table.ttft_s[0] == 0
    assert table.loras[0] == Loras()
    assert belief(table, 5.0)[0] == 0
