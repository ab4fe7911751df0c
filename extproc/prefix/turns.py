# SPDX-License-Identifier: Apache-2.0
"""Conversation turns: the next prompt starts with the last one and its answer.

Answers are not seen, only their length is known. If a new prompt starts with a complete earlier one, down to its last
bytes, the endpoint that served the earlier one also has its answer cached. How much of the answer returns in the next
prompt varies (reasoning is often left out, templates add words), so this fraction is learned from what engines
report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

_WEIGHT: Final = 0.1


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The digest and the length in bytes of a prompt's part after its last whole block."""

    digest: int
    length: int


class Turn(msgspec.Struct, frozen=True):
    """The end of a served prompt, and the estimated size of its answer in bytes of text."""

    tail: Tail
    answer_bytes: float


_NONE: Final[dict[int, Turn]] = {}


class Turns:
    """Ended turns by the last whole block of their prompt and by the row that served them.

    ``answer_share``: the learned fraction of an answer that returns in the next prompt.
    """

    def __init__(self) -> None:
        self.answer_share = 1.0
        self.by_block: dict[int, dict[int, Turn]] = {}

    def record(self, row: int, block: int, turn: Turn) -> bool:
        """The endpoint of ``row`` has answered a prompt whose last whole block is ``block``. Whether it is one more."""
        turns = self.by_block.setdefault(block, {})
        is_new = row not in turns
        turns[row] = turn
        return is_new

    def forget(self, row: int, block: int) -> bool:
        """The endpoint of ``row`` has lost ``block``. Whether a turn ended there."""
        turns = self.by_block.get(block)
        if turns is None or turns.pop(row, None) is None:
            return False
        if not turns:
            del self.by_block[block]
        return True

    def continuations(self, last_block: int, rest: bytes | memoryview) -> Iterator[tuple[int, float]]:
        """The rows that served a prompt which this one continues, with the bytes that each holds.

        ``last_block``: the last whole block of both prompts. ``rest``: this prompt's text after it. The bytes are
        those of the earlier prompt after the block, and of its answer.
        """
        for row, turn in self.by_block.get(last_block, _NONE).items():
            continued = len(rest) - turn.tail.length
            if continued >= 0 and xxhash.xxh3_64_intdigest(rest[: turn.tail.length]) == turn.tail.digest:
                yield row, turn.tail.length + min(self.answer_share * turn.answer_bytes, continued)

    def learn(self, *, expected: float, found: float) -> None:
        """Of ``expected`` tokens of an earlier answer, ``found`` were cached for the next prompt."""
        if expected >= 1:
            share = min(1.0, max(0.0, self.answer_share * found / expected))
            self.answer_share += _WEIGHT * (max(share, 0.05) - self.answer_share)


def tail_of(prompt: bytes, covered: int) -> Tail:
    """The part of ``prompt`` that its whole blocks do not cover."""
    tail = prompt[covered:]
    return Tail(xxhash.xxh3_64_intdigest(tail), len(tail))
