# SPDX-License-Identifier: Apache-2.0
"""Scorers by observed or expected latency, by price, and at random."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import numpy as np

from extproc.scheduling.plugins.load_scorers import less_is_better
from extproc.scheduling.plugins.noise import uniforms
from extproc.scheduling.plugins.objectives import objective_ms
from extproc.scheduling.plugins.reasons import LEARNED_LATENCY, ONE_INDEX

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class LeastLatency(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-latency``: ``w * ttft + (1 - w) * tpot`` with w = ``TTFTTPOTWeightFactor``.

    Each part is ``(max - x) / (max - min)`` of the recent mean, or 0.5 for an endpoint without data, as in Kthena.
    """

    ttft_tpot_weight_factor: Share = msgspec.field(default=0.5, name="TTFTTPOTWeightFactor")

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the endpoint that is fastest in both."""
        weight = self.ttft_tpot_weight_factor
        scores: Floats = weight * _known(view.table.ttft_s, candidates) + (1 - weight) * _known(
            view.table.tpot_s, candidates
        )
        return scores


def _known(latency: Floats, candidates: Bools) -> Floats:
    known = candidates & (latency > 0)
    return np.where(known, less_is_better(latency, known), 0.5)


class LatencyScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``latency-scorer``: the headroom of the expected latency below the request's objectives.

    ``headroom = 0.8 * (slo_ttft - ttft) + 0.2 * (slo_tpot - tpot)`` in milliseconds. The objectives are in the
    headers ``x-llm-d-slo-ttft-ms`` and ``x-llm-d-slo-tpot-ms`` (formerly ``x-slo-...``); a missing one is 0.
    Endpoints that meet the objectives score at least 0.5: with ``least``, the one with the least headroom scores
    highest, which leaves fast endpoints to demanding requests; with ``most``, the one with the most headroom.
    Endpoints that miss the objectives score below 0.5, the smallest miss highest. TTFT is waiting work over the
    learned prefill rate, TPOT the recent mean; llm-d predicts both with a trained model.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            **dict.fromkeys(
                ("compositeKVWeight", "compositeQueueWeight", "compositePrefixWeight"),
                "there always is an expected latency, so there is nothing to fall back to",
            ),
            "latencyPredictionInfoProducerName": LEARNED_LATENCY,
            "prefixMatchInfoProducerName": ONE_INDEX,
        }
    )

    ttft_weight: NonNegative = 0.8
    tpot_weight: NonNegative = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"

    def score(self, view: View, candidates: Bools) -> Floats:
        """Endpoints that meet the objectives score from 0.5 to 1, the others from 0 to 0.4."""
        ttft = objective_ms(view, "ttft") - 1000 * view.ttft_s()
        tpot = objective_ms(view, "tpot") - 1000 * view.table.tpot_s
        headroom = self.ttft_weight * ttft + self.tpot_weight * tpot
        meets, misses = candidates & (headroom >= 0), candidates & (headroom < 0)
        close = less_is_better(headroom, meets)
        rank = close if self.headroom_selection_strategy == "least" else less_is_better(-headroom, meets)
        scores: Floats = np.where(meets, 0.5 + 0.5 * rank, 0.4 * less_is_better(-headroom, misses))
        return scores


class CostScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The configured price of an endpoint: ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the cheapest endpoint, and for all if prices are equal."""
        return less_is_better(view.table.price, candidates)


class RandomScore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``random``: noise to add to other scores.

    A scorer is a pure function of the view, so the noise is a hash of the request's time and the row.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """Uniform in [0, 1)."""
        return uniforms(view.now_s, candidates.size)
