# SPDX-License-Identifier: Apache-2.0
"""Scorers of load and of caches: requests and tokens that wait, run or are in flight, and cached tokens."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_running, estimated_waiting
from extproc.endpoints.in_flight import backlogs
from extproc.scheduling.plugins.ineffective_parameters import (
    INDEX_PARAMETERS,
    KV_EVENTS,
    NEVER_USED,
    ONE_INDEX,
    ONE_LEDGER,
)

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


def scores_for_less_is_better(values: Floats, candidates: Bools) -> Floats:
    """``(max - x) / (max - min)`` over the rows of ``candidates``; 1 for all if they are equal."""
    inside = values[candidates]
    least, most = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 0.0)
    if most <= least:
        return np.ones(values.size)
    scores: Floats = (most - values) / (most - least)
    return scores


class QueueScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``queue-scorer``: requests that wait in the engine, ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the shortest queue, 0 for the longest."""
        return scores_for_less_is_better(estimated_waiting(view.table, view.now_s), candidates)


class RunningRequestsScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``running-requests-size-scorer``: requests in the engine's batch, ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the smallest batch, 0 for the largest."""
        return scores_for_less_is_better(estimated_running(view.table, view.now_s), candidates)


class ActiveRequestsScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``active-request-scorer``: requests in flight.

    ``count <= idleThreshold``: 1; else ``(max - count) / max * maxBusyScore``.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "requestTimeout": "a request counts until its stream ends",
            "inFlightLoadProducerName": ONE_LEDGER,
        }
    )

    idle_threshold: Count = 0
    max_busy_score: Share = 1.0

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for idle endpoints, ``maxBusyScore`` at most for the others."""
        counts = view.table.in_flight.astype(np.float64)
        most = float(counts[candidates].max(initial=0.0))
        if most <= 0:
            return np.ones(counts.size)
        busy = (most - counts) / most * self.max_busy_score
        scores: Floats = np.where(counts <= self.idle_threshold, 1.0, busy)
        return scores


class LoadAwareScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``load-aware-scorer``: ``0.5 * (1 - min(waiting, t) / t)`` with t = ``threshold`` requests."""

    threshold: Annotated[int, msgspec.Meta(ge=1)] = 128

    def score(self, view: View, candidates: Bools) -> Floats:
        """0.5 for an empty queue, 0 from the threshold on."""
        del candidates
        scores: Floats = 0.5 * (
            1 - np.minimum(estimated_waiting(view.table, view.now_s), self.threshold) / self.threshold
        )
        return scores


class TokenLoadScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``token-load-scorer``: ``1 - min(T, Q) / Q`` with Q = ``queueThresholdTokens``.

    T is the prefill work that waits at the endpoint plus this prompt's own, in tokens, attention included.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "inFlightLoadProducerName": ONE_LEDGER,
            "nonTextTokenWeight": "images count by the tokens that engines report for them",
        }
    )

    queue_threshold_tokens: Annotated[float, msgspec.Meta(gt=0)] = 4_194_304

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 without any work, 0 from the threshold on."""
        del candidates
        tokens = backlogs(view.table, view.now_s) + view.demand.work
        scores: Floats = 1 - np.minimum(tokens, self.queue_threshold_tokens) / self.queue_threshold_tokens
        return scores


class LMetricScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``lmetric-scorer`` (arXiv 2603.15202): ``uncached * (in flight + 1)``, ``(max - x) / (max - min)``.

    ``uncached``: tokens of the prompt that the endpoint would have to compute.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"inFlightLoadProducerName": ONE_LEDGER})

    prefix_match_info_producer_name: str = ""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the least product, and for all if they are equal."""
        cached = view.demand.cached_by(self.prefix_match_info_producer_name)
        uncached = np.maximum(view.request.input_tokens - cached, 0.0)
        return scores_for_less_is_better(uncached * (view.table.in_flight + 1.0), candidates)


class LeastRequestScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-request`` score: ``(max - base) / max`` with ``base = F + 100 * max(F - R, 0)``.

    F: requests in flight. R: requests that the engine reports as running. The rest must be waiting in its queue.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for an endpoint with no request in flight."""
        sent = view.table.in_flight.astype(np.float64)
        base = sent + 100.0 * np.maximum(sent - estimated_running(view.table, view.now_s), 0.0)
        most = float(base[candidates].max(initial=0.0))
        return (most - base) / most if most > 0 else np.ones(base.size)


class KvCacheUtilizationScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``kv-cache-utilization-scorer`` and Kthena's ``gpu-usage``: ``1 - usage``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for an empty cache."""
        del candidates
        scores: Floats = 1.0 - estimated_kv_usage(view.table, view.now_s)
        return scores


class PrefixCacheScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefix-cache-scorer``: the fraction of the prompt that is probably cached.

    ``ratio = matched / total`` in tokens. With ``matchLengthWeight`` w it is ``w * min(1, matched / scale) ** 2 + (1
    - w) * ratio``, so that a long match counts more than a short one of the same fraction.
    """

    WITHOUT_EFFECT: ClassVar = INDEX_PARAMETERS

    match_length_weight: Share = 0.0
    match_length_scale_tokens: Positive = 8192
    # the names of these two in older releases of llm-d
    prefix_length_weight: Share | None = None
    max_model_len: Positive | None = None
    # a tier of its own if it names a producer with a capacity of its own, else the pool's index
    prefix_match_info_producer_name: str = ""

    def score(self, view: View, candidates: Bools) -> Floats:
        """The fraction by row; 0 where nothing of the prompt is cached."""
        del candidates
        matched = view.demand.cached_by(self.prefix_match_info_producer_name)
        ratio: Floats = matched / max(view.request.input_tokens, 1.0)
        weight = self.match_length_weight if self.prefix_length_weight is None else self.prefix_length_weight
        if not weight:
            return ratio
        length = np.minimum(1.0, matched / (self.max_model_len or self.match_length_scale_tokens)) ** 2
        scores: Floats = weight * length + (1 - weight) * ratio
        return scores


class PrecisePrefixCacheScorer(msgspec.Struct, frozen=True, rename="camel"):
    """llm-d's ``precise-prefix-cache-scorer`` and Kthena's ``kvcache-aware``: ``matched / total`` by KV events.

    The pool follows KV events if its ModelServer sets ``kvEvents``. Without a feed or a tokenizer, it falls back to
    its approximate index. The index is configured in the ModelServer; parameters are accepted without effect.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        dict.fromkeys(
            ("tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing", "speculativeTTL"),
            KV_EVENTS,
        )
    )
    TOLD: ClassVar = "by KV events if the ModelServer sets kvEvents; otherwise the same as prefix-cache-scorer"

    def score(self, view: View, candidates: Bools) -> Floats:
        """The fraction by row; 0 where nothing of the prompt is cached."""
        return PrefixCacheScorer().score(view, candidates)


class NoHitLruScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``no-hit-lru-scorer``: spreads prompts that no endpoint has cached.

    If any endpoint has a hit, all score 0.5. Otherwise ``1 - rank / (n - 1)``: first the endpoints that never
    received a prompt without a hit, then those whose last one is longest ago.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "lruSize": "every endpoint is remembered",
            "prefixPluginName": NEVER_USED,
            "prefixPluginType": NEVER_USED,
            "prefixMatchInfoProducerName": ONE_INDEX,
        }
    )

    def score(self, view: View, candidates: Bools) -> Floats:
        """Rank the endpoints by the time of their last prompt without a hit."""
        size = view.demand.cached_tokens.size
        if bool((view.demand.cached_tokens[candidates] > 0).any()):
            return np.full(size, 0.5)
        rows = candidates.nonzero()[0]
        scores = np.ones(size)
        if rows.size > 1:
            last = view.table.cold_prompt_at_s[rows]
            # equal times share a rank, as among endpoints that never received one
            _, rank = np.unique(last, return_inverse=True)
            scores[rows] = 1.0 - rank / (rows.size - 1)
        return scores
