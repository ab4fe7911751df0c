# SPDX-License-Identifier: Apache-2.0
"""The precise prefix index: which endpoint has which blocks cached, by KV events.

Engines' block hashes are opaque. The key of a block is computed here from its tokens and the key of the block before
it, so hash seeds need not be aligned. An engine's hash is only used to find the key again, when a successor is stored
or the block is removed.

The prompt of a request that was just sent will be cached before its event arrives. Its blocks count as held for
``SPECULATION_S``.

Engines are not trusted: the memory and time that the events of each can cost this process are bounded. A cleared cache
counts no more from that moment on. Its blocks are dropped a slice at a time (``drop_cleared_blocks``), as a large
cache takes half a second.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash

from extproc.prefix.kv_event_decoder import (
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Event,
    IgnoredEvent,
    decode_batch,
    max_blocks_per_source,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


SPECULATION_S: Final = 2.0
# The value of a cached token, as in llm-d: what is not on the GPU must be copied there first.
_OFF_GPU_WEIGHT: Final = 0.8
_MOST_MEDIA: Final = 4
# Block sizes of one source, and of all: a prompt has a chain of keys for each.
_MOST_OWN_SIZES: Final = 2
_MOST_SIZES: Final = 4
# Blocks of cleared caches that are dropped with each change: more than it adds, so that they become fewer.
_SLICE: Final = 2_000
# Sets of caches whose rows are cached.
_MOST_MASKS: Final = 4_096
# Blocks and events that are applied at once: 1 to 3 ms.
_MOST_TOGETHER: Final = 1_000


class EventSource(msgspec.Struct, frozen=True):
    """The publisher of an event: the endpoint's row, and its data-parallel rank."""

    row: int
    rank: int = 0


class CachedPrefix(msgspec.Struct, frozen=True):
    """The endpoints in the bit mask ``holders`` hold the first ``tokens`` tokens of a prompt.

    ``weighted``: the same tokens, weighted by medium.
    """

    holders: int
    tokens: int
    weighted: float


class _Cache(msgspec.Struct, eq=False):
    """The blocks of one source. ``bit``: stands for it in the masks of ``_Holders``.

    ``tiers``: by medium and block size in tokens, from the engine's hash to our key. ``ignored``: blocks that were
    beyond a bound.
    """

    row: int
    bit: int
    tiers: dict[tuple[str, int], dict[BlockHash, int]] = msgspec.field(default_factory=dict)
    blocks: int = 0
    ignored: int = 0

    def find(self, value: BlockHash) -> tuple[int, int] | None:
        """The key of a block, and its size."""
        for (_, size), blocks in self.tiers.items():
            if value in blocks:
                return blocks[value], size
        return None


