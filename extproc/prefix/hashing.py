"""A prompt as a chain of block hashes: equal hashes at a position mean an equal prompt up to there.

Blocks grow with the position: 64 of 128 bytes (some 32 tokens; or of another size, as engines' blocks are), then 64 of twice
that, of four times, and so on. So the end of a shared prefix is known to about a sixty-fourth of its length, a prompt of
400 KB is some 350 blocks instead of 3,125, and no prompt that a gateway can buffer has many more. The hash of a block covers all before it (as in vLLM's automatic prefix caching) and
starts from the model or adapter, whose caches share nothing. xxh3 (https://xxhash.com) is not cryptographic: a client that
forges a collision gains a poor pick for itself.

The low bits of a hash hold the block's size class, so that an index of hashes alone knows how much text it stands for.
"""

from __future__ import annotations

from typing import Final

import xxhash

FIRST_BLOCK_BYTES: Final = 128
_BLOCKS_PER_CLASS: Final = 64
_CLASS_BITS: Final = 5
_CLASS_MASK: Final = (1 << _CLASS_BITS) - 1


def hash_blocks(prompt: bytes, seed: str, first_block_bytes: int = FIRST_BLOCK_BYTES) -> list[int]:
    """Chained 64-bit hashes of the whole blocks of ``prompt``; the rest at its end is left out."""
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(prompt)
    parent = digest(f"{first_block_bytes} {seed}".encode())
    blocks: list[int] = []
    start = 0
    for size_class in range(_CLASS_MASK + 1):
        size = first_block_bytes << size_class
        end = min(len(view), start + size * _BLOCKS_PER_CLASS)
        for offset in range(start, end - size + 1, size):
            parent = digest(view[offset : offset + size], parent) & ~_CLASS_MASK | size_class
            blocks.append(parent)
        start += size * _BLOCKS_PER_CLASS
        if start >= len(view):
            return blocks
    return blocks


def block_units(block: int) -> int:
    """How many first blocks the text of one block would fill."""
    return 1 << (block & _CLASS_MASK)


def covered_units(count: int) -> int:
    """The same of the first ``count`` blocks of any chain."""
    size_class, rest = divmod(count, _BLOCKS_PER_CLASS)
    return _BLOCKS_PER_CLASS * ((1 << size_class) - 1) + (rest << size_class)
