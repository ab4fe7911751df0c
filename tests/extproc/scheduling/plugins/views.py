# SPDX-License-Identifier: Apache-2.0
"""A view over a few endpoints, column by column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extproc.endpoints.learned_speeds import PromptCost
from extproc.endpoints.table import EndpointTable
from extproc.scheduling.picker import RequestDemandByRow, RequestFacts, View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def view_of(
    count: int,
    *,
    input_tokens: float = 1000.0,
    cached: Sequence[float] = (),
    now_s: float = 0.0,
    adapter: str | None = None,
    headers: Mapping[str, str] | None = None,
    **columns: Sequence[float],
) -> View:
    """Endpoints ``e0:1``, ``e1:1``, ...; ``columns`` are those of the table."""
    table = EndpointTable()
    table.replace_endpoints(f"e{number}:1" for number in range(count))
    # as engines have just said
    table.reported_at_s[:count] = now_s
    for name, values in columns.items():
        getattr(table, name)[:count] = values
    table.in_flight_at_report[:] = table.in_flight
    held = np.zeros(len(table.addresses))
    held[: len(cached)] = cached
    demand = RequestDemandByRow(held, PromptCost().prefill_work(input_tokens - held, held))
    table.has_failures = bool(table.retry_at_s.any())
    return View(table, demand, RequestFacts("m", input_tokens, adapter, headers or {}, is_trusted=True), now_s)
