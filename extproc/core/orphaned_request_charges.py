# SPDX-License-Identifier: Apache-2.0
"""Budgets are charged for requests whose process died: by whichever process gets their entries of the access log.

An entry has what the usage log knows of its request, so the charge is that of the row. What the dead process had
reserved is given back apart from that. While the process may live, it settles the request itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.identity import Caller
from extproc.admission.rate_limits import NO_USAGE, RequestUsage
from extproc.api.charged_tokens import expected_tokens_of, used_tokens
from extproc.api.pricing import cost_micros
from extproc.api.usage_log import UsageContext
from extproc.core.request_record import Outcome, answer_usage_of

if TYPE_CHECKING:
    from extproc.core.effects import Effect
    from extproc.core.flow_control import AdmissionController
    from extproc.core.limit_accounting import LimitAccounting

# Outcomes that processes which may live have yet to settle; the oldest are dropped first.
_MOST_PENDING: Final = 65_536


class OrphanedOutcome(msgspec.Struct, frozen=True):
    """A request that another process has decided. ``arrived_s``: seconds since 1970."""

    outcome: Outcome
    context: UsageContext
    arrived_s: float

    @property
    def ticket(self) -> str:
        """The other process's name for it."""
        return self.outcome.ticket

    @property
    def ended_s(self) -> float:
        """Seconds since 1970."""
        return self.arrived_s + self.outcome.duration_s


def process_of_ticket(ticket: str) -> str:
    """The process that has given the ticket."""
    return ticket.rpartition("-")[0]


class OrphanedRequests:
    """Those of other processes, which may be gone.

    ``rows_read_s``: when usage rows were read last, by any process. What ended before is in the rows, or will be when
    they are read again; charged here, it could count twice.
    """

    def __init__(self, admission: AdmissionController, accounts: LimitAccounting) -> None:
        self._admission = admission
        self._accounts = accounts
        # by process
        self._pending: OrderedDict[str, list[OrphanedOutcome]] = OrderedDict()
        self._count = 0
        self.rows_read_s = -math.inf

    def on_outcome(self, orphan: OrphanedOutcome, now: float, out: list[Effect], *, may_be_settled: bool) -> None:
        """Charge it, or wait for a sign that its process lives and has got the outcome."""
        if not may_be_settled:
            self._charge(orphan, now, out)
            return
        self._pending.setdefault(process_of_ticket(orphan.ticket), []).append(orphan)
        self._count += 1
        if self._count > _MOST_PENDING:
            self._drop(next(iter(self._pending)))

    def on_process_alive(self, origin: str) -> None:
        """The process has sent something, and settles all that it was told before."""
        if self._pending:
            self._drop(origin)

    def on_process_lost(self, origin: str, now: float, out: list[Effect]) -> None:
        """The process has sent nothing since."""
        for orphan in self._drop(origin):
            self._charge(orphan, now, out)

    def _drop(self, origin: str) -> list[OrphanedOutcome]:
        found = self._pending.pop(origin, [])
        self._count -= len(found)
        return found

    def _charge(self, orphan: OrphanedOutcome, now: float, out: list[Effect]) -> None:
        if orphan.ended_s < self.rows_read_s:
            return
        context, used = orphan.context, _used_by(orphan)
        caller = Caller(context.tenant, context.user, context.api_key)
        charges = self._admission.budgets_of_route(context.route).charges(caller, used, orphan.arrived_s)
        self._accounts.charge_unreserved(charges, used, now, out)


def _used_by(orphan: OrphanedOutcome) -> RequestUsage:
    """As its row has it."""
    found = used_tokens(expected_tokens_of(orphan.context), answer_usage_of(orphan.outcome))
    if found is None:
        return NO_USAGE
    price = orphan.context.as_served_by(orphan.outcome.served_by).price
    cost = 0 if price is None else cost_micros(price, found.counts)
    return RequestUsage(float(found.counts.input), float(found.counts.output), cost_micros=float(cost))
