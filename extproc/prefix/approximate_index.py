# SPDX-License-Identifier: Apache-2.0
"""The approximate prefix index: which endpoint probably has which prefix cached.

It records which prompts were sent where. For each block hash it has a bit mask of endpoints (by row), and for each
endpoint its blocks (``HeldBlocks``): those pinned by requests in flight, which cannot be evicted, and the others
in the order in which they were unpinned. Engines manage their blocks in the same way (vLLM's block pool). The order
matters: in a cache that is half full of running requests, every third match depends on whether blocks are ordered by
the start or by the end of their last request. Two invariants make the index exact and fast:

* An endpoint that holds a block holds all blocks before it in the chain, and has used them at least as
  recently: chains are unpinned from tail to head, and the least recently used blocks are evicted first.
* Hence the masks along a chain only lose bits, and a binary search finds where each endpoint's prefix ends.

Engines evict in the same order (vLLM frees a request's blocks from the tail), so one reported miss implies that every
block used no later than the missing one is gone, too.

Blocks grow with their position: 64 blocks of 128 bytes (about 32 tokens; the size can be fitted to the engines'
blocks), then 64 of twice that size, and so on. So the end of a shared prefix is known to about 1/64 of its length,
and a prompt of 400 KB has about 350 blocks instead of 3,125. The hash of a block covers all blocks before it, as in
vLLM's automatic prefix caching, and starts from the model or adapter, as these share no cache. xxh3
(https://xxhash.com) is not cryptographic: a client that forges a collision only worsens its own pick.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from struct import Struct, iter_unpack
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIRST_BLOCK_BYTES: Final = 128
_BLOCKS_PER_CLASS: Final = 64
# More than any prompt has: the last blocks would be of 256 GiB.
_CLASSES: Final = 32
_WEIGHT: Final = 0.1
_NONE: Final[dict[int, ConversationTurn]] = {}
# Most blocks that are kept of one endpoint, and of all together: some 120 bytes each, so 2 MiB and half a GiB; twice
# that where each prompt has but two or three blocks.
MOST_BLOCKS: Final = 16_384
MOST_BLOCKS_IN_ALL: Final = 4_194_304
# A turn takes the memory of so many blocks.
_TURN_BLOCKS: Final = 4
_MIN_CAPACITY_BYTES: Final = 64 * 1024
# The initial capacity is a guess; confirmed predictions may raise it by this factor.
_GROWTH: Final = 4.0


def hash_blocks(prompt: bytes, seed: str, first_block_bytes: int = FIRST_BLOCK_BYTES) -> list[int]:
    """Chained 64-bit hashes of the whole blocks of ``prompt``; the incomplete last block is left out.

    ``seed``: names what shares a cache, such as the model.
    """
    digest = xxhash.xxh3_64_intdigest
    parent = digest(f"{first_block_bytes} {seed}".encode())
    blocks: list[int] = []
    start = 0
    for size_class in range(_CLASSES):
        size = first_block_bytes << size_class
        end = start + size * _BLOCKS_PER_CLASS
        # cut in C; the copies cost less than views
        if end > len(prompt):
            blocks += [parent := digest(text, parent) for (text,) in _rest(prompt, size, start)]
            break
        blocks += [parent := digest(text, parent) for text in _whole_class(size).unpack_from(prompt, start)]
        start = end
    return blocks


@lru_cache(maxsize=2 * _CLASSES)
def _whole_class(size: int) -> Struct:
    """Cuts all blocks of one size at once."""
    return Struct(f"{size}s" * _BLOCKS_PER_CLASS)


def _rest(prompt: bytes, size: int, start: int) -> Iterator[tuple[bytes]]:
    """The whole blocks of ``size`` bytes from ``start`` to the end of ``prompt``."""
    whole = (len(prompt) - start) // size * size
    return iter_unpack(f"{size}s", memoryview(prompt)[start : start + whole])


def size_of_first_blocks(count: int) -> int:
    """The total size of the first ``count`` blocks of any chain, in units of the first block's size."""
    size_class, rest = divmod(count, _BLOCKS_PER_CLASS)
    return _BLOCKS_PER_CLASS * ((1 << size_class) - 1) + (rest << size_class)


# The same by ``count``, for all possible chains: a pick reads several of them.
COVERED_UNITS: Final = tuple(size_of_first_blocks(count) for count in range(_BLOCKS_PER_CLASS * _CLASSES + 1))


class PromptTail(msgspec.Struct, frozen=True, array_like=True):
    """The digest and the length in bytes of a prompt's part after its last whole block."""

    digest: int
    length: int


class ConversationTurn(msgspec.Struct, frozen=True):
    """The end of a served prompt, and the estimated size of its answer in bytes of text."""

    tail: PromptTail
    answer_bytes: float


