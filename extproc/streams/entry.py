"""One request's way through limits, tokens and queue to a decision, without I/O: what must be waited for is ``pending``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from extproc.admission.limits import Charge, Grant, unavailable
from extproc.core.types import Arrival, Decision, Held, Terms
from extproc.errors import Refusal

if TYPE_CHECKING:
    from extproc.core.types import Attachment
    from extproc.streams.exchange import Desk


class GrantWanted(msgspec.Struct, frozen=True):
    """Limits that all machines share are to grant this. Answered with a Grant, a Refusal, or None if nobody can be asked."""

    charges: Sequence[Charge]


class TokensWanted(msgspec.Struct, frozen=True):
    """The request would be decided better with its tokens. Answered with them, or None."""

    arrival: Arrival


# What a request may wait for; one that is Held is answered with a Decision or a Refusal.
Pending = GrantWanted | TokensWanted | Held
Answer = Grant | Decision | Refusal | Sequence[int] | None


class Entry:
    """From an arrival to its decision."""

    def __init__(self, desk: Desk, arrival: Arrival, attachment: Attachment, began: float) -> None:
        self._desk = desk
        self.arrival = arrival
        self._attachment = attachment
        self._began = began
        self._grants: tuple[Grant, ...] = ()
        self.pending: Pending | None = None

    def begin(self) -> Decision | None:
        """The decision, or None: something is pending. Raises a Refusal."""
        charges = self._desk.pipeline.admission.charges(self.arrival)
        if charges:
            everywhere = [charge for charge in charges if charge.is_global]
            self._reserve([charge for charge in charges if not charge.is_global])
            if everywhere:
                self.pending = GrantWanted(everywhere)
                return None
        return self._ask_tokens()

    def resume(self, answer: Answer) -> Decision | None:
        """Go on with what was pending; as ``begin``."""
        pending, self.pending = self.pending, None
        match pending:
            case GrantWanted():
                self._granted(pending, answer)
                return self._ask_tokens()
            case TokensWanted():
                # the shell answers what was asked
                return self._enter(answer)  # type: ignore[arg-type]
            case Held():
                if isinstance(answer, Refusal):
                    raise answer
                return answer if isinstance(answer, Decision) else None
            case None:
                return None

    def close(self) -> None:
        """The client has gone while something was pending."""
        pending, self.pending = self.pending, None
        if isinstance(pending, Held):
            self._desk.leave(pending)
        elif pending is not None:
            self._give_back()

    def _ask_tokens(self) -> Decision | None:
        if self.arrival.wants_tokens and self.arrival.request.prompt:
            self.pending = TokensWanted(self.arrival)
            return None
        return self._enter(None)

    def _enter(self, tokens: Sequence[int] | None) -> Decision | None:
        desk = self._desk
        terms = Terms(tokens, self._attachment, desk.metrics.wants_reasons(), self._grants)
        found = desk.enter(self.arrival, terms, began=self._began)
        if isinstance(found, Held):
            self.pending = found
            return None
        return found

    def _granted(self, queued: GrantWanted, answer: Answer) -> None:
        if isinstance(answer, Grant):
            self._grants = (*self._grants, answer)
            return
        if answer is None and not any(charge.needs_redis for charge in queued.charges):
            # what this machine grants by itself
            self._reserve(queued.charges)
            return
        self._give_back()
        raise answer if isinstance(answer, Refusal) else unavailable()

    def _reserve(self, charges: Sequence[Charge]) -> None:
        if not charges:
            return
        try:
            grant = self._desk.pipeline.admission.reserve(charges, self._desk.clock())
        except Refusal:
            self._give_back()
            raise
        self._grants = (*self._grants, grant)

    def _give_back(self) -> None:
        grants, self._grants = self._grants, ()
        self._desk.pipeline.admission.settle_grants(grants, None, self._desk.clock())
