# SPDX-License-Identifier: Apache-2.0
"""The ratio between prefill and decode."""

from __future__ import annotations

import itertools

from controller.api.autoscaling_binding import RatioConstraint
from controller.autoscaler.decision.allocation.allocate import enforce_ratios

PD = RatioConstraint(numerator="p", denominator="d", min=0.25, max=1.0)
MOST = {"p": 20, "d": 20}


def repaired(prefill: int, decode: int, one: RatioConstraint = PD, most: dict[str, int] = MOST) -> tuple[int, int]:
    found, _ = enforce_ratios({"p": prefill, "d": decode}, [one], most)
    return found["p"], found["d"]


def test_the_short_side_is_raised() -> None:
    assert repaired(1, 8) == (2, 8)
    assert repaired(6, 2) == (6, 6)
    assert repaired(3, 4) == (3, 4)


def test_both_are_zero_together() -> None:
    assert repaired(0, 0) == (0, 0)
    assert repaired(0, 3) == (1, 3)
    assert repaired(1, 0) == (1, 1)


def test_an_upper_bound_stops_it_and_is_told() -> None:
    found, steps = enforce_ratios({"p": 1, "d": 16}, [PD], {"p": 2, "d": 20})
    assert found == {"p": 2, "d": 16}
    assert [(one.rule, one.before, one.after) for one in steps] == [("Ratio", 1, 2)]
    assert "4 would be needed" in steps[0].reason


def test_a_window_without_whole_numbers_does_not_run_away() -> None:
    exact = RatioConstraint(numerator="p", denominator="d", min=0.3, max=0.3)
    assert repaired(1, 2, exact) == (1, 2)
    assert repaired(1, 5, exact) == (2, 5)


def test_nothing_is_lowered_and_what_is_kept_stays() -> None:
    for prefill, decode in itertools.product(range(12), range(12)):
        p, d = repaired(prefill, decode)
        assert (p, d) >= (prefill, decode)
        assert p >= prefill
        assert d >= decode
        if p and d:
            assert 0.25 <= p / d <= 1.0
        assert repaired(p, d) == (p, d)


def test_several_ratios_are_repaired_one_after_the_other() -> None:
    chain = [
        RatioConstraint(numerator="d", denominator="e", min=2, max=9),
        RatioConstraint(numerator="e", denominator="p", min=1, max=9),
    ]
    found, _ = enforce_ratios({"p": 4, "e": 1, "d": 1}, chain, {"p": 9, "e": 9, "d": 9})
    assert found == {"p": 4, "e": 4, "d": 8}
