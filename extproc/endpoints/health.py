# SPDX-License-Identifier: Apache-2.0
"""Health: what the answers of one endpoint were like, and what its failures are called."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

# An engine without a report for so long, and for so many intervals, does not say how it is: what is known of it are our
# own counts.
_SILENT_AFTER_S: Final = 5.0
_SILENT_INTERVALS: Final = 3.0
_MEMORY_ANSWERS: Final = 50.0
_REMEMBERED_REFUSALS: Final = 64


def silent_after_s(interval_s: float) -> float:
    """The age from which an engine's last report says that it is silent. ``interval_s``: between two reads of it."""
    return max(_SILENT_AFTER_S, _SILENT_INTERVALS * interval_s)


class Failure(enum.Enum):
    """What was wrong with an answer, for the log."""

    PASSED_OVER = "it does not answer requests, and Envoy goes on to the next endpoint"
    REFUSED = "it refuses requests (4xx) that others serve"
    ERROR = "it answers with errors (429 or 5xx)"
    CUT = "its answers end early"
    NO_USAGE = "its answers end without usage, so they are cut short or no answers at all"
    SILENT = "it has requests and answers none"


ADVICE: Final = {
    Failure.PASSED_OVER: "see that it runs and listens on the address of its ModelServer",
    Failure.REFUSED: "compare its model, adapters and version with the others'",
    Failure.ERROR: "read its log; it may be out of memory or overloaded",
    Failure.CUT: "read its log; it may crash or run out of memory",
    Failure.NO_USAGE: "read its log, and see that an engine of this version listens at this address",
    Failure.SILENT: "it may hang: read its log, and restart it",
}


NO_ANSWER: Final = "it cannot be reached, or answers nothing"
"""Of an endpoint that backs off without being a suspect: no answer of it was ever judged."""


class EndpointHealth(msgspec.Struct):
    """What one endpoint's answers were like.

    ``answers``, ``failed``: decayed counts. ``served_at_s``: end of its last good answer. ``reasons``: why it is a
    suspect, empty if it is none. ``avoided_since_s``: if it is one, or backs off. ``good_in_a_row``: of a suspect.
    ``probe_at_s``: when the first of the requests was sent that now try it one by one, 0 if none. ``refusals``: of
    which requests, lately.
    """

    answers: float = 0.0
    failed: float = 0.0
    served_at_s: float = 0.0
    reasons: set[Failure] = msgspec.field(default_factory=set)
    avoided_since_s: float = 0.0
    good_in_a_row: int = 0
    probe_at_s: float = 0.0
    refusals: list[int] = []

    @property
    def is_suspect(self) -> bool:
        """Its answers fail more than the others'."""
        return bool(self.reasons)

    def count(self, *, has_failed: bool) -> None:
        """Take one more answer."""
        kept = 1 - 1 / _MEMORY_ANSWERS
        self.answers = self.answers * kept + 1
        self.failed = self.failed * kept + has_failed

    def is_repeated(self, request: int) -> bool:
        """Whether the endpoint has refused this very request before. ``request``: a hash of its prompt."""
        if request in self.refusals:
            return True
        self.refusals.append(request)
        del self.refusals[:-_REMEMBERED_REFUSALS]
        return False
