# SPDX-License-Identifier: Apache-2.0
"""What requests wait for, as Prometheus metrics: a first engine, an adapter, a turn; limits, budgets and costs.

Tenants are named by those that a trusted hop has authenticated; the largest of late have series, and the rest are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, Final

from extproc.admission.budgets import BudgetKey
from extproc.core.effects import ClientLeft, GuardAnswered
from extproc.core.request_states import RequestState
from extproc.metrics.exposition import (
    CounterFamily,
    DeferredHistogram,
    DeferredHistogramFamily,
    MetricFamily,
    PiecewiseCollector,
    StaleSeriesRemover,
)
from extproc.metrics.label_cardinality import BusiestNames
from extproc.refusals import BudgetSpent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from prometheus_client import CollectorRegistry

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.admission.flow_queues import QueuedRequest
    from extproc.admission.token_buckets import BucketLevel
    from extproc.core.effects import (
        Decision,
        EngineStarted,
        OutcomeJoined,
        Prefill,
        PrefillEnded,
        RequestRefused,
        SoftBudgetPassed,
    )
    from extproc.core.request_record import AdapterLoadResult
    from extproc.scheduling.pool import Pool

# How many requests wait in a state, by ModelServer.
WaitingIn = Callable[[RequestState], Mapping[str, int]]
_START_BUCKETS: Final = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600)
# Adapters and queues have families of their own: with zeros, and by band.
_BY_STATE: Final = {
    RequestState.AWAITING_ENGINE: MetricFamily(
        "attache_activation_waiting", "Requests that wait because no engine can take them.", ("server",)
    ),
}
_PREFILLS_IN_FLIGHT: Final = MetricFamily(
    "attache_prefill_legs_in_flight", "Prefills requested of other engines that have not ended.", ("server",)
)
# The share of a prompt from which on it was not computed again.
_FETCHED: Final = 0.5
_PREFILL_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_GUARD_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LOAD_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
_WAITING_FOR_ADAPTER: Final = MetricFamily("attache_adapter_waiting", "Requests that wait for an adapter.", ("server",))
_ADAPTERS_HELD: Final = MetricFamily(
    "attache_adapters_held", "Adapters that take a slot of the engine.", ("server", "endpoint")
)
MOST_TENANTS: Final = 500
OTHERS: Final = "(others)"
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TENANT_TOKENS: Final = {
    "prompt": "Prompt tokens, cached ones included, as limits count them.",
    "cached": "Prompt tokens that engines found in their caches.",
    "output": "Tokens of answers, as limits count them.",
}
_REDIS_BUCKETS: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 1e-2, 0.05, 0.25)
_BANDS: Final = ("server", "band")
_QUEUED: Final = MetricFamily("attache_queue_waiting", "Requests that wait for an engine.", _BANDS)
_QUEUED_BYTES: Final = MetricFamily("attache_queue_bytes", "Bytes of requests that wait.", _BANDS)
_FLOWS: Final = MetricFamily("attache_queue_flows", "Flows that are remembered.", _BANDS)
_FULL: Final = MetricFamily("attache_saturation", "How full the engines are, 0 to 1.", ("server",))
_STALE: Final = MetricFamily(
    "attache_stale_endpoints", "Engines judged by our own counts, for want of reports.", ("server",)
)
_WANTED: Final = MetricFamily(
    "attache_wanted_engines", "Requests that wait while there is no engine: start one.", ("server",)
)
_USED: Final = MetricFamily(
    "attache_budget_used_ratio",
    "Used and reserved share of budgets, of the callers that have used the largest part.",
    ("budget", "unit", "caller"),
)
# Callers of one budget that are shown.
_MOST_CALLERS: Final = 20
# Levels, between two turns of other work.
_LEVELS_AT_ONCE: Final = 2_000


class ActivationMetrics:
    """No series before the first request has waited for an engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._starts = DeferredHistogramFamily(
            "attache_engine_start_seconds",
            "From the first request that waited for an engine to the first engine.",
            _START_BUCKETS,
            ["server"],
            registry,
        )

    def observe_start(self, effect: EngineStarted) -> None:
        """A ModelServer has an engine again."""
        self._starts.observe(effect.after_s, effect.server)


