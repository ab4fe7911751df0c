# SPDX-License-Identifier: Apache-2.0
"""KV caches on their way from a prefill engine to a decode engine: links, leases and pinned blocks, without I/O.

As vLLM's NixlConnector does it (``vllm/distributed/kv_transfer/kv_connector/v1/nixl``): the prefill engine pins the
blocks of a finished prefill until they were pulled or the lease ends. The decode engine prolongs the lease by
heartbeats. What is read after the end of the lease are the blocks of somebody else: the answer is garbage, and nobody
is told.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from bench.engine.kv_cache import BlockPool

Key = TypeVar("Key", bound="Hashable")
# vLLM's kv_lease_duration; a heartbeat, one every 5 s, adds the extension to what is left, from the time it comes.
LEASE_S: Final = 30.0
LEASE_EXTENSION_S: Final = 20.0
HEARTBEAT_S: Final = 5.0


class TransferNetwork(msgspec.Struct, frozen=True):
    """What engines transfer KV caches over. ``bandwidth``: of one engine, bytes/s in each direction.

    ``latency_s``: of a transfer of a few bytes. ``handshake_s``: added to the first transfer of a pair of engines.
    """

    bandwidth: float
    latency_s: float = 0.002
    handshake_s: float = 1.0


# NVLink as in hardware.py; the others at their nominal rate, one adapter for each engine.
NETWORKS: Final[Mapping[str, TransferNetwork]] = MappingProxyType(
    {
        "nvlink": TransferNetwork(366e9, latency_s=0.001, handshake_s=0.2),
        "400gb": TransferNetwork(50e9),
        "100gb": TransferNetwork(12.5e9),
        "10gb": TransferNetwork(1.25e9),
    }
)


class SharedLink(Generic[Key]):
    """One direction of an engine's network adapter: the transfers under way share its bandwidth equally.

    A transfer has carried as many bytes as any other that began with it. So one counter of bytes for each transfer is
    enough, and the end of a transfer is a value of that counter.
    """

    def __init__(self, bandwidth: float) -> None:
        """``bandwidth``: bytes/s."""
        self._bandwidth = bandwidth
        self._carried = 0.0
        self._at_s = 0.0
        self._ends: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._ended: list[Key] = []

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._ends)

    def begin(self, key: Key, size: float, now: float) -> None:
        """A transfer of ``size`` bytes begins. A key may have several at a time, each of which ends by itself."""
        self._advance(now)
        heapq.heappush(self._ends, (self._carried + size, next(self._order), key))

    def cancel(self, key: Key, now: float) -> None:
        """The transfers of ``key`` are given up."""
        self._advance(now)
        self._ends = [one for one in self._ends if one[2] != key]
        heapq.heapify(self._ends)

    def pop_ended(self, now: float) -> list[Key]:
        """The keys of transfers that have ended by ``now``, each once for each transfer, in the order of their ends."""
        self._advance(now)
        found, self._ended = self._ended, []
        return found

    def next_end_s(self) -> float | None:
        """When the next transfer ends if none begins until then; None: there is none."""
        if not self._ends:
            return None
        return self._at_s + max(0.0, self._ends[0][0] - self._carried) * len(self._ends) / self._bandwidth

    def _advance(self, now: float) -> None:
        while (end_s := self.next_end_s()) is not None and end_s <= now:
            self._carried, _, key = heapq.heappop(self._ends)
            self._at_s = max(self._at_s, end_s)
            self._ended.append(key)
        if self._ends and now > self._at_s:
            self._carried += (now - self._at_s) * self._bandwidth / len(self._ends)
        self._at_s = max(self._at_s, now)


class _Pinned(msgspec.Struct):
    blocks: Sequence[int]
    until_s: float


class PinnedExports(Generic[Key]):
    """Blocks of finished prefills, pinned in their pool. ``expired``: how many leases have ended."""

    def __init__(self, pool: BlockPool, lease_s: float = LEASE_S) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._pinned: dict[Key, _Pinned] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._pinned)

    def __contains__(self, key: Key) -> bool:
        return key in self._pinned

    def pin(self, key: Key, blocks: Sequence[int], now: float) -> None:
        """Keep ``blocks``, which the request held until now. Another export under the same key is released."""
        self.release(key)
        self._pinned[key] = _Pinned(blocks, now + self._lease_s)

    def prolong(self, key: Key, now: float) -> bool:
        """A heartbeat. False: there is no such lease, or there is no more."""
        self.expire(now)
        pinned = self._pinned.get(key)
        if pinned is None:
            return False
        pinned.until_s = max(pinned.until_s, now + LEASE_EXTENSION_S)
        return True

    def release(self, key: Key) -> bool:
        """The blocks were pulled, or nobody wants them. False: they are not pinned."""
        pinned = self._pinned.pop(key, None)
        if pinned is None:
            return False
        self._pool.release(pinned.blocks)
        return True

    def expire(self, now: float) -> list[Key]:
        """Release what nobody pulled in time; the keys."""
        found = [key for key, pinned in self._pinned.items() if pinned.until_s <= now]
        for key in found:
            self.release(key)
        self.expired += len(found)
        return found

    def next_end_s(self) -> float | None:
        """When the next lease ends; None: there is none."""
        return min((pinned.until_s for pinned in self._pinned.values()), default=None)
