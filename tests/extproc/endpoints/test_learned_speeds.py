# SPDX-License-Identifier: Apache-2.0
"""Costs learned from answers, and least squares."""

from __future__ import annotations

import random

import pytest

from extproc.endpoints.learned_speeds import (
    INITIAL_ATTENTION,
    AnswerCost,
    DecodeSpeed,
    PromptCost,
    RelativeLeastSquares,
)


@pytest.mark.parametrize("attention", [8_000.0, 33_000.0, 120_000.0])
@pytest.mark.parametrize("rate", [3_000.0, 40_000.0])
def test_attention_is_found_within_a_factor_of_two_though_a_third_waited_for_others(
    attention: float, rate: float
) -> None:
    cost, rng = PromptCost(), random.Random(0)
    for _ in range(1500):
        tokens = min(120_000.0, 2_000 * rng.lognormvariate(0.5, 1.2))
        cached = rng.choice([0.0, 0.0, tokens * 0.8])
        uncached = tokens - cached
        seconds = (300 + uncached * (1 + (cached + uncached / 2) / attention)) / rate
        seconds *= rng.uniform(0.97, 1.03)
        if rng.random() < 0.3:
            seconds += rng.expovariate(2.0)
        cost.learn(uncached=uncached, cached=cached, seconds=seconds, share=1.0)
    assert attention / 2 < cost.attention < 2 * attention


def test_the_initial_cost_is_that_of_an_8b_model() -> None:
    assert PromptCost().attention == INITIAL_ATTENTION
    # 1,000 tokens after 9,000: each attends to 9,500 others on average
    assert PromptCost().prefill_work(1_000.0, 9_000.0) == 1_000 * (1 + 9_500 / 20_000)


def test_first_tokens_that_mostly_waited_for_others_teach_nothing() -> None:
    cost = PromptCost()
    for _ in range(100):
        cost.learn(uncached=50_000, cached=0, seconds=100.0, share=0.1)
        cost.learn(uncached=0, cached=50_000, seconds=1.0, share=1.0)
        cost.learn(uncached=500, cached=0, seconds=-1.0, share=1.0)
    assert cost.attention == INITIAL_ATTENTION


@pytest.mark.parametrize("kind", [AnswerCost, DecodeSpeed])
def test_the_cost_of_decoding_is_found_among_steps_that_computed_prompts(
    kind: type[AnswerCost | DecodeSpeed],
) -> None:
    cost, rng = kind(), random.Random(0)
    for _ in range(1500):
        tokens = rng.uniform(2_000, 400_000)
        tpot_s = (0.017 + 5e-8 * tokens) * rng.uniform(0.97, 1.03)
        if rng.random() < 0.4:
            tpot_s += rng.expovariate(30)
        cost.learn(tokens=tokens, tpot_s=tpot_s)
    assert cost.step_s_per_token == pytest.approx(5e-8, rel=0.3)
    assert cost.step_s == pytest.approx(0.017, rel=0.3)


@pytest.mark.parametrize(("step_s", "step_s_per_token"), [(0.026, 3e-7), (0.0075, 8e-8), (0.002, 2e-8)])
def test_the_speed_of_decoding_is_known_after_a_hundred_answers_however_slow_the_engine(
    step_s: float, step_s_per_token: float
) -> None:
    cost, rng = DecodeSpeed(), random.Random(0)
    assert not cost.is_learned
    for _ in range(100):
        tokens = rng.uniform(2_000, 30_000)
        tpot_s = (step_s + step_s_per_token * tokens) * rng.uniform(0.97, 1.03)
        if rng.random() < 0.4:
            tpot_s *= rng.uniform(1.0, 2.0)
        cost.learn(tokens=tokens, tpot_s=tpot_s)
    assert cost.is_learned
    for tokens in (1_000.0, 30_000.0, 100_000.0):
        found = cost.step_s + cost.step_s_per_token * tokens
        assert found == pytest.approx(step_s + step_s_per_token * tokens, rel=0.15)


def learn_line(fit: RelativeLeastSquares, samples: int, *, offset: float, slope: float) -> list[float] | None:
    """The last coefficients after so many exact samples of a line."""
    rng, found = random.Random(0), None
    for _ in range(samples):
        x = rng.uniform(0.1, 1.0)
        found = fit.learn([1.0, x], offset + slope * x, weight=1.0) or found
    return found


def test_exact_samples_give_their_coefficients() -> None:
    assert learn_line(RelativeLeastSquares(2), 16, offset=2.0, slope=3.0) == pytest.approx([2.0, 3.0])


def test_coefficients_are_solved_after_every_eight_samples() -> None:
    fit = RelativeLeastSquares(1)
    solved = [fit.learn([1.0], 1.0, weight=1.0) is not None for _ in range(16)]
    assert solved == [number % 8 == 0 for number in range(1, 17)]


def test_the_weight_of_a_sample_counts() -> None:
    # relative errors of 1 and 3 seconds: the best constant c minimizes 3 * (c - 1)^2 + (c / 3 - 1)^2
    fit = RelativeLeastSquares(1)
    fit.add_prior([1.0], 3.0, weight=1.0)
    fit.add_prior([1.0], 1.0, weight=3.0)
    for _ in range(8):
        found = fit.learn([1.0], 1.0, weight=0.0)
    assert found == pytest.approx([(3 + 1 / 3) / (3 + 1 / 9)])


def test_old_samples_are_forgotten() -> None:
    fit = RelativeLeastSquares(2)
    learn_line(fit, 200, offset=2.0, slope=3.0)
    assert learn_line(fit, 4000, offset=1.0, slope=5.0) == pytest.approx([1.0, 5.0], rel=0.01)


def test_nine_of_ten_answers_are_within_the_spread_of_the_decode_speed() -> None:
    rng, speed = random.Random(0), DecodeSpeed()
    speed.learn_spread(tokens=1000, tpot_s=1.0)
    assert speed.spread == 1.0
    for _ in range(200):
        speed.learn(tokens=rng.uniform(1_000, 100_000), tpot_s=0.03)
    beyond = 0
    for number in range(2_000):
        ratio = rng.uniform(1.0, 2.0)
        predicted = speed.step_s + speed.step_s_per_token * 10_000
        beyond += number >= 1_000 and ratio > speed.spread
        speed.learn_spread(tokens=10_000, tpot_s=ratio * predicted)
    assert 50 < beyond < 150
    for _ in range(2_000):
        speed.learn_spread(tokens=10_000, tpot_s=1e9)
    assert speed.spread == 4.0
