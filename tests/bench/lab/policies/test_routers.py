# SPDX-License-Identifier: Apache-2.0
"""Each policy's rule on a case worked out by hand from its documentation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.engine.request import Request
from bench.lab.policies.registry import POLICIES, policy_named
from bench.lab.policies.routers import (
    AffinityWithTokenLoad,
    AibrixPrefixCache,
    DynamoKvRouter,
    KthenaDefault,
    LeastKvCache,
    LeastRequest,
    LMetric,
    PowerOfTwo,
    PrebleExploitExplore,
    RandomPick,
    RayPrefixAffinity,
    SglangCacheAware,
)
from bench.lab.policies.trackers import (
    EngineCalibration,
    InFlightTracker,
    PrefixMemoryPolicy,
    PrefixMemoryRule,
)
from bench.virtual.observers import REQUEST_KEY
from extproc.api.config_errors import ConfigInvalid
from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.table import EndpointTable
from extproc.scheduling.picker import RequestDemandByRow, RequestFacts, View

if TYPE_CHECKING:
    from extproc.scheduling.picker import Picker

BLOCK = 64
KNOWN = EngineCalibration(prefill_tokens_per_s=10_000.0, decode_s_per_token=0.001, block_size=BLOCK)


class Engines:
    """Three engines; requests of 6,400 tokens unless it is said."""

    def __init__(self, engines: int = 3) -> None:
        self.table = EndpointTable()
        self.table.replace_endpoints([f"e{number}" for number in range(engines)])
        self.tracker = InFlightTracker()
        self.rng = random.Random(0)
        self.keys = 0
        self.now = 0.0

    def loaded(self, *requests: int) -> Engines:
        for row, count in enumerate(requests):
            for _ in range(count):
                begin_request(self.table, row, work=0, now=0.0)
        return self

    def request(self, text: str = "x", tokens: int = 6400) -> Request:
        self.keys += 1
        prompt = (text * (4 * tokens))[: 4 * tokens].encode()
        return Request(self.keys, prompt, b"word" * 10, model="m", block_size=BLOCK)

    def view(self, request: Request, **cached: float) -> View:
        column = np.zeros(len(self.table.addresses))
        for address, tokens in cached.items():
            column[self.table.row_of(address)] = tokens
        facts = RequestFacts("m", float(request.prompt_tokens), headers={REQUEST_KEY: str(request.key)})
        self.tracker.on_arrival(request, (0, 0), self.now)
        return View(self.table, RequestDemandByRow(column, request.prompt_tokens - column), facts, self.now)

    def pick(self, picker: Picker, request: Request | None = None, **cached: float) -> str:
        """The first choice; the request counts as sent there."""
        asked = request or self.request()
        address = self.table.addresses[picker.pick(self.view(asked, **cached), rng=self.rng).rows[0]]
        if isinstance(
            picker, AffinityWithTokenLoad | DynamoKvRouter | LMetric | PrebleExploitExplore | PrefixMemoryPolicy
        ):
            self.tracker.on_sent(asked, address, self.now)
        return address


def test_simple_ones() -> None:
    scene = Engines().loaded(2, 0, 1)
    assert scene.pick(LeastRequest()) == "e1"
    assert {scene.pick(RandomPick()) for _ in range(50)} == {"e0", "e1", "e2"}
    drawn = [scene.pick(PowerOfTwo()) for _ in range(300)]
    # e0 is never the better of two; e1 is in two of three pairs
    assert "e0" not in drawn
    assert 160 < drawn.count("e1") < 240


def test_llm_d_stays_with_the_prompt_until_the_gap_is_its_throughput_times_eighteen_seconds() -> None:
    scene = Engines()
    picker = AffinityWithTokenLoad(scene.tracker, prefill_tokens_per_s=10_000.0)
    assert scene.pick(picker, e2=6000) == "e2"
    scene.tracker.prefill_tokens[2] = 179_000
    assert scene.pick(picker, e2=6000) == "e2"
    scene.tracker.prefill_tokens[2] = 181_000
    assert scene.pick(picker, e2=6000) != "e2"


def test_llm_d_without_a_match_of_four_fifths_takes_the_least_uncached_tokens() -> None:
    scene = Engines()
    picker = AffinityWithTokenLoad(scene.tracker, prefill_tokens_per_s=10_000.0)
    scene.tracker.observe(scene.view(scene.request()))
    scene.tracker.prefill_tokens[:3] = [1000, 500, 4000]
    # 1000 + 6400, 500 + 6400, 4000 + 6400 - 5000
    assert scene.pick(picker, e2=5000) == "e2"


def test_books_free_uncached_tokens_at_the_first_token_and_count_shared_blocks_once() -> None:
    scene = Engines()
    picker = DynamoKvRouter(scene.tracker, BLOCK)
    first = scene.request("a")
    address = scene.pick(picker, first)
    row = scene.tracker.row_of(scene.table, address)
    assert scene.tracker.prefill_tokens[row] == 6400
    assert scene.tracker.distinct_block_counts_with(scene.request("a"))[row] == 100
    scene.tracker.on_first_token(first, 1.0)
    assert scene.tracker.prefill_tokens[row] == 0
    assert scene.tracker.distinct_block_counts_with(scene.request("b"))[row] == 200
    scene.tracker.on_ended(first, 2.0)
    assert scene.tracker.distinct_block_counts_with(scene.request("b"))[row] == 100


def test_dynamo_adds_prefill_blocks_and_blocks_in_use() -> None:
    scene = Engines(2)
    picker = DynamoKvRouter(scene.tracker, BLOCK)
    first = scene.request("a")
    busy = scene.pick(picker, first)
    scene.tracker.on_first_token(first, 0.5)
    other = "e1" if busy == "e0" else "e0"
    # there: 100 - 50 to compute and 100 + 100 in use; elsewhere 100 and 100
    assert scene.pick(picker, scene.request("b"), **{busy: 3200}) == other


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    scene = Engines().loaded(4, 1, 0)
    picker = LMetric(scene.tracker)
    scene.tracker.observe(scene.view(scene.request()))
    scene.tracker.prefill_tokens[:3] = [0, 6000, 20_000]
    # 400 * 5, 12,400 * 2, 26,400 * 1
    assert scene.pick(picker, e0=6000) == "e0"
    # 6,400 * 5, 12,400 * 2, 26,400 * 1
    assert scene.pick(picker) == "e1"


def test_sglang_follows_the_tree_above_half_and_the_load_below_or_when_far_apart() -> None:
    assert Engines().loaded(5, 0, 0).pick(SglangCacheAware(), e0=3201) == "e0"
    assert Engines().loaded(5, 1, 0).pick(SglangCacheAware(), e0=3200) == "e2"
    assert Engines().loaded(33, 0, 1).pick(SglangCacheAware(), e0=6300) == "e1"
    # 33 apart, and yet the most is not 1.1 times the least
    assert Engines().loaded(433, 400, 400).pick(SglangCacheAware(), e0=6300) == "e0"


def test_aibrix_takes_the_best_match_that_is_not_too_busy() -> None:
    assert Engines().loaded(1, 1, 1).pick(AibrixPrefixCache(), e0=6000, e1=3000) == "e0"
    # mean 3, deviation 2.2: five are within, six are not
    assert Engines().loaded(6, 2, 1).pick(AibrixPrefixCache(), e0=6000, e1=3000) == "e1"
    assert Engines().loaded(9, 0, 3).pick(AibrixPrefixCache(), e0=6000) == "e1"
    scene = Engines()
    scene.table.kv_usage[:3] = [0.5, 0.2, 0.9]
    assert scene.pick(LeastKvCache()) == "e1"


def test_ray_follows_a_match_of_a_tenth_and_fills_the_smallest_tree() -> None:
    scene, picker = Engines(), RayPrefixAffinity()
    assert scene.pick(picker, e1=700) == "e1"
    # what e1 was first to be sent makes its tree the largest
    assert scene.pick(picker) != "e1"
    assert Engines().loaded(11, 0, 0).pick(RayPrefixAffinity(), e0=6000) != "e0"


def test_kthena_sees_eight_kilobytes_and_prefers_who_has_nothing_in_flight() -> None:
    scene = Engines().loaded(1, 0, 0)
    scene.table.running[:3] = [1, 0, 0]
    scene.table.reported_at_s[:3] = 0.0
    # 2,048 tokens are all it looks at, so both match wholly
    assert scene.pick(KthenaDefault(), e0=6000, e1=2048) == "e1"


def test_preble_exploits_above_half_and_else_balances_what_was_sent_in_three_minutes() -> None:
    scene = Engines(2)
    picker = PrebleExploitExplore(
        scene.tracker, prefill_tokens_per_s=10_000.0, decode_s_per_token=0.001, block_size=BLOCK
    )
    first = scene.pick(picker, scene.request("a"))
    assert scene.pick(picker, scene.request("b")) != first
    assert scene.pick(picker, scene.request("a"), **{first: 3300}) == first
    # 0.84 s and 0.84 + 0.51 s were sent; less than half is cached
    other = "e1" if first == "e0" else "e0"
    assert scene.pick(picker, scene.request("c"), **{first: 3000}) == other
    # after three minutes all is forgotten, and the missed part decides
    scene.now = 400.0
    assert scene.pick(picker, scene.request("d"), **{first: 3000}) == first


@pytest.mark.parametrize("by", ["sent", "ended"])
def test_a_memory_knows_a_prompt_from_when_its_router_does(by: str) -> None:
    scene = Engines(2)
    picker = PrefixMemoryPolicy(SglangCacheAware(), scene.tracker, PrefixMemoryRule(by=by), BLOCK)  # type: ignore[arg-type]
    first = scene.request("a")
    holder = scene.pick(picker, first)
    other = "e1" if holder == "e0" else "e0"
    scene.loaded(*((1, 0) if holder == "e0" else (0, 1)))
    assert scene.pick(picker, scene.request("a")) == (holder if by == "sent" else other)
    first.produced = first.output_tokens
    assert scene.pick(picker, scene.request("a")) == holder


def test_a_bounded_memory_forgets_what_was_sent_longest_ago() -> None:
    scene = Engines(1)
    scene.table.kv_capacity_tokens[0] = 150 * BLOCK
    picker = PrefixMemoryPolicy(SglangCacheAware(), scene.tracker, PrefixMemoryRule(), BLOCK)
    for text in "ab":
        scene.pick(picker, scene.request(text))
    held = picker._held[0].keys()
    assert len(held) == 150
    assert all(block in held for block in scene.request("b").text.hashes)
    # of the first, the end of the prompt goes first
    old = scene.request("a").text.hashes
    assert [block in held for block in old] == [True] * 50 + [False] * 50


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_made_anew_for_each_run(name: str) -> None:
    one, other = policy_named(name)(KNOWN), policy_named(name)(KNOWN)
    assert one is not other
    assert one.observer is None or one.observer is not other.observer


def test_a_policy_that_is_neither_a_name_nor_a_file_says_what_there_is() -> None:
    with pytest.raises(ConfigInvalid, match="attache"):
        policy_named("nobody")(KNOWN)
