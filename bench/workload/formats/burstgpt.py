# SPDX-License-Identifier: Apache-2.0
"""BurstGPT's traces (Wang et al., KDD 2025): times and lengths by model.

The requests went to an Azure OpenAI service. Rows without an answer are requests that failed there; they are left
out. The traces say nothing about prefixes, so all prompts differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn, one_piece

if TYPE_CHECKING:
    from bench.workload.formats.rows import Rows

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class BurstRow(msgspec.Struct, frozen=True):
    """``at_s``: arrival, from the start of the trace. Lengths in tokens."""

    at_s: float
    model: str
    input_tokens: Count
    output_tokens: Count


def sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request, labelled with its model."""

    read = rows.table(BurstRow, COLUMNS)
    return [
        Session(
            row.at_s - read[0].at_s,
            (SessionTurn(one_piece(f"burstgpt/{number}", row.input_tokens), row.output_tokens),),
            label=row.model,
        )
        for number, row in enumerate(read, rows.excerpt.skip)
        if row.output_tokens
    ]
