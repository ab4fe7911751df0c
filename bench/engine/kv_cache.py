# SPDX-License-Identifier: Apache-2.0
"""The KV cache: blocks held by requests, blocks kept for reuse, eviction, and the journal that KV events are made from.

As in vLLM V1 (``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``): a full block is identified by the hash of all
text up to its end. A request shares the cached blocks with which its prompt begins. A block that no request holds stays
cached until it is needed: the least recently used is evicted first, and among the blocks of one request the last before
the first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlocksStored(msgspec.Struct, frozen=True):
    """Consecutive full blocks of one request that are now in the cache by their hashes.

    ``parent``: the hash of the block before the first; None at the beginning of a prompt. ``text``: of all the blocks.
    ``model``: of the request, maybe an adapter. ``salt``: of the request, if the first block begins its prompt.
    """

    hashes: list[int]
    parent: int | None
    text: bytes
    model: str
    salt: str = ""


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks that were evicted."""

    hashes: list[int]


CacheChange: TypeAlias = BlocksStored | BlocksRemoved


class CacheJournal:
    """Changes since they were last taken."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] = []

    def on_stored(
        self, hashes: Sequence[int], parent: int | None, blocks: Sequence[bytes], model: str, salt: str = ""
    ) -> None:
        """Record consecutive blocks that are now cached; see BlocksStored. ``blocks``: their texts."""
        if hashes:
            self._changes.append(
                BlocksStored(list(hashes), parent, b"".join(blocks), model, salt if parent is None else "")
            )

    def on_removed(self, block_hash: int) -> None:
        """Note the eviction of a block; evictions in a row are one change."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self._changes.append(BlocksRemoved([block_hash]))

    def pop_changes(self) -> list[CacheChange]:
        """All changes, once."""
        changes, self._changes = self._changes, []
        return changes


class BlockPool:
    """``total`` blocks, each in use or free. Free blocks may still be cached by their hash."""

    def __init__(self, total: int, journal: CacheJournal | None = None) -> None:
        """``journal``: takes the evictions."""
        self.total = total
        self._journal = journal
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._holders = [0] * total
        self._hash_of: dict[int, int] = {}
        self._known: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    @property
    def blocks_in_use(self) -> int:
        """Blocks that some request holds."""
        return self.total - len(self._free)

    def match_prefix(self, hashes: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._known.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, shared: Sequence[int], new: int) -> list[int] | None:
        """Hold the ``shared`` blocks and ``new`` more. None, with nothing changed, if too few are free."""
        holders, free = self._holders, self._free
        revived = [block for block in shared if not holders[block]]
        if new > len(free) - len(revived):
            return None
        for block in revived:
            del free[block]
        for block in shared:
            holders[block] += 1
        return [*shared, *[self._evict() for _ in range(new)]]

    def register(self, block: int, block_hash: int) -> bool:
        """Cache a full ``block`` by its hash. False if another block has that hash already."""
        if block_hash in self._known:
            return False
        self._known[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """A request gives up its blocks, which come in the order of its text. The last of them is evicted first."""
        holders, free = self._holders, self._free
        for block in reversed(blocks):
            holders[block] -= 1
            if not holders[block]:
                free[block] = None

    def _evict(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._known[block_hash]
            if self._journal is not None:
                self._journal.on_removed(block_hash)

        self._holders[block] = 1
        return block