class ConversationTurns:
    """Ended turns by the last whole block of their prompt and by the row that served them.

    The next prompt of a conversation starts with the last one and its answer. extproc reads the length of answers, not
    their text. If a new prompt starts with a complete earlier one, down to its last bytes, the endpoint that served the
    earlier one also has its answer cached. How much of it returns in the next prompt varies (reasoning is often left
    out, templates add words), so this fraction is learned from what engines report.

    ``answer_share``: the learned fraction of an answer that returns in the next prompt.
    """

    def __init__(self) -> None:
        self.answer_share = 1.0
        self.by_block: dict[int, dict[int, ConversationTurn]] = {}

    def record(self, row: int, block: int, turn: ConversationTurn) -> bool:
        """The endpoint of ``row`` has answered a prompt whose last whole block is ``block``. Whether it is one more."""
        turns = self.by_block.setdefault(block, {})
        is_new = row not in turns
        turns[row] = turn
        return is_new

    def forget(self, row: int, block: int) -> bool:
        """The endpoint of ``row`` has lost ``block``. Whether a turn ended there."""
        turns = self.by_block.get(block)
        if turns is None or turns.pop(row, None) is None:
            return False
        if not turns:
            del self.by_block[block]
        return True

    def rows_of_earlier_turns(self, last_block: int, rest: bytes | memoryview) -> Iterator[tuple[int, float]]:
        """The rows that served a prompt which this one continues, with the bytes that each holds.

        ``last_block``: the last whole block of both prompts. ``rest``: this prompt's text after it. The bytes are
        those of the earlier prompt after the block, and of its answer.
        """
        for row, turn in self.by_block.get(last_block, _NONE).items():
            continued = len(rest) - turn.tail.length
            if continued >= 0 and xxhash.xxh3_64_intdigest(rest[: turn.tail.length]) == turn.tail.digest:
                yield row, turn.tail.length + min(self.answer_share * turn.answer_bytes, continued)

    def learn_answer_share(self, *, expected: float, found: float) -> None:
        """Of ``expected`` tokens of an earlier answer, ``found`` were cached for the next prompt."""
        if expected >= 1:
            share = min(1.0, max(0.0, self.answer_share * found / expected))
            self.answer_share += _WEIGHT * (max(share, 0.05) - self.answer_share)


def prompt_tail(prompt: bytes, covered: int) -> PromptTail:
    """The part of ``prompt`` that its whole blocks do not cover."""
    tail = prompt[covered:]
    return PromptTail(xxhash.xxh3_64_intdigest(tail), len(tail))


class _Segment(msgspec.Struct, eq=False):
    """A run of blocks. ``first``: position of the first one in its chain. ``parent``: the segment before it.

    ``requests``: in flight with this segment in their chain. ``used_at_s``: when the last request ended, or, of a
    segment in use, when it began to be in use. ``is_sole``: one request only has ever used it.
    """

    blocks: list[int]
    first: int
    parent: _Segment | None
    requests: int
    used_at_s: float
    is_sole: bool = False


class BlockPin(msgspec.Struct, frozen=True, eq=False):
    """What a running request holds at an endpoint: ``last`` and all segments before it, None for a short prompt."""

    held: HeldBlocks
    last: _Segment | None


class HeldBlocks:
    """The blocks of one endpoint, as a tree of segments. ``units``: their total size in sizes of the first block.

    A segment is a run of blocks that were always used together. A request pins the segments of its chain, and while it
    runs they cannot be evicted. The others are evicted in the order of their last use, each segment from its tail.
    Where a chain leaves a segment, the segment is split in two. A segment is found by its first block. So the cost of a
    request depends on how many segments its chain has, a few, and not on its hundreds of blocks.
    """

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
    def evictable_count(self) -> int:
        """How many blocks no running request uses."""
        return self._idle_blocks

    def in_eviction_order(self) -> list[int]:
        """The blocks that no running request uses."""
        return [block for segment in self._idle for block in reversed(segment.blocks)]

    def all(self) -> list[int]:
        """Every block."""
        # with the idle ones that have lost their entry to another segment, which begins with the same hash
        return [block for segment in {*self._segments.values(), *self._idle} for block in segment.blocks]

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

    def pin(self, chain: list[int], now: float) -> tuple[BlockPin, list[int]]:
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
            segment.is_sole = False
            segment = segment.parent
        if last is not None and new:
            last.is_sole = True
        return BlockPin(self, last), new

    def unpin(self, pin: BlockPin, now: float) -> None:
        """The request has ended: what no other one uses may be evicted, tail first."""
        segment = pin.last
        while segment is not None:
            segment.requests -= 1
            if not segment.requests:
                segment.used_at_s = now
                self._idle[segment] = None
                self._idle_blocks += len(segment.blocks)
            segment = segment.parent

    def withdraw(self, pin: BlockPin, now: float) -> list[int]:
        """The request never came here: drop and return the blocks that no other one has used."""
        segment, dropped = pin.last, list[int]()
        while segment is not None and segment.is_sole:
            if self._segments.get(segment.blocks[0]) is segment:
                del self._segments[segment.blocks[0]]
            self._blocks -= len(segment.blocks)
            self.units -= COVERED_UNITS[segment.first + len(segment.blocks)] - COVERED_UNITS[segment.first]
            dropped += segment.blocks
            segment = segment.parent
        self.unpin(BlockPin(self, segment), now)
        return dropped

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
        head = _Segment(
            blocks[:size], segment.first, segment.parent, segment.requests, segment.used_at_s, segment.is_sole
        )
        segment.blocks, segment.first, segment.parent = blocks[size:], segment.first + size, head
        self._segments[head.blocks[0]], self._segments[segment.blocks[0]] = head, segment
        if segment in self._idle:
            self._idle_blocks -= size
        return head


