# SPDX-License-Identifier: Apache-2.0
"""The result of one reconciliation of a binding: its targets' plans, and the content of status, Events and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decision import Decision, TargetDecision
from controller.autoscaler.decision.situation import Situation
from controller.autoscaler.reconciler.bindings import ManualOverride
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget

# Why a decision is only reported, by mode.
_REPORT_ONLY: Final = {
    "Recommend": "the mode is Recommend",
    "Export": "the mode is Export",
    "Paused": "the mode is Paused",
}


class TargetAction(msgspec.Struct, frozen=True, kw_only=True):
    """The action on one target. ``replicas``: that it should have; None: no change. ``held``: why that is not written;
    empty if it is. ``hold``: the manual override, if that is why.
    """

    target: ResolvedTarget
    decided: TargetDecision
    replicas: int | None
    held: str = ""
    hold: ManualOverride | None = None

    @property
    def is_written_by_us(self) -> bool:
        """Whether it is carried out."""
        return self.replicas is not None and not self.held

    @property
    def will_be_applied(self) -> bool:
        """Whether the replicas will be applied: written by us, or by the consumer of our exports."""
        return self.replicas is not None and self.held in ("", _REPORT_ONLY["Export"])

    @property
    def is_report_only(self) -> bool:
        """Whether the mode alone keeps it from being written."""
        return self.held in _REPORT_ONLY.values()

    @property
    def is_in_effect(self) -> bool:
        """Whether the target is as it should be, with no mark on its pods, as most are."""
        found, pods = self.target.found, self.target.pods
        is_scaled = found is not None and self.replicas == found.replicas
        return is_scaled and all(one.draining_at_s is None and one.deletion_cost is None for one in pods)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to write and no manual override is in force."""
        return self.hold is None and (not self.is_written_by_us or self.is_in_effect)


class ReplicaUpdate(msgspec.Struct, frozen=True):
    """Replicas that were written. ``name``: of the target. ``what``: its kind and name."""

    name: str
    what: str
    before: int
    after: int
    reason: str


class ReconciliationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a reconciliation. ``policy``: None if there is none; ``bad_schedules``: of it, as messages.
    ``problem``: why nothing can be decided, as reason and message. By target: ``holds``: manual overrides,
    ``waits_for``: pods that drain, ``without_nodes``: why no node counts, ``refused``: why the API server refuses
    writes. ``awaits_data``: missing data may still arrive.
    """

    now_s: float
    policy: AutoscalingPolicySpec | None = None
    bad_schedules: Sequence[str] = ()
    problem: tuple[str, str] | None = None
    resolved: Sequence[ResolvedTarget] = ()
    situations: Sequence[Situation] = ()
    decision: Decision | None = None
    steps: Sequence[TargetAction] = ()
    scaled: Sequence[ReplicaUpdate] = ()
    holds: Mapping[str, ManualOverride] = {}
    waits_for: Mapping[str, Sequence[str]] = {}
    without_nodes: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    awaits_data: bool = False


def target_actions(
    decision: Decision, resolved: Sequence[ResolvedTarget], holds: Mapping[str, ManualOverride]
) -> Iterator[TargetAction]:
    """``holds``: by name of the target."""
    decided = {one.name: one for one in decision.targets}
    for target in resolved:
        one = decided.get(target.spec.name)
        if one is not None:
            yield _step(decision.mode, target, one, holds.get(target.spec.name))


def _step(mode: str, target: ResolvedTarget, one: TargetDecision, hold: ManualOverride | None) -> TargetAction:
    held = _REPORT_ONLY.get(mode, "")
    if not held and not target.may_write:
        held = target.problem.message if target.problem is not None else "the target is not there"
    if not held and hold is not None:
        held = f"{hold.writer} has set {hold.replicas} replicas"
    replicas = one.desired
    if replicas is not None and target.found is not None and mode == "ScaleUpOnly":
        replicas = max(replicas, target.found.replicas)
    return TargetAction(target=target, decided=one, replicas=replicas, held=held, hold=hold)
