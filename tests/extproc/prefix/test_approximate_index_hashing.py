# SPDX-License-Identifier: Apache-2.0
"""Prompts as chains of blocks that grow with the position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix.approximate_index import FIRST_BLOCK_BYTES, hash_blocks, size_of_first_blocks


def test_blocks_are_64_of_128_bytes_then_64_of_256() -> None:
    chain = hash_blocks(bytes(64 * 128 + 3 * 256 + 255), "m")

    assert len(chain) == 64 + 3
    assert [size_of_first_blocks(count + 1) - size_of_first_blocks(count) for count in range(67)] == [1] * 64 + [2] * 3


def test_four_hundred_kilobytes_are_a_few_hundred_blocks() -> None:
    assert len(hash_blocks(bytes(400_000), "m")) == 355


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    assert hash_blocks(bytes(127), "m") == []


def test_another_model_shares_nothing() -> None:
    assert not set(hash_blocks(bytes(1000), "base")) & set(hash_blocks(bytes(1000), "adapter"))


@given(st.binary(max_size=20_000), st.binary(max_size=2_000), st.binary(max_size=2_000))
def test_chains_are_equal_exactly_as_far_as_prompts_are(shared: bytes, one: bytes, other: bytes) -> None:
    first, second = hash_blocks(shared + one, "m"), hash_blocks(shared + other, "m")
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1

    end = size_of_first_blocks(common) * FIRST_BLOCK_BYTES
    assert (shared + one)[:end] == (shared + other)[:end]
    if common < min(len(first), len(second)):
        further = size_of_first_blocks(common + 1) * FIRST_BLOCK_BYTES
        assert (shared + one)[:further] != (shared + other)[:further]
    assert not set(first[common:]) & set(second[common:])


@given(st.integers(0, 700))
def test_covered_bytes_add_up(count: int) -> None:
    text = bytes(64 * size_of_first_blocks(count))

    assert len(hash_blocks(text, "m", 64)) == count
    assert len(hash_blocks(text[1:], "m", 64)) == max(0, count - 1)
