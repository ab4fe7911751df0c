# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that ends at once when its caller stops."""

from __future__ import annotations

import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``count`` processes. If the block raises, as by Ctrl-C, what they are doing is given up.

    A pool by itself would first finish that, and what it had handed out beyond it.
    """
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            for one in set(multiprocessing.active_children()) - before:
                one.terminate()
            pool.shutdown(cancel_futures=True)
            raise
