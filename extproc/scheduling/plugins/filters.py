"""Filters: who may not take a request at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class LeastRequestFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-request`` filter: a queue shorter than ``maxWaitingRequests``."""

    max_waiting_requests: Annotated[int, msgspec.Meta(ge=1)] = 10

    def keep(self, view: View, among: Bools) -> Bools:
        """Nobody, if all queues are long."""
        return among & (view.table.waiting < self.max_waiting_requests)


class LoraLoaded(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``lora-affinity`` filter: endpoints that have the adapter loaded."""

    def keep(self, view: View, among: Bools) -> Bools:
        """All, for a request that asks for no adapter."""
        adapter = view.request.adapter
        if adapter is None:
            return among
        has = np.fromiter((adapter in loras.active for loras in view.table.loras), np.bool_, among.size)
        return among & has


class Healthy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints that did not just fail; all, if all did."""

    def keep(self, view: View, among: Bools) -> Bools:
        """Refusing everybody helps nobody."""
        healthy = among & (view.table.avoid_until_s <= view.now_s)
        return healthy if healthy.any() else among


class SubsetHint(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Endpoints that the gateway names: the endpoint picker protocol's subset (Gateway API Inference Extension, 004)."""

    header: str = "x-gateway-destination-endpoint-subset"

    def keep(self, view: View, among: Bools) -> Bools:
        """All without a hint; an empty or unknown subset leaves nobody, which the protocol answers with 503."""
        hint = view.request.headers.get(self.header)
        if hint is None:
            return among
        only = np.zeros(among.size, np.bool_)
        for address in hint.split(","):
            row = view.table.row_of(address.strip())
            if row is not None:
                only[row] = True
        return among & only


class PrefixCacheAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefix-cache-affinity-filter``: those that hold the prompt, as long as they are not much later.

    Sticky: match ratio at least ``affinityThreshold``. None: all. Else only the sticky, unless the best sticky TTFT is more
    than ``maxTTFTPenaltyMs`` above the best of the others. TTFT: waiting work over the learned prefill rate.
    """

    affinity_threshold: Share = 0.80
    max_ttft_penalty_ms: NonNegative = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")

    def keep(self, view: View, among: Bools) -> Bools:
        """One side or the other of the threshold, or everybody."""
        ratio = view.demand.cached_tokens / max(view.request.input_tokens, 1.0)
        sticky = among & (ratio >= self.affinity_threshold)
        others = among & ~sticky
        if not sticky.any():
            return among
        if not others.any():
            return sticky
        ttft_s = view.ttft_s()
        is_late = float(ttft_s[sticky].min()) - float(ttft_s[others].min()) > self.max_ttft_penalty_ms / 1000
        return among if is_late else sticky


class Saturation(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``utilization-detector`` as a filter: ``max(waiting / queueDepth, kv / kvCacheUtil) < 1 + headroom``."""

    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: NonNegative = 0.0

    def keep(self, view: View, among: Bools) -> Bools:
        """All, if all are saturated: queues are for another to hold."""
        queue = view.table.waiting / self.queue_depth_threshold
        memory = view.table.kv_usage / self.kv_cache_util_threshold
        free = among & (np.maximum(queue, memory) < 1 + self.headroom)
        return free if free.any() else among


class Concurrency(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``concurrency-detector`` as a filter: what we sent against ``maxConcurrency * (1 + headroom)``."""

    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 100
    headroom: NonNegative = 0.0

    def keep(self, view: View, among: Bools) -> Bools:
        """All, if all are full."""
        free = among & (view.table.in_flight < self.max_concurrency * (1 + self.headroom))
        return free if free.any() else among