class _WaitingSeries(PiecewiseCollector):
    """Read from the core at each scrape."""

    families = tuple(_BY_STATE.values())

    def __init__(self, waiting_in: WaitingIn) -> None:
        self._waiting_in = waiting_in

    def exposition_chunks(self) -> Iterator[str]:
        """Of ModelServers that requests wait for now."""
        for state, family in _BY_STATE.items():
            yield from family.exposition_chunks(
                family.line((server,), count) for server, count in self._waiting_in(state).items()
            )


class AdapterMetrics:
    """One sample a ModelServer and family, and no series before the first load."""

    def __init__(self, registry: CollectorRegistry, pools: Callable[[], Iterable[Pool]]) -> None:
        self._loads = CounterFamily(
            "attache_adapter_loads",
            "Loads of adapters by result: loaded, was_there, busy, broken, unreachable.",
            ["server", "result"],
            registry,
        )
        self._unloads = CounterFamily(
            "attache_adapter_unloads", "Adapters unloaded to make room for others.", ["server"], registry
        )
        self._seconds = DeferredHistogramFamily(
            "attache_adapter_load_seconds",
            "Of loads that succeeded, unloads included.",
            _LOAD_BUCKETS,
            ["server"],
            registry,
        )
        registry.register(_AdapterSeries(pools))

    def observe_load(self, result: AdapterLoadResult) -> None:
        """A load is over."""
        if result.problem is not None:
            self._loads.add(result.server, result.problem.value)
        else:
            self._loads.add(result.server, "was_there" if result.was_there else "loaded")
            self._seconds.observe(result.duration_s, result.server)
        if result.unloaded:
            self._unloads.add_amount(len(result.unloaded), result.server)


