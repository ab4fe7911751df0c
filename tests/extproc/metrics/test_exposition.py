# SPDX-License-Identifier: Apache-2.0
"""Pages in pieces, and counters that are cheap to write."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, address_of, configuration
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.request_states import RequestState
from extproc.endpoints.engine_reports import apply_report
from extproc.engines.metrics import EngineReport
from extproc.metrics.exposition import (
    _MOST_PENDING,
    CounterFamily,
    DeferredHistogram,
    DeferredHistogramFamily,
    MetricFamily,
    Registry,
)
from extproc.metrics.request_metrics import Metrics
from tests.extproc import scenes

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


class Theirs(Collector):
    """One family of the library's."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]


def theirs(family: Metric) -> str:
    return generate_latest(Theirs(family)).decode()


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9), FLOATS), max_size=5), st.text(max_size=20))
def test_gauges_and_counters_are_written_as_the_library_writes_them(
    samples: list[tuple[str, str, float]], text: str
) -> None:
    labels = ("server", "endpoint")
    gauge, counter = GaugeMetricFamily("a", text, labels=labels), CounterMetricFamily("b", text, labels=labels)
    for one, two, value in samples:
        gauge.add_metric([one, two], value)
        counter.add_metric([one, two], value)
    for family, expected in (
        (MetricFamily("a", text, labels), gauge),
        (MetricFamily("b", text, labels, "counter"), counter),
    ):
        written = "".join(family.exposition_chunks(family.line((one, two), value) for one, two, value in samples))
        assert written == theirs(expected)


@given(st.lists(st.floats(min_value=0, max_value=1e12), min_size=1, max_size=30))
def test_histograms_are_written_as_the_library_writes_them(values: list[float]) -> None:
    registry = Registry()
    histograms = DeferredHistogramFamily("h", "Seconds.", (0.1, 1, 1e7), ["server"], registry)
    for value in values:
        histograms.observe(value, 'a"b\n')
    bounds = [0.1, 1.0, 1e7, math.inf]
    counts = [("+Inf" if bound == math.inf else str(bound), sum(one <= bound for one in values)) for bound in bounds]
    family = HistogramMetricFamily("h", "Seconds.", labels=["server"])
    family.add_metric(['a"b\n'], counts, float(np.array(values).sum()))
    assert "".join(registry.exposition_chunks()) == theirs(family)


def test_the_librarys_own_collectors_are_on_the_page_too() -> None:
    registry, reference = Registry(), CollectorRegistry()
    for one in (registry, reference):
        Gauge("g", "A gauge.", registry=one).set(2)
    CounterFamily("c", "A counter.", [], registry).add()
    page = "".join(registry.exposition_chunks())
    assert page.startswith(generate_latest(reference).decode())
    assert page.endswith("c_total 1.0\n")


