# SPDX-License-Identifier: Apache-2.0
"""The requests that wait to be joined, and when they leave together.

A request waits only while the engine computes another one, and no longer than ``max_delay_s``: without load nothing is
delayed, and under load batches fill. What waits and what is under way is bounded in number and in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")
# Requests that are held, and the bytes of their bodies.
_MOST_HELD: Final = 2048
_MOST_BYTES: Final = 32 * 1024 * 1024


class BatchLimits(msgspec.Struct, frozen=True):
    """``max_rows``: of a batch. ``max_delay_s``: that a request waits for others. ``max_held``: requests that wait or
    are under way; ``max_bytes``: of their bodies.
    """

    max_rows: int = 32
    max_delay_s: float = 0.005
    max_held: int = _MOST_HELD
    max_bytes: int = _MOST_BYTES


class _Group(Generic[T]):
    def __init__(self, now_s: float) -> None:
        self.began_at_s = now_s
        self.rows = 0
        self.waiting: dict[T, None] = {}


class BatchQueue(Generic[T]):
    """``T``: a request, which is hashable. The lists that methods return are batches that leave now: each is under way
    until ``on_call_ended`` is called.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.held = 0
        self.held_bytes = 0
        self.under_way = 0
        # The oldest first, and so the first that is due.
        self._groups: dict[Hashable, _Group[T]] = {}

    @property
    def next_due_at_s(self) -> float | None:
        """When ``due`` is to be called; None while nothing waits."""
        oldest = next(iter(self._groups.values()), None)
        return None if oldest is None else oldest.began_at_s + self.limits.max_delay_s

    @property
    def waiting_count(self) -> int:
        """Requests."""
        return sum(len(one.waiting) for one in self._groups.values())

    def try_reserve(self, size: int) -> bool:
        """Whether a request of so many bytes may be held; it is then, until ``release_reserved``."""
        if self.held >= self.limits.max_held or self.held_bytes + size > self.limits.max_bytes:
            return False
        self.held += 1
        self.held_bytes += size
        return True

    def release_reserved(self, size: int) -> None:
        """It is answered, or its client has left."""
        self.held -= 1
        self.held_bytes -= size

    def add(self, key: Hashable, request: T, rows: int, now_s: float) -> list[list[T]]:
        """A request with at most ``max_rows``."""
        leaving = []
        group = self._groups.get(key)
        if group is not None and group.rows + rows > self.limits.max_rows:
            leaving.append(self._leave(key))
            group = None
        if group is None:
            group = self._groups[key] = _Group(now_s)
        group.waiting[request] = None
        group.rows += rows
        if not self.under_way or group.rows >= self.limits.max_rows:
            leaving.append(self._leave(key))
        return leaving

    def remove(self, key: Hashable, request: T, rows: int) -> None:
        """Its client has left. Nothing happens if it does not wait any more."""
        group = self._groups.get(key)
        if group is not None and request in group.waiting:
            del group.waiting[request]
            group.rows -= rows
            if not group.waiting:
                del self._groups[key]

    def pop_due_batches(self, now_s: float) -> list[list[T]]:
        """Those who have waited for long enough."""
        late = [key for key, one in self._groups.items() if one.began_at_s + self.limits.max_delay_s <= now_s]
        return [self._leave(key) for key in late]

    def on_call_started(self) -> None:
        """Something is under way that no method has returned."""
        self.under_way += 1

    def on_call_ended(self) -> list[list[T]]:
        """The engine has answered. Once it has nothing to do, nobody waits any longer."""
        self.under_way -= 1
        return [] if self.under_way else [self._leave(key) for key in list(self._groups)]

    def _leave(self, key: Hashable) -> list[T]:
        self.under_way += 1
        return list(self._groups.pop(key).waiting)
