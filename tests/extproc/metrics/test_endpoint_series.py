# SPDX-License-Identifier: Apache-2.0
"""Series by endpoint."""

from __future__ import annotations

import random
import re

from prometheus_client import CollectorRegistry, generate_latest

from bench.stack.loopback_stack import documents
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.endpoints.health import EngineFailure
from extproc.endpoints.outliers import record_bad_answer, record_good_answer
from extproc.metrics.endpoint_series import EndpointSeries
from extproc.prefix.kv_event_decoder import BlocksStored
from extproc.prefix.kv_index import EventSource, KvIndex
from tests.extproc.breakers import trip

ADDRESSES = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


def test_an_avoided_endpoint_is_told_with_how_it_fails_and_since_when() -> None:
    snapshot = load_snapshot({"a.yaml": documents(ADDRESSES, gateway={}).encode()})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="test")
    (pool,) = core.pools.values()
    clock = {"now": 0.0}
    registry = CollectorRegistry()
    # the wall clock is 5,000 s ahead
    registry.register(EndpointSeries(core.pools.values, lambda: clock["now"], lambda: clock["now"] + 5000))

    def lines() -> list[str]:
        page = generate_latest(registry).decode()
        return [line for line in page.splitlines() if line.startswith("attache_endpoint_avoided")]

    assert lines() == []
    row = pool.table.row_of(ADDRESSES[1])
    assert row is not None
    for second in range(100, 120):
        for other in pool.table.active_rows:
            if other == row:
                record_bad_answer(pool.table, row, EngineFailure.ERROR)
            else:
                record_good_answer(pool.table, other, now=second)
    record_bad_answer(pool.table, row, EngineFailure.CUT)
    since_s = 119.0
    trip(pool.table, row, since_s)
    clock["now"] = 200.0
    label = f'endpoint="{ADDRESSES[1]}"'
    assert lines() == [
        f'attache_endpoint_avoided{{{label},reason="cut",server="default/llama"}} 1.0',
        f'attache_endpoint_avoided{{{label},reason="error",server="default/llama"}} 1.0',
        f'attache_endpoint_avoided_since_timestamp_seconds{{{label},server="default/llama"}} {5000 + since_s}',
    ]
    core.reset_breakers(pool.name, ADDRESSES[1], 210.0)
    assert lines() == []

    # what cannot be reached at all is avoided without any comparison
    trip(pool.table, row, 300.0)
    assert lines() == [
        f'attache_endpoint_avoided{{{label},reason="no_answer",server="default/llama"}} 1.0',
        f'attache_endpoint_avoided_since_timestamp_seconds{{{label},server="default/llama"}} 5300.0',
    ]
    core.reset_breakers(pool.name, "", 310.0)
    assert lines() == []


def test_an_endpoint_has_the_stages_of_its_pd_group_or_of_the_label_that_llm_ds_filters_read() -> None:
    def roles(more: dict[str, object], *labels: dict[str, str]) -> list[str]:
        endpoints = [{"address": one, "labels": own} for one, own in zip(ADDRESSES, labels, strict=True)]
        snapshot = load_snapshot({"a.yaml": documents([], gateway={}, more={"endpoints": endpoints, **more}).encode()})
        registry = CollectorRegistry()
        pools = Core(snapshot, rng=random.Random(0), ticket_prefix="test").pools
        registry.register(EndpointSeries(pools.values, lambda: 0.0, lambda: 0.0))
        page = generate_latest(registry).decode()
        return re.findall(
            r'^attache_endpoint_role\{endpoint="(\S+?):8000",role="(\S+)",server="\S+"\} 1.0$', page, re.MULTILINE
        )

    first, second, third = (one.removesuffix(":8000") for one in ADDRESSES)
    group = {"pdGroup": {"prefillLabels": {"p": "yes"}, "decodeLabels": {"d": "yes"}}}
    encoder = {"llm-d.ai/role": "encode"}
    assert roles(group, {"p": "yes"}, {"d": "yes", "p": "yes"}, encoder) == [
        (first, "prefill"),
        (second, "prefill-decode"),
        (third, "encode"),
    ]
    assert roles({}, {"llm-d.ai/role": "decode"}, {"llm-d.ai/role": "encode-prefill"}, {"llm-d.ai/role": "x\n"}) == [
        (first, "decode"),
        (second, "encode-prefill"),
    ]
    assert roles({}, {}, {}, {}) == []


def test_a_breaker_that_has_ever_opened_has_its_state() -> None:
    snapshot = load_snapshot({"a.yaml": documents(ADDRESSES, gateway={}).encode()})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="test")
    (pool,) = core.pools.values()
    clock = {"now": 0.0}
    registry = CollectorRegistry()
    registry.register(EndpointSeries(core.pools.values, lambda: clock["now"], lambda: 0.0))

    def found() -> list[str]:
        page = generate_latest(registry).decode()
        return [line for line in page.splitlines() if line.startswith("attache_breaker_state")]

    assert found() == []
    row = pool.table.row_of(ADDRESSES[1])
    assert row is not None
    trip(pool.table, row, 100.0)
    pool.breaker = pool.breaker.after_opening(pool.name, 100.0, needed=1)
    server = f'server="{pool.name}"'
    states = []
    for now in (100.0, 110.0):
        clock["now"] = now
        states.append(found())
    core.reset_breakers(pool.name, "", 111.0)
    states.append(found())
    assert states == [
        [
            f'attache_breaker_state{{endpoint="",{server}}} {state}',
            f'attache_breaker_state{{endpoint="{ADDRESSES[1]}",{server}}} {state}',
        ]
        for state in (2.0, 1.0, 0.0)
    ]


def test_blocks_of_the_precise_index_are_counted_by_endpoint_over_all_ranks() -> None:
    snapshot = load_snapshot({"a.yaml": documents(ADDRESSES, gateway={}).encode()})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="test")
    (pool,) = core.pools.values()
    registry = CollectorRegistry()
    registry.register(EndpointSeries(core.pools.values, lambda: 0.0, lambda: 0.0))

    def counts() -> list[float | None]:
        labels = ({"endpoint": one, "server": "default/llama"} for one in ADDRESSES)
        return [registry.get_sample_value("attache_kv_blocks", one) for one in labels]

    assert counts() == [None, None, None], "its engines send no events"
    pool.caches.kv_index = index = KvIndex()
    for rank in range(2):
        index.apply(EventSource(1, rank), [BlocksStored((1, 2), None, (7, rank), 1)])
    assert counts() == [0, 4, 0]
