# SPDX-License-Identifier: Apache-2.0
"""Scorers, a filter and admitters by latency, and by the latency objectives of requests.

Admitters decide whether a request of negative priority is served at all while engines are busy. They are asked once for
each request, after flow control (if there is any) and before the profiles, about all endpoints that may serve it,
whether or not they have room. Requests of priority 0 and above always pass.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_running, estimated_waiting
from extproc.refusals import Shed
from extproc.scheduling.plugins.ineffective_parameters import LEARNED_LATENCY, ONE_INDEX
from extproc.scheduling.plugins.load_scorers import scores_for_less_is_better
from extproc.wire_names import SLO_TPOT_MS, SLO_TTFT_MS

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
# Makes the draw independent of that of other plugins.
_STREAM: Final = 1
Positive = Annotated[float, msgspec.Meta(gt=0)]
# A fuller cache means that the engine has been in use, so that what was learned of its speed holds.
_COLD_KV_USAGE: Final = 0.02
_RETRY_AFTER_S: Final = 1


def hashed_uniforms(now_s: float, count: int, *, stream: int = 0) -> Floats:
    """``count`` numbers in [0, 1). Other times and other ``stream`` numbers give independent ones."""
    bits = np.frombuffer(np.float64(now_s).tobytes(), np.uint64)[0]
    mixed = (np.arange(count, dtype=np.uint64) + bits) * _GOLDEN
    if stream:
        mixed = _finished(mixed ^ np.uint64(stream)) * _GOLDEN
    drawn: Floats = (_finished(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def _finished(mixed: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The finisher of SplitMix64."""
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def objective_ms(view: View, what: Literal["ttft", "tpot"]) -> float:
    """The request's objective in milliseconds; 0 if it has none, or one that cannot be read."""
    if not view.request.is_trusted:
        return 0.0  # clients may not set objectives by themselves
    headers = view.request.headers
    names = SLO_TTFT_MS if what == "ttft" else SLO_TPOT_MS
    text = next((headers[name] for name in names if headers.get(name)), "0")
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def rows_meeting_objectives(view: View) -> Bools | None:
    """The rows expected to meet every objective that the request has; None if it has none.

    TTFT is waiting work over the learned prefill rate, TPOT the recent mean; one that is not known yet is no miss.
    """
    ttft_ms, tpot_ms = objective_ms(view, "ttft"), objective_ms(view, "tpot")
    if not ttft_ms and not tpot_ms:
        return None
    meets: Bools = view.table.is_active.copy()
    if ttft_ms:
        meets &= 1000 * view.ttft_s() <= ttft_ms
    if tpot_ms:
        meets &= 1000 * view.table.tpot_s <= tpot_ms
    return meets


class LeastLatencyScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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
    return np.where(known, scores_for_less_is_better(latency, known), 0.5)


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
        close = scores_for_less_is_better(headroom, meets)
        rank = close if self.headroom_selection_strategy == "least" else scores_for_less_is_better(-headroom, meets)
        scores: Floats = np.where(meets, 0.5 + 0.5 * rank, 0.4 * scores_for_less_is_better(-headroom, misses))
        return scores


class CostScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The configured price of an endpoint: ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the cheapest endpoint, and for all if prices are equal."""
        return scores_for_less_is_better(view.table.price, candidates)


class RandomScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``random``: noise to add to other scores.

    A scorer is a pure function of the view, so the noise is a hash of the request's time and the row.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """Uniform in [0, 1)."""
        return hashed_uniforms(view.now_s, candidates.size)


class SloHeadroomTierFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``slo-headroom-tier-filter``: the endpoints expected to meet the request's objectives, or the others.

    Two tiers: those that meet every objective that the request has, and those that miss one. If both have endpoints,
    the filter keeps the first. With the probability ``epsilonExploreNeg`` it keeps the second, so that the expectations
    of its endpoints are tested again. The draw is a hash of the request's time.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"latencyPredictionInfoProducerName": LEARNED_LATENCY})

    epsilon_explore_neg: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the request has no objective, or if all are in one tier."""
        meets = rows_meeting_objectives(view)
        if meets is None:
            return candidates
        good, bad = candidates & meets, candidates & ~meets
        if not good.any() or not bad.any():
            return candidates
        return bad if float(hashed_uniforms(view.now_s, 1, stream=_STREAM)[0]) < self.epsilon_explore_neg else good


class ProbabilisticAdmitter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``probabilistic-admitter``: requests of negative priority are refused at random, more as load rises.

    The probability is ``min(1, k * saturation ** power)``. Saturation is the mean over endpoints of ``max(waiting /
    queueDepthThreshold, kv / kvCacheUtilThreshold)``. With the defaults that is 2% at a saturation of 0.15, 10% at
    0.2, and 100% from 0.32 on. An endpoint without a recent report counts by our own books, not as full.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(ge=1)] = 5
    kv_cache_util_threshold: Positive = 0.8
    power: Positive = 5.0
    k: Positive = 300.0

    def admit(self, view: View, rng: random.Random) -> None:
        """Raises Shed."""
        if view.request.priority < 0 and rng.random() < self.refusal_probability(view):
            raise Shed(
                "The engines are busy, and this request's priority is negative; try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def refusal_probability(self, view: View) -> float:
        """From 0 to 1, for a request of negative priority; 0 without any endpoint."""
        rows = view.candidates()
        queue = estimated_waiting(view.table, view.now_s)[rows] / self.queue_depth_threshold
        memory = estimated_kv_usage(view.table, view.now_s)[rows] / self.kv_cache_util_threshold
        saturation = float(np.maximum(queue, memory).mean())
        if saturation <= 0:
            return 0.0
        # in logarithms: a long queue to a high power is beyond floating point
        return math.exp(min(0.0, math.log(self.k) + self.power * math.log(saturation)))


class LatencySloAdmitter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``latency-slo-admitter``: refuses requests of negative priority whose objectives no endpoint can meet.

    A request with an objective (``x-llm-d-slo-ttft-ms``, ``x-llm-d-slo-tpot-ms``) is refused if every endpoint is
    expected to miss it, and none of them is idle or cold. An endpoint is cold if less than 2% of its KV cache is in
    use, or if the prefill rate that TTFT follows from has not been learned yet.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"latencyPredictionInfoProducerName": LEARNED_LATENCY})

    def admit(self, view: View, rng: random.Random) -> None:
        """Raises Shed."""
        del rng
        if view.request.priority >= 0:
            return
        meets = rows_meeting_objectives(view)
        if meets is None:
            return
        table, now = view.table, view.now_s
        idle = estimated_running(table, now) <= 0
        cold = (estimated_kv_usage(table, now) < _COLD_KV_USAGE) | (table.rate_samples == 0)
        if not (view.candidates() & (meets | idle | cold)).any():
            raise Shed(
                "No engine is expected to answer within this request's latency objectives, and its priority is "
                "negative; try again later, or allow more time.",
                retry_after_s=_RETRY_AFTER_S,
            )
