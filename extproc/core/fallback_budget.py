# SPDX-License-Identifier: Apache-2.0
"""The budget of a fallback: how many requests of other ModelServers it may have in flight, and each tenant's part.

Those that were sent there count, and so do those that were sent to an engine that has failed since and has answered
nothing after they came: Envoy has passed them on. One more is let in while the budget is not used up.

A tenant whose requests all fail would use it up, so that those of others fail with it. So where others may want it, a
tenant that has ``m`` of the budget gets one more only if it has none yet, or if it would have at most twice as many as
are left then: ``m + 1 <= 2 * (left - 1)``, ``left`` being what nobody has. By that rule

- one tenant has no more than two thirds of the budget;
- whoever is let in, no tenant with fewer would be refused at that moment;
- the last of the budget goes to a tenant that has nothing of it.

A tenant that is alone has all of ``B``. Others may want it if they have requests in flight that are there or would be
tried there next, or were refused for the budget in the last seconds.

How many of a tenant's requests are tried there Envoy alone knows, until their outcomes are known. So of its requests
that could be, a part counts: the mean part of their time that those before had there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from extproc.core.request_record import DispatchedRequest, Outcome
    from extproc.routing.routing_table import Fallbacks
    from extproc.scheduling.pool import Pool

# A refused client tries again within that time, if it does.
WANTED_S: Final = 10.0
# Of the last outcome in a tenant's mean; a mean below the second number is none.
_WEIGHT: Final = 0.2
_LEAST: Final = 0.01
# Tenants with such a mean, by ModelServer; the oldest are forgotten.
MOST_TENANTS: Final = 256


class FallbackBudgets:
    """By ModelServer: requests in flight that came, or may come, from another one."""

    def __init__(self) -> None:
        self._servers: dict[str, FallbackBudget] = {}
        # by ticket; that of its assignment may be another one when it ends
        self._places: dict[str, tuple[Pool, int]] = {}

    def retain_only(self, servers: Collection[str]) -> None:
        """Forget others that have no requests."""
        self._servers = {name: one for name, one in self._servers.items() if name in servers or one.has_requests}

    def on_dispatch(self, ticket: str, run: DispatchedRequest) -> None:
        """The request is sent to an engine."""
        if run.sent.is_fallback:
            self._of(run.pool.name).sent[run.sent.tenant] += 1
        self.on_planned(ticket, run)

    def on_planned(self, ticket: str, run: DispatchedRequest) -> None:
        """Its next ModelServers are known."""
        for server in run.sent.next_servers:
            self._of(server).listed[run.sent.tenant] += 1
        place = run.pool, run.assignment.endpoint.row
        for server in run.reserves:
            self._places[ticket] = place
            self._of(server).places.setdefault(place, {})[ticket] = run

    def on_stream_closed(self, ticket: str, run: DispatchedRequest) -> None:
        """Its stream is closed."""
        if run.sent.is_fallback:
            _less(self._of(run.pool.name).sent, run.sent.tenant)
        for server in run.sent.next_servers:
            _less(self._of(server).listed, run.sent.tenant)
        place = self._places.pop(ticket, None)
        if place is None:
            return
        for server in run.reserves:
            places = self._of(server).places
            runs = places.get(place, {})
            runs.pop(ticket, None)
            if not runs:
                places.pop(place, None)

    def learn(self, run: DispatchedRequest, outcome: Outcome) -> None:
        """The outcome of a request is known."""
        for server in run.sent.next_servers:
            self._of(server).learn(run.sent.tenant, _time_there(outcome) if outcome.served_by == server else 0.0)

    def has_headroom(self, pool: Pool, fallbacks: Fallbacks, tenant: str, now: float) -> bool:
        """Whether the ModelServer may have one more request of the rule that has these ``fallbacks``."""
        in_flight = float(pool.table.in_flight[pool.table.is_active].sum())
        return self._of(pool.name).may_admit(tenant, fallbacks.budget(in_flight), now)

    def _of(self, server: str) -> FallbackBudget:
        return self._servers.setdefault(server, FallbackBudget())


class FallbackBudget:
    """Of one ModelServer. ``sent``: by tenant, what was sent there. ``listed``: by tenant, what was sent elsewhere,
    with this one as a fallback. ``places``: those of this process, by the endpoint that has them, and by ticket.
    Endpoints that fail are few, and there may be ten thousand requests.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.listed: Counter[str] = Counter()
        self.places: dict[tuple[Pool, int], dict[str, DispatchedRequest]] = {}
        # by tenant, see the module
        self._means: OrderedDict[str, float] = OrderedDict()
        # the last two tenants that were refused, and when
        self._refused: OrderedDict[str, float] = OrderedDict()

    @property
    def has_requests(self) -> bool:
        """In flight, there or with this one as a fallback."""
        return bool(self.sent or self.listed or self.places)

    def learn(self, tenant: str, time_there: float) -> None:
        """``time_there``: the part of a request's time that it had there."""
        mean = self._means.pop(tenant, 0.0)
        mean += _WEIGHT * (time_there - mean)
        if mean >= _LEAST:
            self._means[tenant] = mean
            if len(self._means) > MOST_TENANTS:
                self._means.popitem(last=False)

    def may_admit(self, tenant: str, budget: float, now: float) -> bool:
        """Whether ``tenant`` may have one more."""
        passed = self._passed_on()
        is_in = self.sent.total() + passed.total() < budget and (
            not self._may_want_it(tenant, now) or self._has_part(tenant, budget, passed)
        )
        if not is_in:
            self._refused.pop(tenant, None)
            self._refused[tenant] = now
            if len(self._refused) > 2:
                self._refused.popitem(last=False)
        return is_in

    def _has_part(self, tenant: str, budget: float, passed: Mapping[str, int]) -> bool:
        """See the module."""
        expected = {one: max(passed.get(one, 0), self._means.get(one, 0.0) * self.listed[one]) for one in self._means}
        expected = {**passed, **expected}
        mine = self.sent[tenant] + expected.get(tenant, 0.0)
        left = budget - self.sent.total() - sum(expected.values())
        return mine == 0.0 or mine + 1 <= 2 * (left - 1)

    def _passed_on(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (own, row), runs in self.places.items():
            if own.breaker.trips or (own.table.has_failures and own.table.trips[row]):
                found.update(run.sent.tenant for run in runs.values() if _was_passed_on(run))
        return found

    def _may_want_it(self, tenant: str, now: float) -> bool:
        """Whether another tenant may."""
        return any(len(counts) > (tenant in counts) for counts in (self.sent, self.listed)) or any(
            one != tenant and now < at + WANTED_S for one, at in self._refused.items()
        )


def _less(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]


def _was_passed_on(run: DispatchedRequest) -> bool:
    """Whether its endpoint, which fails, has answered nothing since."""
    table, endpoint = run.pool.table, run.assignment.endpoint
    return table.is_current(endpoint) and run.sent_at_s > table.healths[endpoint.row].served_at_s


def _time_there(outcome: Outcome) -> float:
    """The part of the request's time that its last attempt took."""
    if outcome.ttfb_s is None or outcome.engine_s is None or outcome.duration_s <= 0.0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - (outcome.ttfb_s - outcome.engine_s) / outcome.duration_s))
