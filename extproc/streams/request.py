# SPDX-License-Identifier: Apache-2.0
"""The request of one stream, between the core and the gateway: what it waits for, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.effects import Decision, Pending, Refused

if TYPE_CHECKING:
    from extproc.core.entering import Answer, Own
    from extproc.core.types import Arrival, Attachment
    from extproc.streams.context import StreamContext


class StreamRequest:
    """Follows the effects that are about this request; the context performs the others."""

    def __init__(self, context: StreamContext, arrival: Arrival, ticket: str) -> None:
        self.arrival = arrival
        self.pending: Pending | None = None
        self.decision: Decision | None = None
        self._context = context
        self._ticket: str | None = ticket

    @classmethod
    def begin(
        cls, context: StreamContext, arrival: Arrival, attachment: Attachment, began_s: float
    ) -> tuple[StreamRequest, Decision | Refused | None]:
        """A request that goes to the core, and its answer; None: something is pending. ``began_s``: when it was whole."""
        log = context.metrics.decision_log
        own, effects = context.core.arrive(
            arrival, began_s, attachment, wants_reasons=log is not None and log.samples()
        )
        context.perform(effects)
        if isinstance(own, Decision):
            context.metrics.picked_within(context.clock() - began_s)
        request = cls(context, arrival, own.ticket)
        return request, request._follow(own)

    def resume(self, answer: Answer | Decision | Refused) -> Decision | Refused | None:
        """What was pending is here."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if isinstance(answer, Decision | Refused):
            return self._follow(answer)
        own, effects = self._context.core.resume(pending.ticket, answer, self._context.clock())
        self._context.perform(effects)
        return None if own is None else self._follow(own)

    def close(self) -> None:
        """The stream has ended: so has the request, or, if it was not answered yet, its client went away."""
        context, ticket = self._context, self._ticket
        if ticket is not None:
            verb = context.core.leave if self.decision is None else context.core.finish
            self._ticket = None
            context.perform(verb(ticket, context.clock()))

    def _follow(self, own: Own) -> Decision | Refused | None:
        match own:
            case Decision():
                self.decision = own
                return own
            case Refused():
                self._ticket = None
                return own
            case _:
                self.pending = own
                return None
