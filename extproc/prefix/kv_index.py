# SPDX-License-Identifier: Apache-2.0
"""The precise prefix index: which endpoint has which blocks cached, by KV events.

Engines' block hashes are opaque. The key of a block is computed here from its tokens and the key of the block before
it, so hash seeds need not be aligned. An engine's hash is only used to find the key again, when a successor is stored
or the block is removed.

The prompt of a request that was just sent will be cached before an event says so. Its blocks count as held for
``SPECULATION_S``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from extproc.prefix.kv_events import BlockHash, Cleared, Event, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SPECULATION_S: Final = 2.0
# The value of a cached token by medium, as in llm-d: host memory must be copied to the GPU first.
TIER_WEIGHTS: Final = {"GPU": 1.0, "CPU": 0.8}
# The most blocks of one cache: an engine that never removes any is not followed further.
_MAX_BLOCKS: Final = 4_000_000


class Source(msgspec.Struct, frozen=True):
    """Who published an event: the endpoint's row, and its data-parallel rank."""

    row: int
    rank: int = 0


class Cached(msgspec.Struct, frozen=True):
    """The endpoints in the bit mask ``holders`` hold the first ``tokens`` tokens of a prompt.

    ``weighted``: the same tokens, weighted by medium.
    """

    holders: int
    tokens: int
    weighted: float


class _Cache(msgspec.Struct):
    """The blocks of one source: by medium, from the engine's hash to our key and the block size in tokens."""

    by_medium: dict[str, dict[BlockHash, tuple[int, int]]] = msgspec.field(default_factory=dict)

    def find(self, value: BlockHash) -> int | None:
        for blocks in self.by_medium.values():
            if value in blocks:
                return blocks[value][0]
        return None


