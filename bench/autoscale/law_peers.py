# SPDX-License-Identifier: Apache-2.0
"""Peers that are one of the laws by name, with the behaviour block that their projects advise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.autoscale.by_law import ByLaw
from controller.autoscale.laws.concurrency import ConcurrencyLaw
from controller.autoscale.laws.slo import SloLaw
from controller.autoscale.laws.spare_capacity import SpareCapacityLaw
from controller.autoscale.laws.target import TargetLaw
from controller.autoscale.laws.tokens import TokensLaw
from controller.resources.autoscaling import Behavior, MetricTarget, ScalingRule, ScalingRules
from controller.resources.scaling_laws import (
    ConcurrencyParameters,
    SloParameters,
    SpareCapacityParameters,
    TokensParameters,
)

if TYPE_CHECKING:
    from bench.autoscale.scaler import Setup

# llm-d's guide for its latency recipe: docs/architecture/autoscaling/slo-aware-keda.md.
_SLO_BEHAVIOR: Final = Behavior(
    scale_up=ScalingRules(
        stabilization_window_seconds=30, policies=(ScalingRule("Percent", 100, 60), ScalingRule("Pods", 4, 60))
    ),
    scale_down=ScalingRules(stabilization_window_seconds=180, policies=(ScalingRule("Pods", 1, 120),)),
)
# The production advice of the workload-variant-autoscaler for the HPA that acts for it.
_WVA_BEHAVIOR: Final = Behavior(
    scale_up=ScalingRules(stabilization_window_seconds=0, policies=(ScalingRule("Pods", 10, 150),)),
    scale_down=ScalingRules(stabilization_window_seconds=240, policies=(ScalingRule("Pods", 10, 150),)),
)


def hpa(setup: Setup) -> ByLaw:
    """HPA v2 with its default behaviour on requests that run or wait. The knob: of one replica."""
    return ByLaw(setup, TargetLaw((MetricTarget("requests_in_flight", setup.knob),), careful=False), Behavior())


def kpa(setup: Setup) -> ByLaw:
    """Knative's, with its default windows. The knob: the target concurrency, of which 70 % are aimed at."""
    return ByLaw(setup, ConcurrencyLaw(ConcurrencyParameters(target=setup.knob)), None)


def wva_first(setup: Setup) -> ByLaw:
    """Spare capacity, one replica at a time. The knob: the spare share of the KV cache that calls for one more."""
    return ByLaw(setup, SpareCapacityLaw(SpareCapacityParameters(kv_spare_trigger=setup.knob)), _WVA_BEHAVIOR)


def wva_second(setup: Setup) -> ByLaw:
    """Tokens over capacity. The knob: the utilization to scale up at; the other stays 0.15 below it, as in the
    original.
    """
    parameters = TokensParameters(scale_up_utilization=setup.knob, scale_down_utilization=setup.knob - 0.15)
    return ByLaw(setup, TokensLaw(parameters), _WVA_BEHAVIOR)


def llmd_keda(setup: Setup) -> ByLaw:
    """llm-d's recipe: KEDA triggers of type AverageValue on the gateway's queue and on running requests; the larger
    counts. The knob: running requests of a replica.
    """
    metrics = (MetricTarget("requests_queued", 5.0), MetricTarget("requests_running", setup.knob))
    return ByLaw(setup, TargetLaw(metrics, careful=False), Behavior())


def llmd_slo(setup: Setup) -> ByLaw:
    """llm-d's latency recipe. The knob: the share of the objective to scale up at; the other is as far below as in the
    original.
    """
    parameters = SloParameters(scale_up_threshold=setup.knob, scale_down_threshold=setup.knob * 0.4 / 0.55)
    return ByLaw(setup, SloLaw(parameters), _SLO_BEHAVIOR)
