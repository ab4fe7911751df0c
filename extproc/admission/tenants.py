# SPDX-License-Identifier: Apache-2.0
"""The first of two levels of fairness: tenants share a band, flows share a tenant.

A tenant's users, sessions, models and adapters are flows. Were flows alone treated fairly, 200 users would have 200
parts. So the policy of the band first chooses among tenants, with an account of each tenant's service, and then among
the chosen tenant's flows. Its bound between two flows (see each policy) thus holds between two tenants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extproc.admission.deficit_locality import DeficitLocality
from extproc.admission.policy import FlowHeads

if TYPE_CHECKING:
    from extproc.admission.policy import FairnessPolicy
    from extproc.endpoints.table import Bools, Ints


class TenantShares:
    """The accounts of the tenants of one band. A tenant has a row while any of its flows has one."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self.policy = policy
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []
        # by row of the tenant: its flows, and those of them that have a waiting request
        self._flows: Ints = np.zeros(0, np.int64)
        self._waiting: Ints = np.zeros(0, np.int64)
        # by row of the flow: the row of its tenant, -1 if there is no such flow
        self._tenants: Ints = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def grow(self, flows: int) -> None:
        """There are rows for so many flows."""
        self._tenants = np.pad(self._tenants, (0, flows - self._tenants.size), constant_values=-1)

    def join(self, flow: int, tenant: str) -> None:
        """The row ``flow`` was given to a flow of ``tenant``."""
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = self._new_row(tenant)
        self._flows[row] += 1
        self._tenants[flow] = row

    def leave(self, flow: int) -> None:
        """The flow is forgotten; with its last flow its tenant is."""
        row = int(self._tenants[flow])
        self._tenants[flow] = -1
        self._flows[row] -= 1
        if not self._flows[row]:
            del self._rows[self._names[row]]
            self.policy.forget(row)
            self._free.append(row)

    def siblings(self, flow: int) -> Bools:
        """By row, the flows of the same tenant."""
        return np.equal(self._tenants, int(self._tenants[flow]))

    def begins_waiting(self, flow: int) -> None:
        """A flow without waiting requests is about to get one."""
        row = int(self._tenants[flow])
        if not self._waiting[row]:
            self.policy.activate(row, self._waiting > 0)
        self._waiting[row] += 1

    def ends_waiting(self, flow: int) -> None:
        """The flow's last waiting request is gone."""
        self._waiting[self._tenants[flow]] -= 1

    def next(self, candidates: Bools, now: float) -> Bools:
        """By row, the flows of the tenants whose turn it is; at least one of ``candidates`` is among them."""
        policy, count = self.policy, self._flows.size
        asking = np.zeros(count, np.bool_)
        asking[self._tenants[candidates]] = True
        heads = FlowHeads(self._waiting > 0, np.zeros(count), np.zeros(count))
        if isinstance(policy, DeficitLocality):
            # among all that can pay, the longest match goes first
            payable = policy.able_to_pay(asking, heads)
            return np.where(self._tenants >= 0, payable[self._tenants], False)
        return np.equal(self._tenants, policy.choose(asking, heads, now))

    def charge(self, flow: int, service: float, now: float) -> None:
        """A request of the flow is dispatched."""
        self.policy.charge(int(self._tenants[flow]), service, now)

    def settle(self, flow: int, service: float, now: float) -> None:
        """A request of the flow has ended. ``service``: actual minus expected service."""
        self.policy.settle(int(self._tenants[flow]), service, now)

    def largest(self, sizes: Ints) -> Bools:
        """By row, the flows of the tenant that has most by ``sizes``, of which there is one for each flow."""
        present = self._tenants >= 0
        totals = np.bincount(self._tenants[present], weights=sizes[present])
        return np.equal(self._tenants, totals.argmax())

    def _new_row(self, tenant: str) -> int:
        if self._free:
            row = self._free.pop()
            self._names[row] = tenant
            return row
        self._names.append(tenant)
        rows = len(self._names)
        if rows > self._flows.size:
            more = max(8, 2 * self._flows.size) - self._flows.size
            self._flows, self._waiting = (np.pad(one, (0, more)) for one in (self._flows, self._waiting))
            self.policy.grow(self._flows.size)
        return rows - 1