class PrefillMetrics:
    """Prefills that extproc requests itself, and requests for which it does not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # while a ModelServer is configured, it is not forgotten: a gauge that vanishes would not be 0
        self._in_flight = Counter[str]()
        registry.register(_PrefillSeries(self._in_flight))
        self._legs = CounterFamily(
            "attache_prefill_legs", "Prefills requested of other engines, by outcome.", ["server", "outcome"], registry
        )
        self._seconds = DeferredHistogramFamily(
            "attache_prefill_leg_seconds",
            "From the pick to the prefill engine's answer, or to its failure.",
            _PREFILL_BUCKETS,
            ["server"],
            registry,
        )
        self._answers = CounterFamily(
            "attache_prefilled_answers",
            "Requests whose prompt another engine had computed, by what the decode engine made of it.",
            ["server", "outcome"],
            registry,
        )
        self._whole = CounterFamily(
            "attache_prefill_whole_requests",
            "Requests whose prompt no other engine may compute, by reason.",
            ["server", "reason"],
            registry,
        )

    def count_start(self, ask: Prefill) -> None:
        """A prefill is requested."""
        self._in_flight[ask.server] += 1

    def observe_end(self, ended: PrefillEnded) -> None:
        """A prefill is over."""
        self._in_flight[ended.server] -= 1
        self._legs.add(ended.server, ended.leg.outcome)
        self._seconds.observe(ended.leg.took_s, ended.server)

    def count_answer(self, settled: OutcomeJoined) -> None:
        """What became of a prompt that another engine had computed."""
        if settled.prefilled_by:
            self._answers.add(settled.fell_back_from or settled.server, _use_of_prefill(settled))

    def count_not_disaggregated(self, decision: Decision) -> None:
        """A request goes to an engine whose prompt no other one may compute."""
        self._whole.add(decision.server, decision.history.whole)


def _use_of_prefill(settled: OutcomeJoined) -> str:
    """Engines count what they fetched as cached. One that could fetch nothing may answer all the same, unless it had
    the request beside the prefill: such engines compute no prompts.
    """
    outcome = settled.outcome
    if settled.fell_back_from or (outcome.status and not 200 <= outcome.status < 300):
        return "failed"
    if outcome.status and settled.leg is not None:
        return "decoded"
    if not outcome.status or outcome.cached_tokens is None or not outcome.prompt_tokens:
        return "unknown"
    return "decoded" if outcome.cached_tokens >= _FETCHED * outcome.prompt_tokens else "recomputed"


class _PrefillSeries(PiecewiseCollector):
    """Read at each scrape."""

    families = (_PREFILLS_IN_FLIGHT,)

    def __init__(self, in_flight: dict[str, int]) -> None:
        self._in_flight = in_flight

    def retain_only(self, label: str, names: Collection[str]) -> None:
        """Those with a prefill that has not ended stay, too."""
        if label == "server":
            for gone in [one for one, count in self._in_flight.items() if not count and one not in names]:
                del self._in_flight[gone]

    def exposition_chunks(self) -> Iterator[str]:
        """Of ModelServers that have had a prefill requested."""
        return _PREFILLS_IN_FLIGHT.exposition_chunks(
            _PREFILLS_IN_FLIGHT.line((server,), count) for server, count in list(self._in_flight.items())
        )


class _AdapterSeries(PiecewiseCollector):
    """Read from the pools at each scrape."""

    families = (_WAITING_FOR_ADAPTER, _ADAPTERS_HELD)

    def __init__(self, pools: Callable[[], Iterable[Pool]]) -> None:
        self._pools = pools

    def exposition_chunks(self) -> Iterator[str]:
        """Of ModelServers with adapters on demand."""
        pools = [(pool, slots) for pool in self._pools() if (slots := pool.slots) is not None]
        yield from _WAITING_FOR_ADAPTER.exposition_chunks(
            _WAITING_FOR_ADAPTER.line((pool.name,), slots.waiting) for pool, slots in pools
        )
        yield from _ADAPTERS_HELD.exposition_chunks(
            _ADAPTERS_HELD.line((pool.name, address), len(slots.adapters_held(row)))
            for pool, slots in pools
            for address, row in zip(pool.table.active_addresses, pool.table.active_rows, strict=True)
        )


class AdmissionMetrics:
    """Series of one extproc process. ``gates``: by ModelServer. ``waiting_in``: how many wait in a state, by
    ModelServer. ``clock``: that of endpoint tables.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        gates: Callable[[], Mapping[str, FlowControlGate]],
        waiting_in: WaitingIn,
        clock: Callable[[], float],
    ) -> None:
        self._gates = gates
        self._clock = clock
        self._tenants = BusiestNames(MOST_TENANTS, others=OTHERS, forget=self._forget_tenants)
        self._waits = DeferredHistogramFamily(
            "attache_queue_wait_seconds", "From arrival to dispatch.", _WAIT_BUCKETS, ["server", "band"], registry
        )
        self._ends = CounterFamily(
            "attache_queue_waits", "Waits by how they ended.", ["server", "band", "outcome"], registry
        )
        self._requests = CounterFamily(
            "attache_tenant_requests", "Requests by tenant and what was decided.", ["tenant", "outcome"], registry
        )
        self._tokens = {
            name: CounterFamily(f"attache_tenant_{name}_tokens", text, ["server", "tenant"], registry)
            for name, text in _TENANT_TOKENS.items()
        }
        self._service = CounterFamily(
            "attache_tenant_service_tokens", "Weighted tokens that engines gave.", ["server", "tenant"], registry
        )
        self._tenant_wait = CounterFamily(
            "attache_tenant_wait_seconds", "Seconds that requests were held.", ["server", "tenant"], registry
        )
        self._redis = CounterFamily("attache_limits_redis", "Questions to Redis about limits.", ["result"], registry)
        self._redis_seconds = DeferredHistogram(
            "attache_limits_redis_seconds", "Round trips to Redis for limits.", _REDIS_BUCKETS, registry
        )
        registry.register(_QueueSeries(gates, waiting_in, clock))
        registry.register(_WaitingSeries(waiting_in))
        self._cost = CounterFamily(
            "attache_cost_micros",
            "What requests cost by the prices of ModelServers, in millionths of the currency.",
            ["server", "tenant", "currency"],
            registry,
        )
        self._unpriced = CounterFamily(
            "attache_unpriced_requests", "Answered requests of ModelServers without a price.", ["server"], registry
        )
        self._tiers = CounterFamily(
            "attache_tier_picks",
            "Requests of rules with tiers, by why their ModelServer was chosen: holds, waits, up, down, misses.",
            ["server", "reason"],
            registry,
        )
        self._fallbacks = CounterFamily(
            "attache_fallbacks",
            "Requests that a fallback got, by why: failed (Envoy has gone on to it), no_endpoint, queue, late,"
            " context_window, content_policy, prefill.",
            ["server", "reason"],
            registry,
        )
        self._spent = CounterFamily(
            "attache_budget_refused_requests", "Requests for which a budget had no room.", ["budget"], registry
        )
        self._passed = CounterFamily(
            "attache_budget_soft_passed", "Callers that have passed the soft share of a budget.", ["budget"], registry
        )
        self._warned = CounterFamily(
            "attache_budget_warned_requests", "Requests beyond the soft share of a budget.", ["budget"], registry
        )
        self._guards = CounterFamily(
            "attache_guard_requests",
            "Requests by what their guard answered (allowed, refused, changed), or why it did not, and whether they"
            " went on.",
            ["guard", "result", "goes_on"],
            registry,
        )
        self._guard_calls = DeferredHistogramFamily(
            "attache_guard_seconds", "Calls of guards, answered or not.", _GUARD_BUCKETS, ["guard"], registry
        )

    def count_dispatch(self, decision: Decision) -> None:
        """A request goes to an engine, at once or after a wait."""
        history, tenant = decision.history, self._tenants.count_request(decision.tenant, self._clock())
        for grant in decision.grants:
            for charge, level in zip(grant.charges, grant.levels, strict=True):
                if charge.budget is not None and level <= charge.budget.soft:
                    self._warned.add(charge.budget.key)
        self._requests.add(tenant, "picked")
        if history.tier:
            self._tiers.add(decision.server, history.tier)
        if history.fell_back_for:
            self._fallbacks.add(decision.server, history.fell_back_for)
        if history.waited_s:
            self._tenant_wait.add_amount(history.waited_s, decision.server, tenant)
        if history.queued is None:
            return
        band = self._band(decision.server, history.queued)
        self._waits.observe(history.waits.get(RequestState.QUEUED, 0.0), decision.server, band)
        if history.was_held:
            self._ends.add(decision.server, band, "sent")

    def count_refusal(self, refused: RequestRefused) -> None:
        """Limits, the queue or the pool did not take a request."""
        arrival, outcome = refused.arrival, refused.refusal.outcome
        if isinstance(refused.refusal, BudgetSpent):
            self._spent.add(refused.refusal.budget)
        self._requests.add(self._tenants.count_request(arrival.tenant, self._clock()), outcome)
        if refused.was_held and refused.queued is not None:
            self._ends.add(arrival.pool.name, self._band(arrival.pool.name, refused.queued), outcome)

    def count_effect(self, effect: ClientLeft | SoftBudgetPassed | GuardAnswered) -> None:
        """A client did not wait for the end, a guard was asked, or a caller has passed the soft share of a budget."""
        if isinstance(effect, ClientLeft):
            self._ends.add(effect.server, self._band(effect.server, effect.queued), "left")
        elif isinstance(effect, GuardAnswered):
            self._guards.add(effect.name, effect.result, "yes" if effect.goes_on else "no")
            if effect.took_s:
                self._guard_calls.observe(effect.took_s, effect.name)
        elif effect.charge.budget is not None:
            self._passed.add(effect.charge.budget.key)

    def observe_settlement(self, settled: OutcomeJoined) -> None:
        """Record a request's tokens and its cost."""
        if settled.fell_back_from:
            refused = [kind for address, kind in settled.outcome.refused.items() if address != settled.outcome.served]
            self._fallbacks.add(settled.server, refused[0].replace("-", "_") if refused else "failed")
        tenant, used = self._tenants.shown_name(settled.tenant), settled.used
        cached = min(settled.outcome.cached_tokens or 0, used.input_tokens)
        for name, tokens in (("prompt", used.input_tokens), ("cached", cached), ("output", used.output_tokens)):
            if tokens:
                self._tokens[name].add_amount(tokens, settled.server, tenant)
        if settled.currency:
            if used.cost_micros:
                self._cost.add_amount(used.cost_micros, settled.server, tenant, settled.currency)
        elif used.input_tokens or used.output_tokens:
            self._unpriced.add(settled.server)
        if settled.service:
            self._service.add_amount(settled.service, settled.server, tenant)

    def tenant_counts(self) -> Iterator[tuple[str, str, float]]:
        """Tenant, what is counted and how much, in no order: requests that were ``picked`` and ``refused``, tokens
        (``prompt``, ``cached``, ``output``), and ``service``, the last two kinds for each ModelServer.
        """
        for (tenant, outcome), count in self._requests.items():
            yield tenant, outcome if outcome == "picked" else "refused", count
        for name, counters in (*self._tokens.items(), ("service", self._service)):
            for (_, tenant), amount in counters.items():
                yield tenant, name, amount

    def observe_redis_call(self, result: str, seconds: float) -> None:
        """Count a call of Redis for a grant."""
        self._redis.add(result)
        if seconds:
            self._redis_seconds.observe(seconds)

    def _forget_tenants(self, lost: frozenset[str]) -> None:
        for counters in (self._requests, *self._tokens.values(), self._service, self._tenant_wait, self._cost):
            counters.forget("tenant", lost - {OTHERS})

    def _band(self, server: str, queued: QueuedRequest) -> str:
        gate = self._gates().get(server)
        return "" if gate is None else gate.queue.band_of(queued.priority).spec.name


