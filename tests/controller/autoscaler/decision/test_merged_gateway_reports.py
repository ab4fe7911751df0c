# SPDX-License-Identifier: Apache-2.0
"""What gateways say, merged: sums equal what clients sent, whoever restarts, falls silent, repeats itself or lies."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.autoscaler.decision.gateway_reports import MOST, SILENT_AFTER_S
from controller.autoscaler.decision.merged_gateway_reports import ModelServerSignals, SignalAggregator
from controller.autoscaler.decision.situation import Backlog, EngineReport
from extproc.api.status_page_contents import (
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    EngineDemand,
    ProcessDemand,
    RequestCounters,
    ServerDemand,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

LLAMA = "default/llama"
QWEN = "default/qwen"
GATEWAYS = ("attache/g-0", "attache/g-1")
TRUSTED = ("attache",)
BUCKETS = len(TTFT_BOUNDS_S) + 1


def signals(*servers: str, gateways: Iterable[str] = GATEWAYS, now: float = 0.0) -> SignalAggregator:
    made = SignalAggregator(TRUSTED)
    made.set_subscriptions(servers or (LLAMA,), now)
    made.set_gateways(list(gateways), now)
    made.record_traffic_points(now)
    return made


def said(
    instance: str = "a", sequence: int = 1, age_s: float = 0.0, *, slot: str = "", server: str = LLAMA, **fields: object
) -> ProcessDemand:
    """``arrivals`` and other counters become those of one model."""
    counters = {name: value for name, value in fields.items() if name in RequestCounters.__struct_fields__}
    rest = {name: value for name, value in fields.items() if name not in counters}
    return ProcessDemand(
        instance, sequence, age_s, {server: ServerDemand(counted={"m": RequestCounters(**counters)}, **rest)}, slot
    )


def of(made: SignalAggregator, now: float, *servers: str) -> ModelServerSignals:
    return made.merged_signals(servers or (LLAMA,), now)


def arrivals(made: SignalAggregator, now: float) -> float:
    totals = of(made, now).traffic.totals_at(now)
    assert totals is not None
    return totals.arrivals


def test_sums_are_over_processes_and_rates_over_time() -> None:
    made = signals()
    for second in range(1, 21):
        made.ingest(GATEWAYS[0], said("a", second, second, arrivals=2 * second), second)
        made.ingest(GATEWAYS[1], said("b", second, second, arrivals=second, output_tokens=10.0 * second), second)
        made.record_traffic_points(second)
    traffic = of(made, 20.0).traffic
    rates = traffic.rates(10.0, 20.0)
    assert rates is not None
    assert (rates.window_s, rates.arrivals, rates.output_tokens) == (10.0, 3.0, 10.0)
    assert arrivals(made, 20.0) == 60


def test_what_a_process_counted_before_anybody_looked_is_no_news() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("old", 500, 3600.0, arrivals=1_000_000), 1.0)
    assert arrivals(made, 1.0) == 0
    made.ingest(GATEWAYS[0], said("old", 501, 3601.0, arrivals=1_000_005), 2.0)
    assert arrivals(made, 2.0) == 5


def test_a_server_that_an_old_process_gets_later_counts_from_its_first_request() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], ProcessDemand("old", 1, 3600.0), 1.0)
    made.ingest(GATEWAYS[0], said("old", 2, 3601.0, arrivals=3), 2.0)
    assert arrivals(made, 2.0) == 3


def test_a_process_that_begins_anew_adds_to_what_the_one_before_counted() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 1, 0.5, arrivals=10, queued=4), 1.0)
    made.ingest(GATEWAYS[0], said("b", 1, 0.5, arrivals=2, queued=1), 5.0)
    assert arrivals(made, 5.0) == 12
    # the one before has been silent for too long to be there
    assert of(made, 5.0).waiting.requests == 1


def test_of_a_slot_the_youngest_process_counts_at_once() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 1, 0.5, slot="x", arrivals=10, queued=4), 1.0)
    made.ingest(GATEWAYS[0], said("c", 1, 0.5, slot="y", arrivals=10, queued=5), 1.0)
    made.ingest(GATEWAYS[0], said("b", 1, 0.1, slot="x", arrivals=2, queued=1), 1.5)
    assert of(made, 1.5).waiting.requests == 6
    assert arrivals(made, 1.5) == 22


def test_repeated_and_late_messages_change_nothing() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 5, 5.0, arrivals=10), 5.0)
    for sequence in (5, 4, 1):
        made.ingest(GATEWAYS[0], said("a", sequence, 6.0, arrivals=99), 6.0)
    assert of(made, 6.0).freshness.age_s == 6.0  # of the other, unheard one
    made.ingest(GATEWAYS[1], ProcessDemand("b", 1, 0.0), 6.0)
    assert of(made, 6.0).freshness.age_s == 1.0
    made.ingest(GATEWAYS[0], said("a", 6, 6.0, arrivals=11), 6.0)
    assert arrivals(made, 6.0) == 11


def test_a_silent_gateway_is_named_and_what_waited_there_is_kept_until_its_pod_is_gone() -> None:
    made = signals()
    for second in (1.0, 2.0):
        made.ingest(
            GATEWAYS[0], said("a", int(second), second, arrivals=7, queued=3, at_zero=3, queued_tokens=90.0), second
        )
        made.ingest(GATEWAYS[1], said("b", int(second), second, arrivals=5), second)
    for second in range(3, 10):
        made.ingest(GATEWAYS[1], said("b", second, second, arrivals=5), float(second))
    found = of(made, 9.0)
    assert found.freshness.silent == ("attache/g-0",)
    assert (found.freshness.gateways, found.freshness.age_s, found.freshness.since_s) == (2, 7.0, 0.0)
    assert found.waiting == Backlog(3, 90.0, SILENT_AFTER_S, 3)
    assert arrivals(made, 9.0) == 12
    made.set_gateways(GATEWAYS[1:], 9.0)
    found = of(made, 9.0)
    assert (found.freshness.silent, found.waiting) == ((), Backlog())
    assert arrivals(made, 9.0) == 12
    assert of(made, 10.0).freshness.since_s == 1.0


def test_a_gateway_that_never_spoke_is_silent_as_is_a_process_that_does_not_answer_its_pod() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 1, 1.0, slot="x"), 1.0)
    for second in range(1, 6):
        made.ingest(GATEWAYS[0], said("a", second + 1, 1.0 + second, slot="x"), float(second))
        made.ingest(GATEWAYS[0], ProcessDemand("", 0, 0.0, slot="y"), float(second))
    assert of(made, 5.0).freshness.silent == ("attache/g-0 y", "attache/g-1")


def test_without_gateways_nothing_is_known() -> None:
    freshness = of(signals(gateways=()), 5.0).freshness
    assert (freshness.gateways, freshness.age_s, freshness.since_s) == (0, math.inf, 0.0)


def test_what_was_counted_while_nobody_heard_is_spread_over_that_time() -> None:
    made = signals(gateways=GATEWAYS[:1])
    for second in range(1, 101):
        if second <= 40 or second == 100:
            made.ingest(GATEWAYS[0], said("a", second, second, arrivals=10 * second, ttft=(second,)), float(second))
        made.record_traffic_points(float(second))
    traffic = of(made, 100.0).traffic
    assert [traffic.rates(10.0, until).arrivals for until in (40.0, 60.0, 80.0, 100.0)] == pytest.approx([10.0] * 4)
    assert of(made, 100.0).freshness.since_s == 0.0
    made.ingest(GATEWAYS[0], said("a", 101, 101.0, arrivals=1010), 101.0)
    assert of(made, 102.0).freshness.since_s == 2.0


def test_how_long_data_are_whole() -> None:
    made = signals(gateways=GATEWAYS[:1])
    for second in range(1, 21):
        made.ingest(GATEWAYS[0], said("a", second, second), float(second))
    assert of(made, 20.0).freshness.since_s == 20.0
    # one that begins now is known from its beginning
    made.set_gateways(GATEWAYS, 21.0)
    made.ingest(GATEWAYS[0], said("a", 21, 21.0), 21.0)
    made.ingest(GATEWAYS[1], said("b", 1, 1.0), 22.0)
    assert of(made, 22.0).freshness.since_s == 22.0
    # one that ran before is not
    made.set_gateways((*GATEWAYS, "attache/g-2"), 22.0)
    made.ingest("attache/g-2", said("c", 500, 500.0), 23.0)
    assert of(made, 23.5).freshness.since_s == 0.5


def test_engines_have_what_all_send_and_what_was_reported_last() -> None:
    made = signals()
    here = EngineDemand("decode", 2, 100.0, 1.0, 5.0, 0.5, 4.0, 1000.0, 8000.0, 0.01, 1e-7)
    there = EngineDemand("decode", 3, 50.0, 2.0, 6.0, 0.6, 1.0, 1000.0, 12000.0, 0.03, 3e-7)
    made.ingest(GATEWAYS[0], said("a", 1, 1.0, engines={"e:1": here, "e:2": EngineDemand(in_flight=1)}), 10.0)
    made.ingest(GATEWAYS[1], said("b", 1, 1.0, engines={"e:1": there}), 9.5)
    engines = of(made, 10.0).engines
    one = engines["e:1"]
    assert one.report == EngineReport(8.5, 5, 150.0, 2.0, 6.0, 0.6, 1000.0)
    assert (one.role, one.reported_at_s, one.last_report_s) == ("decode", 8.5, 10.0)
    assert (one.prefill_tokens_per_s, one.step_s, one.step_s_per_token) == (10_000.0, 0.02, 2e-7)
    other = engines["e:2"]
    assert other.report == EngineReport(10.0, 1)
    assert (other.reported_at_s, other.prefill_tokens_per_s) == (None, None)


def test_several_servers_are_summed_at_every_instant() -> None:
    made = signals()
    for second in range(1, 11):
        pages = (
            said("a", second, second, arrivals=second).servers
            | said(server=QWEN, arrivals=10 * second, queued=1).servers
        )
        made.ingest(GATEWAYS[0], ProcessDemand("a", second, second, pages), float(second))
        if second == 5:
            made.set_subscriptions((LLAMA, QWEN), 4.5)
        made.record_traffic_points(second)
    found = of(made, 10.0, LLAMA, QWEN)
    assert found.waiting.requests == 1
    rates = found.traffic.rates(4.0, 10.0)
    assert rates is not None
    assert rates.arrivals == 11.0
    totals = found.traffic.totals_at(3.0)
    assert totals is not None
    assert totals.arrivals == 3.0


def test_nobody_speaks_for_other_namespaces_but_those_that_are_trusted() -> None:
    made = SignalAggregator(TRUSTED)
    made.set_subscriptions((LLAMA, "team/own"), 0.0)
    made.set_gateways(("attache/g-0", "team/g"), 0.0)
    for server in (LLAMA, "team/own"):
        made.ingest("team/g", said("t", 1 if server == LLAMA else 2, 1.0, server=server, arrivals=5, queued=9), 1.0)
        made.ingest(GATEWAYS[0], said("a", 1 if server == LLAMA else 2, 1.0, server=server, arrivals=1), 1.0)
    assert [of(made, 1.0, server).traffic.totals_at(1.0).arrivals for server in (LLAMA, "team/own")] == [1.0, 6.0]  # type: ignore[union-attr]
    assert of(made, 1.0).waiting == Backlog()
    # and its silence holds nobody else up
    for second in range(2, 10):
        made.ingest(GATEWAYS[0], said("a", second + 1, second, arrivals=1), second)
    assert of(made, 9.0).freshness.silent == ()
    assert of(made, 9.0, "team/own").freshness.silent == ("team/g",)


def test_very_many_gateways_of_a_namespace_are_not_all_heard() -> None:
    keys = [f"default/g-{number}" for number in range(100)]
    made = signals(gateways=keys)
    for key in keys:
        made.ingest(key, said(f"i {key}", 1, 1.0, arrivals=1), 1.0)
    assert arrivals(made, 1.0) == 32
    assert len(of(made, 9.0).freshness.silent) == 100


ABSURD = st.one_of(
    st.floats(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)


HUGE = st.integers(min_value=-(2**63), max_value=2**64)


@given(st.lists(st.tuples(ABSURD, ABSURD, ABSURD, HUGE), min_size=1, max_size=8))
def test_absurd_values_are_bounded_and_harm_nobody_else(values: list[tuple[float, float, float, int]]) -> None:
    made = signals(LLAMA, "team/own", gateways=("attache/g-0", "team/g"))
    before, now = 0.0, 0.0
    for number, (first, second, third, buckets) in enumerate(values, 1):
        now = float(number)
        engine = EngineDemand("x" * 10_000, first, second, third, first, second, third, first, second, third, first)  # type: ignore[arg-type]
        page = ServerDemand(
            counted={"m": RequestCounters(first, second, third, first, second, third, first)},  # type: ignore[arg-type]
            ttft=(buckets, -buckets) * 50,
            tpot=(buckets,) * (len(TPOT_BOUNDS_S) + 1),
            queued=first,  # type: ignore[arg-type]
            queued_tokens=second,
            oldest_wait_s=third,
            at_zero=first,  # type: ignore[arg-type]
            engines={"e:1": engine, "y" * 10_000: engine},
        )
        servers = dict.fromkeys((f"team/{index}" for index in range(100)), page) | {"team/own": page, LLAMA: page}
        made.ingest("team/g", ProcessDemand("liar", number, first, servers), now)
        made.ingest("attache/g-0", said("a", number, now, arrivals=number), now)
        made.record_traffic_points(now)
        found = of(made, now, "team/own")
        totals = found.traffic.totals_at(now)
        assert totals is not None
        assert before <= totals.arrivals <= MOST
        before = totals.arrivals
        assert all(math.isfinite(one) for one in (found.waiting.tokens, found.waiting.oldest_s, found.waiting.requests))
        assert set(found.engines) <= {"e:1"}
        rates = found.traffic.rates(60.0, now)
        assert rates is None or rates.arrivals >= 0
    assert arrivals(made, now) == len(values)
    assert of(made, now).waiting == Backlog()


class Extproc:
    """A process, and what clients sent there. ``sent``: since it began."""

    def __init__(self, name: str, born_at_s: float) -> None:
        self.name = name
        self.born_at_s = born_at_s
        self.sent = 0
        self.buckets = Counter[int]()
        self.sequence = 0

    def request(self, bucket: int) -> None:
        self.sent += 1
        self.buckets[bucket] += 1

    def message(self, now: float) -> ProcessDemand:
        self.sequence += 1
        ttft = tuple(self.buckets[at] for at in range(BUCKETS))
        return said(
            self.name, self.sequence, now - self.born_at_s, arrivals=self.sent, prompt_tokens=2.0 * self.sent, ttft=ttft
        )


STEP = st.tuples(
    st.sampled_from(["request"] * 4 + ["tell"] * 4 + ["restart", "repeat", "late", "pause"]),
    st.integers(min_value=0, max_value=2),
    st.integers(min_value=0, max_value=BUCKETS - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_sums_equal_what_clients_sent_in_any_order_of_restarts_silence_and_messages(
    steps: list[tuple[str, int, int]],
) -> None:
    keys = [f"attache/g-{number}" for number in range(3)]
    made = signals(gateways=keys)
    now, names = 1.0, 3
    running = [Extproc(f"p{number}", 1.0) for number in range(3)]
    messages: list[tuple[str, ProcessDemand]] = []
    sent, buckets, before = 0, Counter[int](), 0.0
    for what, which, number in steps:
        process, key = running[which], keys[which]
        match what:
            case "request":
                process.request(number)
                sent += 1
                buckets[number] += 1
            case "tell":
                messages.append((key, process.message(now)))
                made.ingest(*messages[-1], now)
            case "restart":
                # it says all that it knows before it ends
                made.ingest(key, process.message(now), now)
                running[which] = Extproc(f"p{names}", now)
                names += 1
            case "repeat" | "late" if messages:
                made.ingest(*messages[-1 if what == "repeat" else number % len(messages)], now)
            case "pause":
                now += number
        now += 0.25
        made.record_traffic_points(now)
        total = arrivals(made, now)
        assert before <= total <= sent
        before = total
    for key, process in zip(keys, running, strict=True):
        made.ingest(key, process.message(now), now)
    totals = of(made, now).traffic.totals_at(now)
    assert totals is not None
    assert (totals.arrivals, totals.prompt_tokens) == (sent, 2.0 * sent)
    assert {at: count for at, count in enumerate(totals.ttft) if count} == dict(buckets)
    points = of(made, now).traffic.points
    sums = [point.totals.arrivals for point in points]
    assert sums == sorted(sums)
    assert [point.at_s for point in points] == sorted({point.at_s for point in points})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=50), min_size=2, max_size=40))
def test_counters_that_fall_never_make_sums_fall_and_count_once_when_they_rise_again(counts: list[int]) -> None:
    made = signals(gateways=GATEWAYS[:1])
    for second, count in enumerate(counts, 1):
        made.ingest(GATEWAYS[0], said("a", second, second, arrivals=count), float(second))
        made.record_traffic_points(second)
        assert arrivals(made, float(second)) == max(counts[:second])


def test_time_runs_on_for_hours_in_bounded_memory() -> None:
    made = signals(gateways=GATEWAYS[:1])
    for second in range(1, 4 * 3600):
        made.ingest(GATEWAYS[0], said("a", second, second, arrivals=3 * second), float(second))
        made.record_traffic_points(float(second))
    now = 4 * 3600.0 - 1
    traffic = of(made, now).traffic
    assert len(traffic.points) <= 300 + 240 + 1
    for window_s in (10.0, 60.0, 300.0, 1800.0, 7000.0):
        rates = traffic.rates(window_s, now)
        assert rates is not None
        assert rates.arrivals == pytest.approx(3.0)
        assert rates.window_s == pytest.approx(window_s, rel=0.05)
    assert traffic.points[0].at_s <= now - 7200


def test_latencies_of_a_window_come_from_its_points() -> None:
    made = signals(gateways=GATEWAYS[:1])
    ttft, tpot = [0] * BUCKETS, [0] * (len(TPOT_BOUNDS_S) + 1)
    for second in range(1, 61):
        ttft[5 if second <= 30 else 15] += 1
        tpot[3] += 2
        made.ingest(GATEWAYS[0], said("a", second, second, ttft=tuple(ttft), tpot=tuple(tpot)), float(second))
        made.record_traffic_points(float(second))
    traffic = of(made, 60.0).traffic
    early, late = traffic.ttft_s(50, 20.0, 25.0), traffic.ttft_s(50, 20.0, 60.0)
    assert early is not None
    assert late is not None
    assert early <= TTFT_BOUNDS_S[5] < TTFT_BOUNDS_S[14] <= late <= TTFT_BOUNDS_S[15]
    assert traffic.tpot_s(50, 20.0, 60.0) is not None


def test_what_is_followed_no_more_is_forgotten() -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 1, 1.0, arrivals=5), 1.0)
    made.set_subscriptions((), 2.0)
    assert len(of(made, 2.0).traffic.points) == 0
    made.set_subscriptions((LLAMA,), 3.0)
    made.ingest(GATEWAYS[0], said("a", 2, 3.0, arrivals=7), 3.0)
    assert arrivals(made, 3.0) == 0


def test_after_the_clock_was_set_back_time_begins_anew_and_sums_go_on() -> None:
    made = signals(gateways=GATEWAYS[:1])
    for second in range(1, 11):
        made.ingest(GATEWAYS[0], said("a", second, second, arrivals=second), 1000.0 + second)
        made.record_traffic_points(1000.0 + second)
    for second in range(11, 21):
        made.ingest(GATEWAYS[0], said("a", second, second, arrivals=second), 500.0 + second)
        made.record_traffic_points(500.0 + second)
    found = of(made, 520.0)
    assert found.traffic.points[-1].totals.arrivals == 20
    rates = found.traffic.rates(5.0, 520.0)
    assert rates is not None
    assert (rates.window_s, rates.arrivals) == (5.0, 1.0)
    assert (found.freshness.silent, found.freshness.since_s) == ((), 9.0)


@pytest.mark.parametrize("huge", [10**400, 2**63, 10**15 + 1])
def test_whole_numbers_beyond_all_bounds_are_the_most_there_is(huge: int) -> None:
    made = signals()
    made.ingest(GATEWAYS[0], said("a", 1, 0.0, arrivals=1, ttft=(0,) * BUCKETS), 0.0)
    told = said("a", 2, 1.0, arrivals=huge, prompt_tokens=1.0, queued=huge, at_zero=huge, ttft=(huge,) * BUCKETS)
    assert made.ingest(GATEWAYS[0], told, 1.0)
    assert arrivals(made, 1.0) <= MOST
    assert of(made, 1.0).waiting.requests == MOST


def test_a_process_with_an_endless_name_is_not_kept() -> None:
    made = signals()
    assert not made.ingest(GATEWAYS[0], said("a" * 100_000, 1), 0.0)
