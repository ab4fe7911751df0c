# SPDX-License-Identifier: Apache-2.0
"""Scorers of caches: how much of the prompt is cached, and how full the KV cache is."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage
from extproc.scheduling.plugins.reasons import INDEX_PARAMETERS, KV_EVENTS, NEVER_USED, ONE_INDEX

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class KvCacheUtilization(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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


class PrecisePrefixCache(msgspec.Struct, frozen=True, rename="camel"):
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


class NoHitLru(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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
