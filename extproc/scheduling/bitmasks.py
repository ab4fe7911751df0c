# SPDX-License-Identifier: Apache-2.0
"""Bit masks of endpoints, as indexes keep them, to row numbers of numpy columns."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


# Successive requests meet the same few sets of holders.
@lru_cache(maxsize=1024)
def rows_of_bitmask(mask: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The row numbers set in a bit mask over ``rows`` rows, usable as an index of columns."""
    raw = np.frombuffer((mask & (1 << rows) - 1).to_bytes((rows + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=rows, bitorder="little").nonzero()[0]
