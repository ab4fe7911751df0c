# SPDX-License-Identifier: Apache-2.0
"""Decisions, refusals and outcomes as Prometheus metrics.

Labels come from the configuration and from fixed sets, never from what a client sends: its model name, path or headers
cannot add a series. Series of an endpoint end when it leaves the configuration.
"""

from __future__ import annotations

from collections import Counter as Counter_
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import Counter, Gauge

from extproc.core.effects import (
    AdapterLoadEnded,
    BreakerChanged,
    CacheLookupResult,
    CacheStoreAttempted,
    ClientLeft,
    Decision,
    EngineStarted,
    Fault,
    GuardAnswered,
    OutcomeJoined,
    Prefill,
    PrefillEnded,
    RequestRefused,
    RequestSloJudged,
    SloMissPredicted,
    SoftBudgetPassed,
)
from extproc.core.request_states import STEP_NAMES, WAITING, RequestState
from extproc.metrics.admission_metrics import (
    OTHERS,
    ActivationMetrics,
    AdapterMetrics,
    AdmissionMetrics,
    BudgetSeries,
    PrefillMetrics,
)
from extproc.metrics.endpoint_series import EndpointSeries
from extproc.metrics.exposition import CounterFamily, DeferredHistogram, DeferredHistogramFamily, Registry
from extproc.metrics.llm_d import LlmdMetrics
from extproc.metrics.recent_requests import RecentRequests
from extproc.metrics.response_cache import ResponseCacheMetrics
from extproc.metrics.slo_metrics import AnswerTimeHistograms, ObjectiveSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.admission.token_buckets import BucketLevel
    from extproc.core.effects import Effect
    from extproc.core.shadow_picks import ShadowComparison
    from extproc.line_writer import LineResult
    from extproc.metrics.admission_metrics import WaitingIn
    from extproc.metrics.decision_log import DecisionLog
    from extproc.refusals import Refusal
    from extproc.scheduling.pool import Pool

_PICK_BUCKETS: Final = (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2, 0.1, 1.0)
# of an engine that starts, too
_WAIT_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_STREAM_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LAG_BUCKETS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)


class ShadowAgreement:
    """How often the other picker's choice is ours, since the start and since it was reported last."""

    def __init__(self) -> None:
        self._counts = Counter_[str]()
        self._reported = 0

    def add(self, verdict: str) -> None:
        """One more comparison."""
        self._counts[verdict] += 1

    def report(self) -> str:
        """A line for the log; empty if nothing was compared since the last one."""
        total = self._counts.total()
        if total == self._reported:
            return ""
        self._reported = total
        compared = self._counts["agreed"] + self._counts["differed"]
        others = {name: count for name, count in sorted(self._counts.items()) if name not in {"agreed", "differed"}}
        share = f"{self._counts['agreed'] / compared:.1%} of {compared}" if compared else "none"
        rest = "".join(f"; {count} {name.replace('_', ' ')}" for name, count in others.items())
        return f"shadow: {share} picks of the other picker are ours{rest}"


