# SPDX-License-Identifier: Apache-2.0
"""The Chatbot Arena log of VTC's artifact (OSDI 2024): requests of 27 clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn, one_piece
from extproc.protocol import TENANT

if TYPE_CHECKING:
    from bench.workload.formats.rows import Rows

COLUMNS = (
    "req_time",
    "adapter_dir",
    "prompt_len",
    "output_len",
    "FCFS_first_token_latency",
    "VTC_first_token_latency",
)


class ArenaRow(msgspec.Struct, frozen=True):
    """``at_s``: arrival, from the start. Lengths in tokens. TTFT as measured under two schedulers, FCFS and VTC."""

    at_s: float
    client: str
    input_tokens: Count
    output_tokens: Count
    fcfs_ttft_s: float
    vtc_ttft_s: float


def read(rows: Rows) -> list[ArenaRow]:
    """The rows with their measurements."""
    return rows.table(ArenaRow, COLUMNS)


def sessions(rows: Rows) -> list[Session]:
    """Each row is a session of one request; the client is the tenant."""

    found = read(rows)
    return [
        Session(
            row.at_s - found[0].at_s,
            (SessionTurn(one_piece(f"arena/{number}", row.input_tokens), max(1, row.output_tokens)),),
            headers={TENANT: row.client},
            label=row.client,
        )
        for number, row in enumerate(found, rows.excerpt.skip)
    ]
