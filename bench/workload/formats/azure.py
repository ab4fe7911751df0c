# SPDX-License-Identifier: Apache-2.0
"""Azure's traces of 2023 (Splitwise, ISCA 2024): times and lengths.

They say nothing about prefixes, so all prompts differ.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn, one_piece

if TYPE_CHECKING:
    from bench.workload.formats.rows import Rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureRow(msgspec.Struct, frozen=True):
    """``at``: arrival as ISO 8601 without a zone. Lengths in tokens."""

    at: str
    input_tokens: Count
    output_tokens: Count

    def at_s(self) -> float:
        """The arrival in Unix seconds, the machine's zone assumed. The trace has seven decimals; Python reads six."""
        return datetime.fromisoformat(self.at[:26]).timestamp()

    def __post_init__(self) -> None:
        self.at_s()  # raises ValueError, while the line is known


def sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request."""

    read = rows.table(AzureRow, COLUMNS)
    return [
        Session(
            row.at_s() - read[0].at_s(),
            (SessionTurn(one_piece(f"azure/{number}", row.input_tokens), max(1, row.output_tokens)),),
        )
        for number, row in enumerate(read, rows.excerpt.skip)
    ]
