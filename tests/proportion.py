# SPDX-License-Identifier: Apache-2.0
"""Whether work takes time in proportion to its size, on a machine that is busy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 8


def takes_time_in_proportion(work: Callable[[bytes], object], line: Callable[[int], bytes], size: int) -> bool:
    """Compare ``size`` with four times as much, by processor time: quadratic work takes sixteen times as long.

    A round measures both: a processor that is slow for a while is slow for both. One good round is enough, as quadratic
    work has none.
    """

    def seconds(text: bytes) -> float:
        began = time.process_time()
        work(text)
        return time.process_time() - began

    short, long = line(size), line(4 * size)
    return any(seconds(long) < 10 * max(seconds(short), 1e-3) for _ in range(_ROUNDS))
