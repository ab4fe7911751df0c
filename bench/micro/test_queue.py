# SPDX-License-Identifier: Apache-2.0
"""The queue with 10,000 requests of 1,000 tenants: time by operation, bytes a request."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.admission.fair_queue import FairQueue, FlowControlGate
from extproc.admission.flow_queues import FlowKey, QueuedRequest
from extproc.admission.saturation import EndpointHeadroom
from extproc.admission.token_buckets import Bucket, Limit
from extproc.api.admission import BANDS, FlowControl, SaturationSpec
from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.table import EndpointTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

WAITING, TENANTS = 10_000, 1_000
FAIRNESS = ["VirtualTokenCounter", "DeficitLocality", "SlidingWindow", "RoundRobin", "GlobalStrict"]


def queued_request(rng: random.Random, numbers: Iterator[int]) -> QueuedRequest:
    number = next(numbers)
    tokens = rng.uniform(100, 10_000)
    cached = rng.choice([0.0, tokens / 2])
    return QueuedRequest(
        f"t-{number:x}",
        FlowKey(f"tenant-{rng.randrange(TENANTS)}", "llama"),
        number * 1e-3,
        number * 1e-3 + 60.0,
        priority=rng.choice([0, 0, 0, 5, 10]),
        size_bytes=2000,
        input_tokens=tokens,
        uncached_tokens=tokens - cached,
        output_tokens=200.0,
        holders=((rng.randrange(8), cached),) if cached else (),
    )


def flow_control_settings(fairness: str = "VirtualTokenCounter") -> FlowControl:
    bands = tuple(msgspec.structs.replace(band, max_requests=10**6) for band in BANDS)
    return FlowControl(fairness=fairness, bands=bands, max_requests=10**6)  # type: ignore[arg-type]  # of the five


def filled_queue(settings: FlowControl, rng: random.Random, numbers: Iterator[int]) -> FairQueue:
    queue = FairQueue(settings)
    for _ in range(WAITING):
        queue.enqueue(queued_request(rng, numbers))
    return queue


def eight_endpoints() -> EndpointTable:
    table = EndpointTable()
    table.replace_endpoints([f"10.0.0.{number}:8000" for number in range(8)])
    return table


@pytest.mark.parametrize("fairness", FAIRNESS)
def test_enter_and_leave(benchmark: BenchmarkFixture, fairness: str) -> None:
    rng, numbers = random.Random(0), itertools.count()
    queue = filled_queue(flow_control_settings(fairness), rng, numbers)
    ready = itertools.cycle([queued_request(rng, numbers) for _ in range(1000)])

    def both() -> int:
        one = next(ready)
        queue.enqueue(one)
        queue.withdraw(one.ticket)
        return len(queue)

    assert benchmark(both) == WAITING


@pytest.mark.parametrize("fairness", FAIRNESS)
def test_next(benchmark: BenchmarkFixture, fairness: str) -> None:
    """One of eight engines has room. Time to find and charge the next request, which then returns to the queue."""
    rng, numbers = random.Random(0), itertools.count()
    settings = flow_control_settings(fairness)
    queue = filled_queue(settings, rng, numbers)
    table = eight_endpoints()
    for row in range(7):
        begin_request(table, row, work=50_000.0, now=0.0)
    capacity = EndpointHeadroom(table, settings.saturation.limits(), 0.0)
    gone: list[QueuedRequest] = []

    def come_back() -> None:
        if gone:
            queue.enqueue(gone.pop())

    def turn() -> None:
        found = queue.pop_next(capacity, 0.0)
        assert found is not None
        queue.begin_service(found[0], 500.0, 0.0)
        gone.append(found[0])

    benchmark.pedantic(turn, setup=come_back, rounds=3000)  # type: ignore[no-untyped-call]  # the library's
    assert len(queue) == WAITING - 1


def test_ended_service(benchmark: BenchmarkFixture) -> None:
    rng, numbers = random.Random(0), itertools.count()
    queue = filled_queue(flow_control_settings(), rng, numbers)
    ones = itertools.cycle([queued_request(rng, numbers) for _ in range(1000)])
    benchmark(lambda: queue.end_service(next(ones), 10.0, 0.0))
    assert len(queue) == WAITING


@pytest.mark.parametrize("endpoints", [8, 100, 1000])
def test_endpoints_with_headroom(benchmark: BenchmarkFixture, endpoints: int) -> None:
    table, limits = EndpointTable(), SaturationSpec().limits()
    table.replace_endpoints([f"10.0.{number // 250}.{number % 250}:8000" for number in range(endpoints)])
    for row in range(endpoints):
        begin_request(table, row, work=5000.0, tokens=5200.0, now=0.0)
    assert not benchmark(lambda: EndpointHeadroom(table, limits, 0.1)).open.any()


def test_pass_through(benchmark: BenchmarkFixture) -> None:
    """What flow control costs a request that need not wait."""
    rng, numbers = random.Random(0), itertools.count()
    gate = FlowControlGate(FlowControl(), eight_endpoints(), stages=lambda: None, rng=rng)
    one = queued_request(rng, numbers)
    assert benchmark(lambda: gate.rows_for_immediate_dispatch(one, 0.0)) is not None


def test_bucket(benchmark: BenchmarkFixture) -> None:
    limit, bucket, now = Limit(1e6, 1e6), Bucket(1e6, 0.0), itertools.count()

    def reserve_and_settle() -> float:
        bucket.refill(limit, next(now) * 1e-3)
        bucket.settle(bucket.reserve(500.0), 100.0)
        return bucket.level

    assert benchmark(reserve_and_settle) > 0


def test_memory_of_a_waiting_request(benchmark: BenchmarkFixture) -> None:
    """Bytes beside the request's body; printed, and kept with the results."""
    rng, numbers = random.Random(0), itertools.count()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    queue = filled_queue(flow_control_settings(), rng, numbers)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    each = (after - before) / len(queue)
    benchmark.extra_info["bytes"] = each
    print(f"\n{each:.0f} bytes a waiting request, beside its body")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # the library's
    assert each < 4000
