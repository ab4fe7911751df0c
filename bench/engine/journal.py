"""What enters and leaves the KV cache, in the order in which it does: what KV events tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stored(msgspec.Struct, frozen=True):
    """Full blocks of one request that are known from now on, each after the one before; ``parent`` before the first."""

    hashes: list[int]
    parent: int | None
    text: bytes
    model: str


class Removed(msgspec.Struct, frozen=True):
    """Blocks that were needed for something else."""

    hashes: list[int]


class Journal:
    """Changes since they were last taken."""

    def __init__(self) -> None:
        self._changes: list[Stored | Removed] = []

    def stored(self, hashes: Sequence[int], parent: int | None, blocks: Sequence[bytes], model: str) -> None:
        """These blocks, which stand one after the other, are known now."""
        if hashes:
            self._changes.append(Stored(list(hashes), parent, b"".join(blocks), model))

    def removed(self, value: int) -> None:
        """This block is not known any more."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed):
            last.hashes.append(value)
        else:
            self._changes.append(Removed([value]))

    def take(self) -> list[Stored | Removed]:
        """All changes, once."""
        changes, self._changes = self._changes, []
        return changes
