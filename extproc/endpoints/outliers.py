# SPDX-License-Identifier: Apache-2.0
"""Endpoints that fail: back-off, and outliers, whose answers fail more than the others'.

Back-off: an endpoint that failed is avoided for a while, twice as long after each failure. After the pause it is tried
with one request at a time. An answer ends the back-off; that of an outlier ends with several in a row. A probe without
an outcome lasts as long as the pause before it, and 5 s at least; then another one goes.

Outliers: an engine that fails fast has no load, so by its load it looks like the best choice. It is detected because
the other endpoints do not fail. A bad request fails everywhere, so failures alone are no evidence: their share is
compared.

    outlier(e)  if  lower(failed(e), answers(e)) > upper(failed(others), answers(others))

``lower`` and ``upper`` are the Wilson score bounds of a share (Wilson 1927, J. Am. Stat. Assoc. 22), with ``z`` = 3:
bounds that do not overlap happen by chance less than once in ten thousand comparisons. ``answers`` and ``failed`` are
decayed by the endpoint's own answers, so they are of its last 50 or so, whatever the rate. Both sides need at least 8
answers. At most half of the endpoints can be outliers: what most of them do is normal.

Clients with bad requests must not make an outlier of the endpoint that has their prompt cached. So a refusal (a status
from 400 to 499) counts if another endpoint serves the same request: after a refusal, Envoy tries what the endpoint
refuses at the next one, for 30 s or until both refuse a request. Behind gateways that cannot do this, only the first
of equal refusals counts, and each of several tenants has one voice: its refusals count no more than the failures of
all others there, and one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.health import EngineFailure
    from extproc.endpoints.table import EndpointTable

_INITIAL_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
# So many failures are a pause of 8 s.
_COSTLY: Final = 3
# An engine that answers nothing keeps its probe until the client gives up: others must not follow every second.
_MIN_PROBE_S: Final = 5.0
_MIN_ANSWERS: Final = 8.0
_Z: Final = 3.0
# A suspect is trusted again after so many answers in a row that were good.
_ANSWERS_TO_CLEAR: Final = 3


def record_failure(
    table: EndpointTable, row: int, now: float, *, sent_at_s: float | None = None, is_costly: bool = False
) -> None:
    """The endpoint could not serve a request: avoid it for a while. ``sent_at_s``: when the request was sent, if known.

    ``is_costly``: it answered nothing, so that a probe costs a client its whole timeout; the first pause is longer.

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


def record_good_answer(table: EndpointTable, row: int, *, now: float, sent_at_s: float, tenant: str = "") -> bool:
    """Count a whole answer; whether the endpoint was a suspect and is none any more."""
    health = table.healths[row]
    health.count(tenant, has_failed=False)
    health.served_at_s = now
    # an answer to an earlier request is no evidence of the present state
    if not health.is_suspect or not health.probe_at_s or sent_at_s < health.probe_at_s:
        return False
    health.good_in_a_row += 1
    if health.good_in_a_row < _ANSWERS_TO_CLEAR:
        return False
    health.reasons.clear()
    return True


def record_bad_answer(table: EndpointTable, row: int, failure: EngineFailure, *, now: float, tenant: str = "") -> bool:
    """Count a failure; whether to report it: the endpoint became a suspect, or fails in a new way."""
    health = table.healths[row]
    health.count(tenant, has_failed=True)
    health.good_in_a_row = 0
    if failure in health.reasons or not (health.is_suspect or _fails_more_than_others(table, row)):
        return False
    if not health.is_suspect and not table.failures[row]:
        health.avoided_since_s = now
    health.reasons.add(failure)
    return True


def _fails_more_than_others(table: EndpointTable, row: int) -> bool:
    own = table.healths[row]
    if own.answers < _MIN_ANSWERS:
        return False
    others = [table.healths[other] for other in table.active_rows if other != row]
    answers = sum(one.answers for one in others)
    suspects = 1 + sum(one.is_suspect for one in others)
    if answers < _MIN_ANSWERS or 2 * suspects > 1 + len(others):
        return False
    _, usual = share_bounds(sum(one.failed for one in others), answers)
    least, _ = share_bounds(own.failed, own.answers)
    return least > usual


def share_bounds(failed: float, answers: float) -> tuple[float, float]:
    """The Wilson score bounds of a share; 0 and 1 without answers."""
    if not answers:
        return 0.0, 1.0
    share, spread = failed / answers, _Z * _Z / answers
    middle = share + spread / 2
    half = _Z * math.sqrt(max(0.0, share * (1 - share)) / answers + spread / (4 * answers))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
