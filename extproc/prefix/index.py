"""Which endpoint probably holds which prefix in its KV cache, from what was sent where.

For each block hash a bit mask of endpoints (by row), and for each endpoint its blocks: those of requests that run there, which cannot
be evicted, and the others in the order in which they were let go. That is how engines keep theirs (vLLM's block pool), and with a cache
that is half full of running requests it decides over every third match whether one asks who was *sent* a prompt last or who was *done* with
it last. Two invariants make it exact and fast:

* an endpoint that holds a block holds all blocks before it in the chain, and has used them at least as recently
  (chains are let go from the tail to the head, and only the least recently used are evicted);
* so the masks along a chain only lose bits, and a binary search finds where each one ends.

Engines evict in the same order (vLLM frees a request's blocks tail first), which is why one reported miss says so much:
all that was used no later than the missing block is gone too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.prefix.hashing import FIRST_BLOCK_BYTES, block_units, covered_units

if TYPE_CHECKING:
    from collections.abc import Sequence

# Bounds one endpoint's memory (some 250 bytes an entry) when all prompts are short.
_MAX_BLOCKS: Final = 16_384
_MIN_CAPACITY_BYTES: Final = 64 * 1024
# The initial capacity is a guess: an engine that keeps confirming may hold several times as much.
_GROWTH: Final = 4.0


class Match(msgspec.Struct, frozen=True):
    """The endpoints whose bits are set in ``holders`` hold at least the first ``blocks`` blocks."""

    blocks: int
    holders: int


class _Pin(msgspec.Struct):
    """Running requests that use a block, and since when."""

    requests: int
    since_s: float


class _Held(msgspec.Struct):
    """One endpoint's blocks: ``pins`` in use, the others by ``last_use``, the least recent first.

    ``capacity_bytes``: what it is believed to hold at most; ``limit_bytes``: what that may grow to.
    """

    capacity_bytes: float
    limit_bytes: float
    bytes: int = 0
    last_use: OrderedDict[int, float] = msgspec.field(default_factory=OrderedDict)
    pins: dict[int, _Pin] = msgspec.field(default_factory=dict)


class PrefixIndex:
    """Bounded by ``capacity_bytes`` of prompt text for each endpoint, and by a number of blocks."""

    def __init__(self, capacity_bytes: float, first_block_bytes: int = FIRST_BLOCK_BYTES) -> None:
        self.first_block_bytes = first_block_bytes
        self._initial_capacity = capacity_bytes
        self._holders: dict[int, int] = {}
        self._held: dict[int, _Held] = {}

    def covered_bytes(self, blocks: int) -> int:
        """The bytes of prompt in the first ``blocks`` blocks of a chain."""
        return covered_units(blocks) * self.first_block_bytes

    def set_capacity(self, row: int, capacity_bytes: float) -> None:
        """The engine of ``row`` says how much it can hold."""
        held = self._held_by(row)
        if held.limit_bytes != capacity_bytes:
            held.limit_bytes = held.capacity_bytes = max(_MIN_CAPACITY_BYTES, capacity_bytes)
            self._shrink(row, held)

    def match(self, chain: Sequence[int]) -> list[Match]:
        """How far each endpoint's knowledge of ``chain`` goes: masks that shrink as the length grows."""
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
        """The last position from ``first`` on whose mask is ``holders``."""
        low, high = first, len(chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._holders.get(chain[middle], 0) == holders:
                low = middle
            else:
                high = middle - 1
        return low

    def last_use(self, row: int, block: int) -> float | None:
        """When the endpoint of ``row`` last used ``block``, or began to; None if it is not known to hold it."""
        held = self._held.get(row)
        if held is None:
            return None
        pin = held.pins.get(block)
        return held.last_use.get(block) if pin is None else pin.since_s

    def record(self, row: int, chain: Sequence[int], now: float) -> None:
        """The endpoint of ``row`` has had all of ``chain``, or as much of its head as it has room for."""
        self.hold(row, chain, now)
        self.let_go(row, chain, now)

    def hold(self, row: int, chain: Sequence[int], now: float) -> None:
        """A request with ``chain`` goes to the endpoint of ``row``: it is about to hold it, until the request is over."""
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

    def let_go(self, row: int, chain: Sequence[int], now: float) -> None:
        """The request is over: what nobody else uses there may be evicted, its tail first."""
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
        """The endpoint of ``row`` is gone, or has lost its cache."""
        held = self._held.pop(row, None)
        if held is not None:
            for block in [*held.last_use, *held.pins]:
                self._drop_bit(row, block)

    def correct(self, row: int, missed_since: float) -> None:
        """The engine turned out not to hold a block last used at ``missed_since``: nor does it hold older ones.

        What remains is also the most that the engine is now believed to hold.
        """
        held = self._held.get(row)
        if held is None:
            return
        while held.last_use and next(iter(held.last_use.values())) <= missed_since:
            self._evict_oldest(row, held)
        held.capacity_bytes = max(_MIN_CAPACITY_BYTES, held.bytes)

    def confirm(self, row: int) -> None:
        """A prediction came true: where the bound is reached, let it grow a little, for the engine may hold more."""
        held = self._held.get(row)
        if held is not None and held.bytes > 0.9 * held.capacity_bytes:
            held.capacity_bytes = min(held.limit_bytes, 1.02 * held.capacity_bytes)

    def blocks_held(self, row: int) -> int:
        """The number of blocks that the endpoint of ``row`` is believed to hold."""
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

    def _shrink(self, row: int, held: _Held) -> None:
        while held.last_use and (held.bytes > held.capacity_bytes or len(held.last_use) > _MAX_BLOCKS):
            self._evict_oldest(row, held)

    def _evict_oldest(self, row: int, held: _Held) -> None:
        block, _ = held.last_use.popitem(last=False)
        held.bytes -= block_units(block) * self.first_block_bytes
        self._drop_bit(row, block)

    def _drop_bit(self, row: int, block: int) -> None:
        holders = self._holders[block] & ~(1 << row)
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]

    def _held_by(self, row: int) -> _Held:
        held = self._held.get(row)
        if held is None:
            held = self._held[row] = _Held(self._initial_capacity, _GROWTH * self._initial_capacity)
        return held

    def _head(self, chain: Sequence[int], capacity_bytes: float) -> Sequence[int]:
        """The longest head of ``chain`` that fits: a longer one would evict its own beginning's descendants at once."""
        if self.covered_bytes(len(chain)) <= capacity_bytes and len(chain) <= _MAX_BLOCKS:
            return chain
        fits = min(len(chain), _MAX_BLOCKS)
        while self.covered_bytes(fits) > capacity_bytes:
            fits -= 1
        return chain[:fits]
