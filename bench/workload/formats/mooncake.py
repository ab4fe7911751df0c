# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces (FAST 2025): times, lengths, and ids of 512-token blocks.

An id names a block of prompt tokens. Equal ids become equal text, so that prompts share prefixes exactly where the
recorded ones did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn
from bench.workload.text import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bench.workload.formats.rows import Rows

_BLOCK: Final = 512


class MooncakeRow(msgspec.Struct, frozen=True):
    """``timestamp``: arrival in milliseconds. Lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]


def sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request."""
    read = rows.decoded(MooncakeRow)
    return [
        Session(
            (row.timestamp - read[0].timestamp) / 1000,
            (SessionTurn(_prompt(row), max(1, row.output_length)),),
        )
        for row in read
    ]


def _prompt(row: MooncakeRow) -> tuple[Piece, ...]:
    return tuple(pieces_of("mooncake", runs_of(row.hash_ids), _BLOCK, row.input_length))


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
