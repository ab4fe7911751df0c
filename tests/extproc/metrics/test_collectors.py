# SPDX-License-Identifier: Apache-2.0
"""Cheap counters and histograms, in the form in which Prometheus reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from extproc.metrics.collectors import _MOST_PENDING, Counters, DeferredHistogram

BOUNDS = (0.1, 0.5, 1.0)


def test_counts_by_label() -> None:
    registry = CollectorRegistry()
    counts = Counters("asked", "Questions.", ["by"], registry)
    counts.begin("nobody")
    counts.add("one")
    counts.add("one")
    assert registry.get_sample_value("asked_total", {"by": "one"}) == 2
    assert registry.get_sample_value("asked_total", {"by": "nobody"}) == 0
    assert b'asked_total{by="one"} 2.0' in generate_latest(registry)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    Counters("asked", "Questions.", [], registry)
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
    assert spread.pending < _MOST_PENDING
