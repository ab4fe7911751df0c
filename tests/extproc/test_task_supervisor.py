# SPDX-License-Identifier: Apache-2.0
"""Feeds that fail are told, counted and started again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter

import pytest

from extproc.task_supervisor import Backoff, FailureLog, Supervisor

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.pause_s == 0
    assert [backoff.record_failure() for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.pause_s == 5
    backoff.reset()
    assert backoff.pause_s == 0
    assert backoff.record_failure() == 1


async def test_a_feed_that_fails_is_started_again_after_pauses_that_grow(caplog: pytest.LogCaptureFixture) -> None:
    starts: list[float] = []
    failed: Counter[str] = Counter()

    async def feed() -> None:
        starts.append(now())
        if len(starts) < 12:
            raise OverflowError("of an engine")

    await Supervisor(lambda name: failed.update([name])).run("kv_events", feed, of="10.0.0.1:5557")
    pauses = [round(later - earlier, 3) for earlier, later in itertools.pairwise(starts)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert failed == {"kv_events": 11}
    assert caplog.text.count("Traceback") == 1
    assert "kv_events of 10.0.0.1:5557 has failed" in caplog.text


async def test_a_feed_that_ran_for_long_is_started_again_at_once() -> None:
    starts: list[float] = []

    async def feed() -> None:
        starts.append(now())
        if len(starts) == 4:
            await asyncio.sleep(60)
        if len(starts) < 6:
            raise OSError

    await Supervisor(lambda _: None).run("engines", feed)
    assert starts[4] - starts[3] == pytest.approx(60.1)


async def test_other_feeds_go_on() -> None:
    async def fails() -> None:
        raise RecursionError

    async def works() -> None:
        await asyncio.sleep(100)

    supervisor = Supervisor(lambda _: None)
    failing = asyncio.create_task(supervisor.run("one", fails))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run("other", works))
    assert not failing.done()
    failing.cancel()
    await asyncio.wait([failing])
    assert failing.cancelled()


@pytest.mark.parametrize("swallows", [False, True])
async def test_one_that_is_cancelled_ends_whatever_its_library_makes_of_that(*, swallows: bool) -> None:
    async def feed() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            if swallows:
                raise ConnectionError from None
            raise

    task = asyncio.create_task(Supervisor(lambda _: None).run("peers", feed))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_failure_of_another_kind_is_logged_whole_too(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"))
    for error in (KeyError("one"), KeyError("two"), ValueError("three")):
        failures.record("it", error)
    assert caplog.text.count("only the first of its kind") == 2
