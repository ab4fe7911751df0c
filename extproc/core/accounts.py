# SPDX-License-Identifier: Apache-2.0
"""What requests cost their callers: grants of rate limits, and service of flows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.effects import Effect, SettleGrant, Tell
from extproc.core.peer_events import Spent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.admission.limits import Charge, Grant, Usage
    from extproc.admission.local_limits import LocalLimits
    from extproc.core.record import Record


class Accounts:
    """Reserve before a request is dispatched, settle when it has ended. Effects are appended to ``out``.

    ``machine``: the machine whose processes share the local limits; None: there is only this process.
    """

    def __init__(self, limits: LocalLimits, *, machine: str | None) -> None:
        self._limits = limits
        self._machine = machine

    def reserve(self, charges: Sequence[Charge], now: float, out: list[Effect]) -> Grant:
        """Reserve in this process's own buckets; raises RateLimited with nothing taken."""
        grant = self._limits.reserve(charges, now)
        for charge in charges:
            self._tell_spent(charge, charge.amount, out)
        return grant

    def settle_grants(self, grants: Sequence[Grant], used: Usage | None, now: float, out: list[Effect]) -> None:
        """Correct each grant to the actual usage. ``used=None`` refunds all: the request was never dispatched."""
        for grant in grants:
            if grant.is_global:
                out.append(SettleGrant(grant, used))
                continue
            self._limits.settle(grant, used, now)
            for charge in grant.charges:
                actual = 0.0 if used is None else used.of(charge.resource)
                self._tell_spent(charge, actual - charge.amount, out)

    def close(self, record: Record, used: Usage | None, service: float, now: float, out: list[Effect]) -> None:
        """Correct the accounts of a request's flow and of its limits; ``used`` None: no engine got it."""
        run, queued = record.run, record.queued
        if run is not None and run.gate is not None and queued is not None:
            tokens = 0.0 if used is None else used.input_tokens + used.output_tokens
            run.gate.ended(queued, service - run.charged, tokens=tokens, now=now)
        if record.is_ours:
            grants, record.grants = record.grants, ()
            self.settle_grants(grants, used, now, out)

    def _tell_spent(self, charge: Charge, amount: float, out: list[Effect]) -> None:
        if self._machine is not None and amount:
            out.append(Tell(Spent(self._machine, charge.key, charge.limit, amount)))
