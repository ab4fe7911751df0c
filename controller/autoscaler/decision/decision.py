# SPDX-License-Identifier: Apache-2.0
"""The record of one scaling decision: what was known, what each law asked for, and what became of it, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from controller.autoscaler.decision.law import Recommendation
from controller.autoscaler.decision.situation import Freshness, Waiting

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
"""All that may change an answer, in the order of a decision; docs/autoscaling.md says when each does."""


class Step(msgspec.Struct, frozen=True):
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
    """One stage. ``stage``: Both, Prefill or Decode. ``recommendations``: of the laws. ``combined``: what came of them;
    None: unknown. ``steps``: what changed it after that. ``waiting`` and ``freshness``: what it was decided from.
    ``is_proven``: False if a slightly cheaper set of targets may exist.
    """

    stage: str
    recommendations: tuple[Recommendation, ...]
    combined: float | None
    steps: tuple[Step, ...] = ()
    waiting: Waiting = Waiting()
    freshness: Freshness = Freshness()
    is_proven: bool = True


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """``binding``: its key. ``at_s``: when. ``mode``: of the policy. ``targets``: what each should have.
    ``look_again_at_s``: when the next decision is due. ``inputs``: more numbers that were used, such as learned start
    times. ``lacks``: replicas that targets would have as well, were there accelerators for them, by target.
    """

    binding: str
    at_s: float
    mode: str
    targets: tuple[TargetDecision, ...]
    stages: tuple[StageDecision, ...] = ()
    look_again_at_s: float = 0.0
    inputs: Mapping[str, float] = {}
    lacks: Mapping[str, int] = {}
