# SPDX-License-Identifier: Apache-2.0
"""Scorers of caches: how much of the prompt is cached, and how full the KV cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage

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

    match_length_weight: Share = 0.0
    match_length_scale_tokens: Positive = 8192
    # The rest configures the index of llm-d and Kthena. It is accepted without effect, so that their files run
    # unchanged: here the index belongs to the pool and takes its size from what engines report.
    prefix_match_info_producer_name: str = ""
    auto_tune: Any = None
    block_size: Any = None
    block_size_tokens: Any = None
    hash_block_size: Any = None
    lru_capacity_per_server: Any = None
    max_prefix_blocks_to_match: Any = None
    max_prefix_tokens_to_match: Any = None
    block_size_to_hash: Any = None
    max_blocks_to_match: Any = None
    max_hash_cache_size: Any = None
    top_k_matches: Any = msgspec.field(default=None, name="topKMatches")

    def score(self, view: View, candidates: Bools) -> Floats:
        """The fraction by row; 0 where nothing of the prompt is cached."""
        del candidates
        matched = view.demand.cached_tokens
        ratio: Floats = matched / max(view.request.input_tokens, 1.0)
        weight = self.match_length_weight
        if not weight:
            return ratio
        length = np.minimum(1.0, matched / self.match_length_scale_tokens) ** 2
        scores: Floats = weight * length + (1 - weight) * ratio
        return scores


class PrecisePrefixCache(msgspec.Struct, frozen=True, rename="camel"):
    """llm-d's ``precise-prefix-cache-scorer`` and Kthena's ``kvcache-aware``: ``matched / total`` by KV events.

    The pool follows KV events if its ModelServer sets ``kvEvents``. Without a feed or a tokenizer, it falls back to
    its approximate index. The index is configured in the ModelServer; parameters are accepted without effect.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """The fraction by row; 0 where nothing of the prompt is cached."""
        return PrefixCacheScorer().score(view, candidates)


class NoHitLru(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``no-hit-lru-scorer``: spreads prompts that no endpoint has cached.

    If any endpoint has a hit, all score 0.5. Otherwise ``1 - rank / (n - 1)``: first the endpoints that never
    received a prompt without a hit, then those whose last one is longest ago.
    """

    lru_size: Annotated[int, msgspec.Meta(ge=1)] = 1024

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
