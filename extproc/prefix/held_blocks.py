# SPDX-License-Identifier: Apache-2.0
"""The blocks that one endpoint holds, as a tree of segments with a common history.

A segment is a run of blocks that were always used together. A request pins the segments of its chain, and while it
runs they cannot be evicted. The others are evicted in the order of their last use, each segment from its tail. Where
a chain leaves a segment, the segment is split in two. A segment is found by its first block. So the cost of a request
depends on how many segments its chain has, a few, and not on its hundreds of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from extproc.prefix.hashing import COVERED_UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        self._blocks = 0
        # by first block: a chain enters no segment elsewhere, as it is split where a chain leaves it
        self._segments: dict[int, _Segment] = {}
        # segments without a request, by last use
        self._idle: OrderedDict[_Segment, None] = OrderedDict()
        self._idle_blocks = 0

    def __len__(self) -> int:
        return self._blocks

    @property
    def evictable(self) -> int:
        """How many blocks no running request uses."""
        return self._idle_blocks

    def in_eviction_order(self) -> list[int]:
        """The blocks that no running request uses."""
        return [block for segment in self._idle for block in reversed(segment.blocks)]

    def all(self) -> list[int]:
        """Every block."""
        return [block for segment in self._segments.values() for block in segment.blocks]

    def last_use(self, chain: Sequence[int], position: int) -> float | None:
        """When block number ``position`` of ``chain`` was last used, or began to be if it is in use; None if it is not
        held.
        """
        start = 0
        while start <= position and (segment := self._segments.get(chain[start])) is not None:
            end = start + len(segment.blocks)
            if position < end:
                return segment.used_at_s if segment.blocks[position - start] == chain[position] else None
            start = end
        return None

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
            last = self._segments[new[0]] = _Segment(new[:], start, last, 0, now)
            self._blocks += len(new)
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
            # two segments may begin with the same hash: the first has lost its entry to the second
            if self._segments.get(block) is segment:
                del self._segments[block]
        self._idle_blocks -= 1
        self._blocks -= 1
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
                segment, end = self._split(segment, common), start + common
            last, start = segment, end
        return last, start

    def _split(self, segment: _Segment, size: int) -> _Segment:
        """Make the first ``size`` blocks a segment of its own, which is to be pinned at once; returns it."""
        blocks = segment.blocks
        head = _Segment(blocks[:size], segment.first, segment.parent, segment.requests, segment.used_at_s)
        segment.blocks, segment.first, segment.parent = blocks[size:], segment.first + size, head
        self._segments[head.blocks[0]], self._segments[segment.blocks[0]] = head, segment
        if segment in self._idle:
            self._idle_blocks -= size
        return head


def _common(one: list[int], other: list[int]) -> int:
    """How many leading blocks are the same; the lists differ."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
