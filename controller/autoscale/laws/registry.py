# SPDX-License-Identifier: Apache-2.0
"""From the strategies of a policy to the laws that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.autoscale.laws.work import WorkLaw
from controller.resources.scaling_laws import WorkParameters

if TYPE_CHECKING:
    from controller.autoscale.law import Law
    from controller.resources.autoscaling import AutoscalingPolicySpec, Strategy


def laws_of(policy: AutoscalingPolicySpec) -> tuple[Law[Any], ...]:
    """In the order of the policy."""
    return tuple(_law(strategy) for strategy in policy.strategies)


def _law(strategy: Strategy) -> Law[Any]:
    if strategy.name == "Work":
        return WorkLaw(strategy.work or WorkParameters())
    raise NotImplementedError(strategy.name)
