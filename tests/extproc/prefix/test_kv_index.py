# SPDX-License-Identifier: Apache-2.0
"""The precise index against the real content of a cache."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix.kv_event_decoder import AllBlocksCleared, BlocksRemoved, BlocksStored, max_blocks_per_source
from extproc.prefix.kv_index import SPECULATION_S, EventSource, KvIndex, chain_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE = 4


def stored(tokens: Sequence[int], hashes: Sequence[int], *, parent: int | None = None, **more: object) -> BlocksStored:
    return BlocksStored(tuple(hashes), parent, tuple(tokens), SIZE, **more)  # type: ignore[arg-type]


def held(
    index: KvIndex, tokens: Sequence[int], *, now: float = 0.0, adapter: str | None = None, salt: str | None = None
) -> dict[int, float]:
    """Weighted tokens by row."""
    found: dict[int, float] = {}
    for one in index.match(index.block_keys(tokens, adapter=adapter, salt=salt), now):
        for row in range(16):
            if one.holders >> row & 1:
                found[row] = max(found.get(row, 0.0), one.weighted)
    return found


def test_the_longest_run_from_the_beginning_counts() -> None:
    index = KvIndex()
    tokens = list(range(16))
    index.apply(EventSource(0), [stored(tokens[:8], [1, 2])])
    index.apply(EventSource(1), [stored(tokens, [91, 92, 93, 94])])
    index.apply(EventSource(2), [stored([7, 7, 7, 7], [5])])
    assert held(index, tokens) == {0: 8.0, 1: 16.0}
    assert held(index, [*tokens, 99]) == {0: 8.0, 1: 16.0}
    assert held(index, [5, *tokens]) == {}
    assert index.blocks_held(1) == 4


def test_successors_are_found_by_the_engines_own_hashes() -> None:
    index = KvIndex()
    tokens = list(range(12))
    index.apply(
        EventSource(0), [stored(tokens[:4], [b"a" * 32]), stored(tokens[4:], [b"b" * 32, b"c" * 32], parent=b"a" * 32)]
    )  # type: ignore[list-item, arg-type]
    assert held(index, tokens) == {0: 12.0}


def test_a_successor_of_an_unknown_block_is_ignored() -> None:
    index = KvIndex()
    index.apply(EventSource(0), [stored([1, 2, 3, 4], [2], parent=1)])
    assert held(index, [1, 2, 3, 4]) == {}


def test_a_block_that_was_removed_ends_the_run() -> None:
    index = KvIndex()
    tokens = list(range(12))
    index.apply(EventSource(0), [stored(tokens, [1, 2, 3]), BlocksRemoved((2,))])
    assert held(index, tokens) == {0: 4.0}
    index.apply(EventSource(0), [stored(tokens[4:8], [2], parent=1)])
    assert held(index, tokens) == {0: 12.0}


def test_a_cleared_cache_is_empty_and_the_others_stay() -> None:
    index = KvIndex()
    index.apply(EventSource(0), [stored([1, 2, 3, 4], [1])])
    index.apply(EventSource(1), [stored([1, 2, 3, 4], [1])])
    index.apply(EventSource(0), [AllBlocksCleared()])
    assert held(index, [1, 2, 3, 4]) == {1: 4.0}
    index.forget(1)
    assert held(index, [1, 2, 3, 4]) == {}
    assert index.block_keys([1, 2, 3, 4], adapter=None, salt=None) == {}, "no block size is in use any more"


def test_adapters_and_salts_share_nothing() -> None:
    index = KvIndex()
    index.apply(EventSource(0), [stored([1, 2, 3, 4], [1], lora_name="sql", extra_keys=(["sql"],))])
    index.apply(EventSource(1), [stored(range(8), [2, 3], extra_keys=(["tenant"], None))])
    assert held(index, [1, 2, 3, 4], adapter="sql") == {0: 4.0}
    assert held(index, [1, 2, 3, 4]) == {}
    assert held(index, range(8), salt="tenant") == {1: 8.0}
    assert held(index, range(8)) == {}


def test_host_memory_counts_less() -> None:
    index = KvIndex()
    tokens = list(range(8))
    index.apply(EventSource(0), [stored(tokens, [1, 2])])
    # offloaded: the event repeats no tokens
    index.apply(EventSource(0), [BlocksStored((2,), None, (), SIZE, "CPU"), BlocksRemoved((2,), "GPU")])
    assert held(index, tokens) == {0: 4 + 0.8 * 4}
    index.apply(EventSource(0), [BlocksRemoved((2,), "CPU")])
    assert held(index, tokens) == {0: 4.0}


def test_ranks_of_one_endpoint_are_kept_apart_and_seen_together() -> None:
    index = KvIndex()
    for rank in (0, 1):
        index.apply(EventSource(3, rank), [stored([1, 2, 3, 4], [1])])
    index.apply(EventSource(3, 0), [BlocksRemoved((1,))])
    assert held(index, [1, 2, 3, 4]) == {3: 4.0}
    index.apply(EventSource(3, 1), [BlocksRemoved((1,))])
    assert held(index, [1, 2, 3, 4]) == {}


def test_a_prompt_just_sent_counts_for_a_while() -> None:
    index = KvIndex()
    index.apply(EventSource(0), [stored([9, 9, 9, 9], [9])])
    tokens = list(range(8))
    index.assume_held(2, index.block_keys(tokens, adapter=None, salt=None), 10.0)
    assert held(index, tokens, now=10.0 + SPECULATION_S - 0.1) == {2: 8.0}
    assert held(index, tokens, now=10.0 + SPECULATION_S) == {}


def test_engines_with_blocks_of_different_sizes_are_matched_each_in_its_own() -> None:
    index = KvIndex()
    tokens = list(range(16))
    index.apply(EventSource(0), [stored(tokens[:12], [1, 2, 3])])
    index.apply(EventSource(1), [BlocksStored((7,), None, tuple(tokens[:8]), 8)])
    assert held(index, tokens) == {0: 12.0, 1: 8.0}


PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=20)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), PROMPTS, st.sampled_from(["store", "remove", "clear"]))), PROMPTS)
def test_it_agrees_with_sets_of_prefixes(actions: list[tuple[int, list[int], str]], prompt: list[int]) -> None:
    index = KvIndex()
    model: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set(), 2: set()}
    for row, tokens, action in actions:
        blocks = [tuple(tokens[: end + SIZE]) for end in range(0, len(tokens) - SIZE + 1, SIZE)]
        if action == "store":
            for block in blocks:
                parent = hash(block[:-SIZE]) if len(block) > SIZE else None
                if block not in model[row]:
                    index.apply(EventSource(row), [stored(block[-SIZE:], [hash(block)], parent=parent)])
                    model[row].add(block)
        elif action == "remove" and blocks and blocks[-1] in model[row]:
            # engines let go of children before parents
            below = {one for one in model[row] if one[: len(blocks[-1])] == blocks[-1]}
            index.apply(EventSource(row), [BlocksRemoved(tuple(map(hash, below)))])
            model[row] -= below
        elif action == "clear":
            index.apply(EventSource(row), [AllBlocksCleared()])
            model[row].clear()
    expected = {}
    for row, blocks_held in model.items():
        run = 0
        while tuple(prompt[: run + SIZE]) in blocks_held and run + SIZE <= len(prompt):
            run += SIZE
        if run:
            expected[row] = float(run)
    assert held(index, prompt) == expected


def test_keys_depend_on_all_that_comes_before() -> None:
    first = chain_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, adapter=None, salt=None)
    second = chain_keys([0, 2, 3, 4, 5, 6, 7, 8], 4, adapter=None, salt=None)
    assert len(first) == 2
    assert not set(first) & set(second)


def test_a_prompt_of_two_blocks_with_one_key_is_held_until_both_are_gone() -> None:
    index = KvIndex()
    index.apply(EventSource(0), [stored([1, 2, 3, 4], [1]), stored([1, 2, 3, 4], [2]), BlocksRemoved((1,))])
    assert held(index, [1, 2, 3, 4]) == {0: 4.0}
    index.apply(EventSource(0), [BlocksRemoved((2,))])
    assert held(index, [1, 2, 3, 4]) == {}


MEDIA = ("GPU", "CPU", "DISK")
SOURCES = (EventSource(0, 0), EventSource(0, 1), EventSource(1, 0))
# blocks that begin a prompt: few, so that ranks and media hold the same
STORE = st.tuples(
    st.just("store"), st.sampled_from(SOURCES), st.sampled_from(MEDIA), st.integers(0, 3), st.integers(0, 5)
)
REMOVE = st.tuples(st.just("remove"), st.sampled_from(SOURCES), st.sampled_from((None, *MEDIA)), st.integers(0, 5))
COPY = st.tuples(st.just("copy"), st.sampled_from(SOURCES), st.sampled_from(MEDIA), st.integers(0, 5))
CLEAR = st.tuples(st.sampled_from(["cleared", "clear"]), st.sampled_from(SOURCES))
FORGET = st.tuples(st.just("forget"), st.sampled_from([0, 1]))


class Model:
    """What each source holds: by medium and the engine's hash, the block's content."""

    def __init__(self) -> None:
        self.held: dict[EventSource, dict[tuple[str, int], int]] = {source: {} for source in SOURCES}

    def play(self, index: KvIndex, action: tuple[object, ...]) -> None:
        match action:
            case ("store", EventSource() as source, str() as medium, int() as content, int() as value):
                index.apply(source, [stored([content] * SIZE, [value], medium=medium)])
                self.held[source].setdefault((medium, value), content)
            case ("copy", EventSource() as source, str() as medium, int() as value):
                index.apply(source, [BlocksStored((value,), None, (), SIZE, medium)])
                known = [content for (_, other), content in self.held[source].items() if other == value]
                if known:
                    # of contents that an engine says of one hash, any
                    self.held[source].setdefault((medium, value), known[0])
            case ("remove", EventSource() as source, medium, int() as value):
                index.apply(source, [BlocksRemoved((value,), medium)])  # type: ignore[arg-type]
                self.held[source] = {
                    key: one
                    for key, one in self.held[source].items()
                    if key[1] != value or medium not in {None, key[0]}
                }
            case ("cleared", EventSource() as source):
                index.apply(source, [AllBlocksCleared()])
                self.held[source] = {}
            case ("clear", EventSource() as source):
                index.clear(source)
                self.held[source] = {}
            case ("forget", int() as row):
                index.forget(row)
                self.held.update({source: {} for source in SOURCES if source.row == row})

    def weights(self, content: int) -> dict[int, float]:
        """The weighted tokens by row of a prompt with this content."""
        found: dict[int, float] = {}
        for source, blocks in self.held.items():
            for (medium, _), one in blocks.items():
                if one == content:
                    found[source.row] = max(found.get(source.row, 0.0), SIZE * (1.0 if medium == "GPU" else 0.8))
        return found


@settings(max_examples=200)
@given(st.lists(STORE | REMOVE | COPY | CLEAR | FORGET, max_size=40))
def test_it_agrees_with_a_plain_model_of_ranks_and_media(actions: list[tuple[object, ...]]) -> None:
    index, model = KvIndex(), Model()
    for action in actions:
        model.play(index, action)
        for content in range(4):
            assert held(index, [content] * SIZE) == pytest.approx(model.weights(content))
        for row in (0, 1):
            assert index.blocks_held(row) == sum(
                len(blocks) for source, blocks in model.held.items() if source.row == row
            )
    for source in SOURCES:
        index.clear(source)
    assert not index.drop_cleared_blocks()
    assert index.block_keys([1] * SIZE, adapter=None, salt=None) == {}


def calls(act: Callable[[], object]) -> int:
    """Calls of functions and steps of generators while it acts."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def ranks(blocks: int, each: int = 2) -> KvIndex:
    """An endpoint whose ranks hold so many blocks."""
    index = KvIndex()
    for rank in range(each):
        for start in range(0, blocks, 500):
            tokens = [token for one in range(start, start + 500) for token in (rank, one, 0, 0)]
            index.apply(EventSource(0, rank), [stored(tokens, range(start, start + 500))])
    return index


