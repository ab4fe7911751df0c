# SPDX-License-Identifier: Apache-2.0
"""The steps of one sampled request on its way to a decision, with their times: spans, as plain data.

Other requests have none of this: whether a request is sampled is decided by the gateway, before it comes here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.core.request_states import STEP_NAMES, RequestState

AttributeValue = str | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]

# W3C's Trace Context: version, id of the trace, id of the span, flags.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
# The other states are no part of a decision.
_PICK: Final = "pick"
_STEPS: Final[Mapping[RequestState, str]] = MappingProxyType({**STEP_NAMES, RequestState.RUNNING: _PICK})
# A request goes from one step to the next a few times; if its configuration changes all the while, more often.
_MOST_STEPS: Final = 32


class TraceParent(msgspec.Struct, frozen=True):
    """The span of the gateway that a decision belongs to. Both ids are hexadecimal."""

    trace_id: str
    span_id: str


class TraceStep(msgspec.Struct, frozen=True):
    """A span within a decision. Times are the core's."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = MappingProxyType({})


class Trace(msgspec.Struct):
    """One decision. ``started_s``: when the request was whole. ``tags``: what the gateway's spans say of the request.
    ``error``: the code of the refusal, empty if it was sent to an engine; ``ended_s``: 0 until then.
    """

    parent: TraceParent
    started_s: float
    tags: Mapping[str, str | int] = MappingProxyType({})
    ticket: str = ""
    error: str = ""
    ended_s: float = 0.0
    steps: list[TraceStep] = msgspec.field(default_factory=list)
    _name: str = ""
    _since_s: float = 0.0

    def enter_state(self, state: RequestState, now: float) -> None:
        """The request has come into ``state``."""
        self.start_step(_STEPS.get(state, ""), now)

    def start_step(self, name: str, now: float) -> None:
        """The step before has ended, and the one of this name begins; empty: none."""
        if self._name and len(self.steps) < _MOST_STEPS:
            self.steps.append(TraceStep(self._name, self._since_s, now))
        self._name, self._since_s = name, now

    def on_decision(self, attributes: Attributes, tags: Mapping[str, str | int], now: float) -> None:
        """The request has an endpoint. ``attributes``: of the pick. ``tags``: what the decision adds."""
        self.start_step("", now)
        if self.steps and self.steps[-1].name == _PICK:
            self.steps[-1] = msgspec.structs.replace(self.steps[-1], attributes=attributes)
        self.tags = {**self.tags, **tags}
        self.ended_s = now

    def on_refusal(self, error: str, now: float) -> None:
        """No engine gets the request. ``error``: why, as a code; empty: it was answered without one."""
        self.start_step("", now)
        self.tags = {**self.tags, "queue_ms": round(1000 * (now - self.started_s))}
        self.error, self.ended_s = error, now


def parse_trace_parent(metadata: Iterable[tuple[str, str]]) -> TraceParent | None:
    """The gateway's span, out of the metadata of its stream; None: the request is not sampled."""
    for name, value in metadata:
        if name == "traceparent":
            found = _TRACEPARENT.fullmatch(value)
            is_sampled = found is not None and int(found[3], 16) & _SAMPLED
            return TraceParent(found[1], found[2]) if found is not None and is_sampled else None
    return None
