# SPDX-License-Identifier: Apache-2.0
"""Text of a given length in tokens, cut from endless named texts.

Traces hold no text but say where prompts are equal, and prompts are long: an agent's has half a megabyte. So a
workload keeps names and positions instead of text. The same position of the same text is always the same; all others
differ. Any position can be made without what precedes it: the text is the output of a counter-based generator
(Philox: Salmon et al., SC 2011) in base64, three random bytes for a token of four letters.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

# One count of the generator is 32 bytes; 32 tokens of 3 bytes are 3 counts.
_GROUP_TOKENS: Final = 32
_GROUP_COUNTS: Final = 3
_WORDS_A_COUNT: Final = 4


class Piece(msgspec.Struct, frozen=True):
    """``tokens`` tokens of the text called ``key``, beginning with its token number ``first``."""

    key: str
    tokens: int
    first: int = 0


def text_of(key: str, tokens: int, first: int = 0) -> str:
    """The text of a piece: four letters a token."""
    start, skipped = divmod(first, _GROUP_TOKENS)
    groups = -(-(skipped + tokens) // _GROUP_TOKENS)
    generator = np.random.Philox(key=xxhash.xxh3_128_intdigest(key.encode()), counter=start * _GROUP_COUNTS)
    raw = generator.random_raw(groups * _GROUP_COUNTS * _WORDS_A_COUNT).astype("<u8", copy=False).tobytes()
    return base64.b64encode(raw[3 * skipped : 3 * (skipped + tokens)]).decode()


def join(pieces: Iterable[Piece]) -> str:
    """The text of all pieces in a row."""

    return "".join([text_of(piece.key, piece.tokens, piece.first) for piece in pieces])
