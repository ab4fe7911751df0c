# SPDX-License-Identifier: Apache-2.0
"""Filters: which endpoints may not take a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_running, estimated_waiting
from extproc.endpoints.ledger import backlogs
from extproc.scheduling.labels import has_no_model_list, runs_adapter, serves_adapter

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


class LoraLoaded(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``lora-affinity`` filter: endpoints with the adapter in their list of models or their batch."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the request names no adapter."""
        adapter = view.request.adapter
        if adapter is None:
            return candidates
        return candidates & (serves_adapter(view.table, adapter) | runs_adapter(view.table, adapter))


class ModelLoaded(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints whose list of models has the requested one, or whose list is not known."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none of the known lists has the model."""
        model = view.request.model
        return candidates & (serves_adapter(view.table, model) | has_no_model_list(view.table))


class Healthy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints that are not in back-off after a failure."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if all are in back-off."""
        healthy = candidates & (view.table.retry_at_s <= view.now_s)
        return healthy if healthy.any() else candidates


class SubsetHint(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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


class PrefixCacheAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefix-cache-affinity-filter``: endpoints with the prompt cached, unless they are much slower.

    An endpoint is sticky if its match ratio is at least ``affinityThreshold``. Only sticky endpoints are kept, unless
    there are none, or the best sticky TTFT exceeds the best TTFT of the others by more than ``maxTTFTPenaltyMs``.
    TTFT is the waiting work over the learned prefill rate, or over ``peakPrefillThroughput`` (tokens a second) if
    that is set.
    """

    affinity_threshold: Share = 0.80
    max_ttft_penalty_ms: NonNegative = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")
    peak_prefill_throughput: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # accepted without effect: random tie-breaking explores enough
    exploration_probability: Any = None
    prefix_match_info_producer_name: Any = None
    in_flight_load_producer_name: Any = None

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the sticky endpoints or all."""
        ratio = view.demand.cached_tokens / max(view.request.input_tokens, 1.0)
        sticky = candidates & (ratio >= self.affinity_threshold)
        others = candidates & ~sticky
        if not sticky.any():
            return candidates
        if not others.any():
            return sticky
        ttft_s = view.ttft_s()
        if self.peak_prefill_throughput is not None:
            ttft_s = ttft_s * view.table.prefill_rate / self.peak_prefill_throughput
        is_late = float(ttft_s[sticky].min()) - float(ttft_s[others].min()) > self.max_ttft_penalty_ms / 1000
        return candidates if is_late else sticky


class SaturationFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``utilization-detector`` as a filter: ``max(waiting / queueDepth, kv / kvCacheUtil) < 1 + headroom``."""

    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: NonNegative = 0.0
    # accepted without effect: trust in a report fades with its age, and a stale one never stops a request
    metrics_staleness_threshold: Any = None

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if all are saturated: holding requests back is the task of flow control."""
        queue = estimated_waiting(view.table, view.now_s) / self.queue_depth_threshold
        memory = estimated_kv_usage(view.table, view.now_s) / self.kv_cache_util_threshold
        free = candidates & (np.maximum(queue, memory) < 1 + self.headroom)
        return free if free.any() else candidates


class Concurrency(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``concurrency-detector`` as a filter: load in flight below a limit times ``1 + headroom``.

    Mode ``requests`` counts requests in flight, ``tokens`` the backlog of prefill work, ``hybrid`` takes the worse of
    both.
    """

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    headroom: NonNegative = 0.0
    in_flight_load_producer_name: Any = None

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if all are full."""
        load: Floats = np.zeros(candidates.size)
        if self.concurrency_mode != "tokens":
            load = view.table.in_flight / self.max_concurrency
        if self.concurrency_mode != "requests":
            load = np.maximum(load, backlogs(view.table, view.now_s) / self.max_token_concurrency)
        free = candidates & (load < 1 + self.headroom)
        return free if free.any() else candidates


class Condition(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An upper bound on one metric."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: NonNegative

    def holds(self, view: View) -> Bools:
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


class Utilization(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``utilization-filter``: endpoints for which all ``conditions`` hold."""

    conditions: tuple[Condition, ...] = ()
    fallback_on_empty: bool = False
    in_flight_load_producer_name: Any = None

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none satisfies all conditions; with ``fallbackOnEmpty``, all of them."""
        kept = candidates
        for condition in self.conditions:
            kept = kept & condition.holds(view)
        return kept if kept.any() or not self.fallback_on_empty else candidates
