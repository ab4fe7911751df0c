# SPDX-License-Identifier: Apache-2.0
"""The live autoscaler in the lab: the same pipeline that the manager calls, with a policy and a binding of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.scaler import told_objective
from controller.api.autoscaling import LatencyObjective, ScaleToZero
from controller.api.autoscaling_binding import AutoscalingPolicyBinding, AutoscalingPolicyBindingSpec
from controller.api.autoscaling_policy import AutoscalingPolicySpec, Strategy
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.strategies.work import WorkParameters
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.autoscale.scaler import Setup
    from controller.autoscaler.decision.memory import Memory
    from controller.autoscaler.decision.situation import Situation

# Of the epoch: the lab's clock begins at 0, and schedules need a day.
_BEGIN_S: Final = 1_700_000_000.0
# Shorter than the default of ten minutes, because the lab's idle times are short.
_TO_ZERO: Final = ScaleToZero(idle=Duration("60s"))


class Live:
    """One binding with all variants of the load as its targets."""

    def __init__(self, setup: Setup, policy: AutoscalingPolicySpec) -> None:
        targets = tuple(
            variant.target(0 if number else setup.min_replicas) for number, variant in enumerate(setup.load.variants)
        )
        self._policy = policy
        self._binding = AutoscalingPolicyBinding(
            metadata=Metadata(name="lab"),
            spec=AutoscalingPolicyBindingSpec(policy_ref="lab", targets=targets),
        )
        self._memory: Memory | None = None

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """As the manager would."""
        if self._policy.objective is not None:
            situation = msgspec.structs.replace(situation, objective=self._policy.objective)
        decision, self._memory = decide(
            self._policy, self._binding, [situation], self._memory, _BEGIN_S + situation.now_s
        )
        return {one.name: one.desired for one in decision.targets if one.desired is not None}


def by_headroom(setup: Setup) -> Live:
    """The load's objective as it is. The knob: for how many times the load of now there is room."""
    work = Strategy(name="Work", work=WorkParameters(headroom=setup.knob))
    return Live(setup, _policy(setup, told_objective(setup), (work,)))


def by_utilization(setup: Setup) -> Live:
    """The knob: the utilization of the strategy Work."""
    work = Strategy(name="Work", work=WorkParameters(utilization=setup.knob))
    return Live(setup, _policy(setup, told_objective(setup), (work,)))


def _policy(setup: Setup, objective: LatencyObjective, strategies: tuple[Strategy, ...]) -> AutoscalingPolicySpec:
    return AutoscalingPolicySpec(
        strategies=strategies,
        objective=objective,
        period=Duration(f"{setup.period_s:g}s"),
        scale_to_zero=None if setup.min_replicas else _TO_ZERO,
    )
