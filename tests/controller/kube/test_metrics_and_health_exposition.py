# SPDX-License-Identifier: Apache-2.0
"""Pages of many series are what prometheus_client would write."""

from __future__ import annotations

import gzip
import tracemalloc
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from bench.stack.processes import free_ports
from controller.kube.metrics_and_health import MetricFamily, encode_labels, render_page, serve_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

NAMES = ("variant_name", "namespace")
VALUES = [
    0,
    1,
    True,
    0.1,
    -2.5,
    1e-9,
    123456.75,
    999999.5,
    1e6,
    1.7e9,
    1763811600.123,
    3e20,
    float("inf"),
    float("nan"),
]


class Families(Collector):
    def collect(self) -> Iterator[Metric]:
        rows = [(encode_labels(NAMES, (f"b{at}", "default")), value) for at, value in enumerate(VALUES)]
        rows.append((encode_labels(NAMES, ('a "b" \\ \n ü', "")), 1.0))
        yield MetricFamily("some_gauge", "What \\ it is\nand more", "gauge", rows)
        yield MetricFamily("some_writes", "Writes", "counter", rows)
        yield MetricFamily("none", "Without series", "gauge", [])


def test_the_page_is_what_the_client_library_writes() -> None:
    registry = CollectorRegistry()
    Counter("before", "One", ("by",), registry=registry).labels("x").inc()
    registry.register(Families())
    Histogram("after_seconds", "Another", registry=registry).observe(0.2)
    page = render_page(registry)
    assert page == generate_latest(registry)
    assert page.count(b"\n") > len(VALUES) * 2
    assert gzip.decompress(render_page(registry, gzipped=True)) == page


class Many(Collector):
    def collect(self) -> Iterator[Metric]:
        rows = [(encode_labels(NAMES, (f"b{at}", "default")), float(at)) for at in range(4_000)]
        for at in range(5):
            yield MetricFamily(f"family{at}", "One of several", "gauge", rows)


def test_a_compressed_page_is_never_whole_in_memory() -> None:
    registry = CollectorRegistry()
    registry.register(Many())
    rows_alone = peak_of(lambda: sum(1 for _ in registry.collect()))
    plain = peak_of(lambda: render_page(registry)) - rows_alone
    compressed = peak_of(lambda: render_page(registry, gzipped=True)) - rows_alone
    assert compressed < plain / 2


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "value"), [("some_gauge", 0.1), ("some_writes_total", 0.1)])
def test_who_knows_no_families_finds_samples(name: str, value: float) -> None:
    registry = CollectorRegistry()
    registry.register(Families())
    assert registry.get_sample_value(name, {"variant_name": "b3", "namespace": "default"}) == value


async def test_who_accepts_gzip_gets_the_same_page_compressed() -> None:
    registry = CollectorRegistry()
    registry.register(Families())
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with (
        serve_pages(address, registry, lambda: True),
        aiohttp.ClientSession(f"http://{address}") as http,
        http.get("/metrics", headers={"accept-encoding": "gzip"}) as compressed,
        http.get("/metrics", headers={"accept-encoding": "identity"}) as plain,
    ):
        assert [one.headers.get("content-encoding") for one in (compressed, plain)] == ["gzip", None]
        assert await compressed.read() == await plain.read() == generate_latest(registry)


@pytest.mark.parametrize(
    ("accepts", "encoding"),
    [
        ("gzip;q=0", None),
        ("gzip; q=0.000, identity", None),
        ("GZIP ; Q=0", None),
        ("deflate, gzip;q=0.001", "gzip"),
        ("identity;q=0, gzip;q=1.0", "gzip"),
        ("", None),
    ],
)
async def test_who_declines_gzip_gets_plain_text(accepts: str, encoding: str | None) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with (
        serve_pages(address, CollectorRegistry(), lambda: True),
        aiohttp.ClientSession(f"http://{address}") as http,
        http.get("/metrics", headers={"accept-encoding": accepts}) as page,
    ):
        assert page.headers.get("content-encoding") == encoding