class KvIndex:
    """The index of one ModelServer. ``orphans``: blocks stored under an unknown parent, which are ignored."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[int, int]] = {}
        self._caches: dict[Source, _Cache] = {}
        self._block_sizes: dict[int, int] = {}
        self._expected: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.orphans = 0

    def apply(self, source: Source, events: Iterable[Event]) -> None:
        """Apply the events of ``source`` in order."""
        cache = self._caches.setdefault(source, _Cache())
        for event in events:
            match event:
                case Stored():
                    self._store(source, cache, event)
                case Removed():
                    for medium in [event.medium] if event.medium else list(cache.by_medium):
                        for value in event.hashes:
                            self._remove(source, cache, medium, value)
                case Cleared():
                    self.clear(source)
                    cache = self._caches.setdefault(source, _Cache())

    def clear(self, source: Source) -> None:
        """Drop all blocks of ``source``: its cache is empty, or what we know of it is unreliable."""
        cache = self._caches.pop(source, None)
        if cache is not None:
            for medium, blocks in cache.by_medium.items():
                for key, size in blocks.values():
                    self._drop(source, medium, key, size)

    def forget(self, row: int) -> None:
        """Drop all blocks of the endpoint of ``row``, which has been removed."""
        for source in [one for one in self._caches if one.row == row]:
            self.clear(source)

    def keys(self, tokens: Sequence[int], *, adapter: str | None, salt: str | None) -> dict[int, list[int]]:
        """The keys of a prompt's whole blocks, for each block size in use."""
        return {size: chain_keys(tokens, size, adapter=adapter, salt=salt) for size in self._block_sizes}

    def match(self, chains: dict[int, list[int]], now: float) -> list[Cached]:
        """How much of a prompt each endpoint holds, grouped by endpoints that hold the same.

        ``chains``: the result of ``keys``. Every block is looked up: unlike in the approximate index, an endpoint may
        hold a block without its predecessors.
        """
        found: list[Cached] = []
        for size, chain in chains.items():
            alive = -1
            for length, key in enumerate(chain):
                holders = self._holders_of(key, now)
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

    def speculate(self, row: int, chains: dict[int, list[int]], now: float) -> None:
        """A prompt is sent to ``row``: count its blocks as held for ``SPECULATION_S``."""
        while self._expected and next(iter(self._expected.values()))[1] <= now:
            self._expected.popitem(last=False)
        for chain in chains.values():
            for key in chain:
                mask, until = self._expected.pop(key, (0, 0.0))
                self._expected[key] = ((mask if until > now else 0) | 1 << row, now + SPECULATION_S)

    def blocks_held(self, row: int) -> int:
        """The number of blocks that ``row`` holds by its events."""
        caches = (cache for source, cache in self._caches.items() if source.row == row)
        return sum(len(blocks) for cache in caches for blocks in cache.by_medium.values())

    def _holders_of(self, key: int, now: float) -> int:
        mask = 0
        for holders in self._holders.values():
            mask |= holders.get(key, 0)
        expected = self._expected.get(key)
        return mask | expected[0] if expected is not None and expected[1] > now else mask

    def _weigh(self, rows: int, chain: Sequence[int], size: int) -> list[Cached]:
        tokens = len(chain) * size
        slow = {
            medium: holders
            for medium, holders in self._holders.items()
            if TIER_WEIGHTS.get(medium, 0.8) < 1.0 and holders
        }
        if not slow:
            return [Cached(rows, tokens, float(tokens))]
        fast = self._holders.get("GPU", {})
        found = []
        while rows:
            bit = rows & -rows
            rows &= ~bit
            on_gpu = sum(1 for key in chain if fast.get(key, 0) & bit)
            weight = max((TIER_WEIGHTS.get(medium, 0.8) for medium in slow), default=1.0)
            found.append(Cached(bit, tokens, size * (on_gpu + weight * (len(chain) - on_gpu))))
        return found

    def _store(self, source: Source, cache: _Cache, event: Stored) -> None:
        blocks = cache.by_medium.setdefault(event.medium, {})
        if not event.token_ids:
            self._copy(source, cache, event)
            return
        if event.parent is None:
            parent = chain_seed(event.lora_name)
        else:
            known = cache.find(event.parent)
            if known is None:
                self.orphans += len(event.hashes)
                return
            parent = known
        size = event.block_size
        for index, value in enumerate(event.hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            if len(tokens) < size or len(blocks) >= _MAX_BLOCKS:
                return
            extra = event.extra_keys[index] if index < len(event.extra_keys) else None
            parent = block_key(tokens, parent, _salt_of(extra, event.lora_name))
            self._hold(source, blocks, event.medium, value, (parent, size))

    def _copy(self, source: Source, cache: _Cache, event: Stored) -> None:
        """Known blocks were copied to another medium; such events do not repeat their tokens."""
        blocks = cache.by_medium[event.medium]
        for value in event.hashes:
            entry = next((held[value] for held in cache.by_medium.values() if value in held), None)
            if entry is not None:
                self._hold(source, blocks, event.medium, value, entry)

    def _hold(
        self,
        source: Source,
        blocks: dict[BlockHash, tuple[int, int]],
        medium: str,
        value: BlockHash,
        entry: tuple[int, int],
    ) -> None:
        if value in blocks:
            return
        blocks[value] = entry
        holders = self._holders.setdefault(medium, {})
        holders[entry[0]] = holders.get(entry[0], 0) | 1 << source.row
        self._block_sizes[entry[1]] = self._block_sizes.get(entry[1], 0) + 1

    def _remove(self, source: Source, cache: _Cache, medium: str, value: BlockHash) -> None:
        entry = cache.by_medium.get(medium, {}).pop(value, None)
        if entry is not None:
            self._drop(source, medium, *entry)

    def _drop(self, source: Source, medium: str, key: int, size: int) -> None:
        self._block_sizes[size] -= 1
        if not self._block_sizes[size]:
            del self._block_sizes[size]
        if self._is_held_by_another_rank(source, medium, key):
            return
        holders = self._holders[medium]
        mask = holders.get(key, 0) & ~(1 << source.row)
        if mask:
            holders[key] = mask
        else:
            holders.pop(key, None)

    def _is_held_by_another_rank(self, source: Source, medium: str, key: int) -> bool:
        return any(
            key == held
            for other, cache in self._caches.items()
            if other.row == source.row and other.rank != source.rank
            for held, _ in cache.by_medium.get(medium, {}).values()
        )


def chain_seed(adapter: str | None) -> int:
    """The key before the first block, by LoRA adapter; None: the base model."""
    return xxhash.xxh3_64_intdigest((adapter or "").encode())


def block_key(tokens: Sequence[int], parent: int, salt: str) -> int:
    """The key of a block of ``tokens`` that follows the block with the key ``parent``."""
    return xxhash.xxh3_64_intdigest(array("I", tokens).tobytes() + salt.encode(), parent)


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


def _salt_of(extra: object, adapter: str | None) -> str:
    """What an engine's extra keys add to a block's key, without the adapter, which ``chain_seed`` covers."""
    if not isinstance(extra, (list, tuple)):
        return ""
    parts = [str(one) for one in extra if one != adapter]
    return "".join(_salt_text(part) for part in parts)


def _salt_text(salt: str) -> str:
    return f"\0{salt}"
