# SPDX-License-Identifier: Apache-2.0
"""The work queue, in virtual time: an hour passes in no time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import pytest

from controller.kube.errors import ServerError, TooManyRequests
from controller.kube.work_queue import QueueTiming, WorkQueue

pytestmark = pytest.mark.looptime

TIMING = QueueTiming()
Look = Callable[[str], Awaitable[float | None]]


class Looks:
    """A look of no length that notes when it came, and answers as told."""

    def __init__(self, *answers: float | Exception | None, lasts_s: float = 0.0) -> None:
        self.at: list[tuple[float, str]] = []
        self.most_at_once = 0
        self._answers = list(answers)
        self._lasts_s = lasts_s
        self._running: set[str] = set()

    async def __call__(self, key: str) -> float | None:
        assert key not in self._running, "two workers look at one key"
        self.at.append((round(asyncio.get_running_loop().time(), 3), key))
        self._running.add(key)
        self.most_at_once = max(self.most_at_once, len(self._running))
        try:
            await asyncio.sleep(self._lasts_s)
        finally:
            self._running.discard(key)
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def keys(self) -> list[str]:
        return [key for _, key in self.at]

    @property
    def times_s(self) -> list[float]:
        return [at_s for at_s, _ in self.at]


@contextlib.asynccontextmanager
async def looking(look: Look, *, workers: int = 1, timing: QueueTiming = TIMING) -> AsyncIterator[WorkQueue[str]]:
    queue = WorkQueue[str](Random(1), timing)
    task = asyncio.create_task(queue.run(look, workers))
    try:
        yield queue
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_many_changes_come_to_one_look() -> None:
    looks = Looks()
    async with looking(looks) as queue:
        for _ in range(100):
            queue.add("a")
        await asyncio.sleep(1)
    assert looks.keys == ["a"]


async def test_a_change_during_a_look_causes_one_more() -> None:
    looks = Looks(lasts_s=1.0)
    async with looking(looks, workers=4) as queue:
        queue.add("a")
        await asyncio.sleep(0.5)
        queue.add("a")
        queue.add("a")
        await asyncio.sleep(10)
    assert looks.at == [(0.0, "a"), (1.0, "a")]


async def test_as_many_looks_at_once_as_there_are_workers() -> None:
    looks = Looks(lasts_s=1.0)
    async with looking(looks, workers=3) as queue:
        for number in range(9):
            queue.add(str(number))
        await asyncio.sleep(0)
        assert queue.depth == 9
        await asyncio.sleep(2.5)
    assert looks.most_at_once == 3
    assert len(looks.keys) == 9


async def test_a_key_that_changes_all_the_time_starves_nobody() -> None:
    async def look(key: str) -> float | None:
        seen.append(key)
        if key == "hot":
            queue.add("hot")
        await asyncio.sleep(0.1)
        return None

    seen: list[str] = []
    async with looking(look) as queue:
        for key in ("hot", "a", "b", "c"):
            queue.add(key)
        await asyncio.sleep(0.55)
    assert seen == ["hot", "a", "b", "c", "hot", "hot"]


async def test_looks_that_come_again_by_themselves_begin_together_and_changes_wait_for_no_slot() -> None:
    looks = Looks(5.0, 5.0, 5.0, 5.0)
    async with looking(looks, timing=QueueTiming(slot_s=0.5)) as queue:
        queue.add_in("a", 0.1)
        queue.add_in("b", 0.2)
        await asyncio.sleep(6.0)
        queue.add_in("c", 0.1)
        await asyncio.sleep(4.4)
    assert looks.at == [(0.1, "a"), (0.2, "b"), (5.0, "a"), (5.0, "b"), (6.1, "c"), (10.0, "a"), (10.0, "b")]


async def test_workers_that_wait_are_woken_for_each_key_whoever_ends_meanwhile() -> None:
    looks = Looks(lasts_s=1.0)
    queue = WorkQueue[str](Random(1), TIMING)
    tasks = [asyncio.create_task(queue.run(looks, 1)) for _ in range(3)]
    await asyncio.sleep(0.1)
    queue.add("a")
    # the one that was woken first ends before it takes the key
    tasks[0].cancel()
    queue.add("b")
    await asyncio.sleep(0.5)
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert looks.at == [(0.1, "a"), (0.1, "b")]


async def test_of_several_times_to_look_again_the_earliest_counts() -> None:
    looks = Looks(100.0)
    async with looking(looks) as queue:
        queue.add("a")
        await asyncio.sleep(1)
        queue.add_in("a", 59.0)
        queue.add_in("a", 69.0)
        await asyncio.sleep(3600)
    assert looks.times_s == [0.0, 60.0]


async def test_a_change_takes_the_place_of_the_time_to_look_again() -> None:
    looks = Looks(100.0, None)
    async with looking(looks) as queue:
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        await asyncio.sleep(3600)
    assert looks.times_s == [0.0, 1.0]


async def test_failures_of_a_key_wait_longer_and_longer_and_others_do_not() -> None:
    looks = Looks(*[ServerError(500) for _ in range(12)])
    async with looking(looks, timing=QueueTiming(backoff_s=1.0, backoff_max_s=30.0)) as queue:
        queue.add("bad")
        await asyncio.sleep(3600)
        assert queue.failing == 0
        before = len(looks.at)
        queue.add("good")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert looks.at[before:] == [(3600.0, "good")]
    waits_s = [later - earlier for earlier, later in zip(looks.times_s, looks.times_s[1:12], strict=False)]
    for number, wait_s in enumerate(waits_s):
        most_s = min(30.0, 2.0**number)
        assert most_s / 2 <= wait_s <= most_s + 0.001
    assert len({round(wait_s, 2) for wait_s in waits_s[6:]}) > 1, "waits are spread"


async def test_a_change_does_not_end_a_back_off_unless_it_is_hastened() -> None:
    timing = QueueTiming(backoff_s=10.0)
    looks = Looks(ServerError(500), ServerError(500))
    async with looking(looks, timing=timing) as queue:
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        queue.add_in("a", 0.0)
        await asyncio.sleep(1)
        assert looks.times_s == [0.0]
        queue.skip_backoff("a")
        await asyncio.sleep(1)
        assert looks.times_s == [0.0, 2.0]
        await asyncio.sleep(11)
    assert len(looks.at) == 3, "and the back-off begins anew"


async def test_the_wait_that_a_server_asks_for_is_kept_whatever_happens() -> None:
    looks = Looks(TooManyRequests(429, retry_after_s=60.0))
    async with looking(looks) as queue:
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        queue.skip_backoff("a")
        await asyncio.sleep(100)
    assert len(looks.at) == 2
    assert 60.0 <= looks.times_s[1] <= 61.0


async def test_a_mistake_of_ours_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    looks = Looks(ValueError("what is this"))
    async with looking(looks) as queue:
        queue.add("a")
        await asyncio.sleep(10)
    assert looks.keys == ["a", "a"]
    assert "what is this" in caplog.text


async def test_a_cancelled_queue_has_no_look_left() -> None:
    looks = Looks(lasts_s=100.0)
    async with looking(looks, workers=2) as queue:
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(1)
    assert looks._running == set()
