# SPDX-License-Identifier: Apache-2.0
"""The request of one stream: what it waits for, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.effects import Decision, Pending, RequestRefused
from extproc.core.trace import Trace
from extproc.core.trace_attributes import decision_tags, pick_attributes, request_tags
from extproc.refusals import StoredAnswer

if TYPE_CHECKING:
    from extproc.core.admission_pipeline import Answer
    from extproc.core.effects import RequestEffect
    from extproc.core.request_record import Arrival, GatewayProperties
    from extproc.scheduling.pool import Assignment
    from extproc.streams.stream_dependencies import StreamContext

# Why a request has no engine whose client did not wait for one.
_LEFT: Final = "client_left"


class StreamRequest:
    """Follows the effects that are about this request; the context performs the others.

    ``sent``: where an engine was found for it. The prompt and the body are not kept: an answer may take an hour.
    """

    def __init__(self, context: StreamContext) -> None:
        self.pending: Pending | None = None
        self.sent: Assignment | None = None
        self.ticket = ""
        self._context = context
        # None: not sampled
        self.trace: Trace | None = None
        self._is_closed = False

    def submit(
        self, arrival: Arrival, attachment: GatewayProperties, began_s: float
    ) -> Decision | RequestRefused | None:
        """Pass the arrival to the core; returns the decision, None: something is pending. ``began_s``: when it was
        whole.
        """
        context = self._context
        log = context.metrics.decision_log
        wants = context.options.emits_scores or (self._is_shown(arrival, began_s) if log is None else log.draw_sample())
        now, parent = began_s, context.trace_parent
        if parent is not None:
            trace = self.trace = Trace(parent, began_s, request_tags(arrival))
            now, wants = context.clock(), True
            trace.start_step("parse", began_s)
        own, effects = context.core.arrive(arrival, now, attachment, wants_reasons=wants, trace=self.trace)
        # whatever fails from here on, ``close`` ends the request
        self.ticket = own.ticket
        if context.metrics.recent.is_open:
            context.metrics.recent.on_arrival(own.ticket, arrival, began_s)
        context.perform(effects, own)
        if isinstance(own, Decision):
            context.metrics.observe_pick_seconds(context.clock() - began_s)
        return self._follow(own)

    def resume(self, answer: Answer | Decision | RequestRefused) -> Decision | RequestRefused | None:
        """Go on with the answer that was pending."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if isinstance(answer, Decision | RequestRefused):
            return self._follow(answer)
        own, effects = self._context.core.resume(pending.ticket, answer, self._context.clock())
        self._context.perform(effects, own)
        return None if own is None else self._follow(own)

    def on_stream_closed(self) -> None:
        """The stream has ended: so has the request, or, if it was not answered yet, its client went away."""
        context = self._context
        if self.ticket and not self._is_closed:
            self._is_closed = True
            if self.sent is None:
                self._refused(_LEFT)
            verb = context.core.on_disconnect if self.sent is None else context.core.on_stream_closed
            now = context.clock()
            if context.metrics.recent.is_open:
                context.metrics.recent.on_stream_closed(self.ticket, now)
            context.perform(verb(self.ticket, now))

    def _is_shown(self, arrival: Arrival, now: float) -> bool:
        """Whether the console shows why this request's engine was chosen. Where decisions are logged, it shows that of
        those in the log, so that there are no others.
        """
        recent = self._context.metrics.recent
        return recent.is_open and recent.wants_reasons(len(arrival.pool.table), now)

    def _follow(self, own: RequestEffect) -> Decision | RequestRefused | None:
        if self._context.metrics.recent.is_open:
            self._context.metrics.recent.on_step(own, self._context.clock())
        match own:
            case Decision():
                self.sent = own.assignment
                self._decided(own)
                return own
            case RequestRefused():
                self._is_closed = True
                self._refused("" if isinstance(own.refusal, StoredAnswer) else own.refusal.outcome)
                return own
            case _:
                self.pending = own
                return None

    def _decided(self, decision: Decision) -> None:
        trace = self.trace
        if trace is not None:
            trace.on_decision(pick_attributes(decision), decision_tags(decision), self._context.clock())
            self._hand_over(trace)

    def _refused(self, error: str) -> None:
        trace = self.trace
        if trace is not None:
            trace.on_refusal(error, self._context.clock())
            self._hand_over(trace)

    def _hand_over(self, trace: Trace) -> None:
        trace.ticket = self.ticket
        if self._context.traces is not None:
            self._context.traces.add(trace)