class BudgetSeries(PiecewiseCollector):
    """Read from the levels of budgets at each scrape."""

    families = (_USED,)

    def __init__(
        self,
        levels: Callable[[], Iterable[BucketLevel]],
        wall_clock: Callable[[], float],
        names: StaleSeriesRemover,
    ) -> None:
        self._levels = levels
        self._wall_clock = wall_clock
        self._names = names

    def exposition_chunks(self) -> Iterator[str]:
        """By budget, of the windows that are open. What was used of a budget that has left the configuration is kept,
        as it may return, and has no series.
        """
        in_use = self._names.names_in_use("budget")
        wall_s, largest = self._wall_clock(), dict[tuple[str, str], list[tuple[float, str]]]()
        for number, one in enumerate(self._levels()):
            if number % _LEVELS_AT_ONCE == _LEVELS_AT_ONCE - 1:
                yield ""
            named = BudgetKey.parse(one.key) if one.limit.ends_at_s > wall_s else None
            if named is None or (in_use is not None and named.budget not in in_use):
                continue
            found = largest.setdefault((named.budget, named.resource), [])
            entry = (1.0 - one.level / one.limit.capacity, named.caller_text)
            (heappush if len(found) < _MOST_CALLERS else heappushpop)(found, entry)
        yield from _USED.exposition_chunks(
            _USED.line((budget, resource, caller), used)
            for (budget, resource), found in sorted(largest.items())
            for used, caller in sorted(found, reverse=True)
        )