class _Holders:
    """Which caches hold a block: by its key the mask of their bits."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        # how many more blocks with the same key a cache holds, under other hashes or on other media
        self._more: dict[tuple[int, int], int] = {}

    def add(self, bit: int, key: int) -> None:
        mask = self.masks.get(key, 0)
        if mask & bit:
            self._more[bit, key] = self._more.get((bit, key), 0) + 1
        else:
            # one object for all blocks that no other cache holds: with thousands of caches it takes a KiB
            self.masks[key] = mask | bit if mask else bit

    def discard(self, bit: int, key: int) -> None:
        more = self._more.get((bit, key), 0) if self._more else 0
        if more:
            self._more[bit, key] = more - 1
            if more == 1:
                del self._more[bit, key]
            return
        mask = self.masks[key] & ~bit
        if mask:
            self.masks[key] = mask
        else:
            del self.masks[key]


class KvIndex:
    """The index of one ModelServer. Blocks stored under an unknown parent are ignored."""

    def __init__(self) -> None:
        self._most_blocks = max_blocks_per_source(1)
        self._on_gpu, self._off_gpu = _Holders(), _Holders()
        self._caches: dict[EventSource, _Cache] = {}
        # those that were cleared, and whose blocks are still among the holders
        self._cleared: deque[_Cache] = deque()
        # each bit stands for caches of one row for ever, so that a cache that comes or goes changes nothing else
        self._row_of_bit = array("q")
        self._spare: dict[int, list[int]] = {}
        self._alive = 0
        # blocks of each row, and of each size
        self._held: Counter[int] = Counter()
        self._block_sizes: dict[int, int] = {}
        # the rows of a mask of caches that are not cleared
        self._rows: dict[int, int] = {}
        self._expected: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def apply(self, source: EventSource, events: Iterable[Event]) -> None:
        """Apply the events of ``source`` in order."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(self._cache_of(source), event)
                case BlocksRemoved():
                    self._remove(self._cache_of(source), event)
                case AllBlocksCleared():
                    self.clear(source)
                case IgnoredEvent():
                    pass
        self.drop_cleared_blocks()

    def clear(self, source: EventSource) -> None:
        """Drop all blocks of ``source``: its cache is empty, or the index of it is unreliable."""
        cache = self._caches.pop(source, None)
        if cache is None:
            return
        self._alive &= ~cache.bit
        for (_, size), blocks in cache.tiers.items():
            self._count(cache, size, -len(blocks))
        self._cleared.append(cache)
        self.drop_cleared_blocks()

    def limit_blocks(self, most_blocks: int) -> None:
        """Of each source. One that has more is cleared, and not complete until its engine has cleared its cache: what
        was left out is not known, so removed blocks or a higher bound do not make up for it.
        """
        self._most_blocks = most_blocks
        for source in [source for source, cache in self._caches.items() if cache.blocks > most_blocks]:
            self.clear(source)
            self._cache_of(source).ignored += 1

    def forget(self, row: int) -> None:
        """Drop all blocks of the endpoint of ``row``, which has been removed."""
        for source in [one for one in self._caches if one.row == row]:
            self.clear(source)

    def drop_cleared_blocks(self) -> bool:
        """Drop some blocks of cleared caches; whether any are left."""
        room = _SLICE
        while self._cleared and room > 0:
            cache = self._cleared[0]
            for (medium, size), blocks in list(cache.tiers.items()):
                holders, count = self._holders_on(medium), min(room, len(blocks))
                for _ in range(count):
                    holders.discard(cache.bit, blocks.popitem()[1])
                room -= count
                if not blocks:
                    del cache.tiers[medium, size]
            if not cache.tiers:
                self._spare.setdefault(cache.row, []).append(cache.bit)
                self._cleared.popleft()
        return bool(self._cleared)

    def is_complete(self, source: EventSource) -> bool:
        """Whether no block of ``source`` was beyond a bound."""
        cache = self._caches.get(source)
        return cache is None or not cache.ignored

    def block_keys(self, tokens: Sequence[int], *, adapter: str | None, salt: str | None) -> dict[int, list[int]]:
        """The keys of a prompt's whole blocks, for each block size in use."""
        return {size: chain_keys(tokens, size, adapter=adapter, salt=salt) for size in self._block_sizes}

    def match(self, chains: dict[int, list[int]], now: float) -> list[CachedPrefix]:
        """How much of a prompt each endpoint holds, grouped by endpoints that hold the same.

        ``chains``: the result of ``block_keys``. Every block is looked up: unlike in the approximate index, an endpoint
        may hold a block without its predecessors.
        """
        found: list[CachedPrefix] = []
        for size, chain in chains.items():
            alive = -1
            for length, key in enumerate(chain):
                holders = self._rows_with(key, now)
                lost = alive & ~holders
                if lost:
                    if length and alive != -1:
                        found.extend(self._weigh(lost, chain[:length], size))
                    alive &= holders
                    if not alive:
                        break
            else:
                if chain and alive not in {-1, 0}:
                    found.extend(self._weigh(alive, chain, size))
        return found

    def assume_held(self, row: int, chains: dict[int, list[int]], now: float) -> None:
        """A prompt is sent to ``row``: count its blocks as held for ``SPECULATION_S``."""
        while self._expected and next(iter(self._expected.values()))[1] <= now:
            self._expected.popitem(last=False)
        for chain in chains.values():
            for key in chain:
                mask, until = self._expected.pop(key, (0, 0.0))
                self._expected[key] = ((mask if until > now else 0) | 1 << row, now + SPECULATION_S)

    def blocks_held(self, row: int) -> int:
        """The number of blocks that ``row`` holds by its events."""
        return self._held[row]

    def _rows_with(self, key: int, now: float) -> int:
        mask = self._on_gpu.masks.get(key, 0)
        if self._off_gpu.masks:
            mask |= self._off_gpu.masks.get(key, 0)
        rows = self._rows_of(mask)
        expected = self._expected.get(key)
        return rows | expected[0] if expected is not None and expected[1] > now else rows

    def _rows_of(self, mask: int) -> int:
        mask &= self._alive
        rows = self._rows.get(mask)
        if rows is None:
            if len(self._rows) >= _MOST_MASKS:
                self._rows.clear()
            rows = self._rows[mask] = self._rows_by_bits(mask)
        return rows

    def _rows_by_bits(self, mask: int) -> int:
        """The same, made anew: in microseconds, however many caches there are."""
        row_of_bit = np.frombuffer(self._row_of_bit, np.int64)
        bits = np.frombuffer(mask.to_bytes(len(row_of_bit) // 8 + 1, "little"), np.uint8)
        rows = row_of_bit[np.unpackbits(bits, count=len(row_of_bit), bitorder="little").view(np.bool_)]
        found = np.zeros(int(rows.max(initial=0)) + 1, np.bool_)
        found[rows] = True
        return int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")

    def _weigh(self, rows: int, chain: Sequence[int], size: int) -> list[CachedPrefix]:
        tokens = len(chain) * size
        if not self._off_gpu.masks:
            return [CachedPrefix(rows, tokens, float(tokens))]
        fast = self._on_gpu.masks
        found = []
        while rows:
            bit = rows & -rows
            rows &= ~bit
            on_gpu = sum(1 for key in chain if self._rows_of(fast.get(key, 0)) & bit)
            found.append(CachedPrefix(bit, tokens, size * (on_gpu + _OFF_GPU_WEIGHT * (len(chain) - on_gpu))))
        return found

    def _cache_of(self, source: EventSource) -> _Cache:
        cache = self._caches.get(source)
        if cache is None:
            cache = self._caches[source] = _Cache(source.row, self._bit_of(source.row))
            self._alive |= cache.bit
        return cache

    def _bit_of(self, row: int) -> int:
        """A bit that no cache has."""
        spare = self._spare.get(row)
        if spare:
            return spare.pop()
        self._row_of_bit.append(row)
        return 1 << (len(self._row_of_bit) - 1)

    def _holders_on(self, medium: str) -> _Holders:
        return self._on_gpu if medium == "GPU" else self._off_gpu

    def _store(self, cache: _Cache, event: BlocksStored) -> None:
        if not event.token_ids:
            self._copy(cache, event)
            return
        parent, size = chain_seed(event.lora_name), event.block_size
        if event.parent is not None:
            known = cache.find(event.parent)
            if known is None:
                return
            parent = known[0]
        tokens = array("I", event.token_ids).tobytes()
        width = size * array("I").itemsize
        for index, value in enumerate(event.hashes[: len(event.token_ids) // size]):
            extra = event.extra_keys[index] if index < len(event.extra_keys) else None
            salt = _salt_of(extra, event.lora_name).encode() if extra else b""
            parent = xxhash.xxh3_64_intdigest(tokens[index * width : (index + 1) * width] + salt, parent)
            self._hold(cache, (event.medium, size), value, parent)

    def _copy(self, cache: _Cache, event: BlocksStored) -> None:
        """Known blocks were copied to another medium; such events do not repeat their tokens."""
        for value in event.hashes:
            known = cache.find(value)
            if known is not None:
                self._hold(cache, (event.medium, known[1]), value, known[0])

    def _hold(self, cache: _Cache, place: tuple[str, int], value: BlockHash, key: int) -> None:
        """``place``: medium and block size."""
        blocks = cache.tiers.get(place)
        if blocks is None:
            if not self._is_within_bounds(cache, *place):
                cache.ignored += 1
                return
            blocks = cache.tiers[place] = {}
        if value in blocks:
            return
        if cache.blocks >= self._most_blocks:
            cache.ignored += 1
            return
        medium, size = place
        blocks[value] = key
        self._holders_on(medium).add(cache.bit, key)
        self._count(cache, size, 1)

    def _is_within_bounds(self, cache: _Cache, medium: str, size: int) -> bool:
        """Whether one more medium, or size of blocks, is within the bounds."""
        cache.tiers = {place: blocks for place, blocks in cache.tiers.items() if blocks}
        media, sizes = {one for one, _ in cache.tiers}, {one for _, one in cache.tiers}
        return (
            len(media | {medium}) <= _MOST_MEDIA
            and len(sizes | {size}) <= _MOST_OWN_SIZES
            and len(self._block_sizes.keys() | {size}) <= _MOST_SIZES
        )

    def _remove(self, cache: _Cache, event: BlocksRemoved) -> None:
        for (medium, size), blocks in cache.tiers.items():
            if event.medium in {None, medium}:
                holders, before = self._holders_on(medium), len(blocks)
                for value in event.hashes:
                    key = blocks.pop(value, None)
                    if key is not None:
                        holders.discard(cache.bit, key)
                self._count(cache, size, len(blocks) - before)

    def _count(self, cache: _Cache, size: int, more: int) -> None:
        """Count blocks of this size; the size of none is not in use."""
        cache.blocks += more
        self._held[cache.row] += more
        self._block_sizes[size] = self._block_sizes.get(size, 0) + more
        if not self._block_sizes[size]:
            del self._block_sizes[size]


def chain_seed(adapter: str | None) -> int:
    """The key before the first block, by LoRA adapter; None: the base model."""
    return xxhash.xxh3_64_intdigest((adapter or "").encode())


def chain_keys(tokens: Sequence[int], size: int, *, adapter: str | None, salt: str | None) -> list[int]:
    """The keys of a prompt's whole blocks of ``size`` tokens. The salt enters the first block, as in vLLM."""
    raw = array("I", tokens).tobytes()
    width = size * array("I").itemsize
    digest = xxhash.xxh3_64_intdigest
    parent = chain_seed(adapter)
    keys = []
    for start in range(0, len(raw) - width + 1, width):
        block = raw[start : start + width]
        parent = digest(block + _salt_text(salt).encode() if salt and not start else block, parent)
        keys.append(parent)
    return keys


def _salt_of(extra: Iterable[str], adapter: str | None) -> str:
    """What an engine's extra keys add to a block's key, without the adapter, which ``chain_seed`` covers."""
    return "".join(_salt_text(one) for one in extra if one != adapter)


def _salt_text(salt: str) -> str:
    return f"\0{salt}"


class KvStream:
    """Applies one publisher's KV events to ``index``, in order, and detects gaps.

    An engine numbers its messages from 0 after each start. Missed messages are requested again if the engine offers a
    replay. Otherwise its blocks are dropped from the index, which fills again with later events. Messages are applied
    in slices: the caller serves requests between two.
    """

    def __init__(self, index: KvIndex, source: EventSource) -> None:
        self._index = index
        self._source = source
        self._expected: int | None = None
        self._is_whole: bool | None = None

    @property
    def is_whole(self) -> bool | None:
        """Whether every event since the engine's start is in the index; None before the first one."""
        return self._is_whole and self._index.is_complete(self._source)

    @property
    def is_truncated(self) -> bool:
        """Whether the engine has more blocks, media or block sizes than are followed."""
        return not self._index.is_complete(self._source)

    def on_disconnect(self) -> None:
        """The connection is lost: assume that the engine's cache is empty."""
        self._index.clear(self._source)
        self._expected, self._is_whole = None, None

    def gap_before(self, number: int) -> int | None:
        """From which number on to request a replay, which must include this message; None: it can be applied.

        After a smaller number than before, the engine has restarted with an empty cache.
        """
        expected = self._expected
        if expected is not None and number < expected:
            self.on_disconnect()
            expected = None
        if number == (expected or 0):
            return None
        return expected or 0

    def was_applied(self, number: int) -> bool:
        """Whether this message was already applied, as part of a replay."""
        return self._expected is not None and number < self._expected

    def apply(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply the next message, a slice with each step. Raises UnreadableEvents."""
        self._expected = number + 1
        if number == 0:
            self._is_whole = True
        for events in _slices(decode_batch(payload)):
            self._index.apply(self._source, events)
            yield

    def apply_replay(self, start: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[None]:
        """Apply the ``messages`` of a replay from number ``start``, a slice with each step. There are none if the
        engine has published nothing. Raises UnreadableEvents.
        """
        known = [(number, payload) for number, payload in messages if number >= start]
        if not start or (known and known[0][0] > start):
            self._index.clear(self._source)
        is_whole = bool(self._is_whole) if start else True
        if known and known[0][0] > start:
            is_whole = False
        self._expected = start
        for number, payload in known:
            is_whole = is_whole and number == self._expected
            yield from self.apply(number, payload)
        self._is_whole = is_whole

    def restart_from(self, number: int, payload: bytes) -> Iterator[None]:
        """There is no replay: drop the engine's blocks and start with this message, a slice with each step. Raises
        UnreadableEvents.
        """
        self._index.clear(self._source)
        self._is_whole = False
        yield from self.apply(number, payload)


def _slices(events: Iterable[Event]) -> Iterator[list[Event]]:
    together: list[Event] = []
    size = 0
    for event in events:
        together.append(event)
        size += 1 + (len(event.hashes) if isinstance(event, (BlocksStored, BlocksRemoved)) else 0)
        if size >= _MOST_TOGETHER:
            yield together
            together, size = [], 0
    yield together
