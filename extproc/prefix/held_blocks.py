# SPDX-License-Identifier: Apache-2.0
"""The blocks that one endpoint holds, as a tree of segments with a common history.

A segment is a run of blocks that were always used together. A request pins the segments of its chain, and while it
runs they cannot be evicted. The others are evicted in the order of their last use, each segment from its tail. Where
a chain leaves a segment, the segment is split in two. So the cost of a request depends on how many segments its chain
has, a few, and not on its hundreds of blocks: only blocks that are new to the endpoint are looked at one by one.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from extproc.prefix.hashing import COVERED_UNITS


class _Segment(msgspec.Struct, eq=False):
    """A run of blocks. ``first``: position of the first one in its chain. ``parent``: the segment before it.

    ``requests``: in flight with this segment in their chain. ``used_at_s``: when the last request ended, or, of a
    segment in use, when it began to be in use.
    """

    blocks: list[int]
    first: int
    parent: _Segment | None
    requests: int
    used_at_s: float


class Pin(msgspec.Struct, frozen=True, eq=False):
    """What a running request holds at an endpoint: ``last`` and all segments before it, None for a short prompt."""

    held: HeldBlocks
    last: _Segment | None


class HeldBlocks:
    """The blocks of one endpoint. ``units``: their total size in units of the first block's size."""

    def __init__(self) -> None:
        self.units = 0
        self._segments: dict[int, _Segment] = {}
        # segments without a request, by last use
        self._idle: OrderedDict[_Segment, None] = OrderedDict()
        self._idle_blocks = 0

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def evictable(self) -> int:
        """How many blocks no running request uses."""
        return self._idle_blocks

    def in_eviction_order(self) -> list[int]:
        """The blocks that no running request uses."""
        return [block for segment in self._idle for block in reversed(segment.blocks)]

    def all(self) -> list[int]:
        """Every block."""
        return list(self._segments)

    def last_use(self, block: int) -> float | None:
        """When ``block`` was last used, or began to be if it is in use; None if it is not held."""
        segment = self._segments.get(block)
        return None if segment is None else segment.used_at_s

    def oldest_use(self) -> float | None:
        """When the block that would be evicted next was last used; None if all are in use."""
        return next((segment.used_at_s for segment in self._idle), None)

    def pin(self, chain: list[int], now: float) -> tuple[Pin, list[int]]:
        """A request with ``chain`` begins: it holds the blocks until ``unpin``. Returns also those that are new
        here.
        """
        last, start = self._walk(chain)
        new = chain[start:]
        if new:
            last = _Segment(new[:], start, last, 0, now)
            self._segments.update(dict.fromkeys(new, last))
            self.units += COVERED_UNITS[len(chain)] - COVERED_UNITS[start]
        segment = last
        while segment is not None:
            if not segment.requests:
                segment.used_at_s = now
                if segment in self._idle:
                    del self._idle[segment]
                    self._idle_blocks -= len(segment.blocks)
            segment.requests += 1
            segment = segment.parent
        return Pin(self, last), new

    def unpin(self, pin: Pin, now: float) -> None:
        """The request has ended: what no other one uses may be evicted, tail first."""
        segment = pin.last
        while segment is not None:
            segment.requests -= 1
            if not segment.requests:
                segment.used_at_s = now
                self._idle[segment] = None
                self._idle_blocks += len(segment.blocks)
            segment = segment.parent

    def evict(self) -> int:
        """Drop and return the block whose last use is the longest ago; there must be one that no request uses."""
        segment = next(iter(self._idle))
        block = segment.blocks.pop()
        if not segment.blocks:
            del self._idle[segment]
        self._idle_blocks -= 1
        # of two blocks with the same hash, the other one may be gone already
        self._segments.pop(block, None)
        end = segment.first + len(segment.blocks)
        self.units -= COVERED_UNITS[end + 1] - COVERED_UNITS[end]
        return block

    def _walk(self, chain: list[int]) -> tuple[_Segment | None, int]:
        """The last held segment of ``chain``, and how many blocks are held. A segment that ``chain`` leaves is
        split.
        """
        last, start = None, 0
        while start < len(chain) and (segment := self._segments.get(chain[start])) is not None:
            end = start + len(segment.blocks)
            if chain[start:end] != segment.blocks:
                common = _common(chain[start:end], segment.blocks)
                if not common:
                    # another block with the same hash
                    break
                segment, end = self._split(segment, common), start + common
            last, start = segment, end
        return last, start

    def _split(self, segment: _Segment, size: int) -> _Segment:
        """Make the first ``size`` blocks a segment of its own, which is to be pinned at once; returns it."""
        blocks = segment.blocks
        head = _Segment(blocks[:size], segment.first, segment.parent, segment.requests, segment.used_at_s)
        segment.blocks, segment.first, segment.parent = blocks[size:], segment.first + size, head
        self._segments.update(dict.fromkeys(head.blocks, head))
        if segment in self._idle:
            self._idle_blocks -= size
        return head


def _common(one: list[int], other: list[int]) -> int:
    """How many leading blocks are the same; the lists differ."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
