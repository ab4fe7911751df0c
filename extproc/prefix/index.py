# SPDX-License-Identifier: Apache-2.0
"""The approximate prefix index: which endpoint probably has which prefix cached.

It records which prompts were sent where. For each block hash it has a bit mask of endpoints (by row), and for each
endpoint its blocks (``held_blocks.py``): those pinned by requests in flight, which cannot be evicted, and the others
in the order in which they were unpinned. Engines manage their blocks in the same way (vLLM's block pool). The order
matters: in a cache that is half full of running requests, every third match depends on whether blocks are ordered by
the start or by the end of their last request. Two invariants make the index exact and fast:

* An endpoint that holds a block holds all blocks before it in the chain, and has used them at least as
  recently: chains are unpinned from tail to head, and the least recently used blocks are evicted first.
* Hence the masks along a chain only lose bits, and a binary search finds where each endpoint's prefix ends.

Engines evict in the same order (vLLM frees a request's blocks from the tail), so one reported miss tells much:
everything used no later than the missing block is gone, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.prefix.hashing import COVERED_UNITS, FIRST_BLOCK_BYTES
from extproc.prefix.held_blocks import HeldBlocks, Pin
from extproc.prefix.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.prefix.turns import Turn

# Remembered of one endpoint at most, and of all together: some 130 bytes each, so 2 MiB and half a GiB.
MOST_BLOCKS: Final = 16_384
MOST_BLOCKS_IN_ALL: Final = 4_194_304
# A turn takes the memory of so many blocks.
_TURN_BLOCKS: Final = 4
_MIN_CAPACITY_BYTES: Final = 64 * 1024
# The initial capacity is a guess; confirmed predictions may raise it by this factor.
_GROWTH: Final = 4.0


class Match(msgspec.Struct, frozen=True):
    """The endpoints in the bit mask ``holders`` hold at least the first ``blocks`` blocks of a chain."""

    blocks: int
    holders: int


class _Endpoint(msgspec.Struct):
    """What one endpoint holds, with sizes in bytes of prompt text.

    ``bit``: of its row, one object for all masks with no other bit: with thousands of rows it takes a KiB.
    ``capacity_bytes``: its estimated capacity. ``limit_bytes``: the most to which that may grow. ``turns``: how many
    end at its blocks.
    """

    bit: int
    capacity_bytes: float
    limit_bytes: float
    blocks: HeldBlocks = msgspec.field(default_factory=HeldBlocks)
    turns: int = 0


def blocks_of_each(endpoints: int) -> int:
    """How many blocks a process with so many endpoints may remember of each."""
    return min(MOST_BLOCKS, MOST_BLOCKS_IN_ALL // max(1, endpoints))


class PrefixIndex:
    """The index of one ModelServer, bounded for each endpoint in bytes of prompt text and in blocks.

    ``capacity_bytes``: the initial estimate of an endpoint's capacity. ``first_block_bytes``: see ``hashing.py``.
    ``most_blocks``: remembered of an endpoint; one that holds more loses the oldest at its next request.
    """

    def __init__(
        self, capacity_bytes: float, first_block_bytes: int = FIRST_BLOCK_BYTES, most_blocks: int = MOST_BLOCKS
    ) -> None:
        self.first_block_bytes = first_block_bytes
        self.most_blocks = most_blocks
        self.turns = Turns()
        self._initial_capacity = capacity_bytes
        self._holders: dict[int, int] = {}
        self._held: dict[int, _Endpoint] = {}

    def covered_bytes(self, blocks: int) -> int:
        """The bytes of prompt text in the first ``blocks`` blocks of a chain."""
        return COVERED_UNITS[blocks] * self.first_block_bytes

    def set_capacity(self, row: int, capacity_bytes: float) -> None:
        """Set the capacity that the engine of ``row`` reports."""
        held = self._held_by(row)
        if held.limit_bytes != capacity_bytes:
            held.limit_bytes = held.capacity_bytes = max(_MIN_CAPACITY_BYTES, capacity_bytes)
            self._shrink(row, held)

    def match(self, chain: list[int]) -> list[Match]:
        """How much of ``chain`` each endpoint holds: masks of holders by increasing length."""
        found: list[Match] = []
        holders_of, start = self._holders.get, 0
        while start < len(chain):
            holders = holders_of(chain[start], 0)
            if not holders:
                break
            # a binary search written out: calls of a key function cost more than all else here
            start, end = start + 1, len(chain)
            while start < end:
                middle = (start + end) // 2
                if holders_of(chain[middle], 0) == holders:
                    start = middle + 1
                else:
                    end = middle
            found.append(Match(start, holders))
        return found

    def last_use(self, row: int, chain: Sequence[int], position: int) -> float | None:
        """When ``row`` last used block number ``position`` of ``chain``, or began to if it is in use; None if it does
        not hold it.
        """
        held = self._held.get(row)
        return None if held is None else held.blocks.last_use(chain, position)

    def record(self, row: int, chain: list[int], now: float) -> None:
        """Record that ``row`` has served a prompt with ``chain``."""
        self.unpin(row, self.pin(row, chain, now), now)

    def pin(self, row: int, chain: list[int], now: float) -> Pin:
        """A request with ``chain`` is sent to ``row``: it holds the blocks at least until ``unpin``."""
        held = self._held_by(row)
        pin, new = held.blocks.pin(self._head(chain, held.capacity_bytes), now)
        holders, bit = self._holders, held.bit
        for block in new:
            others = holders.get(block)
            holders[block] = bit if others is None else others | bit
        self._shrink(row, held)
        return pin

    def unpin(self, row: int, pin: Pin, now: float) -> None:
        """The request has ended: blocks that no other request uses may be evicted, tail first."""
        held = self._held.get(row)
        # if not: the endpoint has lost its cache since
        if held is not None and held.blocks is pin.held:
            held.blocks.unpin(pin, now)
            self._shrink(row, held)

    def record_turn(self, row: int, chain: Sequence[int], turn: Turn) -> None:
        """``row`` has answered the prompt with ``chain``. The turn is kept as long as the last block of its prompt."""
        held = self._held.get(row)
        if held is not None and chain and self._holders.get(chain[-1], 0) >> row & 1:
            held.turns += self.turns.record(row, chain[-1], turn)

    def forget(self, row: int) -> None:
        """Drop everything about ``row``: the endpoint was removed, or lost its cache."""
        held = self._held.pop(row, None)
        if held is not None:
            for block in held.blocks.all():
                self._drop_bit(row, held, block)

    def correct(self, row: int, missed_at_s: float) -> None:
        """A block last used at ``missed_at_s`` was not in the cache of ``row``: drop it and all older ones.

        What remains becomes the estimated capacity.
        """
        held = self._held.get(row)
        if held is None:
            return
        while (used_at_s := held.blocks.oldest_use()) is not None and used_at_s <= missed_at_s:
            self._drop_bit(row, held, held.blocks.evict())
        held.capacity_bytes = max(_MIN_CAPACITY_BYTES, self._bytes(held))

    def confirm(self, row: int) -> None:
        """A prediction for ``row`` was right: if its estimated capacity is nearly used, raise it a little."""
        held = self._held.get(row)
        if held is not None and self._bytes(held) > 0.9 * held.capacity_bytes:
            held.capacity_bytes = min(held.limit_bytes, 1.02 * held.capacity_bytes)

    def blocks_held(self, row: int) -> int:
        """The number of blocks that ``row`` probably holds."""
        held = self._held.get(row)
        return len(held.blocks) if held is not None else 0

    def bytes_held(self, row: int) -> int:
        """The bytes of prompt in those blocks."""
        held = self._held.get(row)
        return self._bytes(held) if held is not None else 0

    def evictable(self, row: int) -> list[int]:
        """The blocks of ``row`` that no running request uses, in the order in which they would be evicted."""
        held = self._held.get(row)
        return held.blocks.in_eviction_order() if held is not None else []

    @property
    def blocks(self) -> int:
        """The number of different blocks that are known of, wherever they are."""
        return len(self._holders)

    def _bytes(self, held: _Endpoint) -> int:
        return held.blocks.units * self.first_block_bytes

    def _shrink(self, row: int, held: _Endpoint) -> None:
        blocks = held.blocks
        while blocks.evictable and (
            self._bytes(held) > held.capacity_bytes or blocks.evictable + _TURN_BLOCKS * held.turns > self.most_blocks
        ):
            self._drop_bit(row, held, blocks.evict())

    def _drop_bit(self, row: int, held: _Endpoint, block: int) -> None:
        holders = self._holders.pop(block, 0) & ~held.bit
        if holders:
            self._holders[block] = holders
        held.turns -= self.turns.forget(row, block)

    def _held_by(self, row: int) -> _Endpoint:
        held = self._held.get(row)
        if held is None:
            held = self._held[row] = _Endpoint(1 << row, self._initial_capacity, _GROWTH * self._initial_capacity)
        return held

    def _head(self, chain: list[int], capacity_bytes: float) -> list[int]:
        """The longest head of ``chain`` that fits the capacity; a longer one would evict its own blocks at once."""
        if self.covered_bytes(len(chain)) <= capacity_bytes and len(chain) <= self.most_blocks:
            return chain
        fits = min(len(chain), self.most_blocks)
        while self.covered_bytes(fits) > capacity_bytes:
            fits -= 1
        return chain[:fits]
