# SPDX-License-Identifier: Apache-2.0
"""The tiers of a request's rule as candidates: what it would cost there, and how soon it would be answered.

Predictions follow from what is learned of each ModelServer, at the endpoint that its picker would choose:

    TTFT = (backlog + own work) / prefill rate + wait in its queue
    TPOT = spread * (step + step per token * (tokens in flight there + own ones)), or the recent mean if that is larger

Without requests nothing is learned, so one slow hour could shut a tier for ever: predictions for an idle ModelServer
that no request has taken for some minutes count as unknown, and the next request tries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.pricing import TokenCounts, cost_micros
from extproc.core.dispatch import constraints_of, prompt_of
from extproc.core.request_record import TierPlacement
from extproc.endpoints.breaker import BreakerState
from extproc.endpoints.in_flight import backlog_of
from extproc.refusals import Refusal
from extproc.routing.cost_tiers import TierCandidate, choose_tier

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival, RequestRecord

_TRY_AGAIN_S: Final = 300.0


class TierSelector:
    """Chooses the tiers of requests."""

    def __init__(self, gates: Callable[[], Mapping[str, FlowControlGate]], *, rng: random.Random) -> None:
        self._gates = gates
        self._rng = rng
        # by ModelServer: when a request of a rule with tiers last took it, or when it was first considered
        self._taken_at_s: dict[str, float] = {}

    def retain_only(self, servers: Collection[str]) -> None:
        """Forget all other ModelServers."""
        for server in self._taken_at_s.keys() - set(servers):
            del self._taken_at_s[server]

    def choose_tier(
        self,
        builder: RequestBuilder,
        record: RequestRecord,
        now: float,
        *,
        is_tried: bool = False,
    ) -> tuple[Arrival, TierPlacement] | None:
        """The request at the tier that it takes, and why; None if its rule has none, or none of them can serve it.

        ``is_tried``: nothing is to be remembered of it.
        """
        arrival = record.arrival_before_dispatch
        tiers = arrival.destination.rule.tiers
        if tiers is None:
            return None
        found: list[tuple[Arrival, TierCandidate]] = []
        for one in builder.arrivals_at_tiers(arrival):
            judged = self.evaluate_candidate(record, one, now)
            if judged is not None:
                found.append((one, judged))
        # a provider that reports that it is full takes requests if all are
        found = [one for one in found if not one[0].pool.is_provider_full(now)] or found
        if not found:
            return None
        candidates = tuple(candidate for _, candidate in found)
        policy = tiers.policy_of(arrival.caller.tenant, arrival.priority)
        choice = choose_tier(candidates, policy, now - record.arrived_at_s)
        taken = found[choice.taken][0]
        if not is_tried:
            for candidate in candidates:
                self.record_choice(candidate.server, now, is_taken=False)
            self.record_choice(taken.pool.name, now, is_taken=True)
        return taken, TierPlacement(policy, candidates, choice)

    def record_choice(self, server: str, now: float, *, is_taken: bool) -> None:
        """A request was predicted at the ModelServer, and has taken it."""
        if is_taken:
            self._taken_at_s[server] = now
        else:
            self._taken_at_s.setdefault(server, now)

    def evaluate_candidate(self, record: RequestRecord, arrival: Arrival, now: float) -> TierCandidate | None:
        """The request at a ModelServer, as ``arrival``; None if no endpoint there can take it."""
        pool, request = arrival.pool, arrival.request
        table, prompt = pool.table, prompt_of(arrival, None)
        if pool.breaker.state(now) is BreakerState.OPEN:
            return None
        try:
            considered = pool.pick_endpoints(prompt, constraints_of(arrival, record.attachment), now=now, rng=self._rng)
        except Refusal:
            return None
        expectation, pick = considered.expectation, considered.pick
        row = pick.rows[0]
        computing = row if pick.prefill_row is None else pick.prefill_row
        demand, input_tokens = expectation.demand, expectation.input_tokens
        output_tokens = pool.expected_output(request.max_output_tokens, request.answers)
        price = pool.price_at(record.wall_s)
        cost = None
        if price is not None:
            cached = round(float(demand.cached_tokens[computing]))
            cost = cost_micros(price, TokenCounts(round(input_tokens), cached, output=round(output_tokens)))
        queue_s = _queue_s(self._gates().get(pool.name), now)
        found = TierCandidate(pool.name, cost, "" if price is None else price.currency, holds_back=queue_s > 0)
        if now - self._taken_at_s.get(pool.name, now) > _TRY_AGAIN_S and not table.in_flight[table.is_active].any():
            return found
        ttft_s = idle_ttft_s = None
        if table.rate_samples[computing]:
            work, rate = float(demand.work[computing]), float(table.prefill_rate[computing])
            idle_ttft_s = work / rate
            ttft_s = backlog_of(table, computing, now) / rate + idle_ttft_s + queue_s
        elif queue_s:
            ttft_s = queue_s
        speed, own = pool.caches.decode_speed, input_tokens + output_tokens
        idle_tpot_s = speed.step_s + speed.step_s_per_token * own if speed.is_learned else None
        others_s = speed.step_s_per_token * float(table.in_flight_tokens[row])
        known = [] if idle_tpot_s is None else [speed.spread * (idle_tpot_s + others_s)]
        if table.in_flight[row] and table.tpot_s[row]:
            known.append(float(table.tpot_s[row]))
        return msgspec.structs.replace(
            found,
            ttft_s=ttft_s,
            tpot_s=max(known, default=None),
            idle_ttft_s=idle_ttft_s,
            idle_tpot_s=idle_tpot_s,
        )


def _queue_s(gate: FlowControlGate | None, now: float) -> float:
    """What a request would wait for its turn; 0 without a queue, or if it has room."""
    return 0.0 if gate is None else gate.expected_wait_s(now)
