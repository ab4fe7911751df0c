# SPDX-License-Identifier: Apache-2.0
"""What requests cost their callers: grants of rate limits, and service of flows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.buckets import Limit
from extproc.admission.limits import BucketLevel
from extproc.core.effects import Effect, Owe, SettleGrant, Tell
from extproc.core.peers import Spent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.admission.limits import Charge, Grant, LocalLimits, Usage
    from extproc.core.record import Record

# After the key of a bucket in the shared store: this process's part of it while the store is away.
_ALONE: Final = "/alone"


class Accounts:
    """Reserve before a request is dispatched, settle when it has ended. Effects are appended to ``out``.

    ``machine``: the machine whose processes share the local limits; None: there is only this process. ``peers``: how
    many other processes are heard of.
    """

    def __init__(self, limits: LocalLimits, *, machine: str | None, peers: Callable[[], int] = lambda: 0) -> None:
        self._limits = limits
        self._machine = machine
        self._peers = peers
        # processes that use the shared store, as far as was known when it last answered; without it they hear less of
        # each other
        self._sharers = 1

    def reserve(self, charges: Sequence[Charge], now: float, out: list[Effect]) -> Grant:
        """Reserve in this process's own buckets; raises RateLimited with nothing taken."""
        grant = self._limits.reserve(charges, now)
        for charge in charges:
            self._tell_spent(charge, charge.amount, out)
        return grant

    def store_answered(self) -> None:
        """The shared store is there, and so are those who are heard of."""
        self._sharers = 1 + self._peers()

    def reserve_alone(
        self, charges: Sequence[Charge], most_left: Sequence[float], now: float, out: list[Effect]
    ) -> Grant:
        """Reserve in place of the shared store: this process's part of what it has left; raises RateLimited.

        A request that is larger than the part is granted while the part is untouched, and leaves a debt.
        """
        part = 1.0 / max(self._sharers, 1 + self._peers())
        parts = [_part_of(charge, part) for charge in charges]
        known = zip(parts, most_left, strict=True)
        self._limits.lower([BucketLevel(one.key, one.limit, level * part) for one, level in known], now)
        grant = msgspec.structs.replace(self._limits.reserve(parts, now), owed=charges)
        out.extend(Owe(charge, charge.amount) for charge in charges)
        return grant

    def settle_grants(self, grants: Sequence[Grant], used: Usage | None, now: float, out: list[Effect]) -> None:
        """Correct each grant to the actual usage. ``used=None`` refunds all: the request was never dispatched."""
        for grant in grants:
            if grant.is_global:
                out.append(SettleGrant(grant, used))
                continue
            self._limits.settle(grant, used, now)
            if grant.owed:
                out.extend(Owe(charge, _used(used, charge) - charge.amount) for charge in grant.owed)
                continue
            for charge in grant.charges:
                self._tell_spent(charge, _used(used, charge) - charge.amount, out)

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


def _used(used: Usage | None, charge: Charge) -> float:
    return 0.0 if used is None else used.of(charge.resource)


def _part_of(charge: Charge, part: float) -> Charge:
    limit = Limit(charge.limit.rate * part, charge.limit.capacity * part)
    enough = limit.capacity if charge.amount <= charge.limit.capacity else math.inf
    return msgspec.structs.replace(charge, key=f"{charge.key}{_ALONE}", limit=limit, is_global=False, enough=enough)