def test_thousands_of_endpoints_are_many_pieces_and_no_piece_is_long() -> None:
    """So that the event loop turns between them; and a reader who stops has the rest never written."""
    sizes = ObjectCounts(models=20, routes=20, hosts=1, adapters=1, endpoints=4_000)
    files = configuration(sizes, GatewayPorts("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 80), "Open")
    core = Core(load_snapshot(files), rng=random.Random(0), ticket_prefix="t")
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 9.0)
    for pool in core.pools.values():
        for row in pool.table.active_rows:
            apply_report(pool.table, row, EngineReport(waiting=1, running=2_000_000, kv_usage=0.25), 5.0)
    pieces = list(metrics.registry.exposition_chunks())
    assert max(piece.count("\n") for piece in pieces) <= 1_000
    # 4,000 endpoints are looked at in four turns, samples or none: nobody is avoided
    at = next(at for at, piece in enumerate(pieces) if "# TYPE attache_endpoint_avoided gauge" in piece)
    assert pieces[at + 1 : at + 5] == [""] * 4
    families = {one.name: one for one in text_string_to_metric_families("".join(pieces))}
    for name, value in (("running", 2e6), ("report_age_seconds", 4.0), ("kv_usage", 0.25)):
        samples = families[f"attache_engine_{name}"].samples
        assert [one.value for one in samples] == [value] * 4_000
    first = families["attache_in_flight"].samples[0]
    assert first.labels == {"server": "default/server-0", "endpoint": address_of(0, 80)}
    # all of a family is in one place
    heads = [line for piece in pieces for line in piece.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


BOUNDS = (0.1, 0.5, 1.0)


def test_counts_by_label() -> None:
    registry = CollectorRegistry()
    counts = CounterFamily("asked", "Questions.", ["by"], registry)
    counts.add_series("nobody")
    counts.add("one")
    counts.add("one")
    assert registry.get_sample_value("asked_total", {"by": "one"}) == 2
    assert registry.get_sample_value("asked_total", {"by": "nobody"}) == 0
    assert b'asked_total{by="one"} 2.0' in generate_latest(registry)


def test_series_of_model_servers_end_when_they_leave_the_configuration() -> None:
    def core_with(*names: str) -> Core:
        return scenes.core_of(servers=dict.fromkeys(names, "endpoints: [{address: '10.0.0.1:8000'}]"))

    core = core_with("stays", "leaves")
    metrics = Metrics(lambda: list(core.pools.values()), lambda: 0.0, lambda: 0.0)

    def counted(name: str) -> list[float | None]:
        labels = {"server": f"default/{name}"}
        series = [
            ("attache_picks_total", {}),
            ("attache_engine_reports_total", {"result": "read"}),
            ("attache_engine_wait_seconds_count", {}),
            ("attache_prefill_legs_in_flight", {}),
        ]
        return [metrics.registry.get_sample_value(one, {**labels, **more}) for one, more in series]

    for name in ("stays", "leaves"):
        server = f"default/{name}"
        metrics._picks.add(server)
        metrics.observe_scrape(server)
        metrics._waits[RequestState.AWAITING_ENGINE].observe(1.0, server)
        metrics._prefills._in_flight[server] += 0
    metrics.on_config_applied()
    assert counted("stays") == counted("leaves") == [1, 1, 1, 0]
    core = core_with("stays")
    metrics.on_config_applied()
    assert counted("stays") == [1, 1, 1, 0]
    assert counted("leaves") == [None] * 4
    assert "default/leaves" not in "".join(metrics.registry.exposition_chunks())


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_an_amount_that_would_spoil_a_series_for_ever_is_left_out_and_logged(
    amount: float, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    counts = CounterFamily("cost", "Seconds.", [], registry)
    counts.add_amount(2.0)
    counts.add_amount(amount)
    assert registry.get_sample_value("cost_total") == 2
    spread = DeferredHistogram("took", "Seconds.", BOUNDS, registry)
    spread.observe(0.2)
    spread.observe(amount)
    assert registry.get_sample_value("took_sum") == 0.2
    assert registry.get_sample_value("took_bucket", {"le": "+Inf"}) == 1
    for name in ("cost", "took"):
        assert f"{name}: values that are negative or not finite are left out, such as {amount}" in caplog.text


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    CounterFamily("asked", "Questions.", [], registry)
    with pytest.raises(ValueError, match="asked"):
        DeferredHistogram("asked", "Questions.", BOUNDS, registry)


@given(st.lists(st.floats(0, 2), max_size=50))
def test_a_spread_is_the_histogram_of_prometheus_client(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = DeferredHistogram("took", "Seconds.", BOUNDS, ours)
    histogram = Histogram("took", "Seconds.", buckets=BOUNDS, registry=theirs)
    for value in values:
        spread.observe(value)
        histogram.observe(value)
    for bound in ("0.1", "0.5", "1.0", "+Inf"):
        labels = {"le": bound}
        assert ours.get_sample_value("took_bucket", labels) == theirs.get_sample_value("took_bucket", labels)
    assert ours.get_sample_value("took_count") == len(values)
    assert ours.get_sample_value("took_sum") == pytest.approx(sum(values))


def test_what_nobody_reads_does_not_pile_up() -> None:
    spread = DeferredHistogram("took", "Seconds.", BOUNDS, CollectorRegistry())
    for _ in range(3 * _MOST_PENDING):
        spread.observe(0.2)
    assert spread.pending_count < _MOST_PENDING
