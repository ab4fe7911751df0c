# SPDX-License-Identifier: Apache-2.0
"""Random numbers for filters and scorers, which are pure functions of the view: a hash of the request's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import Floats

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def uniforms(now_s: float, count: int, *, stream: int = 0) -> Floats:
    """``count`` numbers in [0, 1). Other times and other ``stream`` numbers give independent ones."""
    bits = np.frombuffer(np.float64(now_s).tobytes(), np.uint64)[0]
    mixed = (np.arange(count, dtype=np.uint64) + bits) * _GOLDEN
    if stream:
        mixed = _finished(mixed ^ np.uint64(stream)) * _GOLDEN
    drawn: Floats = (_finished(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def _finished(mixed: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The finisher of SplitMix64."""
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
