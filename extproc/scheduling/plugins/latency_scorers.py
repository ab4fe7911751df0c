"""Scorers of time and money: latencies that were seen or are expected, and what an endpoint costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from extproc.scheduling.plugins.load_scorers import less_is_better

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class LeastLatency(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-latency``: recent TTFT and TPOT, each ``(max - x) / (max - min)``, blended ``w * ttft + (1 - w) * tpot``.

    An endpoint without data scores 0.5 in that half, as in Kthena.
    """

    ttft_tpot_weight_factor: Share = msgspec.field(default=0.5, name="TTFTTPOTWeightFactor")

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the fastest on both counts."""
        weight = self.ttft_tpot_weight_factor
        scores: Floats = weight * _known(view.table.ttft_s, candidates) + (1 - weight) * _known(
            view.table.tpot_s, candidates
        )
        return scores


def _known(latency: Floats, candidates: Bools) -> Floats:
    known = candidates & (latency > 0)
    return np.where(known, less_is_better(latency, known), 0.5)


class LatencyScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``latency-scorer``: how far the expected latency stays under the request's objectives.

    ``headroom = 0.8 * (slo_ttft - ttft) + 0.2 * (slo_tpot - tpot)`` in milliseconds, objectives from the headers
    ``x-llm-d-slo-ttft-ms`` and ``x-llm-d-slo-tpot-ms`` (before: ``x-slo-...``), 0 where there are none. Endpoints that meet them
    score from 0.5 up: with ``least`` the one that meets them most closely is best, which leaves the fast ones to those in
    need; with ``most`` the other way round. Those that miss score less than 0.5, the one that misses least best. TTFT is our own
    expectation (waiting work over the learned prefill rate), TPOT the recent mean; llm-d asks a trained model for both.
    """

    ttft_weight: NonNegative = 0.8
    tpot_weight: NonNegative = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"

    def score(self, view: View, candidates: Bools) -> Floats:
        """Two tiers, each spread over half of the range."""
        ttft = _objective_ms(view, "ttft") - 1000 * view.ttft_s()
        tpot = _objective_ms(view, "tpot") - 1000 * view.table.tpot_s
        headroom = self.ttft_weight * ttft + self.tpot_weight * tpot
        meets, misses = candidates & (headroom >= 0), candidates & (headroom < 0)
        close = less_is_better(headroom, meets)
        rank = close if self.headroom_selection_strategy == "least" else less_is_better(-headroom, meets)
        scores: Floats = np.where(meets, 0.5 + 0.5 * rank, 0.4 * less_is_better(-headroom, misses))
        return scores


def _objective_ms(view: View, what: str) -> float:
    if not view.request.is_trusted:
        return 0.0  # a client's own word does not count
    headers = view.request.headers
    text = headers.get(f"x-llm-d-slo-{what}-ms") or headers.get(f"x-slo-{what}-ms") or "0"
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0  # an objective that cannot be read is none


class CostScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What an endpoint costs a second, as its configuration says: ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the cheapest, and for all if they cost the same."""
        return less_is_better(view.table.price, candidates)


class RandomScore(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``random``: noise beside other scores.

    A scorer is a pure function of the view, so the noise is a hash of the time of the request and the row: another one for
    every request.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """Uniform in [0, 1)."""
        bits = np.frombuffer(np.float64(view.now_s).tobytes(), np.uint64)[0]
        mixed = (np.arange(candidates.size, dtype=np.uint64) + bits) * np.uint64(0x9E3779B97F4A7C15)
        # the finisher of SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scores: Floats = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
        return scores
