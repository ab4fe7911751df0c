"""The KV cache: blocks that requests hold, blocks that are only remembered, and which of those goes first.

As in vLLM V1 (``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``): a full block is known by the hash of everything up
to its end; a request whose prompt begins with known blocks shares them; a block that nobody holds stays known until it is
needed, the least recently used first, and of one request the last of its blocks before the first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.engine.journal import Journal


class BlockPool:
    """``total`` blocks, every one of them either in use or free; some of the free ones are still known by their hash."""

    def __init__(self, total: int, journal: Journal | None = None) -> None:
        """``journal`` is told which blocks are forgotten."""
        self.total = total
        self._journal = journal
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._holders = [0] * total
        self._hash_of: dict[int, int] = {}
        self._known: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Blocks that some request holds."""
        return self.total - len(self._free)

    def match(self, hashes: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning of ``hashes``."""
        found: list[int] = []
        for value in hashes:
            block = self._known.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, shared: Sequence[int], new: int) -> list[int] | None:
        """Hold the ``shared`` blocks and ``new`` more; None, with nothing changed, if there are not enough."""
        holders, free = self._holders, self._free
        revived = [block for block in shared if not holders[block]]
        if new > len(free) - len(revived):
            return None
        for block in revived:
            del free[block]
        for block in shared:
            holders[block] += 1
        return [*shared, *[self._evict() for _ in range(new)]]

    def name(self, block: int, value: int) -> bool:
        """``block`` is full and known by ``value`` from now on, unless another block is already; whether it is."""
        if value in self._known:
            return False
        self._known[value] = block
        self._hash_of[block] = value
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """A request lets go of its blocks, given in the order of its text; its tail will be reused first."""
        holders, free = self._holders, self._free
        for block in reversed(blocks):
            holders[block] -= 1
            if not holders[block]:
                free[block] = None

    def _evict(self) -> int:
        block, _ = self._free.popitem(last=False)
        value = self._hash_of.pop(block, None)
        if value is not None:
            del self._known[value]
            if self._journal is not None:
                self._journal.removed(value)
        self._holders[block] = 1
        return block
