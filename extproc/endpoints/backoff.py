# SPDX-License-Identifier: Apache-2.0
"""Back-off: an endpoint that failed is avoided for a while, twice as long after each failure.

After the pause it is tried with one request at a time. An answer ends the back-off; that of a suspect (``suspects.py``)
ends with several in a row. A probe without an outcome lasts as long as the pause before it, and 5 s at least; then
another one goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

_INITIAL_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
# So many failures are a pause of 8 s.
_COSTLY: Final = 3
# An engine that answers nothing keeps its probe until the client gives up: others must not follow every second.
_MIN_PROBE_S: Final = 5.0


def record_failure(
    table: EndpointTable, row: int, now: float, *, sent_at_s: float | None = None, is_costly: bool = False
) -> None:
    """The endpoint could not serve a request: avoid it for a while. ``sent_at_s``: when the request was sent, if known.

    ``is_costly``: it answered nothing, so a probe would cost a client all of its patience; the first pause is longer.

    Without back-off, a dead engine would look like the best choice for every request, as it has no load. Failures
    during a pause do not extend it, as they are of requests that were already on their way, unless it was a probe.
    """
    health = table.healths[row]
    is_probe = bool(health.probe_at_s) and sent_at_s is not None and sent_at_s >= health.probe_at_s
    if now < table.retry_at_s[row] and not is_probe:
        return
    table.has_failures = True
    failures = int(table.failures[row])
    if not failures and not health.is_suspect:
        health.avoided_since_s = now
    if is_costly:
        failures = max(failures, _COSTLY)
    table.retry_at_s[row] = now + _pause_s(failures)
    table.failures[row] = failures + 1
    health.probe_at_s = 0.0


def record_success(table: EndpointTable, row: int) -> None:
    """The endpoint served a request: end its back-off; a suspect's pause only, so that the next probe may go."""
    if not table.failures[row]:
        return
    health = table.healths[row]
    if health.is_suspect:
        if health.probe_at_s:
            table.retry_at_s[row] = 0.0
        return
    table.failures[row] = 0
    table.retry_at_s[row] = health.probe_at_s = 0.0
    table.has_failures = bool(table.failures.any())


def begin_probe(table: EndpointTable, row: int, now: float) -> None:
    """A request is sent to the endpoint; if its pause is over, this is its probe, and no other follows for now."""
    failures = int(table.failures[row])
    if failures and now >= table.retry_at_s[row]:
        health = table.healths[row]
        # the first of a row of probes: answers to each of them count, however long they take
        health.probe_at_s = health.probe_at_s or now
        table.retry_at_s[row] = now + max(_MIN_PROBE_S, _pause_s(failures - 1))


def _pause_s(failures: int) -> float:
    """``failures``: before this one."""
    return float(min(_MAX_PAUSE_S, _INITIAL_PAUSE_S * 2.0 ** min(failures, 10)))
