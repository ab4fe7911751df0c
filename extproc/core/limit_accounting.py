# SPDX-License-Identifier: Apache-2.0
"""What requests cost their callers: grants of limits and budgets, service of flows, and levels that processes share.

The processes of one machine publish what they spend of local limits, so each has the level of every bucket. A process
that starts would begin with full buckets, and restarts of a worker would circumvent every limit. So it requests the
levels from the others and keeps the lower of each two: they may not have received its own grants yet.

Messages take some milliseconds. What others have granted meanwhile is in memory that the processes share, and one
process at a time grants. So at any moment local limits are granted once, however many workers are asked at once.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.admission.budgets import ALONE
from extproc.admission.local_limits import MOST_LEVELS
from extproc.admission.rate_limits import Grant
from extproc.admission.token_buckets import BucketLevel, BudgetWindowTables, Limit, Reservation
from extproc.core.effects import Broadcast, ChargeSharedStore, Effect, SettleGrant, SoftBudgetPassed
from extproc.core.peer_events import AskLimitLevels, LimitLevels, LimitSpent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from extproc.admission.local_limits import LocalLimits
    from extproc.admission.rate_limits import Charge, RequestUsage
    from extproc.core.request_record import RequestRecord

# Requests for levels, one with each of the first heartbeats; a process that is alone gets no answer.
_MOST_QUESTIONS: Final = 20
# The claim of what was used without a reservation.
_UNRESERVED: Final = Reservation(0.0, 1.0, 0)


class MachineGrantLedger(AbstractContextManager[None], Protocol):
    """Grants of the processes of this machine that this one may not have been told of. Within it is this process's turn
    to grant: one process at a time decides.
    """

    def unseen_amount(self, key: str) -> float:
        """What others have granted of a bucket, and this process was not told of."""
        ...

    def record_grants(self, charges: Iterable[Charge]) -> int:
        """This process grants them, in its turn. Returns the number of the grant, which the others are told."""
        ...

    def mark_seen(self, process: str, number: int) -> None:
        """This process was told of the grants of another one up to ``number``."""
        ...


class _NoOthers(nullcontext[None]):
    """RecentGrants of a process that is alone."""

    def unseen_amount(self, key: str) -> float:  # noqa: ARG002 - of nobody
        return 0.0

    def record_grants(self, charges: Iterable[Charge]) -> int:  # noqa: ARG002 - nobody reads it
        return 0

    def mark_seen(self, process: str, number: int) -> None:
        pass


NO_OTHERS: Final = _NoOthers()


class LimitAccounting:
    """Reserve before a request is dispatched, settle when it has ended. Effects are appended to ``out``.

    ``machine``: the machine whose processes share the local limits; None: there is only this process. ``peers``:
    returns the number of other processes whose messages arrive. ``recent``: grants of this machine's other processes.
    ``has_readers``: whether there is any process that could read what is broadcast.
    """

    def __init__(
        self,
        limits: LocalLimits,
        *,
        machine: str | None,
        peers: Callable[[], int] = lambda: 0,
        recent: MachineGrantLedger = NO_OTHERS,
        has_readers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limits = limits
        self._recent = recent
        self._machine = machine
        self._has_readers = has_readers
        self._peers = peers
        # processes that use the shared store, counted when it last answered; without it fewer messages between
        # processes arrive
        self._sharers = 1
        # whose passing of a budget's soft share was reported, by the end of its window
        self._passed: BudgetWindowTables[set[str]] = BudgetWindowTables(set)
        # by which the wall clock is ahead of the times of events
        self.wall_offset_s = 0.0

    def reserve(self, charges: Sequence[Charge], now: float, out: list[Effect]) -> Grant:
        """Reserve in this process's own buckets; raises RateLimited with nothing taken."""
        with self._recent:
            grant = self._limits.reserve(charges, now, self._recent.unseen_amount)
            number = self._recent.record_grants(grant.charges)
        if self._is_shared:
            for charge in grant.charges:
                self._broadcast_spent(charge, charge.amount, out, reserved=charge.amount, number=number)
        return grant

    @property
    def _is_shared(self) -> bool:
        return self._machine is not None and self._has_readers()

    def on_store_answer(self) -> None:
        """The shared store has answered: count the processes that share it."""
        self._sharers = 1 + self._peers()

    def reserve_without_store(
        self, charges: Sequence[Charge], most_left: Sequence[float], now: float, out: list[Effect]
    ) -> Grant:
        """Reserve in place of the shared store: this process's part of what it has left; raises RateLimited.

        A request that is larger than the part is granted while the part is untouched, and leaves a debt.
        """
        part = 1.0 / max(self._sharers, 1 + self._peers())
        parts = [_part_of(charge, part) for charge in charges]
        known = zip(parts, most_left, strict=True)
        self._limits.cap_levels([BucketLevel(one.key, one.limit, level * part) for one, level in known], now)
        grant = msgspec.structs.replace(self._limits.reserve(parts, now), owed=charges)
        out.extend(ChargeSharedStore(charge, charge.amount) for charge in charges)
        return grant

    def report_soft_budgets(self, grants: Sequence[Grant], out: list[Effect]) -> None:
        """Report the grants with which callers pass the soft share of a budget, once for each caller."""
        for grant in grants:
            for charge, level in zip(grant.charges, grant.levels, strict=True):
                soft = -math.inf if charge.budget is None else charge.budget.soft
                # another process has reported it if the level was below before
                if level <= soft < level + charge.amount:
                    passed = self._passed.get_or_create(charge.limit.ends_at_s)
                    if charge.key not in passed:
                        passed.add(charge.key)
                        out.append(SoftBudgetPassed(charge, level))

    def forget_ended(self, wall_s: float) -> None:
        """Forget windows of budgets that have ended."""
        self._passed.drop_ended(wall_s)

    def settle_grants(self, grants: Sequence[Grant], used: RequestUsage | None, now: float, out: list[Effect]) -> None:
        """Correct each grant to the actual usage. ``used=None`` refunds all: the request was never dispatched."""
        for grant in grants:
            if grant.is_global:
                out.append(SettleGrant(grant, used))
                continue
            self._limits.settle(grant, used, now)
            if grant.owed:
                out.extend(ChargeSharedStore(charge, _used(used, charge) - charge.amount) for charge in grant.owed)
                continue
            if self._is_shared:
                for charge in grant.charges:
                    self._broadcast_spent(charge, _used(used, charge) - charge.amount, out, reserved=-charge.amount)

    def charge_unreserved(self, charges: Sequence[Charge], used: RequestUsage, now: float, out: list[Effect]) -> None:
        """Charge what was used without a reservation, or with one that was given back."""
        shared = [msgspec.structs.replace(one, amount=0.0) for one in charges if one.is_global]
        if shared:
            out.append(SettleGrant(Grant(shared, [_UNRESERVED] * len(shared), [], is_global=True), used))
        for one in charges:
            if not one.is_global:
                self._limits.spend_unreserved(one.key, one.limit, used.amount_of(one.resource), now)
                self._broadcast_spent(one, used.amount_of(one.resource), out)

    def settle_request(
        self, record: RequestRecord, used: RequestUsage | None, service: float, now: float, out: list[Effect]
    ) -> None:
        """Correct the accounts of a request's flow and of its limits; ``used`` None: no engine got it."""
        run, queued = record.run, record.queued
        if run is not None and run.gate is not None and queued is not None:
            tokens = 0.0 if used is None else used.input_tokens + used.output_tokens
            run.gate.on_request_ended(queued, service - run.charged, tokens=tokens, now=now)
        if record.is_decided_here:
            grants, record.grants = record.grants, ()
            self.settle_grants(grants, used, now, out)

    def _broadcast_spent(
        self, charge: Charge, amount: float, out: list[Effect], *, reserved: float = 0.0, number: int = 0
    ) -> None:
        if not charge.limit.ends_at_s:
            # what a bucket that fills has lost to a process that died comes back by itself
            reserved = 0.0
        if self._machine is not None and (amount or reserved):
            out.append(Broadcast(LimitSpent(self._machine, charge.key, charge.limit, amount, reserved, number)))


