# SPDX-License-Identifier: Apache-2.0
"""Requests whose first token is predicted to come too late for what their class is promised.

With ``unmeetable: Refuse`` in their class:

    due   = the shortest of the class's ttft (of streams), its e2e, and the deadline that the request brings
    ttft  = what it has waited + the prediction that tiers use

A request with ttft > due goes to another ModelServer of its rule that is predicted to hold it: the cheapest of those
that ``spill`` allows, if the rule has tiers. If there is none, it goes to a fallback of its rule that is, or else is
refused. A prediction that is not known yet is no miss: a request is how it becomes known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.core.request_record import Arrival, SloForecast, TierPlacement
from extproc.refusals import ObjectiveUnmeetable
from extproc.routing.cost_tiers import TierPolicy, choose_tier

if TYPE_CHECKING:
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.core.cost_tier_selector import TierSelector
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import RequestRecord
    from extproc.routing.cost_tiers import TierCandidate

_MAX_RETRY_S: Final = 300
# Targets by weight have no order of their own.
_ANY: Final = TierPolicy(spill="UpOrDown")


class SloRoutingDecision(msgspec.Struct, frozen=True):
    """``arrival``, ``placement``: where the request goes, changed if it moves."""

    forecast: SloForecast
    arrival: Arrival
    placement: TierPlacement | None

    @property
    def refusal(self) -> ObjectiveUnmeetable | None:
        """None: the request goes on."""
        return unmeetable_refusal(self.forecast) if self.forecast.result == "refused" else None


def first_token_due(
    objectives: ObjectiveClass, arrival: Arrival
) -> tuple[float, Literal["ttft", "e2e", "deadline"]] | None:
    """How long after it came a request's first token is due, and by what; None: nothing is due.

    Answers in the background and counts of tokens have no first token that somebody waits for.
    """
    request, targets = arrival.request, objectives.targets_s
    if not request.uses_flow_control or request.runs_in_background:
        return None
    found: list[tuple[float, Literal["ttft", "e2e", "deadline"]]] = []
    if request.is_streamed and "ttft" in targets:
        found.append((targets["ttft"], "ttft"))
    if "e2e" in targets:
        found.append((targets["e2e"], "e2e"))
    if arrival.caller.deadline_in_s is not None:
        found.append((arrival.caller.deadline_in_s, "deadline"))
    # of equals, the objective: it is the gateway's to keep
    return min(found, key=_seconds, default=None)


def _seconds(due: tuple[float, str]) -> float:
    return due[0]


def unmeetable_refusal(forecast: SloForecast) -> ObjectiveUnmeetable:
    """The error for a request that no ModelServer is predicted to serve in time."""
    ttft_s, due_s = forecast.ttft_s or 0.0, forecast.due_s
    late = f"The first token is predicted after {ttft_s:.3g} s, and is due after {due_s:.3g} s"
    is_of_caller = forecast.objective == "deadline"
    if forecast.idle_ttft_s is not None and forecast.idle_ttft_s > due_s:
        message = f"{late}; engines without other requests would be too slow, too: shorten the prompt."
        return ObjectiveUnmeetable(message, retry_after_s=None, is_of_caller=is_of_caller)
    again = min(_MAX_RETRY_S, max(1, math.ceil(ttft_s - due_s)))
    return ObjectiveUnmeetable(f"{late}; try again later.", retry_after_s=again, is_of_caller=is_of_caller)


class SloForecaster:
    """Predicts by ``tiers``."""

    def __init__(self, tiers: TierSelector) -> None:
        self._tiers = tiers

    def forecast_request(
        self,
        builder: RequestBuilder,
        record: RequestRecord,
        objectives: ObjectiveClass,
        now: float,
        *,
        is_tried: bool = False,
    ) -> SloRoutingDecision | None:
        """None if nothing is due of the request. ``objectives``: of its class, which refuses what would miss them.
        ``is_tried``: nothing is to be remembered of it.
        """
        arrival, placement, waited_s = record.arrival_before_dispatch, record.placement, now - record.arrived_at_s
        due = first_token_due(objectives, arrival)
        if due is None:
            return None
        due_s, objective = due
        at_home = self._tiers.evaluate_candidate(record, arrival, now)
        ttft_s = idle_ttft_s = None
        if at_home is not None:
            ttft_s = None if at_home.ttft_s is None else waited_s + at_home.ttft_s
            idle_ttft_s = at_home.idle_ttft_s
        forecast = SloForecast(objectives, objective, due_s, ttft_s, idle_ttft_s, "held")
        # one that waits for its tier's turn moves before it is late
        is_to_spill = placement is not None and placement.choice.reason == "waits"
        other = None
        if ttft_s is not None and ttft_s > due_s and not is_to_spill:
            other = self._elsewhere(builder, record, now, left_s=due_s - waited_s)
            forecast = msgspec.structs.replace(forecast, result="refused" if other is None else "moved")
        if not is_tried:
            self._tiers.record_choice(arrival.pool.name, now, is_taken=forecast.result == "held")
        if other is None:
            return SloRoutingDecision(forecast, arrival, placement)
        if not is_tried:
            self._tiers.record_choice(other[0].pool.name, now, is_taken=True)
        return SloRoutingDecision(forecast, other[0], None if placement is None else other[1])

    def is_in_time_at(self, record: RequestRecord, forecast: SloForecast, now: float, other: Arrival) -> bool:
        """Whether a request that is late by its ``forecast`` is predicted to be in time at another ModelServer."""
        candidate, left_s = (
            self._tiers.evaluate_candidate(record, other, now),
            forecast.due_s - (now - record.arrived_at_s),
        )
        return left_s > 0 and candidate is not None and (candidate.ttft_s is None or candidate.ttft_s <= left_s)

    def _elsewhere(
        self, builder: RequestBuilder, record: RequestRecord, now: float, *, left_s: float
    ) -> tuple[Arrival, TierPlacement] | None:
        """The request at another ModelServer of its rule that is predicted to be in time; None if there is none."""
        arrival = record.arrival_before_dispatch
        if left_s <= 0:
            return None
        found: list[tuple[Arrival, TierCandidate]] = []
        for one in builder.arrivals_at_tiers(arrival):
            candidate = self._tiers.evaluate_candidate(record, one, now)
            if candidate is not None:
                found.append((one, candidate))
        if not found:
            return None
        own = arrival.destination.rule.tiers
        usual = _ANY if own is None else own.policy_of(arrival.caller.tenant, arrival.priority)
        policy = msgspec.structs.replace(usual, ttft_s=left_s, wait_s=0.0)
        candidates = tuple(candidate for _, candidate in found)
        choice = choose_tier(candidates, policy)
        taken, candidate = found[choice.taken]
        if taken.pool is arrival.pool or (candidate.ttft_s is not None and candidate.ttft_s > left_s):
            return None
        return taken, TierPlacement(policy, candidates, choice)
