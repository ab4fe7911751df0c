# SPDX-License-Identifier: Apache-2.0
"""The KV cache's blocks: none lost, none held twice, the oldest forgotten first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from bench.engine.kv_cache import BlockPool
from tests.examples import examples


def filled(pool: BlockPool, hashes: list[int]) -> list[int]:
    """Blocks of a request whose full blocks have these hashes."""
    shared = pool.match_prefix(hashes)
    blocks = pool.allocate(shared, len(hashes) - len(shared))
    assert blocks is not None
    for block, value in zip(blocks, hashes, strict=True):
        pool.register(block, value)
    return blocks


def test_a_prefix_is_shared_while_held_and_remembered_when_released() -> None:
    pool = BlockPool(4)
    first = filled(pool, [1, 2])
    second = filled(pool, [1, 2, 3])
    assert second[:2] == first
    assert (pool.blocks_in_use, pool.free_blocks) == (3, 1)

    pool.release(first)
    pool.release(second)
    assert (pool.blocks_in_use, pool.free_blocks) == (0, 4)
    assert pool.match_prefix([1, 2, 3, 4]) == second


def test_the_least_recently_used_block_goes_first_and_of_one_request_its_tail() -> None:
    pool = BlockPool(4)
    old, young = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.release(old)
    pool.release(young)

    pool.allocate((), 1)
    assert pool.match_prefix([1, 2]) == old[:1]
    pool.allocate((), 1)
    assert pool.match_prefix([1]) == []
    assert pool.match_prefix([3, 4]) == young


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3)
    held = filled(pool, [1, 2])
    assert pool.allocate(held, 2) is None
    assert (pool.blocks_in_use, pool.free_blocks) == (2, 1)
    # a remembered block that would be shared is not free for something new
    pool.release(held)
    assert pool.allocate(pool.match_prefix([1, 2]), 2) is None
    assert pool.allocate(pool.match_prefix([1, 2]), 1) is not None


TOTAL = 12


class BlockAccounting(RuleBasedStateMachine):
    """Requests come, grow and go in any order; a plain model says who holds what."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.held: dict[int, list[int]] = {}
        self.stored: set[tuple[int, ...]] = set()
        self.next = 0

    @rule(target=requests, text=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def begin(self, text: list[int]) -> int:
        # the hash of a block stands for all up to it
        hashes = [hash(tuple(text[: end + 1])) for end in range(len(text))]
        shared = self.pool.match_prefix(hashes)
        for depth in range(1, len(shared) + 1):
            assert tuple(text[:depth]) in self.stored, "a hit on what was never stored"
        blocks = self.pool.allocate(shared, len(text) - len(shared))
        self.next += 1
        if blocks is None:
            assert len(text) - len(shared) > TOTAL - len({b for one in self.held.values() for b in one} | set(shared))
            self.held[self.next] = []
            return self.next
        for depth, (block, value) in enumerate(zip(blocks, hashes, strict=True), 1):
            self.pool.register(block, value)
            self.stored.add(tuple(text[:depth]))
        self.held[self.next] = blocks
        return self.next

    @rule(request=requests, count=st.integers(0, 4))
    def grow(self, request: int, count: int) -> None:
        fresh = self.pool.allocate((), count)
        if fresh is not None:
            taken = {block for blocks in self.held.values() for block in blocks}
            assert taken.isdisjoint(fresh), "a block in use was given away"
            self.held[request] += fresh

    @precondition(lambda self: self.held)
    @rule(request=consumes(requests))
    def end(self, request: int) -> None:
        self.pool.release(self.held.pop(request))

    @invariant()
    def in_use_and_free_are_all(self) -> None:
        held = {block for blocks in self.held.values() for block in blocks}
        assert self.pool.blocks_in_use == len(held)
        assert self.pool.blocks_in_use + self.pool.free_blocks == TOTAL


BlockAccounting.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_in_use_and_free_are_all_at_every_step = BlockAccounting.TestCase
