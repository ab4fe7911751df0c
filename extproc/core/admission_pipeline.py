# SPDX-License-Identifier: Apache-2.0
"""From arrival to dispatch: limits grant, tokens are counted, and each wait holds the request or lets it through."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import numpy as np

from extproc.admission.limit_refusals import limits_unavailable_refusal
from extproc.admission.rate_limits import NO_USAGE, Grant, RequestUsage, StoreUnavailable
from extproc.admission.saturation import RECHECK_S
from extproc.admission.token_estimates import ASSUMED_BYTES_PER_TOKEN
from extproc.core.adapter_loading import AdapterWaitStage
from extproc.core.breakers import check_server_breaker, draw_breaker_pass, may_probe
from extproc.core.cost_tier_selector import TierSelector
from extproc.core.dispatch import constraints_of, prompt_of, server_removed_refusal
from extproc.core.effects import (
    AskGuard,
    AskLimits,
    AskPromptTokens,
    CacheLookupResult,
    ClientLeft,
    Decision,
    Effect,
    Fault,
    GuardAnswered,
    RequestEffect,
    RequestHeld,
    RequestRefused,
    SloMissPredicted,
    WakeAt,
    run_or_report_fault,
)
from extproc.core.explanation import (
    BudgetState,
    Explanation,
    adapter_location,
    avoided_endpoints,
    budget_states,
    describe_forecast,
    explain_pick,
    overridden_fields,
    silent_endpoints,
    sticky_split_of,
    tier_states,
)
from extproc.core.fallback import AT_ONCE
from extproc.core.flow_control import MOST_AT_ONCE, QueueWaitStage
from extproc.core.guard_decisions import GuardFailed, GuardPassed, GuardReply, GuardStopped, apply_guard_reply
from extproc.core.request_builder import api_not_served_refusal
from extproc.core.request_record import RequestRecord
from extproc.core.request_states import ASKING, WAITING, IllegalEvent, RequestEvent, RequestState
from extproc.core.response_cache import ResponseCaches
from extproc.core.scale_from_zero import EngineWaitStage
from extproc.core.slo_admission import SloForecaster, SloRoutingDecision
from extproc.core.spare_capacity import has_capacity
from extproc.refusals import InternalError, QueueFull, Refusal, StoredAnswer, UnknownModel
from extproc.scheduling.model_check import why_model_is_refused

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping

    from extproc.admission.guard_services_by_route import RouteGuardConfig
    from extproc.core.dispatch import Dispatcher
    from extproc.core.fallback import FallbackPlanner
    from extproc.core.flow_control import AdmissionController
    from extproc.core.limit_accounting import LimitAccounting
    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival, FallbackReason, GatewayProperties, TierPlacement
    from extproc.endpoints.table import Bools
    from extproc.scheduling.pool import Pool

# The values with which a shell may resume a request: the answer, or None if there is none.
Answer = Grant | Refusal | StoreUnavailable | GuardReply | GuardFailed | Sequence[int] | None
_Own = TypeVar("_Own")
# What happens to a request before it may wait: the effect if it waits or is answered here; None: it goes on.
_Step = Callable[["RequestRecord", float, list[Effect]], RequestEffect | None]
_TIERS_FAILED: Final = "the tiers of a rule could not be compared"
_FALLBACK_FAILED: Final = "a fallback could not be considered"
_NOT_CONFIGURED: Final = GuardFailed("unknown", "the GatewayConfig has no guard of this name; add it")


class WaitStage(Protocol):
    """One thing that a request may have to wait for before its dispatch. Effects about other requests go to ``out``."""

    @property
    def is_empty(self) -> bool:
        """Whether no request waits here."""
        ...

    def may_hold(self, pool: Pool) -> bool:
        """Whether requests of the ModelServer may wait here, by its configuration."""
        ...

    def admit(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestHeld | Decision | None:
        """Hold the request, or dispatch it; None: it need not wait here. Raises a Refusal.

        It is asked again after each later wait, during which what it gives may have gone.
        """
        ...

    def withdraw(self, record: RequestRecord, now: float) -> None:
        """The request does not wait here any more; nothing happens if it did not."""
        ...

    def on_config_change(self, builder: RequestBuilder, now: float, out: list[Effect]) -> None:
        """After a change of configuration: what cannot go on where it waits moves or is refused."""
        ...

    def tick(self, now: float, out: list[Effect]) -> None:
        """Send on requests that may go, and refuse those that have waited too long."""
        ...


class _Reminders:
    """When to ask whether a request that waits goes elsewhere. Entries of those that wait no more are left to their
    time.
    """

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        states: Collection[RequestState],
        leaves: Callable[[RequestRecord, float, list[Effect]], bool],
        failed: str,
    ) -> None:
        """``states``: in which it is asked. ``leaves``: whether the request has left. ``failed``: if that fails."""
        self._records = records
        self._states = states
        self._leaves = leaves
        self._failed = failed
        # with tickets
        self._due: list[tuple[float, str]] = []

    def add(self, record: RequestRecord, after_s: float, out: list[Effect]) -> None:
        """Ask so long after the request came."""
        at_s = record.arrived_at_s + after_s
        heapq.heappush(self._due, (at_s, record.ticket))
        out.append(WakeAt(at_s))

    def tick(self, now: float, out: list[Effect]) -> None:
        """Ask about those whose time has come."""
        asked, due = 0, self._due
        while due and due[0][0] <= now and asked < MOST_AT_ONCE:
            _, ticket = heapq.heappop(due)
            record = self._records.get(ticket)
            if record is None or record.state not in self._states:
                continue
            asked += 1
            if not run_or_report_fault(out, self._failed, partial(self._leaves, record, now, out)):
                # however many wait, a second has as many questions as one tick
                heapq.heappush(due, (now + RECHECK_S * max(1.0, len(due) / MOST_AT_ONCE), ticket))
        if due:
            out.append(WakeAt(max(now, due[0][0])))


class _RouteSteps(msgspec.Struct, frozen=True):
    """The steps that requests of one ModelRoute take before they may wait, by what is configured for it.

    ``arrived``: all of them. ``granted``: those after its limits. ``guarded``: those after its guard.
    """

    arrived: tuple[_Step, ...] = ()
    granted: tuple[_Step, ...] = ()
    guarded: tuple[_Step, ...] = ()


class AdmissionPipeline:
    """From the arrival to a Decision, a Refused, or something to wait for. Other effects go to ``out``."""

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        admission: AdmissionController,
        accounts: LimitAccounting,
        dispatcher: Dispatcher,
        fallbacks: FallbackPlanner,
        *,
        rng: random.Random,
        has_peers: bool,
    ) -> None:
        """``apply_config`` comes before anything else."""
        self._records = records
        self._admission = admission
        self._accounts = accounts
        self._dispatcher = dispatcher
        self._builder: RequestBuilder
        self.caches = ResponseCaches(rng=rng)
        self._rng = rng
        # by the key of the ModelRoute
        self._guards: Mapping[str, RouteGuardConfig] = {}
        self._tiers = TierSelector(lambda: admission.gates, rng=rng)
        self._forecaster = SloForecaster(self._tiers)
        self._fallbacks = fallbacks
        self._late_fallbacks = _Reminders(records, WAITING, self._fall_back_after_wait, _FALLBACK_FAILED)
        self._spills = _Reminders(records, {RequestState.QUEUED}, self._spill, _TIERS_FAILED)
        self._queue = QueueWaitStage(records, admission, dispatcher, self._turn_came)
        self.adapters = AdapterWaitStage(records, admission, dispatcher, self._wait_ended, has_peers=has_peers)
        self.engines = EngineWaitStage(records, admission, dispatcher, self._engine_ready, self._withdraw)
        # in the order in which a request meets them
        self._waits: tuple[WaitStage, ...] = (self.engines, self.adapters, self._queue)
        self._behind_engines = self._waits[1:]
        # by ModelServer: those at which its requests may be held
        self._waits_at: Mapping[str, tuple[WaitStage, ...]] = {}
        # by the key of the ModelRoute, where they are not the usual ones
        self._steps: Mapping[str, _RouteSteps] = {}
        self._usual_steps = _RouteSteps()

    def apply_config(
        self, builder: RequestBuilder, guards: Mapping[str, RouteGuardConfig], now: float, out: list[Effect]
    ) -> None:
        """Follow the configuration, which the admission controller has already. ``guards``: by the key of the
        ModelRoute.
        """
        self._builder, self._guards = builder, guards
        admission, caches, objectives = self._admission, self.caches, self._dispatcher.objectives
        routes = {*admission.routes, *admission.budgets, *guards, *caches.routes_with_cache, *objectives.routes}
        self._steps = {route: self._steps_of(route) for route in routes}
        self._usual_steps = self._steps_of("")
        self._waits_at = {
            name: tuple(one for one in self._waits if one.may_hold(pool)) for name, pool in builder.pools.items()
        }
        self._fallbacks.apply_config(builder)
        self._tiers.retain_only(builder.pools)
        for record in [one for one in self._records.values() if one.state in ASKING]:
            self._reroute(record, builder)
        for wait in self._waits:
            wait.on_config_change(builder, now, out)
        self.wake_if_any_held(now, out)

    def _steps_of(self, route: str) -> _RouteSteps:
        guarded = [self._answer_from_cache] * (route in self.caches.routes_with_cache)
        guarded += [self._foresee] * self._dispatcher.objectives.refuses_predicted_misses(route)
        granted = [self._ask_guard] * (route in self._guards) + guarded
        arrived = [self._ask_limits] * self._admission.may_limit_route(route) + granted
        return _RouteSteps(tuple(arrived), tuple(granted), tuple(guarded))

    def _reroute(self, record: RequestRecord, builder: RequestBuilder) -> None:
        """A request whose server has lost its engines goes to another of its rule that has some."""
        pool = record.arrival_before_dispatch.pool
        if builder.pools.get(pool.name) is pool and pool.spec.activation is not None and not pool.readiness.can_serve:
            other = builder.move_to_other_server(record.arrival_before_dispatch)
            if other is not None:
                self._dispatcher.move_to_server(record, other)
                # one that waits for limits has not requested tokens yet, and will request them for its new model
                record.has_moved = record.state is RequestState.ASKING_TOKENS

    def choose_server(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """Choose the tier of a request that arrives, before anything of it is counted, or another ModelServer of its
        rule where the breaker of its own has tripped, or where that is full. If the choice of a tier fails, the rule's
        weights have chosen.
        """
        arrival = record.arrival_before_dispatch
        if arrival.destination.rule.tiers is not None:
            found = run_or_report_fault(
                out, _TIERS_FAILED, partial(self._tiers.choose_tier, self._builder, record, now)
            )
            if found is not None:
                arrival, record.placement = found
                record.arrival = arrival
        if arrival.pool.breaker.generation:
            self._avoid_failing(record, now)
        self._avoid_full(record, now)

    def _avoid_failing(self, record: RequestRecord, now: float) -> None:
        """A request goes to another ModelServer of its rule while the breaker of its own lets too few through."""
        pool = record.arrival_before_dispatch.pool
        record.is_drawn = draw_breaker_pass(pool, now, self._rng)
        if record.is_drawn or may_probe(pool, now):
            return
        other = self._builder.move_to_other_server(
            record.arrival_before_dispatch, lambda one: not one.breaker.trips and one is not pool
        )
        if other is not None:
            record.arrival, record.placement, record.is_drawn = other, None, True

    def _avoid_full(self, record: RequestRecord, now: float) -> None:
        """A request goes to another target of its rule that has room, while its own, a provider, reports that it is
        full. With ``sticky`` it stays: its session would change the model with each report.
        """
        arrival = record.arrival_before_dispatch
        candidates = arrival.candidates
        if candidates is None or not arrival.pool.is_provider_full(now):
            return
        if arrival.destination.rule.tiers is not None or candidates.targets.sticky is not None:
            return
        other = self._builder.move_to_other_server(
            arrival, lambda one: not one.breaker.trips and has_capacity(one, now)
        )
        if other is not None:
            record.arrival = other

    def start_request(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestEffect:
        """The request has come."""
        return self._attempt(record, lambda: self._set_out(record, now, out), now, out)

    def resume(self, record: RequestRecord, answer: Answer, now: float, out: list[Effect]) -> RequestEffect:
        """The answer that the request waited for has come."""
        if record.state is RequestState.ASKING_LIMITS:
            if answer is None or isinstance(answer, Grant | Refusal | StoreUnavailable):
                return self._attempt(record, lambda: self._granted(record, answer, now, out), now, out)
        elif record.state is RequestState.ASKING_GUARD:
            if isinstance(answer, GuardReply | GuardFailed):
                return self._attempt(record, lambda: self._guarded(record, answer, now, out), now, out)
        elif not isinstance(answer, Grant | Refusal | StoreUnavailable | GuardReply | GuardFailed):
            # tokens of another model are of no use
            record.tokens = None if record.has_moved else answer
            return self._attempt(record, lambda: self._go_on(record, now, out), now, out)
        raise IllegalEvent(type(answer).__name__, record.state.name, f"request {record.ticket}")

    def tick(self, now: float, out: list[Effect]) -> None:
        """Send on held requests that can go, and refuse those that have waited too long."""
        self._late_fallbacks.tick(now, out)
        self._spills.tick(now, out)
        for wait in self._waits:
            wait.tick(now, out)

    def _fall_back_after_wait(self, record: RequestRecord, now: float, out: list[Effect]) -> bool:
        """Whether a request that has waited long enough has left where it waits, for a fallback."""
        other = self._fallbacks.choose_fallback(record, "queue", now)
        return other is not None and self._leave_wait(record, other, now, out, why="queue")

    def _spill(self, record: RequestRecord, now: float, out: list[Effect]) -> bool:
        """Whether a request that has waited long enough for its home has left its queue, for another tier."""
        found = self._tiers.choose_tier(self._builder, record, now)
        if found is None or found[0].pool is record.arrival_before_dispatch.pool:
            return False
        return self._leave_wait(record, found[0], now, out, placement=found[1])

    def _leave_wait(
        self,
        record: RequestRecord,
        other: Arrival,
        now: float,
        out: list[Effect],
        *,
        placement: TierPlacement | None = None,
        why: FallbackReason | None = None,
    ) -> bool:
        """Whether a request that waits goes elsewhere, as ``other``: only if there is room for it at once."""
        room = self._queue.entry_at_other_server(record, other, now)
        if room is None:
            return False
        self._withdraw(record, now)
        self._move(record, other, placement=placement, why=why)
        record.queued, with_room = room
        record.begin_transition(RequestEvent.GRANTED)
        self._turn_came(record, with_room, now, out)
        return True

    def _fall_back(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """A request whose prompt is too long for its ModelServer goes to a fallback that may take it, and one whose
        ModelServer has no usable endpoint to one that has.
        """
        for why in AT_ONCE:
            instead = partial(self._fallbacks.choose_fallback, record, why, now, is_drawn=record.is_drawn)
            other = run_or_report_fault(out, _FALLBACK_FAILED, instead)
            if other is not None:
                self._move(record, other, why=why)
                return

    def _fall_back_at_turn(self, record: RequestRecord, with_room: Bools | None, now: float) -> Bools | None:
        """The breaker of the ModelServer has opened while the request waited: it goes to a fallback that has room at
        once. Returns the rows that have room where it goes.
        """
        other = self._fallbacks.choose_fallback(record, "no_endpoint", now, is_drawn=False)
        room = None if other is None else self._queue.entry_at_other_server(record, other, now)
        if other is None or room is None:
            return with_room
        self._move(record, other, why="no_endpoint")
        record.queued, with_room = room
        return with_room

    def prepare_fallback_move(self, record: RequestRecord, now: float, out: list[Effect]) -> Callable[[], None] | None:
        """What sends a request, whose prefill has failed, to a fallback that has room for it at once; None: there is
        none. Its engines must be free of it by then.
        """
        other = run_or_report_fault(
            out, _FALLBACK_FAILED, partial(self._fallbacks.choose_fallback, record, "prefill", now)
        )
        room = None if other is None else self._queue.entry_at_other_server(record, other, now)
        if other is None or room is None:
            return None

        def go() -> None:
            self._move(record, other, why="prefill")
            record.queued, with_room = room
            self._turn_came(record, with_room, now, out)

        return go

    def _move(
        self,
        record: RequestRecord,
        other: Arrival,
        *,
        placement: TierPlacement | None = None,
        why: FallbackReason | None = None,
    ) -> None:
        """The request goes to another ModelServer, which is a tier of its rule, or for ``why`` a fallback."""
        self._dispatcher.move_to_server(record, other)
        record.placement = placement
        if why is not None:
            record.fell_back_for, record.is_drawn = why, True

    def _watch_wait(self, record: RequestRecord, out: list[Effect]) -> None:
        """The request waits, and may go elsewhere after a while."""
        placement, fallbacks = record.placement, record.arrival_before_dispatch.destination.fallbacks
        if record.state is RequestState.QUEUED and placement is not None and placement.choice.ask_again_s:
            self._spills.add(record, placement.choice.ask_again_s, out)
        if fallbacks is not None and not record.is_stream_waiting:
            waits_s = [one.as_fallback.after_queue_s for one in fallbacks.chain]
            known = [one for one in waits_s if one is not None]
            if known:
                self._late_fallbacks.add(record, min(known), out)

    def wake_if_any_held(self, now: float, out: list[Effect]) -> None:
        """A change that may let a held request go."""
        for wait in self._waits:
            if not wait.is_empty:
                out.append(WakeAt(now))
                return

    def on_disconnect(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """The client of a request that is not dispatched yet has disconnected."""
        if record.state is RequestState.QUEUED and record.queued is not None:
            out.append(ClientLeft(record.ticket, record.arrival_before_dispatch.pool.name, record.queued))
        self._withdraw(record, now)
        self._dispatcher.on_client_left(record, now, out)

    def explain(
        self,
        arrival: Arrival,
        attachment: GatewayProperties,
        tokens: Sequence[int] | None,
        *,
        now: float,
        rng: random.Random,
        guarded: str = "",
    ) -> Explanation:
        """Where a request would go or what it would wait for, with nothing changed; raises a Refusal.

        ``tokens``: its prompt's, if known. ``guarded``: what its guard said, if it was asked.
        """
        tried = RequestRecord("", arrival=arrival, attachment=attachment, arrived_at_s=now)
        tried.wall_s = now + self._accounts.wall_offset_s
        placed = self._tiers.choose_tier(self._builder, tried, now, is_tried=True)
        if placed is not None:
            tried.arrival, tried.placement = placed
        self._avoid_full(tried, now)
        objectives, foreseen = self._dispatcher.objectives_of(tried.arrival_before_dispatch), None
        if objectives is not None and objectives.refuses:
            foreseen = self._forecaster.forecast_request(self._builder, tried, objectives, now, is_tried=True)
        if foreseen is not None:
            foreseen = self._in_time_elsewhere(tried, foreseen, now) or foreseen
            tried.arrival, tried.placement, tried.forecast = foreseen.arrival, foreseen.placement, foreseen.forecast
        if tried.forecast is not None and tried.forecast.result == "fallback":
            tried.fell_back_for = "late"
        else:
            for why in AT_ONCE:
                other = self._fallbacks.choose_fallback(tried, why, now)
                if other is not None:
                    tried.arrival, tried.fell_back_for = other, why
                    break
        if tried.arrival_before_dispatch.pool is not arrival.pool:
            tokens = None
        arrival, placement, forecast = tried.arrival_before_dispatch, tried.placement, tried.forecast
        pool, prompt = arrival.pool, prompt_of(arrival, tokens)
        guard = self.guard_of(arrival)
        guarded = guarded or ("" if guard is None else f"'{guard.name}' is asked first")
        if self.engines.would_hold(pool) and attachment.subset is None:
            return Explanation(
                server=pool.name,
                model=arrival.destination.model,
                input_tokens=round(pool.estimate_prompt(prompt, now).input_tokens, 1),
                cached_tokens=0.0,
                addresses=(),
                cost_s=0.0,
                prefill=None,
                stage="",
                profiles=(),
                waits=self.engines.describe_wait(pool, now),
                tiers=tier_states(placement),
                guard=guarded,
                forecast=None if forecast is None else describe_forecast(forecast),
                split=sticky_split_of(arrival),
                sets=overridden_fields(arrival),
                rule=arrival.destination.rule.title,
            )
        adapter, loader = adapter_location(pool, arrival.adapter, attachment.subset, now)
        only = None if loader is None else np.arange(len(pool.table.addresses)) == loader
        constraints = constraints_of(arrival, attachment, only, wants_reasons=True)
        considered = pool.pick_endpoints(prompt, constraints, now=now, rng=rng)
        has_sidecar = considered.pick.prefill_row is not None and pool.prefill_protocol is None
        plan = self._fallbacks.plan_attempts(tried, considered.addresses, now, has_sidecar=has_sidecar)
        fallbacks = () if plan is None else plan.states
        found = explain_pick(considered, arrival, None, placement, forecast, guarded=guarded, fallbacks=fallbacks)
        avoided, silent = avoided_endpoints(pool, now), silent_endpoints(pool, now)
        budgets = self._explain_budgets(arrival, now)
        mirror = self._dispatcher.mirrors.describe_copy(arrival, considered, now)
        return msgspec.structs.replace(
            found, mirror=mirror, adapter=adapter, avoided=avoided, silent=silent, budgets=budgets
        )

    def _explain_budgets(self, arrival: Arrival, now: float) -> tuple[BudgetState, ...]:
        budgets = self._admission.budgets_of_route(arrival.destination.route)
        if not budgets.has_any:
            return ()
        wall_s = now + self._accounts.wall_offset_s
        usage = usage_to_reserve(arrival).with_cost(arrival.pool.price_at(wall_s))
        charges = budgets.charges(arrival.caller, usage, wall_s)
        return tuple(budget_states(charges, self._admission.limits.level_of))

    def _withdraw(self, record: RequestRecord, now: float) -> None:
        for wait in self._waits:
            wait.withdraw(record, now)

    def _attempt(
        self, record: RequestRecord, step: Callable[[], _Own], now: float, out: list[Effect]
    ) -> _Own | RequestRefused:
        """Take the next step of one request: if it is refused or our own code fails, nothing of the request remains and
        all others go on.
        """
        refusal: Refusal
        try:
            own = step()
            if isinstance(own, RequestHeld) and record.state in WAITING:
                self._watch_wait(record, out)
            return own
        except Refusal as error:
            # a flood of requests is refused on arrival, where they wait for nothing
            refusal, may_wait = error, record.state in WAITING
        except Exception as error:  # noqa: BLE001 - a mistake of ours may raise anything, half-way through a wait, too
            refusal, may_wait = InternalError(error), True
        if may_wait:
            self._withdraw(record, now)
        return self._dispatcher.refuse(record, refusal, now, out)

    def _set_out(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestEffect:
        """Refuse what its ModelServer cannot serve, before anything is reserved for it; then take the first step."""
        arrival = record.arrival_before_dispatch
        if arrival.engine_api is not None and not record.attachment.is_bundle:
            # no other gateway has a translator
            raise api_not_served_refusal(arrival.request, arrival.pool.spec, arrival.head)
        if arrival.pool.apis_without_model:
            why = why_model_is_refused(arrival.pool, arrival.request.api, now)
            if why and arrival.destination.model == arrival.pool.spec.model:
                raise UnknownModel(why, param="model")
        if arrival.pool.breaker.trips and arrival.destination.fallbacks is None:
            check_server_breaker(arrival.pool, now, is_drawn=True)
        return self._take(record, self._steps_for(arrival).arrived, now, out)

    def _steps_for(self, arrival: Arrival) -> _RouteSteps:
        return self._steps.get(arrival.destination.route, self._usual_steps)

    def _take(self, record: RequestRecord, steps: Sequence[_Step], now: float, out: list[Effect]) -> RequestEffect:
        """Take the steps in order, until one has an effect; then count the tokens, if that is needed, and wait."""
        for step in steps:
            own = step(record, now, out)
            if own is not None:
                return own
        return self._ask_tokens(record, now, out)

    def _ask_limits(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestEffect | None:
        """Local limits first, then those that all machines share. Nobody is charged for a copy."""
        arrival = record.arrival_before_dispatch
        if arrival.destination.is_copy:
            return None
        record.limited = usage_to_reserve(arrival).with_cost(arrival.pool.price_at(record.wall_s))
        charges = self._admission.charges(arrival, record.limited, now=now, wall_s=record.wall_s)
        local = [charge for charge in charges if not charge.is_global]
        if local:
            record.grants = (self._accounts.reserve(local, now, out),)
        everywhere = [charge for charge in charges if charge.is_global]
        if not everywhere:
            return None
        self._dispatcher.add_record(record, RequestState.ASKING_LIMITS, now)
        record.charges = everywhere
        return AskLimits(record.ticket, everywhere)

    def _granted(
        self, record: RequestRecord, answer: Grant | Refusal | StoreUnavailable | None, now: float, out: list[Effect]
    ) -> RequestEffect:
        """Apply the store's grant, or else grant in this process, where that is allowed."""
        charges = record.charges
        if isinstance(answer, Grant | Refusal):
            self._accounts.on_store_answer()
        if isinstance(answer, Refusal):
            raise answer
        if isinstance(answer, Grant):
            grant = answer
        elif any(charge.needs_redis for charge in charges):
            raise limits_unavailable_refusal()
        elif answer is None:
            grant = self._accounts.reserve(charges, now, out)
        else:
            grant = self._accounts.reserve_without_store(charges, answer.most_left, now, out)
        record.grants = (*record.grants, grant)
        return self._take(record, self._steps_for(record.arrival_before_dispatch).granted, now, out)

    def guard_of(self, arrival: Arrival) -> RouteGuardConfig | None:
        """The one that the request must pass."""
        return self._guards.get(arrival.destination.route)

    def _ask_guard(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestEffect | None:
        """A refused caller costs the guard nothing, and a request that the guard refuses no place in a queue."""
        guard = record.guard = self.guard_of(record.arrival_before_dispatch)
        if guard is None:
            return None
        if guard.service is None:
            return self._guarded(record, _NOT_CONFIGURED, now, out)
        self._dispatcher.add_record(record, RequestState.ASKING_GUARD, now)
        return AskGuard(record.ticket, record.arrival_before_dispatch, guard)

    def _guarded(
        self, record: RequestRecord, answer: GuardReply | GuardFailed, now: float, out: list[Effect]
    ) -> RequestEffect:
        """The request goes on, maybe changed, or is refused."""
        guard = record.guard
        if guard is None:
            raise IllegalEvent(type(answer).__name__, record.state.name, f"request {record.ticket}")
        asked = partial(GuardAnswered, guard.name, took_s=answer.took_s, ticket=record.ticket)
        try:
            found = self.apply_guard_reply(guard, record.arrival_before_dispatch, answer, out)
        except GuardStopped as stopped:
            out.append(asked(stopped.result, goes_on=False, detail=stopped.detail))
            raise stopped.refusal from None
        out.append(asked(found.result, goes_on=True, detail=found.detail))
        record.arrival, record.guarded = found.arrival, found.text
        return self._take(record, self._steps_for(found.arrival).guarded, now, out)

    def apply_guard_reply(
        self, guard: RouteGuardConfig, arrival: Arrival, answer: GuardReply | GuardFailed, out: list[Effect]
    ) -> GuardPassed:
        """What becomes of the request; raises GuardStopped. An error of ours is a failure of the guard."""
        try:
            return apply_guard_reply(guard, arrival, answer, self._builder)
        except GuardStopped:
            raise
        except Exception as error:  # noqa: BLE001 - the failure mode decides
            out.append(Fault(f"the answer of the guard {guard.name} could not be followed", error))
            return apply_guard_reply(guard, arrival, GuardFailed.of_internal_error(error), self._builder)

    def _answer_from_cache(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """A hit has used one request, and no tokens; raises StoredAnswer."""
        try:
            found = self.caches.lookup(record.arrival_before_dispatch, record.attachment, record.ticket, now)
        except StoredAnswer:
            out.append(CacheLookupResult(record.arrival_before_dispatch.destination.route, "hit"))
            grants, record.grants = record.grants, ()
            self._accounts.settle_grants(grants, NO_USAGE, now, out)
            raise
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001 - the request can do without
            out.append(Fault("the response cache could not be asked", error))
            return
        if found is not None:
            lookup, record.to_store = found
            out.append(lookup)

    def _ask_tokens(self, record: RequestRecord, now: float, out: list[Effect]) -> RequestEffect:
        """A request that goes to a fallback at once is counted by that one's tokens."""
        arrival = record.arrival_before_dispatch
        if arrival.destination.fallbacks is not None:
            self._fall_back(record, now, out)
            arrival = record.arrival_before_dispatch
        if arrival.pool.caches.kv_index is None or not arrival.wants_tokens:
            return self._go_on(record, now, out)
        self._dispatcher.add_record(record, RequestState.ASKING_TOKENS, now)
        return AskPromptTokens(record.ticket, arrival)

    def _foresee(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """Once its limits have granted it: a request that is predicted to miss what its class is promised moves within
        its rule, or is refused, if the class wants that.
        """
        objectives = self._dispatcher.objectives_of(record.arrival_before_dispatch)
        if objectives is None or not objectives.refuses:
            return
        foresee = partial(self._forecaster.forecast_request, self._builder, record, objectives, now)
        found = run_or_report_fault(out, "the TTFT of a request could not be predicted", foresee)
        if found is None:
            return
        found = (
            run_or_report_fault(out, _FALLBACK_FAILED, partial(self._in_time_elsewhere, record, found, now)) or found
        )
        forecast = record.forecast = found.forecast
        record.due_by_s = record.arrived_at_s + forecast.due_s
        if forecast.result != "held":
            out.append(SloMissPredicted(forecast))
        if forecast.result == "fallback":
            self._move(record, found.arrival, why="late")
        elif found.refusal is not None:
            raise found.refusal
        elif found.arrival is not record.arrival:
            self._move(record, found.arrival, placement=found.placement)

    def _in_time_elsewhere(
        self, record: RequestRecord, late: SloRoutingDecision, now: float
    ) -> SloRoutingDecision | None:
        """A request that would be refused, at the first fallback that is predicted to be in time; None: it is not
        refused, or there is none.
        """
        if late.refusal is None:
            return None
        in_time = partial(self._forecaster.is_in_time_at, record, late.forecast, now)
        other = self._fallbacks.choose_fallback(record, "late", now, suits=in_time)
        if other is None:
            return None
        return SloRoutingDecision(msgspec.structs.replace(late.forecast, result="fallback"), other, late.placement)

    def _go_on(
        self, record: RequestRecord, now: float, out: list[Effect], waits: Sequence[WaitStage] | None = None
    ) -> RequestEffect:
        """Take the request through the remaining waits, to an engine. ``waits``: None: all of its ModelServer."""
        pool = record.arrival_before_dispatch.pool
        if self._builder.pools.get(pool.name) is not pool:
            # the configuration changed while the request waited
            raise server_removed_refusal(pool.name)
        own = _admit(record, self._waits_at[pool.name] if waits is None else waits, now, out)
        return own or self._dispatcher.dispatch(record, now, out)

    def _engine_ready(self, record: RequestRecord, now: float, out: list[Effect]) -> bool:
        """The request goes to the next wait, or to the engine.

        Returns False if the queue is full: the request keeps its place before it.
        """
        record.begin_transition(RequestEvent.GRANTED)

        def step() -> RequestHeld | Decision | None:
            try:
                own = _admit(record, self._behind_engines, now, out)
            except QueueFull:
                record.queued = None
                return None
            self.engines.withdraw(record, now)
            return own or self._dispatcher.dispatch(record, now, out)

        own = self._attempt(record, step, now, out)
        if own is None:
            return False
        _answer(own, out)
        return True

    def _wait_ended(self, record: RequestRecord, now: float, out: list[Effect]) -> None:
        """The request goes to the next wait, or to the engine."""
        _answer(self._attempt(record, lambda: self._go_on(record, now, out, self._behind_engines), now, out), out)

    def _turn_came(self, record: RequestRecord, with_room: Bools | None, now: float, out: list[Effect]) -> None:
        """The request goes to the engine, unless what it has waited for before has gone meanwhile."""

        def step() -> RequestHeld | Decision:
            room = with_room
            if (
                record.arrival_before_dispatch.destination.fallbacks is not None
                and record.arrival_before_dispatch.pool.breaker.trips
            ):
                room = self._fall_back_at_turn(record, with_room, now)
            gate = self._admission.gates.get(record.arrival_before_dispatch.pool.name)
            return _admit(record, self._behind_engines[:-1], now, out) or self._dispatcher.dispatch(
                record, now, out, gate=gate, with_room=room
            )

        _answer(self._attempt(record, step, now, out), out)


def usage_to_reserve(arrival: Arrival) -> RequestUsage:
    """The tokens that the request may use.

    Input: all of its prompts, by their tokens or else by their bytes, its media, and what an engine has stored of it.
    Output: for each answer the requested maximum, or else the length that nearly all answers had. None of either where
    the body is not read.
    """
    request, pool = arrival.request, arrival.pool
    if request.is_unread:
        return NO_USAGE
    prompts, most = request.prompts, request.max_output_tokens
    estimate = pool.input_estimates.of_tenant(arrival.caller.tenant)
    text = estimate.tokens(request.text_bytes, ASSUMED_BYTES_PER_TOKEN, prompts=prompts.count)
    sent = text + prompts.token_ids + request.media.tokens
    if most is not None and not request.has_stored_prompt:
        return RequestUsage(sent, request.answers * float(most))
    stored = estimate.stored_prompt_tokens if request.has_stored_prompt else 0.0
    output = pool.output_estimate.tokens if most is None else float(most)
    known = RequestUsage(sent, 0.0 if most is None else request.answers * output)
    return RequestUsage(sent + stored, request.answers * output, known)


def _admit(
    record: RequestRecord, waits: Sequence[WaitStage], now: float, out: list[Effect]
) -> RequestHeld | Decision | None:
    """Take the request through the waits, in order, until one holds or dispatches it; None: it need wait for none."""
    for wait in waits:
        own = wait.admit(record, now, out)
        if own is not None:
            return own
    return None


def _answer(own: RequestEffect, out: list[Effect]) -> None:
    """Send the effect to the stream of a held request; none if the request is held again."""
    if not isinstance(own, RequestHeld):
        out.append(own)