class Metrics:
    """All series of one extproc process, in a registry of their own."""

    def __init__(
        self,
        pools: Callable[[], Iterable[Pool]],
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        gates: Callable[[], Mapping[str, FlowControlGate]] = dict,
        waiting_in: WaitingIn = lambda _: {},
        *,
        budget_levels: Callable[[], Iterable[BucketLevel]] = tuple,
        has_llm_d_names: bool = False,
        decision_log: DecisionLog | None = None,
    ) -> None:
        """``clock``: that of endpoint tables. ``gates``: by ModelServer, where there is flow control. ``waiting_in``:
        the core's meter's. ``budget_levels``: of budgets that are used. ``has_llm_d_names``: series under the names of
        llm-d's picker, too. ``decision_log``: gets the same effects.
        """
        self.recent, self.shadow, self.decision_log = RecentRequests(), ShadowAgreement(), decision_log
        self.registry = Registry()
        self.admission = AdmissionMetrics(self.registry, gates, waiting_in, clock)
        self.registry.register(BudgetSeries(budget_levels, wall_clock, self.registry.names))
        self.objectives = ObjectiveSeries(self.registry, wall_clock)
        self._answer_times = AnswerTimeHistograms(self.registry, gates, clock)
        self._adapters, self._prefills = AdapterMetrics(self.registry, pools), PrefillMetrics(self.registry)
        self._activation, self.caches = ActivationMetrics(self.registry), ResponseCacheMetrics(self.registry)
        # those in queues count by band, and with requests that need not wait
        self._waits = {
            state: DeferredHistogramFamily(
                f"attache_{STEP_NAMES[state]}_wait_seconds",
                f"What requests waited in the step '{STEP_NAMES[state]}'.",
                _WAIT_BUCKETS,
                ["server"],
                self.registry,
            )
            for state in sorted(WAITING - {RequestState.QUEUED})
        }
        self._wall_clock, self._clock, self._pools = wall_clock, clock, pools
        self._requests = CounterFamily("attache_requests", "Requests by what was decided.", ["outcome"], self.registry)
        self._requests.add_series("picked")
        self._picks = CounterFamily("attache_picks", "Requests sent to a ModelServer.", ["server"], self.registry)
        self._answers = CounterFamily(
            "attache_answers",
            "Answers by ModelServer, class of status, and whether the first choice served.",
            ["server", "status_class", "first_choice"],
            self.registry,
        )
        self._plugin_failures, self._breakers = (
            CounterFamily(name, text, labels, self.registry)
            for name, text, labels in (
                (
                    "attache_plugin_failures",
                    "Failures of plugins of other packages, without which requests were decided.",
                    ["server", "plugin"],
                ),
                (
                    "attache_breaker_transitions",
                    "Times that breakers of endpoints or ModelServers have opened or closed, as this process saw it.",
                    ["server", "level", "to"],
                ),
            )
        )
        self._traces, self._log_lines = (
            CounterFamily(name, text, ["result"], self.registry)
            for name, text in (
                (
                    "attache_traces",
                    "Decisions of sampled requests, by what became of their spans: sent, failed, dropped.",
                ),
                ("attache_decision_log_lines", "Lines of the decision log: written, dropped, failed."),
            )
        )
        self._pick_seconds = DeferredHistogram(
            "attache_pick_seconds",
            "Parse, route, pick: from a whole body to the decision.",
            _PICK_BUCKETS,
            self.registry,
        )
        self._stream_seconds = DeferredHistogram(
            "attache_stream_seconds",
            "Life of an ext_proc stream, which is that of the request.",
            _STREAM_BUCKETS,
            self.registry,
        )
        # instants by the clock of endpoint tables, 0 if there was none
        self._open, self.last_stream_at_s, self.last_check_at_s = 0, 0.0, 0.0
        for name, text, instant in (
            ("attache_last_stream", "When the last ext_proc stream began", lambda: self.last_stream_at_s),
            ("attache_last_health_check", "When an Envoy last asked for health", lambda: self.last_check_at_s),
        ):
            last = Gauge(f"{name}_timestamp_seconds", f"{text}, 0 if never.", registry=self.registry)
            last.set_function(partial(self._timestamp, instant))
        self._misses_envoy = Gauge(
            "attache_envoy_misses_extproc",
            "1 if Envoy is configured to call another address than extproc's.",
            registry=self.registry,
        )
        open_streams = Gauge("attache_open_streams", "ext_proc streams open now.", registry=self.registry)
        open_streams.set_function(lambda: self._open)
        self._log_entries = CounterFamily(
            "attache_access_log_entries", "Access log entries by use.", ["result"], self.registry
        )
        self._log_lag = DeferredHistogram(
            "attache_access_log_lag_seconds",
            "From the end of a request to its access log entry.",
            _LAG_BUCKETS,
            self.registry,
        )
        self._shadow_picks = CounterFamily(
            "attache_shadow_picks",
            "Picks of another picker beside ours: agreed, differed, or why they cannot be compared.",
            ["server", "verdict"],
            self.registry,
        )
        self._shadow_seconds = CounterFamily(
            "attache_shadow_cost_seconds",
            "Expected cost of compared picks, by our estimate: the other picker's and ours.",
            ["server", "picker"],
            self.registry,
        )
        self._config_reloads = CounterFamily(
            "attache_config_reloads", "Readings of the configuration by result.", ["result"], self.registry
        )
        self._config_valid = Gauge(
            "attache_config_valid", "1 if the directory as it is now could be applied.", registry=self.registry
        )
        self._config_applied = Gauge(
            "attache_config_applied_timestamp_seconds",
            "When the configuration in use was read.",
            registry=self.registry,
        )
        self._kv_events = CounterFamily(
            "attache_kv_events", "Messages with KV events, and replays.", ["server", "result"], self.registry
        )
        self._feed_restarts = CounterFamily(
            "attache_feed_restarts",
            "Feeds beside the requests that failed and were started again; the log says why.",
            ["feed"],
            self.registry,
        )
        self._tokenized = CounterFamily(
            "attache_tokenized_prompts",
            "Prompts for the precise index: all but `tokenized` were matched by the approximate one.",
            ["server", "result"],
            self.registry,
        )
        self._shared = CounterFamily(
            "attache_shared_messages", "Messages between processes.", ["result"], self.registry
        )
        self._peers = Gauge("attache_peers", "Other processes that are heard of.", registry=self.registry)
        self._scrapes = CounterFamily(
            "attache_engine_reports", "Readings of engines' metrics.", ["server", "result"], self.registry
        )
        self._stretch = Gauge(
            "attache_scrape_stretch",
            "By what scrape intervals are multiplied, so that reading engines leaves time for requests.",
            registry=self.registry,
        )
        self._stretch.set(1)
        self.registry.register(EndpointSeries(pools, clock, wall_clock))
        age = Gauge("attache_config_age_seconds", "Age of the configuration in use.", registry=self.registry)
        # client_golang's idiom; prometheus_client keeps the value of a set gauge where no function computes it
        age.set_function(self._config_age)
        self._applied_at: float = wall_clock()
        self._llm_d = LlmdMetrics(self.registry, pools, gates, clock) if has_llm_d_names else None

    def on_stream_opened(self) -> None:
        """A request's stream begins."""
        self._open += 1
        self.last_stream_at_s = self._clock()

    def on_stream_closed(self, seconds: float) -> None:
        """A request's stream is over."""
        self._open -= 1
        self._stream_seconds.observe(seconds)

    def on_health_check(self) -> None:
        """Envoy has asked for our health."""
        self.last_check_at_s = self._clock()

    def set_listener_reachable(self, *, is_reachable: bool) -> None:
        """Whether Envoy is configured to call where we listen."""
        self._misses_envoy.set(not is_reachable)

    def count_effect(self, effect: Effect) -> None:
        """Count the core's decisions and measurements; effects of other kinds are ignored."""
        if self._llm_d is not None:
            self._llm_d.count_effect(effect)
        self._count(effect)

    def _count(self, effect: Effect) -> None:
        match effect:
            case Decision():
                self._count_decision(effect)
            case OutcomeJoined() if effect.is_ours:
                self._count_answer(effect)
            case RequestSloJudged() | SloMissPredicted():
                self.objectives.count(effect)
            case RequestRefused():
                self._requests.add(effect.refusal.outcome)
                self.admission.count_refusal(effect)
            case CacheLookupResult() | CacheStoreAttempted():
                self.caches.count(effect)
            case ClientLeft() | SoftBudgetPassed() | GuardAnswered():
                self.admission.count_effect(effect)
            case EngineStarted():
                self._activation.observe_start(effect)
            case AdapterLoadEnded() | Prefill() | PrefillEnded():
                self._count_work(effect)
            case BreakerChanged() | Fault():
                self._count_failure(effect)

    def _count_failure(self, effect: BreakerChanged | Fault) -> None:
        if isinstance(effect, BreakerChanged):
            level = "endpoint" if effect.address else "server"
            self._breakers.add(effect.server, level, "open" if effect.after.trips else "closed")
        elif effect.plugin:
            self._plugin_failures.add(effect.server, effect.plugin)

    def _count_work(self, work: AdapterLoadEnded | Prefill | PrefillEnded) -> None:
        match work:
            case AdapterLoadEnded():
                self._adapters.observe_load(work.result)
            case Prefill():
                self._prefills.count_start(work)
            case PrefillEnded():
                self._prefills.observe_end(work)

    def _count_decision(self, decision: Decision) -> None:
        if self.decision_log is not None:
            self.decision_log.log_decision(decision)
        self.admission.count_dispatch(decision)
        self._requests.add("picked")
        self._picks.add(decision.server)
        if decision.history.whole:
            self._prefills.count_not_disaggregated(decision)
        for state, waited_s in decision.history.waits.items():
            if waited_s and state in self._waits:
                self._waits[state].observe(waited_s, decision.server)

    def count_shadow_pick(self, pick: ShadowComparison) -> None:
        """Another picker has decided a request, and ours would have decided so."""
        self._shadow_picks.add(pick.server, pick.verdict)
        self.shadow.add(pick.verdict)
        if pick.ours is not None and pick.their_cost_s is not None:
            self._shadow_seconds.add_amount(pick.their_cost_s, pick.server, "theirs")
            self._shadow_seconds.add_amount(pick.ours.cost_s, pick.server, "ours")
        if self.decision_log is not None:
            self.decision_log.log_shadow(pick)

    def count_traces(self, result: str, count: int) -> None:
        """Spans of ``count`` decisions were sent to the collector, failed to be sent, or did not fit its queue."""
        self._traces.add_amount(count, result)

    def count_log_lines(self, result: LineResult, count: int) -> None:
        """Lines of the decision log were written, could not be written, or did not fit its queue."""
        self._log_lines.add_amount(count, result)

    def outcomes(self) -> dict[str, int]:
        """Requests by what was decided."""
        return {outcome: int(count) for (outcome,), count in self._requests.items()}

    def observe_pick_seconds(self, seconds: float) -> None:
        """Record a decision without a wait, and its time since the whole body."""
        self._pick_seconds.observe(seconds)
        if self._llm_d is not None:
            self._llm_d.observe_pick_seconds(seconds)

    def count_direct_response(self, what: Literal["models_listed", "health"]) -> None:
        """Count an answer that no engine was asked for."""
        self._requests.add(what)

    def count_early_refusal(self, refusal: Refusal) -> None:
        """A request was refused before it came to the core."""
        self._requests.add(refusal.outcome)

    def count_matched_log_entry(self, ended_at_s: float) -> None:
        """An access log entry found its decision; ``ended_at_s``: when the request ended, wall clock."""
        self._log_entries.add("settled")
        self._log_lag.observe(max(0.0, self._wall_clock() - ended_at_s))

    def _count_answer(self, settled: OutcomeJoined) -> None:
        if self.decision_log is not None:
            self.decision_log.log_outcome(settled)
        if self.recent.is_open:
            self.recent.on_outcome(settled)
        self.admission.observe_settlement(settled)
        self._prefills.count_answer(settled)
        self._answer_times.observe(settled)
        outcome = settled.outcome
        status_class = f"{outcome.status // 100}xx" if 100 <= outcome.status < 600 else "none"
        first = "yes" if outcome.served == settled.assignment.endpoint.address else "no"
        self._answers.add(settled.server, status_class, first)

    def count_kv_events(self, server: str, result: str) -> None:
        """A message with KV events, or a replay of them."""
        self._kv_events.add(server, result)

    def count_feed_failure(self, feed: str) -> None:
        """A feed has failed, and is started again."""
        self._feed_restarts.add(feed)

    def count_tokenization(self, server: str, result: str) -> None:
        """Count an attempt to tokenize a prompt."""
        self._tokenized.add(server, result)

    def count_peer_message(self, result: str) -> None:
        """A message to or from other processes."""
        self._shared.add(result)

    def set_peers(self, count: int) -> None:
        """Number of other processes whose reports arrive."""
        self._peers.set(count)

    def observe_scrape(self, server: str) -> None:
        """An engine's report was read."""
        self._scrapes.add(server, "read")

    def count_scrape_failure(self, server: str) -> None:
        """Count a failed read of an engine."""
        self._scrapes.add(server, "failed")

    def set_scrape_interval_factor(self, factor: float) -> None:
        """Scrape intervals are so many times as long as configured."""
        self._stretch.set(factor)

    def count_unmatched_log_entry(self, *, has_ticket: bool) -> None:
        """An access log entry without a ticket, or with one that this process did not give or has settled."""
        self._log_entries.add("unknown_ticket" if has_ticket else "no_ticket")

    def on_config_applied(self) -> None:
        """A new configuration is in use. Series of ModelServers that it does not have end; one that returns begins at
        0, as after a restart.
        """
        self.registry.retain_only("server", {OTHERS, "", *(pool.name for pool in self._pools())})
        self._config_reloads.add("applied")
        self._config_valid.set(1)
        self._applied_at = self._wall_clock()
        self._config_applied.set(self._applied_at)

    def on_config_refused(self) -> None:
        """The directory is broken; the last good state stays."""
        self._config_reloads.add("refused")
        self._config_valid.set(0)

    def on_config_mended(self) -> None:
        """The directory is valid again and equals the configuration in use."""
        self._config_valid.set(1)

    def _timestamp(self, instant: Callable[[], float]) -> float:
        at_s = instant()
        return self._wall_clock() - (self._clock() - at_s) if at_s else 0.0

    def _config_age(self) -> float:
        return self._wall_clock() - self._applied_at


class TlsMetrics:
    """In ``registry``, where the gRPC port has TLS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._expires = Gauge(
            "attache_tls_certificate_expires_timestamp_seconds",
            "When the certificate of the gRPC port ends to be valid.",
            registry=registry,
        )
        self._loads = Counter(
            "attache_tls_certificate_loads_total",
            "Certificates that were read, by result.",
            ["result"],
            registry=registry,
        )
        for result in ("used", "refused"):
            self._loads.labels(result)

    def on_certificate_loaded(self, expires_at_s: float) -> None:
        """A certificate is in use, until this Unix time."""
        self._loads.labels("used").inc()
        self._expires.set(expires_at_s)

    def on_certificate_refused(self) -> None:
        """Count a certificate that could not be used."""
        self._loads.labels("refused").inc()