def test_what_an_eviction_costs_does_not_grow_with_the_blocks_of_other_ranks() -> None:
    removed = [BlocksRemoved((value,)) for value in range(100)]
    small, large = (calls(partial(ranks(size).apply, EventSource(0, 0), removed)) for size in (500, 5_000))
    assert small == large


def test_a_large_cache_counts_no_more_at_once_and_is_dropped_in_slices() -> None:
    index, small = ranks(10_000), ranks(5_000)
    cost = [calls(partial(one.clear, EventSource(0, 0))) for one in (index, small)]
    assert cost[0] == cost[1], "it does not grow with the blocks"
    assert index.blocks_held(0) == 10_000
    assert held(index, [0, 9_000, 0, 0]) == {}
    slices = 1
    while index.drop_cleared_blocks():
        slices += 1
    assert slices == 4
    # a row that is given to another endpoint meanwhile has nothing of the last one
    index.forget(0)
    index.apply(EventSource(0, 0), [stored([8, 8, 8, 8], [1])])
    for content in range(500):
        assert held(index, [1, content, 0, 0]) == {}
    assert held(index, [8, 8, 8, 8]) == {0: 4.0}


def test_caches_that_are_cleared_again_and_again_do_not_pile_up() -> None:
    index = KvIndex()
    for number in range(50):
        for start in range(0, 4_000, 500):
            tokens = [token for one in range(500) for token in (number, start + one, 0, 0)]
            index.apply(EventSource(0), [stored(tokens, range(start, start + 500))])
        index.apply(EventSource(0), [AllBlocksCleared()])
    assert len(index._row_of_bit) <= 4


