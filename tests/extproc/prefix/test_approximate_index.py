# SPDX-License-Identifier: Apache-2.0
"""The prefix index against a plain model of it: a list of block lists, searched from the front."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.prefix.approximate_index import (
    FIRST_BLOCK_BYTES,
    ConversationTurn,
    PrefixIndex,
    PrefixMatch,
    PromptTail,
    hash_blocks,
    max_blocks_per_endpoint,
    size_of_first_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.prefix.approximate_index import BlockPin

CAPACITY = 64 * 1024
ROWS = st.integers(0, 70)  # more than fit a machine word


# of all blocks that were made
_sizes: dict[int, int] = {}


def _bytes(block: int) -> int:
    return _sizes[block]


def chain_of(*parts: int) -> list[int]:
    """Equal leading parts give equal leading blocks; a part is 1 KiB."""
    chain = hash_blocks(b"".join(bytes([part]) * 1024 for part in parts), "m")
    for at, block in enumerate(chain):
        _sizes[block] = (size_of_first_blocks(at + 1) - size_of_first_blocks(at)) * FIRST_BLOCK_BYTES
    return chain


def matched(index: PrefixIndex, row: int, chain: list[int]) -> int:
    return max((match.blocks for match in index.match(chain) if match.holders >> row & 1), default=0)


def test_an_empty_index_matches_nothing() -> None:
    assert PrefixIndex(CAPACITY).match(chain_of(1)) == []


def test_endpoints_are_distinguished_by_how_much_they_hold() -> None:
    index = PrefixIndex(CAPACITY)
    index.record(0, chain_of(1, 2), 0.0)
    index.record(3, chain_of(1, 9), 0.0)

    assert index.match(chain_of(1, 2, 3)) == [PrefixMatch(8, 0b1001), PrefixMatch(16, 0b0001)]


def test_the_tail_of_the_least_recent_prompt_goes_first() -> None:
    index = PrefixIndex(CAPACITY)
    old, recent = chain_of(*range(1, 33)), chain_of(*range(101, 133))
    index.record(0, old, 0.0)
    index.record(0, recent, 1.0)
    index.record(0, chain_of(201, 202), 2.0)

    assert 0 < matched(index, 0, old) < len(old)
    assert matched(index, 0, recent) == len(recent)


def test_a_prefix_in_use_outlives_unused_ones() -> None:
    index = PrefixIndex(CAPACITY)
    shared = chain_of(1, 2, 3, 4)
    for turn in range(40):
        index.record(0, chain_of(1, 2, 3, 4, 100 + turn, 100 + turn), float(turn))

    assert matched(index, 0, shared) == len(shared)
    assert matched(index, 0, chain_of(1, 2, 3, 4, 100, 100)) == len(shared)


def test_of_a_prompt_larger_than_the_cache_the_head_is_kept() -> None:
    index = PrefixIndex(CAPACITY)
    chain = chain_of(*range(200))
    index.record(0, chain, 0.0)

    kept = matched(index, 0, chain)
    assert sum(map(_bytes, chain[:kept])) <= CAPACITY < sum(map(_bytes, chain[: kept + 1]))


def test_a_reported_miss_drops_everything_used_no_later() -> None:
    index = PrefixIndex(CAPACITY)
    index.record(0, chain_of(1), 1.0)
    index.record(0, chain_of(2), 2.0)
    index.record(0, chain_of(3), 3.0)
    index.on_missed_prediction(0, missed_at_s=2.0)

    assert [matched(index, 0, chain_of(part)) for part in (1, 2, 3)] == [0, 0, 8]


def test_a_miss_lowers_the_bound_and_confirmed_hits_raise_it_again() -> None:
    index = PrefixIndex(4 * CAPACITY)
    long = chain_of(*range(1, 129))
    index.record(0, long, 1.0)
    index.record(0, long[: len(long) // 2], 2.0)
    index.on_missed_prediction(0, missed_at_s=1.0)
    index.record(0, long, 3.0)
    lowered = matched(index, 0, long)
    for _ in range(100):
        index.record(0, long, 4.0)
        index.on_confirmed_prediction(0)

    assert lowered < len(long)
    assert matched(index, 0, long) == len(long)


def test_the_end_of_a_request_frees_nothing_that_was_pinned_after_the_cache_was_lost() -> None:
    index = PrefixIndex(CAPACITY)
    before = index.pin(0, chain_of(1, 2), 0.0)
    index.forget(0)
    index.pin(0, chain_of(1, 3), 1.0)
    index.unpin(0, before, 2.0)

    assert index.evictable_blocks(0) == []
    assert index.blocks_held(0) == len(chain_of(1, 3))


def test_blocks_with_the_same_hash_in_different_prompts_do_no_harm() -> None:
    index = PrefixIndex(CAPACITY)
    common = 7 << 5
    pins = [index.pin(0, chain, 0.0) for chain in ([1 << 5, common, 2 << 5], [3 << 5, common, common], [common])]
    for pin in pins:
        index.unpin(0, pin, 1.0)
    index.on_missed_prediction(0, missed_at_s=1.0)

    assert (index.distinct_block_count, index.blocks_held(0), index.bytes_held(0)) == (0, 0, 0)


def test_what_was_not_sent_is_not_held_but_for_what_others_use_too() -> None:
    index = PrefixIndex(CAPACITY)
    index.record(0, chain_of(1), 0.0)
    pin = index.pin(0, chain_of(1, 2, 3), 1.0)
    # it divides what the first one alone has
    index.record(0, chain_of(1, 2, 4), 2.0)
    index.withdraw(0, pin, 3.0)

    assert matched(index, 0, chain_of(1, 2, 3)) == len(chain_of(1, 2))
    assert matched(index, 0, chain_of(1, 2, 4)) == len(chain_of(1, 2, 4)) == index.blocks_held(0)
    assert len(index.evictable_blocks(0)) == index.distinct_block_count == index.blocks_held(0)
    assert index.bytes_held(0) == sum(map(_bytes, chain_of(1, 2, 4)))


def test_what_was_not_sent_may_be_gone_or_have_no_block() -> None:
    index = PrefixIndex(CAPACITY)
    pin = index.pin(0, chain_of(1), 0.0)
    index.forget(0)
    index.record(0, chain_of(1), 1.0)
    index.withdraw(0, pin, 2.0)
    index.withdraw(0, index.pin(0, [], 3.0), 4.0)
    assert index.blocks_held(0) == len(chain_of(1))


def turn_of(number: int) -> ConversationTurn:
    return ConversationTurn(PromptTail(number, 3), 100.0)


def test_of_many_short_prompts_no_more_is_remembered_than_an_endpoint_may_have() -> None:
    index = PrefixIndex(1e9, most_blocks=40)
    for number in range(100):
        index.record(0, chain_of(number % 10, number // 10), float(number))

    assert index.blocks_held(0) == index.distinct_block_count <= 40
    assert matched(index, 0, chain_of(9, 9)) == 16, "the last one"


def test_turns_count_and_go_with_the_last_block_of_their_prompt() -> None:
    index = PrefixIndex(1e9, most_blocks=40)
    for number in range(100):
        index.record(0, chain_of(number), float(number))
        index.record_turn(0, chain_of(number), turn_of(number))

    # a turn takes as much memory as four blocks: of the oldest prompt the end went, with its turn
    assert (index.blocks_held(0), len(index.turns.by_block)) == (31, 3)
    assert list(index.turns.by_block) == [chain_of(number)[-1] for number in (97, 98, 99)]
    index.forget(0)
    assert index.turns.by_block == {}


def test_a_turn_is_of_the_endpoint_that_holds_its_prompt() -> None:
    index = PrefixIndex(CAPACITY)
    index.record(0, chain_of(1), 0.0)
    for row in (0, 0, 1):
        index.record_turn(row, chain_of(1), turn_of(row))
    assert index.turns.by_block == {chain_of(1)[-1]: {0: turn_of(0)}}
    index.on_missed_prediction(0, missed_at_s=0.0)
    assert index.turns.by_block == {}


@pytest.mark.parametrize(("endpoints", "blocks"), [(0, 16_384), (256, 16_384), (1_024, 4_096), (20_000, 209)])
def test_all_endpoints_share_what_a_process_remembers(endpoints: int, blocks: int) -> None:
    assert max_blocks_per_endpoint(endpoints) == blocks


def test_of_an_endpoint_that_leaves_nothing_stays_though_blocks_have_the_same_hash() -> None:
    index = PrefixIndex(CAPACITY)
    common = 7 << 5
    # the third chain splits the second, whose rest then begins as the first does
    for chain in ([common, 8 << 5], [1 << 5, common], [1 << 5, 9 << 5]):
        index.record(0, chain, 0.0)
    index.forget(0)
    assert index.distinct_block_count == 0


class AgainstAPlainModel(RuleBasedStateMachine):
    """Never longer than recorded; equal to LRU by blocks; bounded; nothing left of what is forgotten."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(CAPACITY)
        self.recorded: dict[int, list[list[int]]] = {}
        self.lru: dict[int, list[int]] = {}
        # by row and block, while it is held
        self.uses: Counter[tuple[int, int]] = Counter()
        self.running: list[tuple[int, list[int], BlockPin]] = []
        self.now = 0.0

    @rule(row=ROWS, parts=st.lists(st.integers(0, 2), min_size=1, max_size=60))
    def record(self, row: int, parts: list[int]) -> None:
        self.now += 1
        chain = chain_of(*parts)
        self.index.record(row, chain, self.now)
        self.recorded.setdefault(row, []).append(chain)
        # a request that ends as it begins: until then it holds its blocks
        self._use(row, chain, held=chain)
        self._release(row, chain)

    @rule(row=ROWS, parts=st.lists(st.integers(0, 2), min_size=1, max_size=40))
    def hold(self, row: int, parts: list[int]) -> None:
        self.now += 1
        chain = chain_of(*parts)
        pin = self.index.pin(row, chain, self.now)
        self.recorded.setdefault(row, []).append(chain)
        self.running.append((row, chain, pin))
        self._use(row, chain)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if not self.running:
            return
        self.now += 1
        row, chain, pin = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.index.unpin(row, pin, self.now)
        self._release(row, chain)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if not self.running:
            return
        self.now += 1
        row, chain, pin = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.index.withdraw(row, pin, self.now)
        self.lru[row] = [block for block in self.lru[row] if block not in chain or self.uses[row, block] > 1]
        self._release(row, chain)

    def _release(self, row: int, chain: list[int]) -> None:
        in_use = self._in_use(row)
        kept = self.lru.get(row, [])
        for block in reversed(chain):
            if block in kept and block not in in_use:
                kept.remove(block)
                kept.append(block)
        self._evict(row)

    def _in_use(self, row: int) -> set[int]:
        return {block for other, chain, _ in self.running if other == row for block in chain}

    def _use(self, row: int, chain: list[int], held: Sequence[int] = ()) -> None:
        kept = self.lru.setdefault(row, [])
        for block in reversed(chain):
            if block not in kept:
                self.uses[row, block] = 0
                kept.append(block)
            self.uses[row, block] += 1
        self._evict(row, held)

    def _evict(self, row: int, held: Sequence[int] = ()) -> None:
        kept = self.lru.get(row, [])
        in_use = self._in_use(row).union(held)
        free = [block for block in kept if block not in in_use]
        while free and sum(map(_bytes, kept)) > CAPACITY:
            kept.remove(free.pop(0))

    @rule(row=ROWS)
    def forget(self, row: int) -> None:
        self.index.forget(row)
        self.recorded.pop(row, None)
        self.lru.pop(row, None)
        self.running = [one for one in self.running if one[0] != row]

    @rule(parts=st.lists(st.integers(0, 2), min_size=1, max_size=60))
    def match(self, parts: list[int]) -> None:
        chain = chain_of(*parts)
        for row, recorded in self.recorded.items():
            length = matched(self.index, row, chain)
            assert any(chain[:length] == known[:length] for known in recorded)
            kept = set(self.lru[row])
            assert length == next((n for n, block in enumerate(chain) if block not in kept), len(chain))

    @invariant()
    def is_bounded(self) -> None:
        for row, kept in self.lru.items():
            in_use = self._in_use(row)
            free = [block for block in kept if block not in in_use]
            assert self.index.evictable_blocks(row) == free
            assert self.index.blocks_held(row) == len(kept)
            assert self.index.bytes_held(row) == sum(map(_bytes, kept))
            if free:
                assert self.index.bytes_held(row) <= CAPACITY
            for chain in self.recorded.get(row, []):
                used = [self.index.last_use(row, chain, at) is not None for at in range(len(chain))]
                assert used == [block in kept for block in chain]
        assert self.index.distinct_block_count == len({block for kept in self.lru.values() for block in kept})


TestAgainstAPlainModel = AgainstAPlainModel.TestCase
TestAgainstAPlainModel.settings = settings(max_examples=40, stateful_step_count=30)
