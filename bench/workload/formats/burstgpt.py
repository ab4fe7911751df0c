"""BurstGPT's traces (Wang et al., KDD 2025): times and lengths of requests to an Azure OpenAI service, by model.

Rows without an answer are requests that failed there, and are left out. Of prefixes they say nothing: all prompts differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, Turn, says

if TYPE_CHECKING:
    from bench.workload.formats.rows import Rows

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class BurstRow(msgspec.Struct, frozen=True):
    """``at_s`` from the start of the trace; lengths in tokens."""

    at_s: float
    model: str
    input_tokens: Count
    output_tokens: Count


def sessions(rows: Rows) -> list[Session]:
    """Each row a request of its own, labelled with the model that it was for."""
    read = rows.table(BurstRow, COLUMNS)
    return [
        Session(
            row.at_s - read[0].at_s,
            (Turn(says(f"burstgpt/{number}", row.input_tokens), row.output_tokens),),
            label=row.model,
        )
        for number, row in enumerate(read, rows.part.skip)
        if row.output_tokens
    ]
