# SPDX-License-Identifier: Apache-2.0
"""From the strategies of a policy to the laws that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from controller.api.scaling_laws import (
    ConcurrencyParameters,
    PredictiveParameters,
    SaturationParameters,
    SloParameters,
    SpareCapacityParameters,
    TokensParameters,
    WorkParameters,
)
from controller.autoscaler.decision.behavior import tolerance_of
from controller.autoscaler.decision.strategies.concurrency import ConcurrencyLaw
from controller.autoscaler.decision.strategies.predictive import PredictiveLaw
from controller.autoscaler.decision.strategies.saturation import SaturationLaw
from controller.autoscaler.decision.strategies.slo import SloLaw
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityLaw
from controller.autoscaler.decision.strategies.target import TargetLaw, Tolerance
from controller.autoscaler.decision.strategies.tokens import TokensLaw
from controller.autoscaler.decision.strategies.work import WorkLaw

if TYPE_CHECKING:
    from controller.api.autoscaling import AutoscalingPolicySpec, Strategy
    from controller.autoscaler.decision.decision import Law


def laws_of(policy: AutoscalingPolicySpec) -> tuple[Law[Any], ...]:
    """In the order of the policy."""
    return tuple(_law(strategy, policy) for strategy in policy.strategies)


def _law(strategy: Strategy, policy: AutoscalingPolicySpec) -> Law[Any]:  # noqa: PLR0911 - a case each
    match strategy.name:
        case "Work":
            return WorkLaw(strategy.work or WorkParameters())
        case "Target":
            behavior = policy.behavior
            return TargetLaw(
                policy.metrics, Tolerance(tolerance_of(behavior.scale_up), tolerance_of(behavior.scale_down))
            )
        case "Concurrency":
            return ConcurrencyLaw(strategy.concurrency or ConcurrencyParameters(), policy.panic)
        case "Saturation":
            return SaturationLaw(strategy.saturation or SaturationParameters())
        case "SpareCapacity":
            return SpareCapacityLaw(strategy.spare_capacity or SpareCapacityParameters())
        case "Tokens":
            return TokensLaw(strategy.tokens or TokensParameters())
        case "Slo":
            return SloLaw(strategy.slo or SloParameters(), policy.objective)
        case "Predictive":
            return PredictiveLaw(strategy.predictive or PredictiveParameters())
        case _:
            assert_never(strategy.name)
