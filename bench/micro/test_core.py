# SPDX-License-Identifier: Apache-2.0
"""The parts of a decision by themselves, timed with pytest-benchmark (``make bench``)."""

from __future__ import annotations

import random
from itertools import cycle
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from bench.stack.loopback_stack import ALIAS, MODEL, ROOT, documents
from bench.workload.sessions import text_of
from extproc.api.config_loader import load_snapshot
from extproc.api.model_server import ModelServerSpec
from extproc.core.core import Core
from extproc.core.effects import Decision, Prefill
from extproc.core.request_record import Outcome, PrefillResult, RequestHead
from extproc.endpoints.learned_speeds import PromptCost
from extproc.endpoints.table import EndpointTable
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import installed_plugins
from extproc.prefix.approximate_index import hash_blocks
from extproc.prefix.kv_event_decoder import BlocksRemoved, BlocksStored
from extproc.prefix.kv_index import EventSource, KvIndex
from extproc.request.body_parser import parse_body
from extproc.request.json_rewrite import with_changes
from extproc.scheduling.picker import RequestDemandByRow, RequestFacts, View
from extproc.scheduling.picker_cache import default_picker
from extproc.wire_names import Api

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

SIZES = [2_000, 400_000]
HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
# Four amounts each: a route with two rate limits, and one with two budgets, of tokens and of money.
CHARGED: dict[str, dict[str, object]] = {
    "nothing": {},
    "two rate limits": {
        "rateLimits": [
            {"per": "Tenant", "unit": "day", "totalTokens": 10**12, "requests": 10**9},
            {"per": "User", "unit": "day", "totalTokens": 10**12, "requests": 10**9},
        ]
    },
    "two budgets": {
        "budgets": [
            {"name": "team", "window": "Month", "timeZone": "Europe/Berlin", "max": {"money": 10**9, "tokens": 10**12}},
            {"name": "one", "per": "User", "window": "Day", "max": {"money": 10**9, "tokens": 10**12}},
        ]
    },
}


