# SPDX-License-Identifier: Apache-2.0
"""Tenants with series of their own are the largest of late, and no series goes backwards before it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from extproc.metrics.admission_metrics import OTHERS, AdmissionMetrics
from extproc.metrics.exposition import CounterFamily
from extproc.metrics.label_cardinality import BusiestNames
from extproc.metrics.request_metrics import Metrics

MINUTE_S = 60.0


class Names:
    """Counts names, and knows which have lost their places."""

    def __init__(self, most: int, *, most_counted: int = 20_000) -> None:
        self.lost: set[str] = set()
        self.all = BusiestNames(most, others=OTHERS, forget=self.lost.update, most_counted=most_counted)

    def ask(self, now: float, **counts: int) -> set[str]:
        """So many requests of each. Returns the names that have lost their places."""
        self.lost.clear()
        for name, count in counts.items():
            for _ in range(count):
                assert self.all.count_request(name, now) == self.all.shown_name(name)
        return set(self.lost)

    def __contains__(self, name: str) -> bool:
        return self.all.shown_name(name) == name


def test_a_name_that_has_become_large_takes_the_place_of_the_smallest() -> None:
    names = Names(2)
    names.ask(0.0, first=5, second=3)
    assert not names.ask(30.0, late=4)
    assert ("first" in names, "second" in names, "late" in names) == (True, True, False)
    assert names.ask(60.0, first=1) == {"second"}
    assert ("first" in names, "second" in names, "late" in names) == (True, False, True)


def test_old_requests_count_less() -> None:
    names = Names(1)
    names.ask(0.0, old=100)
    assert not names.ask(60.0, new=30)
    assert not names.ask(120.0, new=30)
    # 100 / 4 of the one, 30 + 30 / 2 of the other
    assert names.ask(180.0, new=1) == {"old"}


def test_a_place_that_nobody_wants_is_kept() -> None:
    names = Names(2)
    names.ask(0.0, a=1)
    for minute in range(1, 100):
        assert not names.ask(minute * MINUTE_S, b=1)
    assert "a" in names
    names.ask(6000.0, b=1, c=1)
    assert "b" in names
    assert names.ask(6060.0, c=1) == {"a"}


def test_equal_names_do_not_change_places() -> None:
    names = Names(2)
    for minute in range(20):
        assert not names.ask(minute * MINUTE_S, z=1, y=1, b=1, a=1)


def test_names_that_are_invented_take_no_place_and_little_memory() -> None:
    names = Names(3, most_counted=20)
    names.ask(0.0, a=5, b=5, c=5)
    number = 0
    for minute in range(1, 50):
        assert not names.ask(minute * MINUTE_S, a=5, b=5, c=5)
        for _ in range(100):
            number += 1
            names.ask(minute * MINUTE_S, **{f"invented-{number}": 1})
        assert len(names.all._counts) <= 20


@given(
    minutes=st.lists(st.lists(st.sampled_from("abcdef"), max_size=30), min_size=1, max_size=8),
    most=st.integers(1, 4),
)
def test_a_review_gives_places_to_the_largest_and_no_more(minutes: list[list[str]], most: int) -> None:
    # the first request of a minute is of one more name, which is the smallest
    names, counts = Names(most), dict.fromkeys("abcdef", 0.0)
    for minute, asked in enumerate(minutes):
        before = {name for name in "abcdef" if name in names}
        lost = names.ask(minute * MINUTE_S, z=1)
        placed = {name for name in "abcdef" if name in names}
        assert lost - {"z"} == before - placed
        assert len(placed) <= most
        if placed and (others := counts.keys() - placed):
            assert min(counts[name] for name in placed) >= max(counts[name] for name in others) - 0.2
        counts = {name: count / 2 for name, count in counts.items()} if minute else counts
        for name in asked:
            names.ask(minute * MINUTE_S, **{name: 1})
            counts[name] += 1
        assert sum(1 for name in "abcdef" if name in names) <= most


@given(
    added=st.lists(st.tuples(st.sampled_from(["a", "b", OTHERS]), st.sampled_from("xy"), st.integers(0, 9))),
    lost=st.sets(st.sampled_from("ab")),
)
def test_series_that_end_change_no_other(added: list[tuple[str, str, int]], lost: set[str]) -> None:
    counters = CounterFamily("c", "", ["tenant", "server"], CollectorRegistry())
    for tenant, server, amount in added:
        counters.add_amount(amount, tenant, server)
    before = dict(counters.items())
    counters.forget("tenant", lost)
    assert dict(counters.items()) == {one: count for one, count in before.items() if one[0] not in lost}


def test_a_page_that_is_being_written_has_the_sums_of_one_moment() -> None:
    counters = CounterFamily("c", "", ["tenant"], CollectorRegistry())
    for number in range(3):
        counters.add_amount(10, f"t{number}")
    pieces = counters.exposition_chunks()
    next(pieces)
    counters.forget("tenant", {"t0", "t1", "t2"})
    text = "".join(pieces)
    assert text.count(" 10.0\n") == 3
    assert counters.items() == []


def test_tenants_that_become_large_get_series_and_none_goes_backwards() -> None:
    now = [0.0]
    metrics = Metrics(list, lambda: 0.0, lambda: now[0])
    admission: AdmissionMetrics = metrics.admission
    admission._tenants = BusiestNames(2, others=OTHERS, forget=admission._forget_tenants)
    before: dict[str, float] = {}
    for minute, tenants in enumerate(["aab", "ccccccaa", "cccccbbb", "dddddddddd", "dddd"]):
        now[0] = minute * MINUTE_S
        for tenant in tenants:
            admission._requests.add(admission._tenants.count_request(tenant, now[0]), "picked")
            counts = {one: count for (one, _), count in admission._requests.items()}
            grown = sum(max(0, count - before.get(one, 0)) for one, count in counts.items())
            assert grown == 1
            assert all(counts.get(one, 0) in (0, count, count + 1) for one, count in before.items())
            assert len(counts.keys() - {OTHERS}) <= 2
            before = counts
    assert {one for (one, _), _ in admission._requests.items()} == {"c", "d", OTHERS}
