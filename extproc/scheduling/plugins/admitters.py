# SPDX-License-Identifier: Apache-2.0
"""Admitters: whether a request of negative priority is served at all while engines are busy.

They are asked once for each request, after flow control (if there is any) and before the profiles, about all endpoints
that may serve it, whether or not they have room. Requests of priority 0 and above always pass.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_kv_usage, estimated_running, estimated_waiting
from extproc.errors import Shed
from extproc.scheduling.plugins.objectives import meets_objectives
from extproc.scheduling.plugins.reasons import LEARNED_LATENCY

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import View

Positive = Annotated[float, msgspec.Meta(gt=0)]

# A fuller cache means that the engine has been in use, so that what was learned of its speed holds.
_COLD_KV_USAGE: Final = 0.02
_RETRY_AFTER_S: Final = 1


class ProbabilisticAdmitter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``probabilistic-admitter``: requests of negative priority are refused at random, ever more as load rises.

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
        meets = meets_objectives(view)
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
