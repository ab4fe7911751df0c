# SPDX-License-Identifier: Apache-2.0
"""A level-triggered work queue: keys to reconcile, each by one worker at a time, with back-off.

A key names an object, not an event, so any number of changes lead to one reconcile. A change during a reconcile causes
one more. Keys are taken in order of arrival, and a repeated one is added at the end: an object that changes
continuously does not starve the others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from controller.kube.errors import ApiError, Backoff, ClusterError

if TYPE_CHECKING:
    from random import Random

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


class QueueTiming(msgspec.Struct, frozen=True):
    """After a failure a key waits about ``backoff_s``, twice as long after each further one, ``backoff_max_s`` at most.
    ``slot_s``: timed reconciles begin at multiples of it, as each wake-up of the process costs CPU; 0: each at its own
    time.
    """

    backoff_s: float = 0.2
    backoff_max_s: float = 30.0
    slot_s: float = 0.0


class WorkQueue(Generic[Key]):
    """``run`` reconciles keys; all other methods are for the thread of its event loop, and return at once."""

    def __init__(self, rng: Random, timing: QueueTiming = QueueTiming()) -> None:  # noqa: B008 - frozen
        self._rng = rng
        self._timing = timing
        self._line = _Line[Key]()
        self._running: set[Key] = set()
        # changed while a worker reconciled it
        self._again: set[Key] = set()
        self._alarms = _Alarms[Key](self.add)
        self._failing: dict[Key, _Failing] = {}

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._line)

    @property
    def failing(self) -> int:
        """Keys whose last reconcile failed."""
        return len(self._failing)

    def add(self, key: Key) -> None:
        """Reconcile ``key`` as soon as a worker is free; after a failure, when its back-off has ended."""
        if key in self._running:
            self._again.add(key)
        elif not self._is_held(key):
            self._alarms.drop(key)
            self._line.add(key)

    def add_in(self, key: Key, delay_s: float) -> None:
        """Reconcile ``key`` in ``delay_s``. Of several such times, the earliest counts."""
        if key not in self._line:
            at_s = _now_s() + delay_s
            failing = self._failing.get(key)
            self._alarms.set(key, at_s if failing is None else max(at_s, failing.until_s))

    def skip_backoff(self, key: Key) -> None:
        """Reconcile ``key`` without waiting for its back-off, because the cause of its failure may be gone. A delay
        that the server requested (``Retry-After``) is kept.
        """
        failing = self._failing.pop(key, None)
        if failing is not None and failing.asked_until_s > _now_s():
            failing.until_s = failing.asked_until_s
            self._failing[key] = failing
            self._alarms.drop(key)
            self._alarms.set(key, failing.until_s)
        self.add(key)

    async def run(self, reconcile: Callable[[Key], Awaitable[float | None]], workers: int) -> None:
        """Run workers until cancelled. ``reconcile`` returns the seconds until the key's next reconcile, None if only a
        change makes that necessary. A key is reconciled again after its back-off if the reconcile raises.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in range(workers):
                tasks.create_task(self._work(reconcile), name=f"worker {number}")

    async def _work(self, reconcile: Callable[[Key], Awaitable[float | None]]) -> None:
        while True:
            key = await self._line.take()
            self._running.add(key)
            self._alarms.drop(key)
            try:
                delay_s = await reconcile(key)
            except Exception as error:  # noqa: BLE001 - a fault of one object must not affect the others
                self._has_failed(key, error)
            else:
                self._failing.pop(key, None)
                if delay_s is not None:
                    self._alarms.set(key, self._in_slot(_now_s() + max(0.0, delay_s)))
            finally:
                self._running.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _has_failed(self, key: Key, error: Exception) -> None:
        failing = self._failing.get(key)
        if failing is None:
            failing = _Failing(Backoff(self._timing.backoff_s, self._timing.backoff_max_s, self._rng))
            self._failing[key] = failing
        wait_s = failing.backoff.record_failure(error)
        failing.until_s = _now_s() + wait_s
        asked_s = error.retry_after_s if isinstance(error, ApiError) else None
        failing.asked_until_s = failing.until_s if asked_s is not None else 0.0
        self._alarms.drop(key)
        self._alarms.set(key, failing.until_s)
        is_ours = not isinstance(error, ClusterError)
        log.log(
            logging.ERROR if is_ours else logging.WARNING,
            "%s: %s; again in %.1f s",
            key,
            repr(error) if is_ours else error,
            wait_s,
            exc_info=error if is_ours else None,
        )

    def _in_slot(self, at_s: float) -> float:
        slot_s = self._timing.slot_s
        return round(at_s / slot_s) * slot_s if slot_s > 0 else at_s

    def _is_held(self, key: Key) -> bool:
        failing = self._failing.get(key)
        return failing is not None and _now_s() < failing.until_s


class _Failing:
    """A key that has failed. ``until_s``: it is not reconciled before. ``asked_until_s``: the delay that a server
    requested.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.until_s = 0.0
        self.asked_until_s = 0.0


class _Line(Generic[Key]):
    """Keys in the order in which they came, each once. A key wakes one worker."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._idle: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        self._keys.setdefault(key)
        self._wake()

    async def take(self) -> Key:
        while not self._keys:
            woken = asyncio.get_running_loop().create_future()
            self._idle.append(woken)
            try:
                await woken
            except asyncio.CancelledError:
                # a worker that ends leaves the key to another
                self._wake()
                raise
        key = next(iter(self._keys))
        del self._keys[key]
        return key

    def _wake(self) -> None:
        while self._idle:
            woken = self._idle.popleft()
            if not woken.done():
                woken.set_result(None)
                return


class _Alarms(Generic[Key]):
    """Calls ``ring`` with each key at its time, the earliest of those that were set."""

    def __init__(self, ring: Callable[[Key], None]) -> None:
        self._ring = ring
        self._at_s: dict[Key, float] = {}
        # with times that are no longer true; the number keeps keys from being compared
        self._heap: list[tuple[float, int, Key]] = []
        self._number = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at_s = math.inf

    def set(self, key: Key, at_s: float) -> None:
        known_s = self._at_s.get(key)
        if known_s is None or at_s < known_s:
            self._at_s[key] = at_s
            heapq.heappush(self._heap, (at_s, next(self._number), key))
            self._arm()

    def drop(self, key: Key) -> None:
        self._at_s.pop(key, None)

    def _arm(self) -> None:
        while self._heap and self._at_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        first_s = self._heap[0][0] if self._heap else math.inf
        if first_s == self._armed_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at_s = first_s
        self._timer = asyncio.get_running_loop().call_at(first_s, self._go_off) if self._heap else None

    def _go_off(self) -> None:
        self._timer, self._armed_at_s = None, math.inf
        now_s = _now_s()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, key = heapq.heappop(self._heap)
            if self._at_s.get(key) == at_s:
                del self._at_s[key]
                self._ring(key)
        self._arm()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
