# SPDX-License-Identifier: Apache-2.0
"""The queue: bands, flows, bounds, blocked heads, and withdrawals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from extproc.admission.fair_queue import FairQueue
from extproc.admission.flow_queues import FlowKey, QueuedRequest
from extproc.admission.saturation import EndpointHeadroom
from extproc.api.admission import FlowControl, PriorityBand, SaturationSpec
from extproc.api.quantities import ByteSize, Duration
from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.table import EndpointTable
from extproc.refusals import QueueFull

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools


class TwoEngines:
    """A queue before two engines that take one request each."""

    def __init__(self, **control: object) -> None:
        limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=None, max_requests=1)
        self.control = FlowControl(**{"saturation": limits, **control})  # type: ignore[arg-type]
        self.queue = FairQueue(self.control)
        self.table = EndpointTable()
        self.table.replace_endpoints(["a:1", "b:1"])
        self.count = 0

    def enqueue(self, who: str = "acme", *, now: float = 0.0, **fields: object) -> str:
        self.count += 1
        ticket = f"{who}-{self.count}"
        self.queue.enqueue(
            QueuedRequest(ticket, FlowKey(who), now, **{"expires_at_s": now + 60.0, **fields})  # type: ignore[arg-type]
        )
        return ticket

    def next(self, *, busy: int = 0, now: float = 0.0, service: float = 10.0) -> str | None:
        """The next request while this many engines are busy."""
        self.table.in_flight[:] = 0
        for row in range(busy):
            begin_request(self.table, row, work=0, now=now)
        found = self.queue.pop_next(EndpointHeadroom(self.table, self.control.saturation.limits(), now), now)
        if found is None:
            return None
        self.queue.begin_service(found[0], service, now)
        return found[0].ticket

    def drain(self, count: int, **fields: float) -> list[str]:
        return [(self.next(**fields) or "").partition("-")[0] for _ in range(count)]  # type: ignore[arg-type]


def only(row: int) -> Bools:
    rows = np.zeros(8, np.bool_)
    rows[row] = True
    return rows


def test_no_request_is_dispatched_while_all_engines_are_full() -> None:
    scene = TwoEngines()
    ticket = scene.enqueue()
    assert scene.next(busy=2) is None
    assert scene.next(busy=1) == ticket
    assert len(scene.queue) == 0


def test_flows_share_by_cost() -> None:
    scene = TwoEngines()
    for _ in range(6):
        scene.enqueue("acme")
        scene.enqueue("bell")
    assert scene.next(service=30) == "acme-1"
    assert scene.drain(4) == ["bell", "bell", "bell", "acme"]


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    scene = TwoEngines(weights={"acme": 2.0})
    for _ in range(20):
        scene.enqueue("acme")
        scene.enqueue("bell")
    assert scene.drain(15).count("acme") == 10


def test_bands_get_their_shares_and_borrow_unused_ones() -> None:
    scene = TwoEngines()
    for _ in range(400):
        scene.enqueue("critical", priority=10)
        scene.enqueue("high", priority=5)
        scene.enqueue("standard", priority=0)
        scene.enqueue("besteffort", priority=-1)
    went = scene.drain(400)
    assert [went.count(name) for name in ("critical", "high", "standard", "besteffort")] == [320, 60, 16, 4]

    alone = TwoEngines()
    for _ in range(100):
        alone.enqueue("high", priority=5)
        alone.enqueue("standard", priority=0)
    went = alone.drain(95)
    assert went.count("high") == pytest.approx(75, abs=1)


@pytest.mark.parametrize(("ageing", "latest_s"), [("5s", 5.0), ("1h", 60.0)])
def test_ageing_bounds_how_long_short_requests_overtake_a_long_one(ageing: str, latest_s: float) -> None:
    scene = TwoEngines(order="ShortestFirst", ageing=Duration(ageing))
    long, now = scene.enqueue(input_tokens=100_000.0, uncached_tokens=100_000.0, expires_at_s=1e9), 0.0
    # ten short ones a second, and ten turns a second
    while now < 60.0:
        scene.enqueue(now=now, input_tokens=100.0, uncached_tokens=100.0)
        if scene.next(now=now) == long:
            break
        now += 0.1
    assert now == pytest.approx(latest_s, abs=0.5)


def test_strict_bands_serve_the_higher_first() -> None:
    scene = TwoEngines(sharing="Strict")
    for _ in range(3):
        scene.enqueue("standard", priority=0)
        scene.enqueue("critical", priority=12)
    assert scene.drain(6) == ["critical"] * 3 + ["standard"] * 3


def test_a_band_at_its_ceiling_does_not_block_lower_bands() -> None:
    bands = (
        PriorityBand(name="high", priority=1, share=99, ceiling=0.4),
        PriorityBand(name="low", priority=0, share=1),
    )
    scene = TwoEngines(bands=bands)
    high, low = scene.enqueue("high", priority=1), scene.enqueue("low", priority=0)
    assert scene.next(busy=1) == low
    assert scene.next(busy=0) == high


def test_a_head_without_room_does_not_block_the_band_below() -> None:
    scene = TwoEngines(sharing="Strict")
    scene.enqueue("critical", priority=10, eligible=lambda: only(0))
    low = scene.enqueue("standard", priority=0)
    # the first engine is busy, and kept for the critical one; the second is free
    assert scene.next(busy=1) == low


def test_no_request_overtakes_a_blocked_head_at_the_engine_set_aside_for_it() -> None:
    scene = TwoEngines(fairness="GlobalStrict")
    head = scene.enqueue("acme", eligible=lambda: only(0))
    scene.enqueue("bell", eligible=lambda: only(0))
    assert scene.next(busy=1) is None
    assert scene.next(busy=0) == head


def test_a_small_request_overtakes_a_large_one_only_without_delaying_it() -> None:
    limits = SaturationSpec(queue_depth=None, kv_usage=None, max_wait=None, max_tokens=1000)
    scene = TwoEngines(saturation=limits, fairness="GlobalStrict")
    table = scene.table
    begin_request(table, 0, work=0, tokens=500, now=0.0)
    begin_request(table, 1, work=0, tokens=600, now=0.0)
    scene.enqueue("large", input_tokens=800.0)
    for _ in range(2):
        scene.enqueue("small", input_tokens=300.0)
    # the large one will go to the first engine, which has more capacity: that is kept
    found = scene.queue.pop_next(EndpointHeadroom(table, limits.limits(), 0.0), 0.0)
    assert found is not None
    assert found[0].ticket == "small-2"
    assert found[1].nonzero()[0].tolist() == [1]
    begin_request(table, 1, work=0, tokens=300, now=0.0)
    assert scene.queue.pop_next(EndpointHeadroom(table, limits.limits(), 0.0), 0.0) is None
    # and a request larger than any engine goes to one that is empty
    table.in_flight[0], table.in_flight_tokens[0] = 0, 0.0
    scene.enqueue("huge", input_tokens=5000.0, now=-1.0)
    huge = scene.queue.pop_next(EndpointHeadroom(table, limits.limits(), 0.0), 0.0)
    assert huge is not None
    assert huge[0].ticket == "huge-4"


def test_locality_serves_what_a_free_engine_has_cached_within_the_deficits() -> None:
    scene = TwoEngines(fairness="DeficitLocality", quantum=1000)
    begin_request(scene.table, 0, work=0, now=0.0)

    def enqueue(who: str, row: int, cached: float) -> str:
        return scene.enqueue(who, input_tokens=900.0, uncached_tokens=900 - cached, holders=((row, cached),))

    elsewhere, some, most = enqueue("acme", 0, 800), enqueue("acme", 1, 300), enqueue("bell", 1, 700)
    # the first engine is busy: what only it holds waits for it, while others can be served better
    assert scene.next(busy=1, service=1200) == most
    # bell has spent what it had
    again = enqueue("bell", 1, 850)
    assert scene.next(busy=1, service=100) == some
    assert scene.next(busy=1, service=100) == elsewhere
    assert scene.next(busy=1, service=100) == again


def test_locality_delays_no_request_beyond_the_ageing_bound() -> None:
    scene = TwoEngines(fairness="DeficitLocality", ageing=Duration("10s"))
    old = scene.enqueue("acme", input_tokens=900.0, uncached_tokens=900.0)
    near = scene.enqueue("acme", now=5.0, input_tokens=900.0, uncached_tokens=10.0, holders=((1, 890.0),))
    assert scene.next(busy=1, now=11.0) == old
    assert scene.next(busy=1, now=11.0) == near


def test_a_full_band_refuses_and_a_full_queue_evicts_from_the_lowest_band() -> None:
    bands = (
        PriorityBand(name="high", priority=1, share=1, max_requests=2),
        PriorityBand(name="low", priority=0, share=1, max_requests=9),
    )
    scene = TwoEngines(bands=bands, max_requests=4)
    for _ in range(4):
        scene.enqueue("low")
    with pytest.raises(QueueFull):
        scene.enqueue("low")
    evicted = scene.queue.enqueue(QueuedRequest("h1", FlowKey("acme"), 0.0, 60.0, priority=1))
    assert [one.ticket for one in evicted] == ["low-4"]
    scene.queue.enqueue(QueuedRequest("h2", FlowKey("acme"), 0.0, 60.0, priority=1))
    with pytest.raises(QueueFull, match="high"):
        scene.queue.enqueue(QueuedRequest("h3", FlowKey("acme"), 0.0, 60.0, priority=1))
    assert len(scene.queue) == 4


def test_bytes_are_bounded_too_and_released() -> None:
    scene = TwoEngines(max_bytes=ByteSize("1Ki"))
    ticket = scene.enqueue(size_bytes=1000)
    with pytest.raises(QueueFull):
        scene.enqueue(size_bytes=100)
    scene.queue.withdraw(ticket)
    scene.enqueue(size_bytes=100)
    assert scene.queue.total_bytes == 100


def test_an_eviction_that_would_not_help_evicts_nothing() -> None:
    scene = TwoEngines(max_bytes=ByteSize("1Ki"))
    low = scene.enqueue("low", size_bytes=100, priority=-1)
    with pytest.raises(QueueFull):
        scene.enqueue("high", size_bytes=2000, priority=5)
    assert scene.queue.withdraw(low) is not None


def test_a_withdrawn_request_frees_its_place_at_once_and_is_skipped() -> None:
    scene = TwoEngines()
    tickets = [scene.enqueue() for _ in range(30)]
    for ticket in tickets[:29]:
        scene.queue.withdraw(ticket)
    assert len(scene.queue) == 1
    assert scene.queue.withdraw(tickets[0]) is None
    assert scene.next() == tickets[29]
    assert scene.next() is None


def test_requests_expire_in_order() -> None:
    scene = TwoEngines()
    late = scene.enqueue(expires_at_s=9.0)
    early = scene.enqueue(expires_at_s=5.0)
    gone = scene.enqueue(expires_at_s=4.0)
    scene.queue.withdraw(gone)
    assert scene.queue.next_expiry_at_s() == 5.0
    assert [one.ticket for one in scene.queue.pop_expired(8.0)] == [early]
    assert [one.ticket for one in scene.queue.pop_expired(9.0)] == [late]
    assert scene.queue.next_expiry_at_s() is None


def test_idle_flows_are_forgotten_the_least_indebted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.flow_queues.MAX_IDLE_FLOWS", 10)
    scene = TwoEngines()
    for number in range(10):
        ticket = scene.enqueue(f"t{number}")
        assert scene.next(service=float(number)) == ticket
        if number:
            queued = QueuedRequest(ticket, FlowKey(f"t{number}"), 0.0, 60.0)
            scene.queue.end_service(queued, 0.0, 1.0)
    scene.enqueue("new")
    flows = scene.queue.band_of(0).flows
    assert len(flows) < 11
    # the first still runs
    assert flows.running[flows.assign_row(FlowKey("t0"))] == 1


def test_those_that_gave_way_in_vain_wait_on() -> None:
    scene = TwoEngines(
        bands=(PriorityBand("high", 10, 1.0), PriorityBand("low", 0, 1.0)), max_requests=100, max_bytes=ByteSize("1Ki")
    )
    low = scene.enqueue(size_bytes=200)
    scene.enqueue(size_bytes=800, priority=10)
    with pytest.raises(QueueFull):
        # the low one makes no place for so much, and the high one keeps its own
        scene.enqueue(size_bytes=900, priority=10)
    assert low in scene.queue
    assert len(scene.queue) == 2


def test_the_times_at_which_those_that_left_would_have_expired_are_not_kept() -> None:
    scene = TwoEngines()
    stays = scene.enqueue(now=0.5)
    for _ in range(3000):
        scene.queue.withdraw(scene.enqueue())
    assert scene.queue.next_expiry_at_s() == 60.5
    assert [one.ticket for one in scene.queue.pop_expired(60.5)] == [stays]
    assert scene.queue.next_expiry_at_s() is None