def lines(act: Callable[[], object]) -> int:
    """Lines of Python that run while it acts; not those that the garbage collector calls."""
    count = 0

    def note(_: object, event: str, __: object) -> object:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    gc.disable()
    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_what_a_prompt_costs_grows_neither_with_the_caches_nor_with_those_that_come_and_go() -> None:
    """Each of its blocks is held by others, and another engine clears its cache before each request."""
    tokens = list(range(64 * SIZE))

    def costs(engines: int) -> tuple[int, int]:
        index = KvIndex()
        for row in range(engines):
            index.apply(EventSource(row), [stored(tokens[: (row % 64 + 1) * SIZE], range(row % 64 + 1))])
        chains = index.block_keys(tokens, adapter=None, salt=None)
        first = lines(partial(index.match, chains, 0.0))
        index.apply(EventSource(engines), [stored([1] * SIZE, [1]), AllBlocksCleared()])
        return first, lines(partial(index.match, chains, 0.0))

    (first, later), (first_of_many, later_of_many) = costs(200), costs(2_000)
    assert first == first_of_many
    assert later == later_of_many < first


def test_an_engine_with_more_blocks_than_are_followed_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS", 10)
    index = KvIndex()
    for value in range(8):
        index.apply(EventSource(0), [stored([value] * SIZE, [value])])
    assert index.is_complete(EventSource(0))
    for value in range(8):
        index.apply(EventSource(0), [stored([value] * SIZE, [value], medium="CPU")])
    assert index.blocks_held(0) == 10, "over all media"
    assert not index.is_complete(EventSource(0))
    index.apply(EventSource(0), [AllBlocksCleared(), stored([1] * SIZE, [1])])
    assert index.is_complete(EventSource(0))


