# SPDX-License-Identifier: Apache-2.0
"""Endpoints whose breakers are open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.endpoints.breaker_ranks import breaker_key, set_breaker

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable


def trip(table: EndpointTable, row: int, now: float, *, times: int = 1) -> float:
    """The breaker of the row opens; returns the end of its pause. ``times``: in a row."""
    for _ in range(times):
        key = breaker_key("default/llama", table.addresses[row])
        set_breaker(table, row, table.breakers[row].after_opening(key, now, needed=1))
    return table.breakers[row].reopen_at_s