def body(size: int, key: str = "a") -> bytes:
    """A chat of about ``size`` bytes."""
    messages = [{"role": "user", "content": text_of(key, size // 4)}]
    return msgspec.json.encode({"model": ALIAS, "messages": messages})


@pytest.mark.parametrize("size", SIZES)
def test_parse(benchmark: BenchmarkFixture, size: int) -> None:
    assert benchmark(parse_body, Api.CHAT, body(size)).model == ALIAS


@pytest.mark.parametrize("size", [2_000, 100_000, 400_000])
def test_rename_the_model(benchmark: BenchmarkFixture, size: int) -> None:
    client = body(size)
    contents = parse_body(Api.CHAT, client).contents
    assert MODEL.encode() in benchmark(with_changes, client, {"model": MODEL}, contents)


@pytest.mark.parametrize("size", SIZES)
def test_hash(benchmark: BenchmarkFixture, size: int) -> None:
    assert len(benchmark(hash_blocks, text_of("a", size // 4).encode(), "m")) > 10


def decide_and_finish(core: Core, body: bytes) -> str:
    own, _ = core.arrive(core.builder.build_by_model(HEAD, body), 0.0)
    assert isinstance(own, Decision)
    core.on_stream_closed(own.ticket, 0.0)
    return own.server


@pytest.mark.parametrize("endpoints", [8, 100])
@pytest.mark.parametrize("size", SIZES)
def test_a_whole_decision(benchmark: BenchmarkFixture, size: int, endpoints: int) -> None:
    engines = [f"10.0.0.{number + 1}:8000" for number in range(endpoints)]
    snapshot = load_snapshot({"all.yaml": documents(engines, gateway={}).encode()})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    bodies = cycle([body(size, f"key {number}") for number in range(8)])

    def decide() -> str:
        return decide_and_finish(core, next(bodies))

    assert benchmark(decide) == "default/llama"


def core_with_prefill_pair() -> Core:
    """One pair, of which the one engine prefills every prompt for the other."""
    roles = ("prefill", "decode")
    endpoints = [{"address": f"10.0.0.{number}:8000", "labels": {"role": role}} for number, role in enumerate(roles, 1)]
    group = {f"{role}Labels": {"role": role} for role in roles}
    leg = {"minUncachedTokens": 0, "decideBy": "UncachedTokens", "leg": "Gateway", "connector": "NixlConnector"}
    more = {"endpoints": endpoints, "pdGroup": {**group, **leg}}
    snapshot = load_snapshot({"all.yaml": documents([], gateway={}, more=more).encode()})
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


@pytest.mark.parametrize("size", [2_000, 100_000, 1_000_000])
def test_a_decision_with_a_prefill_leg(benchmark: BenchmarkFixture, size: int) -> None:
    core, bodies = core_with_prefill_pair(), cycle([body(size, f"key {number}") for number in range(8)])
    # NIXL's: 9 bytes for a block of 16 tokens
    blocks = list(range(10_000_000, 10_000_000 + size // 64))
    params = {"do_remote_prefill": True, "remote_block_ids": [blocks], "remote_host": "10.0.0.1", "remote_port": 5600}
    answered = msgspec.json.encode({"kv_transfer_params": params, "usage": {"prompt_tokens": size // 4}})

    def decide() -> bytes | None:
        own, effects = core.arrive(core.builder.build_by_model(HEAD, next(bodies)), 0.0)
        assert any(isinstance(one, Prefill) for one in effects)
        result = PrefillResult(own.ticket, status=200, body=answered)
        (decision,) = [one for one in core.on_work_result(result, 0.0) if isinstance(one, Decision)]
        core.on_stream_closed(own.ticket, 0.0)
        core.on_outcome(Outcome(own.ticket, 200, "10.0.0.2:8000", 1.0, None, None, None, None), 0.0)
        return decision.body

    changed = benchmark(decide)
    assert changed is not None
    assert len(changed) > size + len(msgspec.json.encode(params))


def endpoint_view(endpoints: int) -> View:
    """Endpoints with some load and some cached prefixes, as they are in the middle of a day."""
    table, rng = EndpointTable(), np.random.default_rng(0)
    table.replace_endpoints(
        f"10.{number // 62500}.{number // 250 % 250}.{number % 250 + 1}:8000" for number in range(endpoints)
    )
    rows = table.is_active.size
    table.in_flight[:] = rng.integers(0, 40, rows) * table.is_active
    table.waiting[:], table.running[:] = rng.integers(0, 5, rows), rng.integers(0, 40, rows)
    table.kv_usage[:], table.backlog_tokens[:] = rng.random(rows), rng.random(rows) * 50_000
    table.reported_at_s[:] = 0.0
    cached = np.where(rng.random(rows) < 0.2, 1500.0, 0.0)
    return View(
        table,
        RequestDemandByRow(cached, PromptCost().prefill_work(2000.0 - cached, cached)),
        RequestFacts("m", 2000.0),
        0.1,
    )


@pytest.mark.parametrize("endpoints", [10, 100, 1000])
@pytest.mark.parametrize("policy", ["default", "llm-d default", "llm-d token load"])
def test_pick(benchmark: BenchmarkFixture, policy: str, endpoints: int) -> None:
    picker = default_picker(ModelServerSpec(model="m", listed=()))
    if policy != "default":
        file = ROOT / "bench/lab/policies/configs" / f"{policy.replace(' ', '-')}.yaml"
        picker = picker_from_text(file.name, file.read_text(), installed_plugins()).picker
    view, rng = endpoint_view(endpoints), random.Random(0)
    assert benchmark(lambda: picker.pick(view, rng=rng)).rows


def test_four_hundred_kilobytes_against_warm_prefixes_on_100_endpoints(benchmark: BenchmarkFixture) -> None:
    engines = [f"10.0.0.{number + 1}:8000" for number in range(100)]
    core = Core(
        load_snapshot({"all.yaml": documents(engines, gateway={}).encode()}), rng=random.Random(0), ticket_prefix="t"
    )
    # a fifth of the endpoints hold some of it, each as far as another
    long = body(400_000)
    for share in range(1, 21):
        request = parse_body(Api.CHAT, body(400_000 * share // 20))
        caches = core.pools["default/llama"].caches
        caches.index.record(share, hash_blocks(request.prompt, MODEL), 0.0)

    def decide() -> str:
        return decide_and_finish(core, long)

    assert benchmark(decide) == "default/llama"


def test_tokens_of_a_hundred_thousand_against_the_precise_index(benchmark: BenchmarkFixture) -> None:
    index, tokens = KvIndex(), list(range(100_000))
    for row in range(20):
        known = tokens[: 16 * (312 * (row + 1))]
        index.apply(EventSource(row), [BlocksStored(tuple(range(len(known) // 16)), None, tuple(known), 16)])

    def match() -> int:
        return len(index.match(index.block_keys(tokens, adapter=None, salt=None), 0.0))

    assert benchmark(match) == 20


def index_of_ranks(ranks: int, blocks: int) -> KvIndex:
    """An endpoint whose data-parallel ranks hold so many blocks each."""
    index = KvIndex()
    for rank in range(ranks):
        for start in range(0, blocks, 500):
            tokens = tuple(16 * [rank] + list(range(16 * start, 16 * (start + 500))))
            index.apply(EventSource(0, rank), [BlocksStored(tuple(range(start - 1, start + 500)), None, tokens, 16)])
    return index


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_thousand_evictions_beside_ranks_of_twenty_thousand_blocks(benchmark: BenchmarkFixture, ranks: int) -> None:
    index, removed = index_of_ranks(ranks, 20_000), [BlocksRemoved((value,)) for value in range(1_000)]
    first = BlocksStored(tuple(range(1_000)), None, tuple(range(16_000)), 16)

    def evict() -> int:
        index.apply(EventSource(0), [first, *removed])
        return index.blocks_held(0)

    assert benchmark(evict) >= 19_000


def test_an_endpoint_that_leaves_with_ranks_of_twenty_thousand_blocks(benchmark: BenchmarkFixture) -> None:
    def fill_and_forget() -> int:
        index = index_of_ranks(8, 20_000)
        index.forget(0)
        while index.drop_cleared_blocks():
            pass
        return index.blocks_held(0)

    assert benchmark(fill_and_forget) == 0


@pytest.mark.parametrize("charged", CHARGED)
def test_charge_and_settle(benchmark: BenchmarkFixture, charged: str) -> None:
    """A request from its arrival to the end of its stream, with what its outcome settles."""
    server = {"pricing": [{"perMillion": {"input": "2.5", "cachedInput": "0.25", "output": "10"}}]}
    text = documents(["10.0.0.1:8000"], gateway={}, more=server, route=CHARGED[charged])
    core = Core(load_snapshot({"all.yaml": text.encode()}), rng=random.Random(0), ticket_prefix="t")
    core.align_with_wall_clock(1.7e9, 0.0)
    arrival = core.builder.build_by_model(HEAD, body(2_000))

    def live() -> bool:
        own, _ = core.arrive(arrival, 0.0)
        assert isinstance(own, Decision)
        core.on_outcome(Outcome(own.ticket, 200, "10.0.0.1:8000", 1.0, 0.1, 500, 20, 100), 1.0)
        core.on_stream_closed(own.ticket, 1.0)
        return bool(own.grants)

    assert benchmark(live) is (charged != "nothing")
