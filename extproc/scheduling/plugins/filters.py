# SPDX-License-Identifier: Apache-2.0
"""Filters: which endpoints may not take a request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_running, estimated_waiting
from extproc.endpoints.in_flight import backlogs
from extproc.scheduling.endpoint_masks import rows_running_adapter, rows_serving_adapter, rows_without_model_list
from extproc.scheduling.plugins.ineffective_parameters import LEARNED_LATENCY, ONE_LEDGER

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class LeastRequestFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-request`` filter: fewer than ``maxWaitingRequests`` requests wait in the engine."""

    max_waiting_requests: Annotated[int, msgspec.Meta(ge=1)] = 10

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if all queues are long."""
        return candidates & (estimated_waiting(view.table, view.now_s) < self.max_waiting_requests)


class LoraLoadedFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``lora-affinity`` filter: endpoints with the adapter in their list of models or their batch."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the request names no adapter."""
        adapter = view.request.adapter
        if adapter is None:
            return candidates
        return candidates & (rows_serving_adapter(view.table, adapter) | rows_running_adapter(view.table, adapter))


class ModelLoadedFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints whose list of models has the requested one, or has not been read."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none of the known lists has the model."""
        model = view.request.model
        return candidates & (rows_serving_adapter(view.table, model) | rows_without_model_list(view.table))


class HealthyFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints whose breakers let requests through."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the breakers of all are open."""
        return view.preferred(candidates)


class SubsetHintFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints that the gateway names: the subset of the endpoint picker protocol (proposal 004)."""

    header: str = "x-gateway-destination-endpoint-subset"

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints without a hint, and none with an empty or unknown one; the protocol demands 503 then."""
        hint = view.request.headers.get(self.header)
        if hint is None:
            return candidates
        only = np.zeros(candidates.size, np.bool_)
        for address in hint.split(","):
            row = view.table.row_of(address.strip())
            if row is not None:
                only[row] = True
        return candidates & only


class PrefixCacheAffinityFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefix-cache-affinity-filter``: endpoints with the prompt cached, unless they are much slower.

    An endpoint is sticky if its match ratio is at least ``affinityThreshold``. Only sticky endpoints are kept, unless
    there are none, or the best sticky TTFT exceeds the best TTFT of the others by more than ``maxTTFTPenaltyMs``; 0
    keeps them always. TTFT is the waiting work over the learned prefill rate, or over ``peakPrefillThroughput``
    (tokens a second) if that is set and ``ttftSource`` is not ``latencyPredictor``. ``maxTokensInFlightPenalty``, of
    older releases, does the same with the waiting tokens themselves; 0 turns it off.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "explorationProbability": "random tie-breaking explores enough",
            "inFlightLoadProducerName": ONE_LEDGER,
            "latencyPredictionInfoProducerName": LEARNED_LATENCY,
            "penaltySource": "the penalty is always the constant maxTTFTPenaltyMs",
            "prefillCalibrationFile": "without peakPrefillThroughput the learned prefill rate of each endpoint is used",
            "prefillCalibrationFingerprint": "no calibration is read",
            "prefillCalibrationRequired": "no calibration is read",
        }
    )

    affinity_threshold: Share = 0.80
    max_ttft_penalty_ms: NonNegative = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")
    max_tokens_in_flight_penalty: NonNegative = 0.0
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: NonNegative | None = None
    prefix_match_info_producer_name: str = ""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the sticky endpoints or all."""
        cached = view.demand.cached_by(self.prefix_match_info_producer_name)
        sticky = candidates & (cached / max(view.request.input_tokens, 1.0) >= self.affinity_threshold)
        others = candidates & ~sticky
        if not sticky.any():
            return candidates
        if not others.any() or not self._is_too_slow(view, sticky, others):
            return sticky
        return candidates

    def _is_too_slow(self, view: View, sticky: Bools, others: Bools) -> bool:
        """Whether the best of the sticky endpoints is further behind the best of the others than is allowed."""
        if self.max_tokens_in_flight_penalty:
            waiting = backlogs(view.table, view.now_s)
            if float(waiting[sticky].min() - waiting[others].min()) > self.max_tokens_in_flight_penalty:
                return True
        if not self.max_ttft_penalty_ms:
            return False
        ttft_s = view.ttft_s()
        if self.peak_prefill_throughput and self.ttft_source == "prefillThroughput":
            ttft_s = ttft_s * view.table.prefill_rate / self.peak_prefill_throughput
        behind_s = float(ttft_s[sticky].min() - ttft_s[others].min())
        return 1000 * behind_s > self.max_ttft_penalty_ms


class SaturationFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``utilization-detector`` as a filter: ``max(waiting / queueDepth, kv / kvCacheUtil) < 1 + headroom``."""

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {"metricsStalenessThreshold": "trust in a report fades with its age, and a stale one never stops a request"}
    )

    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: NonNegative = 0.0

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if all are saturated: holding requests back is the task of flow control."""
        queue = estimated_waiting(view.table, view.now_s) / self.queue_depth_threshold
        memory = estimated_kv_usage(view.table, view.now_s) / self.kv_cache_util_threshold
        free = candidates & (np.maximum(queue, memory) < 1 + self.headroom)
        return free if free.any() else candidates


class ConcurrencyFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``concurrency-detector`` as a filter: load in flight below a limit times ``1 + headroom``.

    Mode ``requests`` counts requests in flight, ``tokens`` the backlog of prefill work, ``hybrid`` takes the worse of
    both.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"inFlightLoadProducerName": ONE_LEDGER})

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    headroom: NonNegative = 0.0

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if all are full."""
        load: Floats = np.zeros(candidates.size)
        if self.concurrency_mode != "tokens":
            load = view.table.in_flight / self.max_concurrency
        if self.concurrency_mode != "requests":
            load = np.maximum(load, backlogs(view.table, view.now_s) / self.max_token_concurrency)
        free = candidates & (load < 1 + self.headroom)
        return free if free.any() else candidates


class MetricLimit(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An upper bound on one metric."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: NonNegative

    def satisfied_rows(self, view: View) -> Bools:
        """The rows that satisfy the condition."""
        table, now = view.table, view.now_s
        match self.metric:
            case "active-requests":
                return table.in_flight <= self.max_value
            case "running-requests":
                return estimated_running(table, now) <= self.max_value
            case "waiting-queue":
                return estimated_waiting(table, now) <= self.max_value
            case "kv-cache-utilization":
                return estimated_kv_usage(table, now) <= self.max_value


class UtilizationFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``utilization-filter``: endpoints for which all ``conditions`` hold."""

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"inFlightLoadProducerName": ONE_LEDGER})

    conditions: tuple[MetricLimit, ...] = ()
    fallback_on_empty: bool = False

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none satisfies all conditions; with ``fallbackOnEmpty``, all of them."""
        kept = candidates
        for condition in self.conditions:
            kept = kept & condition.satisfied_rows(view)
        return kept if kept.any() or not self.fallback_on_empty else candidates
