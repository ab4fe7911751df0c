# SPDX-License-Identifier: Apache-2.0
"""A pool whose caller stops: its processes are given up."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from bench.lab.trial_runner import worker_pool

# Longer than any test may take.
_FOREVER_S = 3600.0


def stopped_while_it_waits(before: set[object]) -> None:
    with worker_pool(2) as pool:
        for _ in range(8):
            pool.submit(time.sleep, _FOREVER_S)
        assert {*multiprocessing.active_children()} - before
        raise KeyboardInterrupt


def test_who_stops_does_not_wait_for_what_is_running_nor_for_what_was_handed_out() -> None:
    before: set[object] = {*multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt):
        stopped_while_it_waits(before)
    assert not {*multiprocessing.active_children()} - before


def test_what_was_handed_in_is_done_otherwise() -> None:
    with worker_pool(1) as pool:
        assert [one.result() for one in [pool.submit(abs, -number) for number in range(4)]] == [0, 1, 2, 3]
