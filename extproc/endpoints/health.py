# SPDX-License-Identifier: Apache-2.0
"""Health: what the answers of one endpoint were like, and what its failures are called."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

# An engine without a report for so long, and for so many intervals, is silent: only our own counts are used for it.
_SILENT_AFTER_S: Final = 5.0
_SILENT_INTERVALS: Final = 3.0
_MEMORY_ANSWERS: Final = 50.0
_KEPT: Final = 1 - 1 / _MEMORY_ANSWERS
_REMEMBERED_REFUSALS: Final = 64
_MOST_VOICES: Final = 64
# After a refusal that another endpoint did not share.
_CHECKS_REFUSALS_S: Final = 30.0
# Of an endpoint whose breaker is open without being a suspect: no answer of it was ever judged.
NO_ANSWER: Final = "it cannot be reached, or answers nothing"


def silent_after_s(interval_s: float) -> float:
    """The age of its last report at which an engine counts as silent. ``interval_s``: between two reads of it."""
    return max(_SILENT_AFTER_S, _SILENT_INTERVALS * interval_s)


class EngineFailure(enum.Enum):
    """What was wrong with an answer, for the log."""

    PASSED_OVER = "it does not answer requests, and Envoy goes on to the next endpoint"
    REFUSED = "it refuses requests (4xx) that others serve"
    ERROR = "it answers with errors (408 or 5xx)"
    CUT = "its answers end early"
    NO_USAGE = "its answers end without usage, so they are cut short or no answers at all"
    SILENT = "it has requests and answers none"


ADVICE: Final = {
    EngineFailure.PASSED_OVER: "see that it runs and listens on the address of its ModelServer",
    EngineFailure.REFUSED: "compare its model, adapters and version with the others'",
    EngineFailure.ERROR: "read its log; it may be out of memory or overloaded",
    EngineFailure.CUT: "read its log; it may crash or run out of memory",
    EngineFailure.NO_USAGE: "read its log, and see that an engine of this version listens at this address",
    EngineFailure.SILENT: "it may hang: read its log, and restart it",
}


class EndpointHealth(msgspec.Struct):
    """What one endpoint's answers were like.

    ``answers``, ``failed``: decayed counts. ``served_at_s``: end of its last good answer. ``reasons``: why it is a
    suspect, empty if it is none. ``refusals``: of which requests, lately. ``voices``: by tenant, the refusals or
    failures that counted, decayed, and the answer's number. ``asked_by``: the last two tenants, the latest first, each
    with the number of its last answer.
    ``checks_refusals_until_s``: Envoy tries what it refuses at the next endpoint.
    ``lacks_model``: its ModelServer's model, if the engine lists its models and not this one. ``serves_unlisted``: its
    last answer to a request for that model was good all the same. ``listed_at_s``: when it last listed its models.
    """

    answers: float = 0.0
    failed: float = 0.0
    served_at_s: float = 0.0
    reasons: set[EngineFailure] = msgspec.field(default_factory=set)
    refusals: list[int] = []
    number: int = 0
    voices: dict[str, tuple[float, int]] = {}
    asked_by: tuple[tuple[str, int], ...] = ()
    checks_refusals_until_s: float = 0.0
    lacks_model: str = ""
    serves_unlisted: bool = False
    listed_at_s: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """Its answers fail more than the others'."""
        return bool(self.reasons)

    def count_answer(self, tenant: str, *, has_failed: bool) -> None:
        """Take one more answer, to a request of ``tenant``."""
        self.answers = self.answers * _KEPT + 1
        self.failed = self.failed * _KEPT + has_failed
        self.number += 1
        self.asked_by = ((tenant, self.number), *[one for one in self.asked_by if one[0] != tenant][:1])

    def start_refusal_check(self, now: float) -> None:
        """It refuses a request, and it is not known whether the others would: have them asked for a while."""
        self.checks_refusals_until_s = now + _CHECKS_REFUSALS_S

    def should_count_refusal(self, tenant: str, request: int) -> bool:
        """Whether a refusal that no other endpoint could check says something of the endpoint, and not of the request
        alone; it is remembered then. ``request``: a hash of its prompt.
        """
        return not self.is_repeated_refusal(request) and self.should_count_failure(tenant)

    def should_count_failure(self, tenant: str) -> bool:
        """Whether a failure that ``tenant`` met counts; it is remembered then.

        A tenant has one voice: its failures count no more than all that others met, and one. But where nobody else
        asks, there is nobody else to hear.
        """
        own = self._counted_of(tenant)
        has_others = any(name != tenant and self.number - last < _MEMORY_ANSWERS for name, last in self.asked_by)
        if has_others and own >= 1 + self.failed - own:
            return False
        self.voices[tenant] = own + 1, self.number + 1
        if len(self.voices) > _MOST_VOICES:
            del self.voices[min(self.voices, key=self._counted_of)]
        return True

    def _counted_of(self, tenant: str) -> float:
        count, number = self.voices.get(tenant, (0.0, self.number))
        return float(count * _KEPT ** (self.number - number))

    def is_repeated_refusal(self, request: int) -> bool:
        """Whether the endpoint has refused this very request before. ``request``: a hash of its prompt."""
        if request in self.refusals:
            return True
        self.refusals.append(request)
        del self.refusals[:-_REMEMBERED_REFUSALS]
        return False
