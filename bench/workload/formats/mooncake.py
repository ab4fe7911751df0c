# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces (FAST 2025) and Bailian's: times, lengths, and ids of blocks.

An id names a block of prompt tokens. Equal ids become equal text, so that prompts share prefixes exactly where the
recorded ones did. Mooncake's blocks have 512 tokens, Bailian's (Qwen's usage traces) 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn
from bench.workload.text import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bench.workload.formats.rows import Rows

_BLOCK: Final = 512
_BAILIAN_BLOCK: Final = 16


class MooncakeRow(msgspec.Struct, frozen=True):
    """``timestamp``: arrival in milliseconds. Lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def __post_init__(self) -> None:
        """Other counts are those of blocks of another size; prompts would be cut, or share what they did not."""
        _check(self.hash_ids, self.input_length, _BLOCK)


class BailianRow(msgspec.Struct, frozen=True):
    """``timestamp``: arrival in seconds. Lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def __post_init__(self) -> None:
        """As MooncakeRow's."""
        _check(self.hash_ids, self.input_length, _BAILIAN_BLOCK)


def _check(hash_ids: list[int], tokens: int, block: int) -> None:
    if len(hash_ids) != (needed := -(-tokens // block)):
        msg = (
            f"has {len(hash_ids)} hash_ids for {tokens} tokens; blocks of {block} tokens make {needed}"
            f" (--format mooncake has blocks of {_BLOCK} tokens and milliseconds, bailian of {_BAILIAN_BLOCK} and"
            " seconds)"
        )
        raise ValueError(msg)


def sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request."""
    return _sessions(rows.decoded(MooncakeRow), "mooncake", block=_BLOCK, ticks_per_s=1000)


def bailian_sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request: it is played at its own time, also if it continues a chat."""
    return _sessions(rows.decoded(BailianRow), "bailian", block=_BAILIAN_BLOCK, ticks_per_s=1)


def _sessions(read: Sequence[MooncakeRow | BailianRow], key: str, *, block: int, ticks_per_s: int) -> list[Session]:
    return [
        Session(
            (row.timestamp - read[0].timestamp) / ticks_per_s,
            (
                SessionTurn(
                    tuple(pieces_of(key, runs_of(row.hash_ids), block, row.input_length)), max(1, row.output_length)
                ),
            ),
        )
        for row in read
    ]


def runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ids, as the first of them and their number."""
    first = count = 0
    for one in ids:
        if count and one == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = one, 1
    if count:
        yield first, count


def pieces_of(key: str, runs: Iterable[tuple[int, int]], block: int, tokens: int) -> Iterator[Piece]:
    """The text of runs of blocks, ``tokens`` in all: the last block may be partial.

    ``key``: the name of the text. ``runs``: first id and number of blocks. ``block``: tokens of a block.
    """

    for first, count in runs:
        length = min(tokens, count * block)
        if length > 0:
            yield Piece(key, length, first * block)
        tokens -= length
