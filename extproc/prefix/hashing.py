# SPDX-License-Identifier: Apache-2.0
"""A prompt as a chain of block hashes; prompts with a common prefix share the first.

Blocks grow with their position: 64 blocks of 128 bytes (about 32 tokens; the size can be fitted to the engines'
blocks), then 64 of twice that size, and so on. So the end of a shared prefix is known to about 1/64 of its length,
and a prompt of 400 KB has about 350 blocks instead of 3,125. The hash of a block covers all blocks before it, as in
vLLM's automatic prefix caching, and starts from the model or adapter, as these share no cache. xxh3
(https://xxhash.com) is not cryptographic: a client that forges a collision only worsens its own pick.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct, iter_unpack
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_BLOCK_BYTES: Final = 128
_BLOCKS_PER_CLASS: Final = 64
# More than any prompt has: the last blocks would be of 256 GiB.
_CLASSES: Final = 32


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


def covered_units(count: int) -> int:
    """The total size of the first ``count`` blocks of any chain, in units of the first block's size."""
    size_class, rest = divmod(count, _BLOCKS_PER_CLASS)
    return _BLOCKS_PER_CLASS * ((1 << size_class) - 1) + (rest << size_class)


# The same by ``count``, for all chains that there can be: a pick looks several of them up.
COVERED_UNITS: Final = tuple(covered_units(count) for count in range(_BLOCKS_PER_CLASS * _CLASSES + 1))
