"""A prompt as a chain of block hashes: equal hashes at a position mean an equal prompt up to there.

Blocks grow with the position: 64 of 128 bytes (some 32 tokens), then 64 of 256, of 512, and so on. So the end of a shared
prefix is known to about a sixty-fourth of its length, a prompt of 400 KB is some 350 blocks instead of 3,125, and no
prompt that a gateway can buffer has many more. The hash of a block covers all before it (as in vLLM's automatic prefix caching) and
starts from the model or adapter, whose caches share nothing. xxh3 (https://xxhash.com) is not cryptographic: a client that
forges a collision gains a poor pick for itself.

The low bits of a hash hold the block's size class, so that an index of hashes alone knows how much text it stands for.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST_BLOCK_BYTES: Final = 128
_BLOCKS_PER_CLASS: Final = 64
_CLASS_BITS: Final = 5
_CLASS_MASK: Final = (1 << _CLASS_BITS) - 1


def hash_blocks(prompt: bytes, seed: str) -> list[int]:
    """Chained 64-bit hashes of the whole blocks of ``prompt``; the rest at its end is left out."""
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(prompt)
    parent = digest(seed.encode())
    blocks: list[int] = []
    start = 0
    for size_class, size in _classes():
        end = min(len(view), start + size * _BLOCKS_PER_CLASS)
        for offset in range(start, end - size + 1, size):
            parent = digest(view[offset : offset + size], parent) & ~_CLASS_MASK | size_class
            blocks.append(parent)
        start += size * _BLOCKS_PER_CLASS
        if start >= len(view):
            return blocks
    return blocks


def block_bytes(block: int) -> int:
    """The bytes of prompt in one block."""
    return _FIRST_BLOCK_BYTES << (block & _CLASS_MASK)


def covered_bytes(count: int) -> int:
    """The bytes of prompt in the first ``count`` blocks of any chain."""
    size_class, rest = divmod(count, _BLOCKS_PER_CLASS)
    return _CLASS_STARTS[size_class] + rest * (_FIRST_BLOCK_BYTES << size_class)


def _classes() -> Iterator[tuple[int, int]]:
    return ((size_class, _FIRST_BLOCK_BYTES << size_class) for size_class in range(_CLASS_MASK + 1))


_CLASS_STARTS: Final = tuple(
    islice(accumulate((size * _BLOCKS_PER_CLASS for _, size in _classes()), initial=0), _CLASS_MASK + 1)
)
