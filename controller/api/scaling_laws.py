# SPDX-License-Identifier: Apache-2.0
"""The parameters of each scaling law: what a strategy of an AutoscalingPolicy may say."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from extproc.api.quantities import Duration
from extproc.api.spec import Rule, Spec

_Utilization = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Amount = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class WorkParameters(Spec, frozen=True):
    """Work to come, in seconds of engines. ``utilization``: the share of its time that an engine may be busy; left out,
    it follows from the objective's TPOT, and is 0.8 without one. ``window``: over which rates are measured.
    ``headroom``: for how many times the load of now there is room, as far as the last hour has seen as much.
    ``drain_budget``: in which what waits should be done. ``trend``: whether the rates are continued over the time that
    an engine takes to start. ``guard``: whether measured latencies above the objective call for more.
    """

    utilization: _Utilization | None = None
    window: Duration = Duration("30s")
    headroom: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.5
    drain_budget: Duration = Duration("15s")
    trend: bool = True
    guard: bool = True


class ConcurrencyParameters(Spec, frozen=True):
    """Knative's KPA. ``target``: requests in flight that one replica should have. ``target_utilization``: the share of
    it that is aimed at. ``stable_window``: over which concurrency is averaged; the policy's ``panic`` says what a panic
    is. ``max_scale_up_rate`` and ``max_scale_down_rate``: the largest factors of one change.
    """

    target: _Amount = 100.0
    target_utilization: _Utilization = 0.7
    stable_window: Duration = Duration("60s")
    max_scale_up_rate: Annotated[float, msgspec.Meta(gt=1, le=1e6)] = 1000.0
    max_scale_down_rate: Annotated[float, msgspec.Meta(gt=1, le=1e6)] = 2.0


class SaturationParameters(Spec, frozen=True):
    """The mean over engines of the larger of KV usage and waiting requests over a full queue. ``max_queue``: requests
    that fill a queue. ``scale_up_threshold``: above it there are to be more. ``scale_down_threshold``: below it, fewer.
    In between nothing changes. ``scale_up_increment``: how many more. ``scale_down_increment``: how many fewer.
    """

    CEL: ClassVar = (
        Rule(
            "self.scaleDownThreshold < self.scaleUpThreshold",
            "scaleDownThreshold must be below scaleUpThreshold; what lies between is the zone without changes",
        ),
    )

    max_queue: _Count = 5
    scale_up_threshold: _Utilization = 0.75
    scale_down_threshold: _Utilization = 0.4
    scale_up_increment: _Count = 1
    scale_down_increment: _Count = 1


class SpareCapacityParameters(Spec, frozen=True):
    """llm-d's workload-variant-autoscaler, first form. ``kv_cache_threshold`` and ``queue_length_threshold``: an engine
    at one of them is saturated. ``kv_spare_trigger`` and ``queue_spare_trigger``: with less room than this on average,
    one more; one fewer if the rest keeps as much.
    """

    kv_cache_threshold: _Utilization = 0.8
    queue_length_threshold: _Amount = 5.0
    kv_spare_trigger: _Utilization = 0.1
    queue_spare_trigger: _Amount = 3.0


class TokensParameters(Spec, frozen=True):
    """llm-d's workload-variant-autoscaler, second form: tokens in use and waiting, over what engines hold.
    ``scale_up_utilization`` and ``scale_down_utilization``: the band of the share in use. ``kv_cache_threshold``: the
    share of a cache that counts as its capacity. ``queue_length_threshold``: with so many waiting, tokens in use are an
    engine's capacity. ``max_batched_tokens`` and ``max_sequences``: of the engines' scheduler.
    """

    CEL: ClassVar = (
        Rule(
            "self.scaleDownUtilization < self.scaleUpUtilization",
            "scaleDownUtilization must be below scaleUpUtilization; what lies between is the zone without changes",
        ),
    )

    scale_up_utilization: _Utilization = 0.85
    scale_down_utilization: _Utilization = 0.7
    kv_cache_threshold: _Utilization = 0.8
    queue_length_threshold: _Amount = 5.0
    max_batched_tokens: _Count = 8192
    max_sequences: _Count = 256


class SloParameters(Spec, frozen=True):
    """The larger of TTFT and TPOT, each as a share of its objective. ``scale_up_threshold``: above it, more in
    proportion.
    ``scale_down_threshold``: below it, fewer. ``smoothing``: of the measured latencies. ``credit``: whether replicas
    that are starting count as being there already.
    """

    CEL: ClassVar = (
        Rule(
            "self.scaleDownThreshold < self.scaleUpThreshold",
            "scaleDownThreshold must be below scaleUpThreshold; what lies between is the zone without changes",
        ),
    )

    scale_up_threshold: _Utilization = 0.55
    scale_down_threshold: _Utilization = 0.4
    smoothing: Duration = Duration("45s")
    credit: bool = True


class PredictiveParameters(Spec, frozen=True):
    """The work of some time ahead. ``season``: after which load repeats; without it the trend of Holt's method alone.
    ``lead``: how far ahead; left out, the measured start time. ``utilization``: as in the strategy Work.
    ``window``: of one observation.
    """

    season: Duration | None = None
    lead: Duration | None = None
    utilization: _Utilization = 0.8
    window: Duration = Duration("30s")
