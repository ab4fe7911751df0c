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
    from collections.abc import Iterator, Sequence

# Turns remembered over all endpoints, some 300 bytes each.
_MOST_TURNS: Final = 20_000
_WEIGHT: Final = 0.1


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The end of a prompt that no whole block covers: a digest of it, and its length."""

    digest: int
    length: int


class Turn(msgspec.Struct, frozen=True):
    """A served prompt beyond its last whole block, and the answer's size in bytes of text."""

    tail: Tail
    answer_bytes: float


_NONE: Final[dict[int, Turn]] = {}


class Turns:
    """Ended turns by the last whole block of their prompt, and the endpoints (rows) that served them."""

    def __init__(self) -> None:
        self.answer_share = 1.0
        self._turns: OrderedDict[int, dict[int, Turn]] = OrderedDict()

    def ended(self, row: int, chain: Sequence[int], prompt: Turn) -> None:
        """The endpoint has answered the prompt of ``chain``, which was made into a Turn when it was sent."""
        if chain:
            self._turns.setdefault(chain[-1], {})[row] = prompt
            self._turns.move_to_end(chain[-1])
            if len(self._turns) > _MOST_TURNS:
                self._turns.popitem(last=False)

    def continued(self, last_block: int, rest: bytes | memoryview) -> Iterator[tuple[int, float]]:
        """Endpoints that served a prompt which ended after ``last_block``, and of which ``rest`` is the continuation.

        With each, how many bytes beyond the block it holds: of the prompt and of its answer.
        """
        for row, turn in self._turns.get(last_block, _NONE).items():
            goes_on = len(rest) - turn.tail.length
            if goes_on >= 0 and xxhash.xxh3_64_intdigest(rest[: turn.tail.length]) == turn.tail.digest:
                yield row, turn.tail.length + min(self.answer_share * turn.answer_bytes, goes_on)

    def learn(self, *, expected: float, found: float) -> None:
        """``found`` of ``expected`` tokens of an answer were in the cache when the next prompt came."""
        if expected >= 1:
            share = min(1.0, max(0.0, self.answer_share * found / expected))
            self.answer_share += _WEIGHT * (max(share, 0.05) - self.answer_share)


def tail_of(prompt: bytes, covered: int) -> Tail:
    """The part of ``prompt`` that its whole blocks do not cover."""
    tail = prompt[covered:]
    return Tail(xxhash.xxh3_64_intdigest(tail), len(tail))
