# SPDX-License-Identifier: Apache-2.0
"""The pure decision as scaling calls it, and what becomes of it for each target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from controller.autoscaler.decision.decision import Decision, TargetDecision
from controller.autoscaler.reconciler.bindings import Hold
from controller.autoscaler.reconciler.resolver import Resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.autoscaler.decision.situation import Situation

Memory = Any
"""What a decision wants to remember until the next one; None at first."""


class Decide(Protocol):
    """``free``: accelerators for which a binding may ask, by pool."""

    def __call__(
        self,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        situations: Sequence[Situation],
        memory: Memory,
        now_s: float,
        /,
        *,
        free: Mapping[str, int] | None = None,
    ) -> tuple[Decision, Memory]:
        """The decision, and what to remember until the next."""
        ...


class Still(Protocol):
    """Whether the last decision stands where nothing but time has changed, without looking at it again."""

    def __call__(
        self,
        memory: Memory,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        now_s: float,
        told_at_s: float,
        /,
    ) -> tuple[Decision, Memory] | None:
        """It, and what to remember until the next; None if it has to be looked whether it stands. ``told_at_s``: no
        data are older.
        """
        ...


class Deciding(NamedTuple):
    """``decide``: the decision. ``kept``: what of a memory survives a restart, as JSON of bounded length; empty if
    nothing. ``restored``: a memory from that and the time; raises ValueError for what is none.
    """

    decide: Decide
    kept: Callable[[Memory], bytes] = lambda _: b""
    restored: Callable[[bytes, float], Memory] = lambda _, __: None
    still: Still = lambda *_: None


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


# Why a decision is only told, by mode.
_TOLD_ONLY: Final = {
    "Recommend": "the mode is Recommend",
    "Export": "the mode is Export",
    "Paused": "the mode is Paused",
}


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
