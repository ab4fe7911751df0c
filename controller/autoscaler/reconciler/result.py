# SPDX-License-Identifier: Apache-2.0
"""What one reconciliation of a binding comes to: its targets' plans, and all that status, Events and metrics report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.decision.decision import Decision, TargetDecision
from controller.autoscaler.decision.situation import Situation
from controller.autoscaler.reconciler.bindings import Hold
from controller.autoscaler.reconciler.resolver import Resolved

# Why a decision is only told, by mode.
_TOLD_ONLY: Final = {
    "Recommend": "the mode is Recommend",
    "Export": "the mode is Export",
    "Paused": "the mode is Paused",
}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one target. ``replicas``: that it should have; None: nothing is to be done. ``held``: why that
    is not written; empty if it is. ``hold``: whose change is honoured, if that is why.
    """

    target: Resolved
    decided: TargetDecision
    replicas: int | None
    held: str = ""
    hold: Hold | None = None

    @property
    def writes(self) -> bool:
        """Whether it is carried out."""
        return self.replicas is not None and not self.held

    @property
    def is_ordered(self) -> bool:
        """Whether it will be so: by us, or by who heeds what we export."""
        return self.replicas is not None and self.held in ("", _TOLD_ONLY["Export"])

    @property
    def is_told_only(self) -> bool:
        """Whether the mode alone keeps it from being written."""
        return self.held in _TOLD_ONLY.values()

    @property
    def is_as_decided(self) -> bool:
        """Whether the target is as it should be, with no mark on its pods, as most are."""
        found, pods = self.target.found, self.target.pods
        is_scaled = found is not None and self.replicas == found.replicas
        return is_scaled and all(one.draining_at_s is None and one.deletion_cost is None for one in pods)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, and nobody else's change is waited out."""
        return self.hold is None and (not self.writes or self.is_as_decided)


class Scaled(msgspec.Struct, frozen=True):
    """Replicas that were written. ``name``: of the target. ``what``: its kind and name."""

    name: str
    what: str
    before: int
    after: int
    reason: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a reconciliation came to. ``policy``: None if there is none; ``problem``: why nothing can be decided, as
    reason and message. ``holds``: whose changes are honoured, ``waits_for``: pods that drain, ``without_nodes``: why no
    node counts, and ``refused``: why the API server does not let us write, by target. ``awaits_data``: what is
    unknown may still arrive by itself.
    """

    now_s: float
    policy: AutoscalingPolicySpec | None = None
    problem: tuple[str, str] | None = None
    resolved: Sequence[Resolved] = ()
    situations: Sequence[Situation] = ()
    decision: Decision | None = None
    steps: Sequence[Step] = ()
    scaled: Sequence[Scaled] = ()
    holds: Mapping[str, Hold] = {}
    waits_for: Mapping[str, Sequence[str]] = {}
    without_nodes: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    awaits_data: bool = False


def steps_of(decision: Decision, resolved: Sequence[Resolved], holds: Mapping[str, Hold]) -> Iterator[Step]:
    """``holds``: by name of the target."""
    decided = {one.name: one for one in decision.targets}
    for target in resolved:
        one = decided.get(target.spec.name)
        if one is not None:
            yield _step(decision.mode, target, one, holds.get(target.spec.name))


def _step(mode: str, target: Resolved, one: TargetDecision, hold: Hold | None) -> Step:
    held = _TOLD_ONLY.get(mode, "")
    if not held and not target.may_write:
        held = target.problem.message if target.problem is not None else "the target is not there"
    if not held and hold is not None:
        held = f"{hold.writer} has set {hold.replicas} replicas"
    replicas = one.desired
    if replicas is not None and target.found is not None and mode == "ScaleUpOnly":
        replicas = max(replicas, target.found.replicas)
    return Step(target=target, decided=one, replicas=replicas, held=held, hold=hold)
