# SPDX-License-Identifier: Apache-2.0
"""What requests cost their callers: grants of rate limits, and the service that flows are charged for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.effects import Effect, SettleGrant, Tell
from extproc.core.peer_events import Spent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.admission.limits import Charge, Grant, LocalLimits, Usage
    from extproc.core.record import Record


class Accounts:
    """Reserves before a request goes, and settles when it is over. What others must know goes to ``out``.

    ``machine``: the machine whose processes share the local limits; None: there is only this process.
    """

    def __init__(self, limits: LocalLimits, *, machine: str | None) -> None:
        self._limits = limits
        self._machine = machine

    def reserve(self, charges: Sequence[Charge], now: float, out: list[Effect]) -> Grant:
        """From this process's own buckets; raises RateLimited, and then nothing was taken."""
        grant = self._limits.reserve(charges, now)
        for ask in charges:
            self._spent(ask, ask.amount, out)
        return grant

    def settle_grants(self, grants: Sequence[Grant], used: Usage | None, now: float, out: list[Effect]) -> None:
        """Correct what was granted to what was used; None: the request never went, and counts as no request either."""
        for grant in grants:
            if grant.is_global:
                out.append(SettleGrant(grant, used))
                continue
            self._limits.settle(grant, used, now)
            for ask in grant.charges:
                self._spent(ask, (0.0 if used is None else used.of(ask.resource)) - ask.amount, out)

    def close(self, record: Record, used: Usage | None, service: float, now: float, out: list[Effect]) -> None:
        """Correct the accounts of a request's flow and of its limits; ``used`` None: no engine got it."""
        run, queued = record.run, record.queued
        if run is not None and run.gate is not None and queued is not None:
            tokens = 0.0 if used is None else used.input_tokens + used.output_tokens
            run.gate.ended(queued, service - run.charged, tokens=tokens, now=now)
        if record.is_ours:
            grants, record.grants = record.grants, ()
            self.settle_grants(grants, used, now, out)

    def _spent(self, ask: Charge, amount: float, out: list[Effect]) -> None:
        if self._machine is not None and amount:
            out.append(Tell(Spent(self._machine, ask.key, ask.limit, amount)))
