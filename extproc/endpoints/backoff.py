# SPDX-License-Identifier: Apache-2.0
"""Back-off: an endpoint that failed is avoided for a while, twice as long after each failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

_INITIAL_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0


def record_failure(table: EndpointTable, row: int, now: float) -> None:
    """The endpoint could not serve a request: avoid it for a while.

    Without back-off, a dead engine would look like the best choice for every request, as it has no load. Failures
    during a pause do not extend it: they are of requests that were already on their way.
    """
    if now < table.retry_at_s[row]:
        return
    table.has_failures = True
    table.retry_at_s[row] = now + min(_MAX_PAUSE_S, _INITIAL_PAUSE_S * 2.0 ** min(int(table.failures[row]), 10))
    table.failures[row] += 1


def record_success(table: EndpointTable, row: int) -> None:
    """The endpoint served a request: end its back-off."""
    if table.failures[row]:
        table.failures[row] = 0
        table.retry_at_s[row] = 0.0
        table.has_failures = bool(table.failures.any())
