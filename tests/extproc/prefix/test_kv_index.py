# SPDX-License-Identifier: Apache-2.0
"""The precise index against the real content of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix.kv_events import Cleared, Removed, Stored
from extproc.prefix.kv_index import SPECULATION_S, KvIndex, Source, chain_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 4


def stored(tokens: Sequence[int], hashes: Sequence[int], *, parent: int | None = None, **more: object) -> Stored:
    return Stored(tuple(hashes), parent, tuple(tokens), SIZE, **more)  # type: ignore[arg-type]


def held(
    index: KvIndex, tokens: Sequence[int], *, now: float = 0.0, adapter: str | None = None, salt: str | None = None
) -> dict[int, float]:
    """Weighted tokens by row."""
    found: dict[int, float] = {}
    for one in index.match(index.keys(tokens, adapter=adapter, salt=salt), now):
        for row in range(16):
            if one.holders >> row & 1:
                found[row] = max(found.get(row, 0.0), one.weighted)
    return found


def test_the_longest_run_from_the_beginning_counts() -> None:
    index = KvIndex()
    tokens = list(range(16))
    index.apply(Source(0), [stored(tokens[:8], [1, 2])])
    index.apply(Source(1), [stored(tokens, [91, 92, 93, 94])])
    index.apply(Source(2), [stored([7, 7, 7, 7], [5])])
    assert held(index, tokens) == {0: 8.0, 1: 16.0}
    assert held(index, [*tokens, 99]) == {0: 8.0, 1: 16.0}
    assert held(index, [5, *tokens]) == {}
    assert index.blocks_held(1) == 4


def test_successors_are_found_by_the_engines_own_hashes() -> None:
    index = KvIndex()
    tokens = list(range(12))
    index.apply(
        Source(0), [stored(tokens[:4], [b"a" * 32]), stored(tokens[4:], [b"b" * 32, b"c" * 32], parent=b"a" * 32)]
    )  # type: ignore[list-item, arg-type]
    assert held(index, tokens) == {0: 12.0}


def test_a_successor_of_an_unknown_block_is_counted_and_ignored() -> None:
    index = KvIndex()
    index.apply(Source(0), [stored([1, 2, 3, 4], [2], parent=1)])
    assert index.orphans == 1
    assert held(index, [1, 2, 3, 4]) == {}


def test_a_block_that_was_removed_ends_the_run() -> None:
    index = KvIndex()
    tokens = list(range(12))
    index.apply(Source(0), [stored(tokens, [1, 2, 3]), Removed((2,))])
    assert held(index, tokens) == {0: 4.0}
    index.apply(Source(0), [stored(tokens[4:8], [2], parent=1)])
    assert held(index, tokens) == {0: 12.0}


def test_a_cleared_cache_is_empty_and_the_others_stay() -> None:
    index = KvIndex()
    index.apply(Source(0), [stored([1, 2, 3, 4], [1])])
    index.apply(Source(1), [stored([1, 2, 3, 4], [1])])
    index.apply(Source(0), [Cleared()])
    assert held(index, [1, 2, 3, 4]) == {1: 4.0}
    index.forget(1)
    assert held(index, [1, 2, 3, 4]) == {}
    assert index.keys([1, 2, 3, 4], adapter=None, salt=None) == {}, "no block size is in use any more"


def test_adapters_and_salts_share_nothing() -> None:
    index = KvIndex()
    index.apply(Source(0), [stored([1, 2, 3, 4], [1], lora_name="sql", extra_keys=(["sql"],))])
    index.apply(Source(1), [stored(range(8), [2, 3], extra_keys=(["tenant"], None))])
    assert held(index, [1, 2, 3, 4], adapter="sql") == {0: 4.0}
    assert held(index, [1, 2, 3, 4]) == {}
    assert held(index, range(8), salt="tenant") == {1: 8.0}
    assert held(index, range(8)) == {}


def test_host_memory_counts_less() -> None:
    index = KvIndex()
    tokens = list(range(8))
    index.apply(Source(0), [stored(tokens, [1, 2])])
    # offloaded: the event repeats no tokens
    index.apply(Source(0), [Stored((2,), None, (), SIZE, "CPU"), Removed((2,), "GPU")])
    assert held(index, tokens) == {0: 4 + 0.8 * 4}
    index.apply(Source(0), [Removed((2,), "CPU")])
    assert held(index, tokens) == {0: 4.0}


def test_ranks_of_one_endpoint_are_kept_apart_and_seen_together() -> None:
    index = KvIndex()
    for rank in (0, 1):
        index.apply(Source(3, rank), [stored([1, 2, 3, 4], [1])])
    index.apply(Source(3, 0), [Removed((1,))])
    assert held(index, [1, 2, 3, 4]) == {3: 4.0}
    index.apply(Source(3, 1), [Removed((1,))])
    assert held(index, [1, 2, 3, 4]) == {}


def test_a_prompt_just_sent_counts_for_a_while() -> None:
    index = KvIndex()
    index.apply(Source(0), [stored([9, 9, 9, 9], [9])])
    tokens = list(range(8))
    index.speculate(2, index.keys(tokens, adapter=None, salt=None), 10.0)
    assert held(index, tokens, now=10.0 + SPECULATION_S - 0.1) == {2: 8.0}
    assert held(index, tokens, now=10.0 + SPECULATION_S) == {}


def test_engines_with_blocks_of_different_sizes_are_matched_each_in_its_own() -> None:
    index = KvIndex()
    tokens = list(range(16))
    index.apply(Source(0), [stored(tokens[:12], [1, 2, 3])])
    index.apply(Source(1), [Stored((7,), None, tuple(tokens[:8]), 8)])
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
                    index.apply(Source(row), [stored(block[-SIZE:], [hash(block)], parent=parent)])
                    model[row].add(block)
        elif action == "remove" and blocks and blocks[-1] in model[row]:
            # engines let go of children before parents
            below = {one for one in model[row] if one[: len(blocks[-1])] == blocks[-1]}
            index.apply(Source(row), [Removed(tuple(map(hash, below)))])
            model[row] -= below
        elif action == "clear":
            index.apply(Source(row), [Cleared()])
            model[row].clear()
    expected = {}
    for row, blocks_held in model.items():
        run = 0
        while tuple(prompt[: run + SIZE]) in blocks_held and run + SIZE <= len(prompt):
            run += SIZE
        if run:
            expected[row] = float(run)
    assert held(index, prompt) == expected
    assert index.orphans == 0


def test_keys_depend_on_all_that_comes_before() -> None:
    first = chain_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, adapter=None, salt=None)
    second = chain_keys([0, 2, 3, 4, 5, 6, 7, 8], 4, adapter=None, salt=None)
    assert len(first) == 2
    assert not set(first) & set(second)
