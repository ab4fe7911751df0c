# SPDX-License-Identifier: Apache-2.0
"""Saturation, and that missing reports never stop requests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from extproc.admission.flow_queues import FlowKey, QueuedRequest
from extproc.admission.saturation import RECHECK_S, EndpointHeadroom, PrefillDecodeMasks
from extproc.api.admission import SaturationSpec
from extproc.api.quantities import Duration
from extproc.endpoints.engine_reports import apply_report
from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.table import INITIAL_PREFILL_RATE, EndpointConfig, EndpointTable
from extproc.engines.metrics import EngineReport

NOW = 100.0
REPORTS = SaturationSpec(queue_depth=5, kv_usage=0.8, max_wait=None).limits()
WANTED = QueuedRequest("t", FlowKey("acme"), NOW, NOW + 60, input_tokens=100.0, uncached_tokens=100.0)


@pytest.fixture
def table() -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints(["a:1", "b:1"])
    return table


def say(table: EndpointTable, row: int, *, waiting: float = 0, running: float = 0, kv: float = 0) -> None:
    apply_report(table, row, EngineReport(waiting, running, kv), NOW)


def test_the_larger_of_queue_and_cache_counts_and_engines_are_averaged(table: EndpointTable) -> None:
    say(table, 0, waiting=1, kv=0.4)
    say(table, 1, waiting=0, kv=0.2)
    assert EndpointHeadroom(table, REPORTS, NOW).saturation == pytest.approx((0.5 + 0.25) / 2)


def test_one_very_full_engine_does_not_make_the_others_full(table: EndpointTable) -> None:
    say(table, 0, waiting=500)
    say(table, 1)
    capacity = EndpointHeadroom(table, REPORTS, NOW)
    assert capacity.saturation == 0.5
    rows = capacity.rows_with_headroom_for(WANTED)
    assert rows is not None
    assert rows.nonzero()[0].tolist() == [1]


def test_a_burst_between_two_reports_does_not_overload_engines_that_looked_empty(table: EndpointTable) -> None:
    say(table, 0)
    say(table, 1)
    sent = 0
    while (rows := EndpointHeadroom(table, REPORTS, NOW + 0.1).rows_with_headroom_for(WANTED)) is not None:
        begin_request(table, int(rows.argmax()), work=10_000, tokens=10_100, now=NOW + 0.1)
        sent += 1
    assert sent == 10
    # once their prefill is done by our books, they run, and do not wait
    assert (
        EndpointHeadroom(table, REPORTS, NOW + 0.1 + 1.5 * 50_000 / INITIAL_PREFILL_RATE).rows_with_headroom_for(WANTED)
        is not None
    )


def test_tokens_dispatched_since_the_report_count_against_a_known_cache_size(table: EndpointTable) -> None:
    table.kv_capacity_tokens[:] = 10_000
    for row in (0, 1):
        say(table, row, kv=0.5)
    begin_request(table, 0, work=0, tokens=4_000, now=NOW)
    capacity = EndpointHeadroom(table, REPORTS, NOW)
    assert capacity.pressure[0] == pytest.approx((0.5 + 0.4) / 0.8)
    assert not capacity.open[0]


def test_missing_reports_never_stop_requests(table: EndpointTable) -> None:
    say(table, 0, waiting=500, kv=1.0)
    say(table, 1, waiting=500, kv=1.0)
    assert EndpointHeadroom(table, REPORTS, NOW + 1).rows_with_headroom_for(WANTED) is None
    late = EndpointHeadroom(table, REPORTS, NOW + 60)
    assert late.rows_with_headroom_for(WANTED) is not None
    assert late.stale_endpoints == 2


def test_engines_without_any_report_are_judged_by_our_own_counts(table: EndpointTable) -> None:
    assert EndpointHeadroom(table, REPORTS, NOW).saturation == 0.0
    for row in (0, 1):
        for _ in range(128):
            begin_request(table, row, work=0, now=NOW)
    assert EndpointHeadroom(table, REPORTS, NOW).rows_with_headroom_for(WANTED) is None
    # a limit of our own takes the place of that guess
    many = SaturationSpec(queue_depth=5, kv_usage=0.8, max_wait=None, max_requests=500).limits()
    assert EndpointHeadroom(table, many, NOW).saturation == pytest.approx(128 / 500)


def test_requests_and_tokens_in_flight(table: EndpointTable) -> None:
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=None, max_requests=2, max_tokens=1000).limits()
    begin_request(table, 0, work=0, tokens=950, now=NOW)
    begin_request(table, 1, work=0, tokens=10, now=NOW)
    rows = EndpointHeadroom(table, limits, NOW).rows_with_headroom_for(WANTED)
    assert rows is not None
    assert rows.nonzero()[0].tolist() == [1]
    begin_request(table, 1, work=0, tokens=10, now=NOW)
    assert EndpointHeadroom(table, limits, NOW).rows_with_headroom_for(WANTED) is None


def test_tokens_in_flight_fill_an_engine_little_by_little(table: EndpointTable) -> None:
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=None, max_tokens=1000).limits()
    begin_request(table, 0, work=0, tokens=500, now=NOW)
    capacity = EndpointHeadroom(table, limits, NOW)
    assert capacity.pressure[0] == pytest.approx(0.5)
    # one of two engines is half full
    assert capacity.saturation == pytest.approx(0.25)
    begin_request(table, 0, work=0, tokens=700, now=NOW)
    assert EndpointHeadroom(table, limits, NOW).saturation == pytest.approx(0.5)


def test_the_expected_wait_fills_an_engine_until_it_is_short_again(table: EndpointTable) -> None:
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=Duration("500ms")).limits()
    for row, tokens in ((0, 7_000), (1, 9_000)):
        begin_request(table, row, work=tokens, now=NOW)
    capacity = EndpointHeadroom(table, limits, NOW)
    assert capacity.rows_with_headroom_for(WANTED) is None
    again_s = capacity.next_headroom_at_s()
    assert again_s == pytest.approx(NOW + 0.2, abs=0.001)
    assert EndpointHeadroom(table, limits, again_s).open.nonzero()[0].tolist() == [0]


def test_there_is_always_a_time_to_check_again(table: EndpointTable) -> None:
    assert EndpointHeadroom(table, REPORTS, NOW).next_headroom_at_s() == NOW + RECHECK_S


def test_failing_and_draining_engines_have_no_room_unless_there_are_no_others(table: EndpointTable) -> None:
    table.has_failures, table.retry_at_s[0] = True, NOW + 5
    assert EndpointHeadroom(table, REPORTS, NOW).open.nonzero()[0].tolist() == [1]
    table.retry_at_s[1] = NOW + 5
    assert EndpointHeadroom(table, REPORTS, NOW).open.nonzero()[0].tolist() == [0, 1]
    table.retry_at_s[:] = 0
    table.replace_endpoints({"a:1": EndpointConfig(is_draining=True), "b:1": EndpointConfig()})
    assert EndpointHeadroom(table, REPORTS, NOW).open.nonzero()[0].tolist() == [1]


def test_without_engines_no_request_is_dispatched(table: EndpointTable) -> None:
    table.replace_endpoints([])
    capacity = EndpointHeadroom(table, REPORTS, NOW)
    assert not capacity.has_endpoints
    assert capacity.rows_with_headroom_for(WANTED) is None
    assert math.isfinite(capacity.next_headroom_at_s())


def test_a_slightly_too_full_engine_with_the_prefix_cached_may_be_used(table: EndpointTable) -> None:
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=Duration("500ms"), headroom=1.0).limits()
    cached = QueuedRequest("t", FlowKey("acme"), NOW, NOW + 60, input_tokens=100.0, uncached_tokens=10.0)
    begin_request(table, 0, work=0.9 * INITIAL_PREFILL_RATE, now=NOW)

    def rows(queued: QueuedRequest) -> list[int] | None:
        found = EndpointHeadroom(table, limits, NOW).rows_with_headroom_for(queued)
        return None if found is None else found.nonzero()[0].tolist()

    assert rows(WANTED) == [1]
    assert rows(cached) == [0, 1]
    begin_request(table, 0, work=0.2 * INITIAL_PREFILL_RATE, now=NOW)
    assert rows(cached) == [1]
    # and with nobody free, nobody goes
    begin_request(table, 1, work=0.6 * INITIAL_PREFILL_RATE, now=NOW)
    assert rows(cached) is None


def test_a_pair_needs_room_at_both_engines_of_one_group() -> None:
    table = EndpointTable()
    table.replace_endpoints(["p0:1", "d0:1", "p1:1", "d1:1"])
    size = len(table.addresses)
    prefill, decode, group = np.zeros(size, np.bool_), np.zeros(size, np.bool_), np.zeros(size, np.intp)
    prefill[[0, 2]] = decode[[1, 3]] = True
    group[[2, 3]] = 1
    stages = PrefillDecodeMasks(prefill, decode, group)
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=None, max_requests=1).limits()
    begin_request(table, 0, work=0, now=NOW)
    rows = EndpointHeadroom(table, limits, NOW, stages).rows_with_headroom_for(WANTED)
    assert rows is not None
    assert rows.nonzero()[0].tolist() == [2, 3]
    begin_request(table, 3, work=0, now=NOW)
    # a free decode engine of one group and a free prefill engine of the other are no pair
    capacity = EndpointHeadroom(table, limits, NOW, stages)
    assert capacity.rows_with_headroom_for(WANTED) is None
    assert capacity.saturation == 0.5
