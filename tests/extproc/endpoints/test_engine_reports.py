# SPDX-License-Identifier: Apache-2.0
"""Engines' reports: trusted while fresh, replaced by our own counts as they age."""

from __future__ import annotations

import numpy as np
import pytest

from extproc.endpoints.engine_reports import (
    apply_report,
    estimated_kv_usage,
    estimated_requests_of_others,
    estimated_running,
    estimated_waiting,
    report_trust,
)
from extproc.endpoints.in_flight import begin_request, end_request
from extproc.endpoints.table import EndpointTable
from extproc.engines.metrics import EngineReport, LoraState


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints(f"e{number}:1" for number in range(count))
    return table


def test_a_fresh_report_is_fully_trusted() -> None:
    table = table_of(2)
    apply_report(table, 0, EngineReport(waiting=3, running=16, kv_usage=0.5), 10.0)
    assert estimated_waiting(table, 10.5)[0] == 3
    assert estimated_running(table, 10.5)[0] == 16
    assert estimated_kv_usage(table, 10.5)[0] == 0.5


def test_requests_dispatched_since_a_report_count_until_the_next() -> None:
    table = table_of(1)
    apply_report(table, 0, EngineReport(waiting=0, running=4, kv_usage=0.1), 0.0)
    endpoint = begin_request(table, 0, work=10, now=0.1)
    assert estimated_running(table, 0.2)[0] == 5
    end_request(table, endpoint, 0.3)
    assert estimated_running(table, 0.2)[0] == 4
    apply_report(table, 0, EngineReport(waiting=2, running=4, kv_usage=0.1), 0.3)
    begin_request(table, 0, work=10, now=0.4)
    assert estimated_waiting(table, 0.5)[0] == 3, "behind those that already wait"
    assert estimated_running(table, 0.5)[0] == 4


def test_an_old_report_gives_way_to_our_own_count() -> None:
    table = table_of(1)
    apply_report(table, 0, EngineReport(waiting=50, running=10, kv_usage=0.9), 0.0)
    for _ in range(12):
        begin_request(table, 0, work=1, now=0.0)
    estimates = [float(estimated_waiting(table, now)[0]) for now in (1.0, 3.0, 6.0, 60.0)]
    assert estimates[0] == 62
    assert estimates == sorted(estimates, reverse=True)
    # 12 in flight where 10 were seen to run
    assert estimates[-1] == pytest.approx(2, abs=0.01)
    assert estimated_running(table, 60.0)[0] == pytest.approx(12, abs=0.01)


def test_trust_is_full_for_two_seconds_and_then_halves_every_three() -> None:
    table = table_of(1)
    apply_report(table, 0, EngineReport(waiting=1), 100.0)
    assert [report_trust(table, now)[0] for now in (100.0, 102.0, 105.0, 108.0)] == pytest.approx([1, 1, 0.5, 0.25])


def test_a_stale_engine_counts_as_full_as_the_fullest() -> None:
    table = table_of(2)
    apply_report(table, 0, EngineReport(kv_usage=0.2), 0.0)
    apply_report(table, 0, EngineReport(kv_usage=0.2), 60.0)
    apply_report(table, 1, EngineReport(kv_usage=0.1), 0.0)
    assert estimated_kv_usage(table, 60.0)[:2] == pytest.approx([0.2, 0.2], abs=1e-6)


def test_without_any_report_our_own_count_is_all_there_is() -> None:
    table = table_of(2)
    begin_request(table, 1, work=5, now=1000.0)
    assert estimated_waiting(table, 1000.0)[:2].tolist() == [0, 1]
    assert estimated_running(table, 1000.0)[:2].tolist() == [0, 1]
    assert np.isfinite(estimated_kv_usage(table, 1000.0)).all()


def test_foreign_requests_are_detected() -> None:
    table = table_of(2)
    begin_request(table, 0, work=5, now=0.0)
    apply_report(table, 0, EngineReport(waiting=0, running=1), 0.5)
    assert not table.has_foreign_requests
    apply_report(table, 1, EngineReport(waiting=3, running=8), 0.5)
    assert table.has_foreign_requests
    assert estimated_requests_of_others(table, 1.0)[:2].tolist() == [0, 11]


def test_missing_values_leave_the_last_ones() -> None:
    table = table_of(1)
    apply_report(
        table, 0, EngineReport(waiting=3, running=2, kv_usage=0.5, loras=LoraState(served=frozenset({"a"}))), 0.0
    )
    apply_report(table, 0, EngineReport(running=4, loras=LoraState(active=frozenset({"a"}), max_active=2)), 0.1)
    assert (table.waiting[0], table.running[0], table.kv_usage[0]) == (3, 4, 0.5)
    assert table.loras[0] == LoraState(frozenset({"a"}), max_active=2, served=frozenset({"a"}))


def test_a_new_endpoint_in_an_old_row_starts_unknown() -> None:
    table = table_of(1)
    apply_report(table, 0, EngineReport(waiting=9, ttft_s=2.0, loras=LoraState(served=frozenset({"a"}))), 5.0)
    table.replace_endpoints(["other:1"])
    assert estimated_waiting(table, 5.0)[0] == 0
    assert table.ttft_s[0] == 0
    assert table.loras[0] == LoraState()
    assert report_trust(table, 5.0)[0] == 0