def _used(used: RequestUsage | None, charge: Charge) -> float:
    return 0.0 if used is None else used.amount_of(charge.resource)


def _part_of(charge: Charge, part: float) -> Charge:
    limit = Limit(charge.limit.rate * part, charge.limit.capacity * part, charge.limit.ends_at_s)
    enough = limit.capacity if charge.amount <= charge.limit.capacity else math.inf
    return msgspec.structs.replace(charge, key=f"{ALONE}{charge.key}", limit=limit, is_global=False, enough=enough)


class LimitLevelExchange:
    """Publishes and receives levels for one process. ``origin``: its name among the others. ``machine``: None if it is
    alone. ``recent``: as of its Accounts.
    """

    def __init__(
        self, limits: LocalLimits, *, machine: str | None, origin: str, recent: MachineGrantLedger = NO_OTHERS
    ) -> None:
        self._limits = limits
        self._recent = recent
        self._machine = machine
        self._origin = origin
        self._questions = 0
        # whether another process has sent its levels
        self.is_told = False

    def request_levels(self, out: list[Effect]) -> None:
        """With a heartbeat."""
        if self._machine is not None and not self.is_told and self._questions < _MOST_QUESTIONS:
            self._questions += 1
            out.append(Broadcast(AskLimitLevels(self._machine)))

    def on_event(
        self, event: LimitSpent | AskLimitLevels | LimitLevels, origin: str, now: float, out: list[Effect]
    ) -> None:
        """Apply an event of the process ``origin``, if it concerns this machine."""
        match event:
            case LimitSpent() if event.machine == self._machine:
                self._limits.on_remote_spend(origin, event.key, event.limit, event.amount, now, reserved=event.reserved)
                if event.grant:
                    self._recent.mark_seen(origin, event.grant)
            case AskLimitLevels() if event.machine == self._machine:
                levels = self._limits.levels(now)
                # budgets may have many; the last message says that it is all
                for begin in range(0, max(1, len(levels)), MOST_LEVELS):
                    part = levels[begin : begin + MOST_LEVELS]
                    out.append(Broadcast(LimitLevels(origin, part, has_more=begin + MOST_LEVELS < len(levels))))
            case LimitLevels() if event.asker == self._origin:
                self._limits.merge_levels(origin, event.levels, now)
                self.is_told = self.is_told or not event.has_more
