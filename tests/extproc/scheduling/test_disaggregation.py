# SPDX-License-Identifier: Apache-2.0
"""Whether another engine prefills, with numbers worked out by hand; and what is learned from transfers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.scheduling.disaggregation import (
    ExpectedSeconds,
    PrefillCosts,
    TransferTimes,
    UncachedTokens,
    choose_decode,
)

COLUMNS = PrefillCosts.__struct_fields__


def choices(*rows: dict[str, float]) -> PrefillCosts:
    return PrefillCosts(**{name: np.array([row.get(name, 0.0) for row in rows]) for name in COLUMNS})


def test_the_cheaper_of_both_decides_with_the_answers_that_would_stop() -> None:
    row = {"uncached_tokens": 8000, "local_s": 1.0, "prefill_s": 0.8, "transfer_s": 0.25, "load_s": 0.1}
    idle, busy = row, {**row, "stalled_s": 1.0}
    short = {**busy, "uncached_tokens": 511}
    found = ExpectedSeconds(512)(choices(idle, busy, short))
    # the remote sums up to 1.15; the local has a fifth of the stalled second more
    assert found.is_remote.tolist() == [False, True, False]
    assert found.is_short.tolist() == [False, False, True]
    assert found.cost_s.tolist() == pytest.approx([1.0, 1.15, 1.2])


def test_the_rule_by_length_is_that_of_llm_d_and_with_a_queue_dynamos() -> None:
    long = {"uncached_tokens": 2000, "prefill_s": 9.0, "local_s": 1.0, "waiting": 2}
    rows = choices(long, {**long, "waiting": 1}, {**long, "uncached_tokens": 100}, {**long, "prefill_s": math.inf})
    assert UncachedTokens(1000)(rows).is_remote.tolist() == [True, True, False, False]
    assert UncachedTokens(1000, max_waiting=2)(rows).is_remote.tolist() == [False, True, False, False]


numbers = st.floats(0, 1e4)


@given(st.fixed_dictionaries(dict.fromkeys(COLUMNS, numbers)), st.floats(0, 1e4), numbers)
def test_more_to_wait_for_never_attracts_the_prefill(row: dict[str, float], minimum: float, more: float) -> None:
    decide = ExpectedSeconds(minimum)
    before = bool(decide(choices(row)).is_remote[0])
    for name in ("prefill_s", "transfer_s"):
        if decide(choices({**row, name: row[name] + more})).is_remote[0]:
            assert before
    for name in ("local_s", "stalled_s"):
        if before:
            assert decide(choices({**row, name: row[name] + more})).is_remote[0]
    assert not decide(choices({**row, "prefill_s": math.inf})).is_remote[0]


@given(st.fixed_dictionaries(dict.fromkeys(COLUMNS, numbers)), st.floats(0, 1e4))
def test_the_cost_is_never_above_that_of_a_whole_engine(row: dict[str, float], minimum: float) -> None:
    decide = ExpectedSeconds(minimum)
    whole = decide(choices({**row, "prefill_s": math.inf})).cost_s[0]
    assert decide(choices(row)).cost_s[0] <= whole


@pytest.mark.parametrize(
    ("cost_s", "kept", "row"),
    [
        ([0.3, 0.5], None, 0),
        # 10 ms and a tenth of 0.5 s are not passed, and are passed
        ([0.45, 0.5], 1, 1),
        ([0.43, 0.5], 1, 0),
        ([0.004, 0.014], 1, 1),
    ],
)
def test_the_decode_endpoint_stays_unless_another_is_clearly_better(
    cost_s: list[float], kept: int | None, row: int
) -> None:
    assert choose_decode(np.array(cost_s), kept) == row


def test_transfers_are_learned_by_tokens_and_by_pair() -> None:
    times = TransferTimes()
    for round_ in range(200):
        tokens = 1000.0 + 500 * (round_ % 20)
        seconds = 0.02 + 2e-5 * tokens
        times.learn("p", "near", tokens=tokens, seconds=seconds)
    assert times.seconds(10_000, "p", "near") == pytest.approx(0.22, rel=0.05)
    for _ in range(100):
        times.learn("p", "far", tokens=10_000, seconds=2.2)
    assert times.seconds(10_000, "p", "far") > 2 * times.seconds(10_000, "p", "near")


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=30))
def test_nothing_that_is_measured_makes_a_transfer_free_or_endless(samples: list[tuple[float, float]]) -> None:
    times = TransferTimes()
    for tokens, seconds in samples:
        times.learn("p", "d", tokens=tokens, seconds=seconds)
    assert 0 < times.seconds(10_000, "p", "d") < math.inf


def test_pairs_are_bounded() -> None:
    times = TransferTimes()
    for number in range(5000):
        times.learn("p", f"d{number}", tokens=1000, seconds=100.0)
    known = [number for number in range(5000) if times.factor("p", f"d{number}") != 1.0]
    # those that were learned from last
    assert known == list(range(5000 - 4096, 5000))