def _common(one: list[int], other: list[int]) -> int:
    """How many leading blocks are the same; the lists differ."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class PrefixMatch(msgspec.Struct, frozen=True):
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


def max_blocks_per_endpoint(endpoints: int) -> int:
    """How many blocks a process with so many endpoints may keep of each."""
    return min(MOST_BLOCKS, MOST_BLOCKS_IN_ALL // max(1, endpoints))


class PrefixIndex:
    """The index of one ModelServer, bounded for each endpoint in bytes of prompt text and in blocks.

    ``capacity_bytes``: the initial estimate of an endpoint's capacity. ``first_block_bytes``: see ``hash_blocks``.
    ``most_blocks``: kept of an endpoint; one that has more loses the oldest at its next request.
    """

    def __init__(
        self, capacity_bytes: float, first_block_bytes: int = FIRST_BLOCK_BYTES, most_blocks: int = MOST_BLOCKS
    ) -> None:
        self.first_block_bytes = first_block_bytes
        self.most_blocks = most_blocks
        self.turns = ConversationTurns()
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

    def match(self, chain: list[int]) -> list[PrefixMatch]:
        """How much of ``chain`` each endpoint holds: masks of holders by increasing length."""
        found: list[PrefixMatch] = []
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
            found.append(PrefixMatch(start, holders))
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

    def pin(self, row: int, chain: list[int], now: float) -> BlockPin:
        """A request with ``chain`` is sent to ``row``: it holds the blocks at least until ``unpin``."""
        held = self._held_by(row)
        pin, new = held.blocks.pin(self._head(chain, held.capacity_bytes), now)
        holders, bit = self._holders, held.bit
        for block in new:
            others = holders.get(block)
            holders[block] = bit if others is None else others | bit
        self._shrink(row, held)
        return pin

    def unpin(self, row: int, pin: BlockPin, now: float) -> None:
        """The request has ended: blocks that no other request uses may be evicted, tail first."""
        held = self._held.get(row)
        # if not: the endpoint has lost its cache since
        if held is not None and held.blocks is pin.held:
            held.blocks.unpin(pin, now)
            self._shrink(row, held)

    def withdraw(self, row: int, pin: BlockPin, now: float) -> None:
        """The request has not been sent to ``row``: what it alone would have used is not there."""
        held = self._held.get(row)
        if held is not None and held.blocks is pin.held:
            for block in held.blocks.withdraw(pin, now):
                self._drop_bit(row, held, block)
            self._shrink(row, held)

    def record_turn(self, row: int, chain: Sequence[int], turn: ConversationTurn) -> None:
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

    def on_missed_prediction(self, row: int, missed_at_s: float) -> None:
        """A block last used at ``missed_at_s`` was not in the cache of ``row``: drop it and all older ones.

        What remains becomes the estimated capacity.
        """
        held = self._held.get(row)
        if held is None:
            return
        while (used_at_s := held.blocks.oldest_use()) is not None and used_at_s <= missed_at_s:
            self._drop_bit(row, held, held.blocks.evict())
        held.capacity_bytes = max(_MIN_CAPACITY_BYTES, self._bytes(held))

    def on_confirmed_prediction(self, row: int) -> None:
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

    def evictable_blocks(self, row: int) -> list[int]:
        """The blocks of ``row`` that no running request uses, in the order in which they would be evicted."""
        held = self._held.get(row)
        return held.blocks.in_eviction_order() if held is not None else []

    @property
    def distinct_block_count(self) -> int:
        """The number of different blocks that are known of, wherever they are."""
        return len(self._holders)

    def _bytes(self, held: _Endpoint) -> int:
        return held.blocks.units * self.first_block_bytes

    def _shrink(self, row: int, held: _Endpoint) -> None:
        blocks = held.blocks
        while blocks.evictable_count and (
            self._bytes(held) > held.capacity_bytes
            or blocks.evictable_count + _TURN_BLOCKS * held.turns > self.most_blocks
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
