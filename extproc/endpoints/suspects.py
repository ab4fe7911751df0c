# SPDX-License-Identifier: Apache-2.0
"""Suspects: an endpoint whose answers fail more than the others' is a suspect.

An engine that fails fast has no load, so by its load it looks like the best choice. What gives it away is that the
other endpoints do not fail. A bad request fails everywhere, so failures alone say nothing: their share is compared.

    suspect(e)  if  lower(failed(e), answers(e)) > upper(failed(others), answers(others))

``lower`` and ``upper`` are the Wilson score bounds of a share (Wilson 1927, J. Am. Stat. Assoc. 22), with ``z`` = 3:
bounds that do not overlap happen by chance less than once in ten thousand comparisons. ``answers`` and ``failed`` are
decayed by the endpoint's own answers, so they tell of its last 50 or so, whatever the rate. Both sides need at least
8 answers. At most half of the endpoints can be suspects: what most of them do is normal.

A client that repeats one bad request must not make a suspect of the endpoint that has its prompt cached, so of equal
refusals (a status from 400 to 499) only the first counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.health import Failure
    from extproc.endpoints.table import EndpointTable

_MIN_ANSWERS: Final = 8.0
_Z: Final = 3.0
# A suspect is trusted again after so many answers in a row that were good.
_ANSWERS_TO_CLEAR: Final = 3


def record_good_answer(table: EndpointTable, row: int, *, now: float, sent_at_s: float) -> bool:
    """Count a whole answer; whether the endpoint was a suspect and is none any more."""
    health = table.healths[row]
    health.count(has_failed=False)
    health.served_at_s = now
    # an answer to a request from before says nothing about now
    if not health.is_suspect or not health.probe_at_s or sent_at_s < health.probe_at_s:
        return False
    health.good_in_a_row += 1
    if health.good_in_a_row < _ANSWERS_TO_CLEAR:
        return False
    health.reasons.clear()
    return True


def record_bad_answer(table: EndpointTable, row: int, failure: Failure, *, now: float) -> bool:
    """Count a failure; whether that is news: the endpoint became a suspect, or fails in a way that is new."""
    health = table.healths[row]
    health.count(has_failed=True)
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
