# SPDX-License-Identifier: Apache-2.0
"""Conditions of a ModelInfer without their times, with KServe's reasons where it has any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.models.model_infer.failures import Failure, failure_of, stuck
from controller.models.model_infer.rollout import BLOCKED
from controller.models.model_infer.target import down

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.rollout import Rollout
    from controller.models.model_infer.target import Target

_LONGEST: Final = 2000
_TOLD: Final = 3


class Condition(msgspec.Struct, frozen=True):
    """Without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


class Problem(msgspec.Struct, frozen=True):
    """``reason``: one word. ``message``: for people."""

    reason: str
    message: str


def conditions_of(
    groups: Sequence[Group], target: Target, rollout: Rollout, problems: Sequence[Problem]
) -> list[Condition]:
    """In the order in which people read them."""
    return [
        Condition("Accepted", "True", "Accepted", "it has no mistake"),
        available(groups, target),
        progressing(rollout),
        degraded(problems),
    ]


def refused(mistakes: Sequence[str]) -> Condition:
    """Of an object that cannot be acted on."""
    return Condition("Accepted", "False", "InvalidSpec", "; ".join(mistakes)[:_LONGEST])


def available(groups: Sequence[Group], target: Target) -> Condition:
    """Enough groups serve: as many as the rollout's ``maxUnavailable`` leaves, and one at least."""
    wanted = target.spec.replicas
    ready = len([one for one in groups if one.is_ready])
    needed = max(min(1, wanted), wanted - down(target.spec.rollout.max_unavailable, wanted))
    said = f"{ready} of {wanted} groups are ready"
    if ready < needed:
        return Condition("Available", "False", "NotEnoughGroups", said)
    return Condition("Available", "True", "AllGroupsReady" if ready >= wanted else "EnoughGroupsReady", said)


def progressing(rollout: Rollout) -> Condition:
    """True while something is under way that may still succeed."""
    status: Literal["True", "False", "Unknown"] = "True" if rollout.phase == "InProgress" else "False"
    return Condition("Progressing", "Unknown" if rollout.phase == "Paused" else status, rollout.phase, rollout.message)


def degraded(problems: Sequence[Problem]) -> Condition:
    """The first problem gives the reason; a few of them are told."""
    if not problems:
        return Condition("Degraded", "False", "AsExpected", "nothing is wrong")
    told = "; ".join(one.message for one in problems[:_TOLD])
    more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
    return Condition("Degraded", "True", problems[0].reason, told[:_LONGEST] + more)


def problems_of(
    groups: Sequence[Group], target: Target, observed: Observed, rollout: Rollout, held: Sequence[Problem]
) -> list[Problem]:
    """The rollout's first, then those of pods, then those of the cluster. ``held``: of what waits to be made."""
    found = [Problem(BLOCKED, rollout.message)] if rollout.phase == BLOCKED else []
    failures = [_as_problem(one, target) for group in groups for one in _failures(group, target, observed)]
    return [*found, *failures, *held]


def failed_groups(groups: Sequence[Group], target: Target, observed: Observed) -> frozenset[int]:
    """Ordinals of groups in which a pod has failed."""
    return frozenset(one.ordinal for one in groups if any(_failures(one, target, observed)))


def _failures(group: Group, target: Target, observed: Observed) -> Iterator[Failure]:
    for pod in group.pods:
        found = failure_of(pod, observed, target.spec.template.unresponsive_timeout) or (
            None if pod.is_ready else stuck(pod, observed)
        )
        if found is not None:
            yield found


def _as_problem(failure: Failure, target: Target) -> Problem:
    """An engine of a revision that never was ready anywhere has not loaded its model."""
    update = target.history.update
    is_new = failure.pod.revision == update.hash != target.current.hash and not update.reached
    reason = "ModelLoadFailed" if failure.reason == "RuntimeUnhealthy" and is_new else failure.reason
    return Problem(reason, f"pod {failure.pod.key.partition('/')[2]}: {failure.message}")