@pytest.mark.parametrize(("sources", "blocks"), [(0, 1_000_000), (4, 1_000_000), (640, 6_553), (6_400, 655)])
def test_all_sources_share_what_a_process_tracks(sources: int, blocks: int) -> None:
    assert max_blocks_per_source(sources) == blocks


def test_a_source_that_has_more_than_a_lower_bound_is_cleared_and_not_complete() -> None:
    index, large, small = KvIndex(), EventSource(0), EventSource(1)
    for value in range(8):
        index.apply(large, [stored([value] * SIZE, [value])])
    index.apply(small, [stored([1] * SIZE, [1])])
    index.limit_blocks(5)
    assert (index.blocks_held(0), index.blocks_held(1)) == (0, 1)
    assert (index.is_complete(large), index.is_complete(small)) == (False, True)
    assert held(index, [1] * SIZE) == {1: 4.0}
    for value in range(8):
        index.apply(large, [stored([value] * SIZE, [value])])
    assert index.blocks_held(0) == 5
    index.limit_blocks(10)
    index.apply(large, [BlocksRemoved((0, 1, 2, 3, 4))])
    assert index.blocks_held(0) == 0
    assert not index.is_complete(large), "what was left out is not known, and may still be there"
    index.apply(large, [AllBlocksCleared(), stored([1] * SIZE, [1])])
    assert index.is_complete(large)


def test_blocks_that_one_cache_holds_take_no_mask_each() -> None:
    index = KvIndex()
    for row in range(20):
        index.apply(EventSource(row), [stored([row] * 100 * SIZE, range(100))])
    assert len({id(mask) for mask in index._on_gpu.masks.values()}) == 20


def test_media_and_block_sizes_of_a_hostile_engine_are_bounded() -> None:
    index, tokens = KvIndex(), list(range(2_000))
    index.apply(EventSource(1), [stored(tokens[:8], [1, 2])])
    for number in range(2_000):
        index.apply(EventSource(0), [stored([7] * SIZE, [number], medium=f"M{number}")])
    for size in range(1, 2_000):
        index.apply(EventSource(2), [BlocksStored((size,), None, tuple(tokens[:size]), size)])
    assert index.blocks_held(0) == 4
    assert len(index.block_keys(tokens, adapter=None, salt=None)) <= 4
    assert held(index, tokens)[1] == 8.0, "honest engines are followed"
    assert [index.is_complete(EventSource(row)) for row in range(3)] == [False, True, False]


def test_a_medium_that_is_empty_makes_room_for_another() -> None:
    index = KvIndex()
    for number in range(20):
        index.apply(EventSource(0), [stored([7] * SIZE, [1], medium=f"M{number}")])
        assert held(index, [7] * SIZE) == {0: 0.8 * SIZE}
        index.apply(EventSource(0), [BlocksRemoved((1,))])
    assert index.is_complete(EventSource(0))
