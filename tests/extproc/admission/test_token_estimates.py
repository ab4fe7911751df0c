# SPDX-License-Identifier: Apache-2.0
"""What is reserved for an answer without a bound: the length that nearly all recent answers did not exceed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.token_estimates import InputEstimate, InputEstimates, TokenQuantile

if TYPE_CHECKING:
    import random


@given(
    # drawn one by one they would take hypothesis most of the time
    some=st.lists(st.floats(0, 1e6), min_size=1, max_size=20),
    count=st.integers(256, 600),
    is_repeating=st.booleans(),
    rng=st.randoms(use_true_random=True),
)
def test_95_of_100_recent_answers_were_not_longer(
    some: list[float], count: int, is_repeating: bool, rng: random.Random
) -> None:
    lengths = some + [rng.choice(some) if is_repeating else rng.uniform(0, 1e6) for _ in range(count)]
    rng.shuffle(lengths)
    estimate = TokenQuantile()
    for length in lengths:
        estimate.learn(length)
    recent = lengths[-256:]
    assert estimate.tokens in recent
    assert sum(length <= estimate.tokens for length in recent) >= math.ceil(0.95 * 256)
    assert sum(length < estimate.tokens for length in recent) < math.ceil(0.95 * 256)


@given(st.lists(st.floats(0, 1e6), max_size=255))
def test_until_there_are_many_the_first_guess_is_one_of_them(lengths: list[float]) -> None:
    estimate = TokenQuantile()
    for length in lengths:
        estimate.learn(length)
    assert estimate.tokens == sorted([1_000.0, *lengths])[math.ceil(0.95 * (len(lengths) + 1)) - 1]


def test_the_template_counts_for_each_prompt() -> None:
    estimate = InputEstimate()
    assert estimate.tokens(0, 4.0, prompts=10) == 10 * estimate.tokens(0, 4.0)
    before = estimate.tokens(0, 4.0)
    # 10 prompts of 8 tokens, 6 of which their bytes do not explain: less than the 16 that are assumed
    estimate.learn(prompt_bytes=80, bytes_per_token=4.0, tokens=80, prompts=10)
    assert estimate.tokens(0, 4.0) < before


def test_what_one_tenant_writes_makes_nobody_elses_prompts_longer() -> None:
    estimates = InputEstimates()
    before = estimates.of_tenant("acme").tokens(40_000, 4.0)
    estimates.of_tenant("other").learn(prompt_bytes=1_000, bytes_per_token=4.0, tokens=1_000)
    estimates.of_tenant("other").learn(prompt_bytes=100, bytes_per_token=4.0, tokens=100)
    assert estimates.of_tenant("other").tokens(40_000, 4.0) > 2 * before
    assert estimates.of_tenant("acme").tokens(40_000, 4.0) == before


def test_so_many_tenants_are_remembered() -> None:
    estimates = InputEstimates()
    kept = estimates.of_tenant("kept")
    for number in range(1_500):
        estimates.of_tenant(str(number))
        assert estimates.of_tenant("kept") is kept
    first = estimates.of_tenant("1499")
    assert estimates.of_tenant("1499") is first
    for number in range(1_500, 3_000):
        estimates.of_tenant(str(number))
    assert estimates.of_tenant("1499") is not first
