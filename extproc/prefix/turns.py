"""The end of a conversation turn: prompt plus answer is the beginning of the next prompt, and the engine holds both.

We never see the answer, only its length. So where a new prompt begins with a whole earlier one, of which the last bytes are
compared too, the engine that served that one also holds its answer. How much of the answer really comes back in the next
prompt differs (reasoning is often left out, templates add words), so its share is learned from what engines report.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

# Turns remembered over all endpoints, some 300 bytes each.
_MOST_TURNS: Final = 20_000
_WEIGHT: Final = 0.1


class Turn(msgspec.Struct, frozen=True):
    """A served prompt beyond its last whole block, and the answer's size in bytes of text."""

    tail: int
    tail_bytes: int
    answer_bytes: float


class Turns:
    """Ended turns by the last whole block of their prompt and the endpoint (row) that served them."""

    def __init__(self) -> None:
        self.answer_share = 1.0
        self._turns: OrderedDict[tuple[int, int], Turn] = OrderedDict()

    def ended(self, row: int, chain: Sequence[int], prompt: Turn) -> None:
        """The endpoint has answered the prompt of ``chain``, which was made into a Turn when it was sent."""
        if chain:
            key = (chain[-1], row)
            self._turns[key] = prompt
            self._turns.move_to_end(key)
            if len(self._turns) > _MOST_TURNS:
                self._turns.popitem(last=False)

    def continued(self, row: int, last_block: int, rest: bytes | memoryview) -> tuple[int, float]:
        """Bytes beyond ``last_block`` that the endpoint holds of a prompt that goes on with ``rest``: prompt, and answer."""
        turn = self._turns.get((last_block, row))
        if (
            turn is None
            or len(rest) < turn.tail_bytes
            or xxhash.xxh3_64_intdigest(rest[: turn.tail_bytes]) != turn.tail
        ):
            return 0, 0.0
        goes_on = len(rest) - turn.tail_bytes
        return turn.tail_bytes, min(self.answer_share * turn.answer_bytes, goes_on)

    def learn(self, *, expected: float, found: float) -> None:
        """``found`` of ``expected`` tokens of an answer were in the cache when the next prompt came."""
        if expected >= 1:
            share = min(1.0, max(0.0, self.answer_share * found / expected))
            self.answer_share += _WEIGHT * (max(share, 0.05) - self.answer_share)


def tail_of(prompt: bytes, covered: int, answer_bytes: float = 0.0) -> Turn:
    """The part of ``prompt`` that its whole blocks do not cover."""
    tail = memoryview(prompt)[covered:]
    return Turn(xxhash.xxh3_64_intdigest(tail), len(tail), answer_bytes)
