# SPDX-License-Identifier: Apache-2.0
"""The record of a scaling decision: recommendations of strategies, and each step that changed the answer after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec

from controller.autoscaler.decision.situation import Backlog, Freshness

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation

Memory = TypeVar("Memory")
Rule = Literal[
    "Unknown",
    "Waiting",
    "Latency",
    "Caches",
    "Stale",
    "Stabilized",
    "Limited",
    "Panic",
    "Restarted",
    "Idle",
    "FromZero",
    "Schedule",
    "ScalingLimited",
    "KeepOne",
    "Budget",
    "Ratio",
]


class Recommendation(msgspec.Struct, frozen=True):
    """``strategy``: its name. ``replicas``: of the first target, a fraction where targets differ in capacity; None:
    unknown, which forbids scaling in. ``reason``: for people. ``inputs``: the numbers used, by name and unit.
    """

    strategy: str
    replicas: float | None
    reason: str
    inputs: Mapping[str, float] = {}


class Strategy(Protocol[Memory]):
    """One strategy. Bounds, behaviour blocks and modes are applied after it."""

    @property
    def name(self) -> str:
        """The strategy's name."""
        ...

    def recommend(self, situation: Situation, memory: Memory | None) -> tuple[Recommendation, Memory | None]:
        """``memory``: what the strategy returned last; None at first, and after a restart."""
        ...


"""All rules that may change a recommendation, in the order of a decision; docs/autoscaling.md describes each."""


class AppliedRule(msgspec.Struct, frozen=True):
    """A rule changed the answer. ``rule``: a ``Rule``, or one of another version of ours. ``before`` and ``after``:
    replicas. ``reason``: for people.
    """

    rule: str
    before: float
    after: float
    reason: str


class TargetDecision(msgspec.Struct, frozen=True):
    """``name``: of the target. ``current`` and ``desired``: replicas. ``ready`` and ``starting``: of the current ones.
    ``reason``: why so many.
    """

    name: str
    current: int | None
    desired: int | None
    ready: int = 0
    starting: int = 0
    reason: str = ""


class StageDecision(msgspec.Struct, frozen=True):
    """One stage. ``stage``: Both, Prefill or Decode. ``recommendations``: of the strategies. ``combined``: from all of
    them; None: unknown. ``steps``: the rules that changed it after that. ``waiting`` and ``freshness``: inputs of the
    decision. ``is_proven``: False if a slightly cheaper set of targets may exist.
    """

    stage: str
    recommendations: tuple[Recommendation, ...]
    combined: float | None
    steps: tuple[AppliedRule, ...] = ()
    waiting: Backlog = Backlog()
    freshness: Freshness = Freshness()
    is_proven: bool = True


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """``binding``: its key. ``at_s``: when. ``mode``: of the policy. ``targets``: what each should have.
    ``requeue_at_s``: when the next decision is due. ``inputs``: more numbers that were used, such as learned start
    times. ``lacks``: replicas that targets would have as well, were there accelerators for them, by target.
    ``blocked``: why no more replicas of a target can be had, by target.
    """

    binding: str
    at_s: float
    mode: str
    targets: tuple[TargetDecision, ...]
    stages: tuple[StageDecision, ...] = ()
    requeue_at_s: float = 0.0
    inputs: Mapping[str, float] = {}
    lacks: Mapping[str, int] = {}
    blocked: Mapping[str, str] = {}


class StageReplicas(msgspec.Struct, frozen=True):
    """``replicas``: of the stage's first target. ``steps``: what changed it, in order."""

    replicas: float
    steps: tuple[AppliedRule, ...] = ()

    def adjusted_to(self, rule: Rule, replicas: float, reason: str) -> StageReplicas:
        """The same if ``replicas`` are; otherwise one step further."""
        if replicas == self.replicas:
            return self
        return StageReplicas(replicas, (*self.steps, AppliedRule(rule, self.replicas, replicas, reason)))

    def floored_at(self, rule: Rule, replicas: float, reason: str) -> StageReplicas:
        """A lower bound."""
        return self.adjusted_to(rule, max(self.replicas, replicas), reason)

    def capped_at(self, rule: Rule, replicas: float, reason: str) -> StageReplicas:
        """An upper bound."""
        return self.adjusted_to(rule, min(self.replicas, replicas), reason)
