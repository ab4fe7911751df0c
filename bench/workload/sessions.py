# SPDX-License-Identifier: Apache-2.0
"""A workload as plain data: sessions with their arrivals, turns and text.

Traces hold no text but mark where prompts are equal, and prompts are long: an agent's has half a megabyte. So a
workload keeps names and positions instead of text. The same position of the same text is always the same; all others
differ. Any position can be made without what precedes it: the text is the output of a counter-based generator (Philox:
Salmon et al., SC 2011) in base64, three random bytes for a token of four letters.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
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


class TextPiece(msgspec.Struct, frozen=True):
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


def join_pieces(pieces: Iterable[TextPiece]) -> str:
    """The text of all pieces in a row."""

    return "".join([text_of(piece.key, piece.tokens, piece.first) for piece in pieces])


class SessionTurn(msgspec.Struct, frozen=True):
    """One request: what the user adds to the conversation, and the length of the answer.

    ``think_s``: from the end of the previous answer to this turn. ``is_whole``: the pieces are the whole prompt, and
    not an addition to the conversation so far.
    """

    pieces: tuple[TextPiece, ...]
    output_tokens: int
    think_s: float = 0.0
    is_whole: bool = False

    @property
    def text(self) -> str:
        """The user's message."""
        return join_pieces(self.pieces)


class Session(msgspec.Struct, frozen=True):
    """A conversation, or a single request of a trace. ``begins_at_s``: from the start of the workload.

    ``headers``: of its requests, such as tenant and objective, as a trusted gateway would write them. ``label``: by
    which results are grouped. ``adapter``: the LoRA adapter to request; empty for the model itself.
    """

    begins_at_s: float
    turns: tuple[SessionTurn, ...]
    system: tuple[TextPiece, ...] = ()
    headers: Mapping[str, str] = {}
    label: str = ""
    adapter: str = ""

    def opening_messages(self) -> list[dict[str, str]]:
        """The messages with which the conversation begins: the system prompt, if there is one."""
        return [{"role": "system", "content": join_pieces(self.system)}] if self.system else []


class Workload(msgspec.Struct, frozen=True):
    """Sessions in the order of their beginning. ``name``: their source, and which excerpt of it."""

    name: str
    sessions: tuple[Session, ...]

    @property
    def request_count(self) -> int:
        """The number of requests of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def adapters(self) -> tuple[str, ...]:
        """All LoRA adapters that requests use."""
        return tuple(sorted({session.adapter for session in self.sessions if session.adapter}))


def single_piece(key: str, tokens: int) -> tuple[TextPiece, ...]:
    """The beginning of the text called ``key``, as the only piece."""
    return (TextPiece(key, tokens),)


def with_rate_scale(workload: Workload, scale: float) -> Workload:
    """The same sessions, ``scale`` times as many a second. Think times within them stay."""
    if scale == 1:
        return workload
    sessions = tuple(msgspec.structs.replace(one, begins_at_s=one.begins_at_s / scale) for one in workload.sessions)
    return Workload(f"{workload.name}, {scale:g} times as fast", sessions)
