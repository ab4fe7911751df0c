# SPDX-License-Identifier: Apache-2.0
"""Least squares of relative errors, against known coefficients."""

from __future__ import annotations

import random

import pytest

from extproc.endpoints.least_squares import RelativeLeastSquares


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
    fit.assume([1.0], 3.0, weight=1.0)
    fit.assume([1.0], 1.0, weight=3.0)
    for _ in range(8):
        found = fit.learn([1.0], 1.0, weight=0.0)
    assert found == pytest.approx([(3 + 1 / 3) / (3 + 1 / 9)])


def test_old_samples_are_forgotten() -> None:
    fit = RelativeLeastSquares(2)
    learn_line(fit, 200, offset=2.0, slope=3.0)
    assert learn_line(fit, 4000, offset=1.0, slope=5.0) == pytest.approx([1.0, 5.0], rel=0.01)
