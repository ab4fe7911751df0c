# SPDX-License-Identifier: Apache-2.0
"""The request of one stream: what it waits for, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.effects import Decision, Pending, Refused

if TYPE_CHECKING:
    from extproc.core.effects import RequestEffect
    from extproc.core.pipeline import Answer
    from extproc.core.record import Arrival, Attachment
    from extproc.scheduling.pool import Assignment
    from extproc.streams.context import StreamContext


class StreamRequest:
    """Follows the effects that are about this request; the context performs the others.

    ``sent``: where an engine was found for it. Of the prompt and the body nothing is kept: an answer may take an hour.
    """

    def __init__(self, context: StreamContext) -> None:
        self.pending: Pending | None = None
        self.sent: Assignment | None = None
        self.ticket = ""
        self._context = context
        self._is_closed = False

    def begin(self, arrival: Arrival, attachment: Attachment, began_s: float) -> Decision | Refused | None:
        """Give it to the core; returns its answer, None: something is pending. ``began_s``: when it was whole."""
        context = self._context
        log = context.metrics.decision_log
        own, effects = context.core.arrive(
            arrival, began_s, attachment, wants_reasons=log is not None and log.samples()
        )
        # whatever fails from here on, ``close`` ends the request
        self.ticket = own.ticket
        context.perform(effects, own)
        if isinstance(own, Decision):
            context.metrics.picked_within(context.clock() - began_s)
        return self._follow(own)

    def resume(self, answer: Answer | Decision | Refused) -> Decision | Refused | None:
        """What was pending is here."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if isinstance(answer, Decision | Refused):
            return self._follow(answer)
        own, effects = self._context.core.resume(pending.ticket, answer, self._context.clock())
        self._context.perform(effects, own)
        return None if own is None else self._follow(own)

    def close(self) -> None:
        """The stream has ended: so has the request, or, if it was not answered yet, its client went away."""
        context = self._context
        if self.ticket and not self._is_closed:
            self._is_closed = True
            verb = context.core.leave if self.sent is None else context.core.finish
            context.perform(verb(self.ticket, context.clock()))

    def _follow(self, own: RequestEffect) -> Decision | Refused | None:
        match own:
            case Decision():
                self.sent = own.assignment
                return own
            case Refused():
                self._is_closed = True
                return own
            case _:
                self.pending = own
                return None
