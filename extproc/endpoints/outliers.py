# SPDX-License-Identifier: Apache-2.0
"""Outliers: endpoints whose answers fail more than the others'. Their breakers open.

An engine that fails fast has no load, so by its load it looks like the best choice. It is detected because
the other endpoints do not fail. A bad request fails everywhere, so failures alone are no evidence: their share is
compared.

    outlier(e)  if  lower(failed(e), answers(e)) > upper(failed(others), answers(others))

``lower`` and ``upper`` are the Wilson score bounds of a share (Wilson 1927, J. Am. Stat. Assoc. 22), with ``z`` = 3:
bounds that do not overlap happen by chance less than once in ten thousand comparisons. ``answers`` and ``failed`` are
decayed by the endpoint's own answers, so they are of its last 50 or so, whatever the rate. Both sides need at least 8
answers. At most half of the endpoints can be outliers: what most of them do is normal.

A ModelServer has no others to be compared with. It fails if most of its requests do:

    lower(failed, answers) > 1/2

Clients with bad requests must not make an outlier of the endpoint that has their prompt cached. So a refusal (a status
from 400 to 499) counts if another endpoint serves the same request: after a refusal, Envoy tries what the endpoint
refuses at the next one, for 30 s or until both refuse a request. Behind gateways that cannot do this, only the first
of equal refusals counts, and each of several tenants has one voice: its refusals count no more than the failures of
all others there, and one. So do its failures at a ModelServer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.health import EndpointHealth, EngineFailure
    from extproc.endpoints.table import EndpointTable

_MIN_ANSWERS: Final = 8.0
_Z: Final = 3.0
_HALF: Final = 0.5


def record_good_answer(table: EndpointTable, row: int, *, now: float, tenant: str = "") -> None:
    """Count a whole answer."""
    health = table.healths[row]
    health.count_answer(tenant, has_failed=False)
    health.served_at_s = now


def record_bad_answer(table: EndpointTable, row: int, failure: EngineFailure, *, tenant: str = "") -> bool:
    """Count a failure; whether to report it: the endpoint became a suspect, or fails in a new way."""
    health = table.healths[row]
    health.count_answer(tenant, has_failed=True)
    if failure in health.reasons or not (health.is_suspect or _fails_more_than_others(table, row)):
        return False
    health.reasons.add(failure)
    return True


def mostly_fails(health: EndpointHealth) -> bool:
    """Whether most of the answers were failures, beyond chance."""
    return wilson_bounds(health.failed, health.answers)[0] > _HALF


def _fails_more_than_others(table: EndpointTable, row: int) -> bool:
    own = table.healths[row]
    if own.answers < _MIN_ANSWERS:
        return False
    others = [table.healths[other] for other in table.active_rows if other != row]
    answers = sum(one.answers for one in others)
    suspects = 1 + sum(one.is_suspect for one in others)
    if answers < _MIN_ANSWERS or 2 * suspects > 1 + len(others):
        return False
    _, usual = wilson_bounds(sum(one.failed for one in others), answers)
    least, _ = wilson_bounds(own.failed, own.answers)
    return least > usual


def wilson_bounds(failed: float, answers: float) -> tuple[float, float]:
    """The Wilson score bounds of a share; 0 and 1 without answers."""
    if not answers:
        return 0.0, 1.0
    share, spread = failed / answers, _Z * _Z / answers
    middle = share + spread / 2
    half = _Z * math.sqrt(max(0.0, share * (1 - share)) / answers + spread / (4 * answers))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
