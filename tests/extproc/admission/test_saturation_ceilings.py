# SPDX-License-Identifier: Apache-2.0
"""When bands may send."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.saturation import FixedCeilings, SoftReflectiveCeilings


def soft(bands: int) -> SoftReflectiveCeilings:
    """All bands in use."""
    ceilings = SoftReflectiveCeilings(bands)
    for band in range(bands):
        ceilings.on_arrival(band)
    return ceilings


def pause_ms(ceilings: SoftReflectiveCeilings, band: int, saturation: float) -> float:
    """After a request at time 0, how long the band is closed; 0: not at all."""
    ceilings.on_dispatch(band, saturation, 0.0)
    if ceilings.is_open(band, saturation, 0.0):
        return 0.0
    next_open_at_s = ceilings.next_open_at_s([band], 0.0)
    assert not ceilings.is_open(band, saturation, next_open_at_s - 1e-6)
    assert ceilings.is_open(band, saturation, next_open_at_s)
    return next_open_at_s * 1000


@pytest.mark.parametrize(
    ("bands", "band", "saturation", "expected_ms"),
    [
        # of two bands, the lower one's ceiling is 1 - s
        (2, 0, 0.99, 0),
        (2, 1, 0.49, 0),
        (2, 1, 0.5, 1),
        (2, 1, 0.75, 3),
        (2, 1, 0.9, 9),
        # of three bands, the ceilings of the lower two are 1 - s / 2 and 1 - s
        (3, 1, 0.6, 0),
        (3, 1, 0.7, 2),
        (3, 2, 0.4, 0),
        (3, 2, 0.65, 2),
        (1, 0, 0.99, 0),
    ],
)
def test_the_pace_of_a_band(bands: int, band: int, saturation: float, expected_ms: float) -> None:
    assert pause_ms(soft(bands), band, saturation) == pytest.approx(expected_ms)


def test_only_bands_that_requests_came_to_count() -> None:
    ceilings = SoftReflectiveCeilings(4)
    ceilings.on_arrival(2)
    assert pause_ms(ceilings, 2, 0.9) == 0, "the only one is the highest"
    ceilings.on_arrival(0)
    assert pause_ms(ceilings, 2, 0.9) == pytest.approx(9)


def test_full_engines_get_nothing_and_nobody_waits_for_a_time() -> None:
    ceilings = soft(2)
    assert [ceilings.is_open(band, 1.0, 0.0) for band in (0, 1)] == [False, False]
    ceilings.on_dispatch(1, 1.0, 0.0)
    assert ceilings.next_open_at_s([0, 1], 0.0) == math.inf


@given(st.integers(2, 6), st.floats(0, 0.999), st.data())
def test_a_lower_band_is_never_faster(bands: int, saturation: float, data: st.DataObject) -> None:
    band = data.draw(st.integers(1, bands - 1))
    ceilings = soft(bands)
    assert pause_ms(ceilings, band - 1, saturation) <= pause_ms(ceilings, band, saturation)


def test_fixed_ceilings_are_not_reached() -> None:
    ceilings = FixedCeilings([1.0, 0.5, 0.0])
    assert [ceilings.is_open(band, 0.5, 0.0) for band in range(3)] == [True, False, False]
    assert not ceilings.is_open(2, 0.0, 0.0), "a ceiling of 0 closes for good"