class _QueueSeries(PiecewiseCollector):
    """Read from the queues at each scrape."""

    families = (_QUEUED, _QUEUED_BYTES, _FLOWS, _FULL, _STALE, _WANTED)

    def __init__(
        self,
        gates: Callable[[], Mapping[str, FlowControlGate]],
        waiting_in: WaitingIn,
        clock: Callable[[], float],
    ) -> None:
        self._gates = gates
        self._waiting_in = waiting_in
        self._clock = clock

    def exposition_chunks(self) -> Iterator[str]:
        """By server, and by band."""
        gates, now = list(self._gates().items()), self._clock()
        for _, gate in gates:
            gate.update_saturation(now)
        bands = [(name, band) for name, gate in gates for band in gate.queue.bands]
        yield from _QUEUED.exposition_chunks(
            _QUEUED.line((name, band.spec.name), band.request_count) for name, band in bands
        )
        yield from _QUEUED_BYTES.exposition_chunks(
            _QUEUED_BYTES.line((name, band.spec.name), band.bytes) for name, band in bands
        )
        yield from _FLOWS.exposition_chunks(
            _FLOWS.line((name, band.spec.name), len(band.flows)) for name, band in bands
        )
        yield from _FULL.exposition_chunks(_FULL.line((name,), gate.saturation) for name, gate in gates)
        yield from _STALE.exposition_chunks(_STALE.line((name,), gate.stale_endpoints) for name, gate in gates)
        wanted = {name: len(gate.queue) if gate.needs_engine else 0 for name, gate in gates}
        for name, count in self._waiting_in(RequestState.AWAITING_ENGINE).items():
            wanted[name] = wanted.get(name, 0) + count
        yield from _WANTED.exposition_chunks(_WANTED.line((name,), count) for name, count in wanted.items())
