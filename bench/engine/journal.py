# SPDX-License-Identifier: Apache-2.0
"""Changes of the KV cache in their order: what KV events are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlocksStored(msgspec.Struct, frozen=True):
    """Full blocks of one request, in a row, that are known by their hashes from now on.

    ``parent``: the hash of the block before the first; None at the beginning of a prompt. ``text``: of all the blocks.
    ``model``: what the request asked for, maybe an adapter.
    """

    hashes: list[int]
    parent: int | None
    text: bytes
    model: str


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks that were evicted."""

    hashes: list[int]


CacheChange: TypeAlias = BlocksStored | BlocksRemoved


class Journal:
    """Changes since they were last taken."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] = []

    def stored(self, hashes: Sequence[int], parent: int | None, blocks: Sequence[bytes], model: str) -> None:
        """Note blocks in a row that are known now; see BlocksStored. ``blocks``: their texts."""
        if hashes:
            self._changes.append(BlocksStored(list(hashes), parent, b"".join(blocks), model))

    def removed(self, block_hash: int) -> None:
        """Note the eviction of a block; evictions in a row are one change."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self._changes.append(BlocksRemoved([block_hash]))

    def take(self) -> list[CacheChange]:
        """All changes, once."""
        changes, self._changes = self._changes, []
        return changes
