# SPDX-License-Identifier: Apache-2.0
"""The approximate prefix index: which endpoint probably has which prefix cached.

It records which prompts were sent where. For each block hash it has a bit mask of endpoints (by row), and for each
endpoint its blocks: those pinned by requests in flight, which cannot be evicted, and the others in the order in which
they were unpinned. Engines manage their blocks in the same way (vLLM's block pool). The order matters: in a cache
that is half full of running requests, every third match depends on whether blocks are ordered by the start or by the
end of their last request. Two invariants make the index exact and fast:

* An endpoint that holds a block holds all blocks before it in the chain, and has used them at least as
  recently: chains are unpinned from tail to head, and the least recently used blocks are evicted first.
* Hence the masks along a chain only lose bits, and a binary search finds where each endpoint's prefix ends.

Engines evict in the same order (vLLM frees a request's blocks from the tail), so one reported miss tells much:
everything used no later than the missing block is gone, too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.prefix.hashing import COVERED_UNITS, FIRST_BLOCK_BYTES, block_units

if TYPE_CHECKING:
    from collections.abc import Sequence

# Bounds the memory for one endpoint (about 250 bytes a block) if all prompts are short.
_MAX_BLOCKS: Final = 16_384
_MIN_CAPACITY_BYTES: Final = 64 * 1024
# The initial capacity is a guess; confirmed predictions may raise it by this factor.
_GROWTH: Final = 4.0


class Match(msgspec.Struct, frozen=True):
    """The endpoints in the bit mask ``holders`` hold at least the first ``blocks`` blocks of a chain."""

    blocks: int
    holders: int


class _Pin(msgspec.Struct):
    """A block in use: by how many ``requests`` in flight, and since when."""

    requests: int
    since_s: float


class _EndpointBlocks(msgspec.Struct):
    """The blocks of one endpoint, with sizes in bytes of prompt text.

    ``capacity_bytes``: its estimated capacity. ``limit_bytes``: the most to which that may grow. ``bytes``: held now.
    ``last_use``: when each unpinned block was last used, least recent first. ``pins``: the blocks in use.
    """

    capacity_bytes: float
    limit_bytes: float
    bytes: int = 0
    last_use: OrderedDict[int, float] = msgspec.field(default_factory=OrderedDict)
    pins: dict[int, _Pin] = msgspec.field(default_factory=dict)


class PrefixIndex:
    """The index of one ModelServer, bounded for each endpoint in bytes of prompt text and in blocks.

    ``capacity_bytes``: the initial estimate of an endpoint's capacity. ``first_block_bytes``: see ``hashing.py``.
    """

    def __init__(self, capacity_bytes: float, first_block_bytes: int = FIRST_BLOCK_BYTES) -> None:
        self.first_block_bytes = first_block_bytes
        self._initial_capacity = capacity_bytes
        self._holders: dict[int, int] = {}
        self._held: dict[int, _EndpointBlocks] = {}

    def covered_bytes(self, blocks: int) -> int:
        """The bytes of prompt text in the first ``blocks`` blocks of a chain."""
        return COVERED_UNITS[blocks] * self.first_block_bytes

    def set_capacity(self, row: int, capacity_bytes: float) -> None:
        """Set the capacity that the engine of ``row`` reports."""
        held = self._held_by(row)
        if held.limit_bytes != capacity_bytes:
            held.limit_bytes = held.capacity_bytes = max(_MIN_CAPACITY_BYTES, capacity_bytes)
            self._shrink(row, held)

    def match(self, chain: Sequence[int]) -> list[Match]:
        """How much of ``chain`` each endpoint holds: masks of holders by increasing length."""
        found: list[Match] = []
        start = 0
        while start < len(chain):
            holders = self._holders.get(chain[start], 0)
            if not holders:
                break
            start = self._last_with(holders, chain, start) + 1
            found.append(Match(start, holders))
        return found

    def _last_with(self, holders: int, chain: Sequence[int], first: int) -> int:
        """The last position from ``first`` on at which the mask is ``holders``."""
        low, high = first, len(chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._holders.get(chain[middle], 0) == holders:
                low = middle
            else:
                high = middle - 1
        return low

    def last_use(self, row: int, block: int) -> float | None:
        """When ``row`` last used ``block``, or began to if it is in use; None if it does not hold it."""
        held = self._held.get(row)
        if held is None:
            return None
        pin = held.pins.get(block)
        return held.last_use.get(block) if pin is None else pin.since_s

    def record(self, row: int, chain: Sequence[int], now: float) -> None:
        """Record that ``row`` has served a prompt with ``chain``."""
        self.pin(row, chain, now)
        self.unpin(row, chain, now)

    def pin(self, row: int, chain: Sequence[int], now: float) -> None:
        """A request with ``chain`` is sent to ``row``: it holds the blocks at least until the request ends."""
        held = self._held_by(row)
        last_use, pins, bit, unit = held.last_use, held.pins, 1 << row, self.first_block_bytes
        for block in self._head(chain, held.capacity_bytes):
            pin = pins.get(block)
            if pin is not None:
                pin.requests += 1
                continue
            if last_use.pop(block, None) is None:
                held.bytes += block_units(block) * unit
                self._holders[block] = self._holders.get(block, 0) | bit
            pins[block] = _Pin(1, now)
        self._shrink(row, held)

    def unpin(self, row: int, chain: Sequence[int], now: float) -> None:
        """The request has ended: blocks that no other request uses may be evicted, tail first."""
        held = self._held.get(row)
        if held is None:
            return
        pins = held.pins
        for block in reversed(chain):
            pin = pins.get(block)
            if pin is None:
                continue
            pin.requests -= 1
            if not pin.requests:
                del pins[block]
                held.last_use[block] = now
        self._shrink(row, held)

    def forget(self, row: int) -> None:
        """Drop everything about ``row``: the endpoint was removed, or lost its cache."""
        held = self._held.pop(row, None)
        if held is not None:
            for block in [*held.last_use, *held.pins]:
                self._drop_bit(row, block)

    def correct(self, row: int, missed_at_s: float) -> None:
        """A block last used at ``missed_at_s`` was not in the cache of ``row``: drop it and all older ones.

        What remains becomes the estimated capacity.
        """
        held = self._held.get(row)
        if held is None:
            return
        while held.last_use and next(iter(held.last_use.values())) <= missed_at_s:
            self._evict_oldest(row, held)
        held.capacity_bytes = max(_MIN_CAPACITY_BYTES, held.bytes)

    def confirm(self, row: int) -> None:
        """A prediction for ``row`` was right: if its estimated capacity is nearly used, raise it a little."""
        held = self._held.get(row)
        if held is not None and held.bytes > 0.9 * held.capacity_bytes:
            held.capacity_bytes = min(held.limit_bytes, 1.02 * held.capacity_bytes)

    def blocks_held(self, row: int) -> int:
        """The number of blocks that ``row`` probably holds."""
        held = self._held.get(row)
        return len(held.last_use) + len(held.pins) if held is not None else 0

    def bytes_held(self, row: int) -> int:
        """The bytes of prompt in those blocks."""
        held = self._held.get(row)
        return held.bytes if held is not None else 0

    def evictable(self, row: int) -> list[int]:
        """The blocks of ``row`` that no running request uses, in the order in which they would be evicted."""
        held = self._held.get(row)
        return list(held.last_use) if held is not None else []

    @property
    def blocks(self) -> int:
        """The number of different blocks that are known of, wherever they are."""
        return len(self._holders)

    def _shrink(self, row: int, held: _EndpointBlocks) -> None:
        while held.last_use and (held.bytes > held.capacity_bytes or len(held.last_use) > _MAX_BLOCKS):
            self._evict_oldest(row, held)

    def _evict_oldest(self, row: int, held: _EndpointBlocks) -> None:
        block, _ = held.last_use.popitem(last=False)
        held.bytes -= block_units(block) * self.first_block_bytes
        self._drop_bit(row, block)

    def _drop_bit(self, row: int, block: int) -> None:
        holders = self._holders[block] & ~(1 << row)
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]

    def _held_by(self, row: int) -> _EndpointBlocks:
        held = self._held.get(row)
        if held is None:
            held = self._held[row] = _EndpointBlocks(self._initial_capacity, _GROWTH * self._initial_capacity)
        return held

    def _head(self, chain: Sequence[int], capacity_bytes: float) -> Sequence[int]:
        """The longest head of ``chain`` that fits the capacity; a longer one would evict its own blocks at once."""
        if self.covered_bytes(len(chain)) <= capacity_bytes and len(chain) <= _MAX_BLOCKS:
            return chain
        fits = min(len(chain), _MAX_BLOCKS)
        while self.covered_bytes(fits) > capacity_bytes:
            fits -= 1
        return chain[:fits]
