# SPDX-License-Identifier: Apache-2.0
"""Links, leases and remote prompts as stories, with numbers worked out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.fake_tokenizer import answer_text
from bench.engine.hardware import PRESETS
from bench.engine.kv_cache import BlockPool
from bench.engine.kv_transfer import PinnedExports, SharedLink
from bench.engine.request import GARBAGE, Request
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import RooflineStepTime

HARDWARE = PRESETS["h100-llama-3.1-8b"]


def test_transfers_share_a_link_equally() -> None:
    link: SharedLink[str] = SharedLink(100.0)
    link.begin("long", 100.0, 0.0)
    assert link.next_end_s() == 1.0
    # half of the long one is over; both have 50 bytes/s from here on
    link.begin("short", 10.0, 0.5)
    assert link.next_end_s() == pytest.approx(0.7)
    assert link.pop_ended(0.6) == []
    assert link.pop_ended(0.7000001) == ["short"]
    # the long one has 40 left, and the link for itself again
    assert link.next_end_s() == pytest.approx(1.1)
    assert link.pop_ended(5.0) == ["long"]
    assert link.next_end_s() is None


def test_a_transfer_that_is_given_up_leaves_its_share_to_others() -> None:
    link: SharedLink[str] = SharedLink(100.0)
    link.begin("one", 100.0, 0.0)
    link.begin("other", 100.0, 0.0)
    link.cancel("other", 1.0)
    assert len(link) == 1
    assert link.next_end_s() == pytest.approx(1.5)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1000)), min_size=1, max_size=20))
def test_a_busy_link_carries_its_bandwidth(transfers: list[tuple[float, float]]) -> None:
    link: SharedLink[int] = SharedLink(100.0)
    for number, (at_s, size) in enumerate(sorted(transfers)):
        link.begin(number, size, at_s)
    last_s = max(at_s for at_s, _ in transfers)
    ended, at_s = link.pop_ended(last_s), last_s
    while (end_s := link.next_end_s()) is not None:
        at_s = end_s
        ended += link.pop_ended(end_s)
    assert sorted(ended) == list(range(len(transfers)))
    total_s = sum(size for _, size in transfers) / 100.0
    assert min(at_s for at_s, _ in transfers) + total_s <= at_s + 1e-6
    assert at_s <= last_s + total_s + 1e-6


def test_pinned_blocks_are_free_when_they_are_pulled_or_the_lease_ends() -> None:
    pool = BlockPool(10)
    exports: PinnedExports[str] = PinnedExports(pool, lease_s=30.0)
    for key in ("pulled", "forgotten", "slow"):
        blocks = pool.allocate((), 3)
        assert blocks is not None
        exports.pin(key, blocks, 0.0)
    assert pool.free_blocks == 1
    assert exports.release("pulled")
    assert pool.free_blocks == 4
    # a heartbeat at 15 s: the lease ends at 35 s in place of 30 s
    assert exports.prolong("slow", 15.0)
    assert exports.expire(30.0) == ["forgotten"]
    assert exports.next_end_s() == 35.0
    assert not exports.prolong("slow", 35.0)
    assert (pool.free_blocks, len(exports), exports.expired) == (10, 0, 2)
    assert not exports.release("slow")


def request(key: int, tokens: int, output: int = 4) -> Request:
    text = b"".join(b"%04d" % (number % 10_000) for number in range(tokens))
    return Request(key, text, answer_text(random.Random(key), output), model="m", block_size=16)


def scheduler(blocks: int = 100) -> Scheduler:
    return Scheduler(RooflineStepTime(HARDWARE), EngineLimits(num_gpu_blocks=blocks))


def run(one: Scheduler) -> list[str]:
    texts = []
    while (step := one.begin_step()) is not None:
        texts += [token.text for token in one.end_step(step)]
    return texts


def test_the_blocks_of_an_exported_prefill_stay_held() -> None:
    prefill = scheduler()
    exported = request(0, 160).prefill_leg(1)
    exported.is_exported = True
    prefill.add(exported)
    assert len(run(prefill)) == 1
    ((found, blocks),) = prefill.pop_finished_exports()
    assert (found, len(blocks)) == (exported, 10)
    assert prefill.pool.blocks_in_use == 10
    assert prefill.pop_sendable_tokens() == [(exported, 160)]
    assert prefill.pop_finished_exports() == []


def test_a_remote_prompt_waits_with_its_blocks_and_computes_one_token() -> None:
    decode = scheduler()
    remote = request(0, 160)
    remote.is_remote = True
    decode.add(remote)
    assert decode.begin_step() is None
    assert decode.pop_transfers_to_start() == [(remote, 160)]
    assert (decode.pool.blocks_in_use, len(decode.running), len(decode.waiting)) == (10, 0, 0)
    decode.on_transfer_ended(remote, 160)
    step = decode.begin_step()
    assert step is not None
    assert [count for _, count in step.parts] == [1]
    decode.end_step(step)
    assert len(run(decode)) == 3
    assert decode.pool.blocks_in_use == 0
    counted = decode.counters
    assert (counted.prompt_tokens, counted.hits, counted.transferred) == (160, 0, 160)


def test_the_next_turn_is_transferred_only_where_it_is_not_cached() -> None:
    decode = scheduler()
    decode.add(request(0, 160))
    run(decode)
    remote = request(1, 320)
    remote.is_remote = True
    decode.add(remote)
    assert decode.begin_step() is None
    assert decode.pop_transfers_to_start() == [(remote, 160)]


def test_a_failed_transfer_is_computed_and_counted() -> None:
    decode = scheduler()
    remote = request(0, 160)
    remote.is_remote = True
    decode.add(remote)
    assert decode.begin_step() is None
    decode.on_transfer_ended(remote, 0)
    step = decode.begin_step()
    assert step is not None
    assert [count for _, count in step.parts] == [160]
    assert decode.counters.transferred == 0


def test_without_room_the_transfer_does_not_begin_and_others_keep_their_blocks() -> None:
    decode = scheduler(blocks=12)
    first, second = request(0, 100), request(1, 100)
    first.is_remote = second.is_remote = True
    decode.add(first)
    decode.add(second)
    assert decode.begin_step() is None
    assert [one for one, _ in decode.pop_transfers_to_start()] == [first]
    decode.abort(first)
    assert decode.begin_step() is None
    assert [one for one, _ in decode.pop_transfers_to_start()] == [second]
    # what comes for a request that was aborted meanwhile changes nothing
    decode.on_transfer_ended(first, 100)
    assert not decode.waiting


def test_a_spoiled_answer_is_garbage_of_the_same_length() -> None:
    one = request(0, 10, output=5)
    one.corrupt_answer()
    assert one.answer == GARBAGE * 5
    assert one.output_tokens == 5
