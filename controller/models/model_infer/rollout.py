# SPDX-License-Identifier: Apache-2.0
"""How far a rollout is: under way, done, paused, or failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.kube.api_resources import CONTROLLER_REVISIONS, parse_timestamp, timestamp_of
from controller.kube.reconcile_plan import Annotate, KubeEvent
from controller.models.model_infer import names
from controller.models.model_infer.pod_changes import is_outdated
from controller.models.model_infer.recovery import recorded_attempts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.models.model_infer.desired_state import DesiredState
    from controller.models.model_infer.groups import Group

PAUSED: Final = "Paused"
BLOCKED: Final = "BlockedByFailedLoad"

Phase = Literal["UpToDate", "InProgress", "Paused", "BlockedByFailedLoad"]


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """``phase``: a reason of the condition Progressing. ``message``: for people. ``is_moving``: groups may be replaced.
    ``notes``: annotations of ControllerRevisions, read by the next reconcile. ``requeue_at_s``: when it fails, if
    nothing becomes ready.
    """

    phase: Phase
    message: str
    is_moving: bool
    notes: tuple[Annotate, ...] = ()
    requeue_at_s: float | None = None


def rollout_state(groups: Sequence[Group], target: DesiredState, now_s: float) -> RolloutProgress:
    """Deadlines count only while an older revision can serve instead."""
    update, settings = target.history.update, target.spec.rollout
    old = {one.ordinal for one in groups if is_outdated(one, target)}
    waiting = [one.ordinal for one in groups if not one.is_ready and one.ordinal not in old]
    missing = target.group_count - len(groups)
    if target.goal.hash != update.hash:
        return _gone_back(target, bool(old or waiting or missing))
    is_done = not old and not waiting and missing <= 0
    notes = tuple(_notes(target, now_s, is_done=is_done))
    if is_done:
        return RolloutProgress(phase="UpToDate", message=_done(target), is_moving=True, notes=notes)
    if settings.paused and old:
        message = f"{len(old)} groups wait for the rollout of revision {update.hash}, which is paused"
        return RolloutProgress(phase=PAUSED, message=message, is_moving=False, notes=notes)
    counts = update.hash != target.current.hash and not update.reached
    fails_at_s = _last_progress_s(groups, target) + settings.progress_deadline
    if counts and now_s >= fails_at_s and (_was_tried(groups, target) or _was_blocked(target)):
        return _failed(target, waiting, notes, now_s)
    if counts and now_s >= fails_at_s and update.uid:
        # old pods still terminate, and it is not known yet whether the revision is good
        notes += (_note(target, {names.ROLLED_OUT_SINCE: timestamp_of(now_s)}),)
        fails_at_s = now_s + settings.progress_deadline
    new = [one for one in groups if one.is_whole_revision and one.revision.hash == update.hash]
    message = f"{len(new)} of {target.spec.replicas} groups have revision {update.hash}{_waiting(waiting)}"
    # a revision that is only being made has not begun
    at_s = fails_at_s if counts and update.uid else None
    return RolloutProgress(phase="InProgress", message=message, is_moving=True, notes=notes, requeue_at_s=at_s)


def _was_tried(groups: Sequence[Group], target: DesiredState) -> bool:
    return any(pod.revision == target.history.update.hash for one in groups for pod in one.pods)


def _was_blocked(target: DesiredState) -> bool:
    """Whether the status reports this revision as failed: it is, even while all of its pods are being created again."""
    status = target.owner.get("status") or {}
    reasons = {one.get("type"): one.get("reason") for one in status.get("conditions") or ()}
    return reasons.get("Progressing") == BLOCKED and status.get("updateRevision") == target.history.update.hash


def _done(target: DesiredState) -> str:
    update = target.history.update
    if target.first_updated_ordinal and update.hash != target.current.hash:
        first = target.first_updated_ordinal
        return f"groups from {first} on have revision {update.hash}, the others {target.current.hash}"
    return f"all groups have revision {update.hash}"


def _failed(target: DesiredState, waiting: Sequence[int], notes: tuple[Annotate, ...], now_s: float) -> RolloutProgress:
    update, settings = target.history.update, target.spec.rollout
    message = f"revision {update.hash} made no progress for {settings.progress_deadline}{_waiting(waiting)}; "
    if settings.on_failure == "RollBack" and update.uid:
        failed = _note(target, {names.FAILED: timestamp_of(now_s)})
        message += f"going back to {target.current.hash}"
        return RolloutProgress(phase=BLOCKED, message=message, is_moving=False, notes=(*notes, failed))
    message += f"it has stopped, and {target.current.hash} serves"
    return RolloutProgress(phase=BLOCKED, message=message, is_moving=False, notes=notes)


def _gone_back(target: DesiredState, is_moving: bool) -> RolloutProgress:
    """``is_moving``: not all groups are back."""
    message = f"revision {target.history.update.hash} did not become ready; " + (
        f"groups go back to {target.goal.hash}" if is_moving else f"all groups are back at {target.goal.hash}"
    )
    return RolloutProgress(phase=BLOCKED, message=message, is_moving=not target.spec.rollout.paused)


def _waiting(ordinals: Sequence[int]) -> str:
    if not ordinals:
        return ""
    more = f" and {len(ordinals) - 5} more" if len(ordinals) > 5 else ""
    return ", waiting for group " + ", ".join(map(str, ordinals[:5])) + more


def _last_progress_s(groups: Sequence[Group], target: DesiredState) -> float:
    """When the rollout began, or when a group of the new revision was last made for the first time, or became ready. A
    group that was recreated after a failure is no progress.
    """
    failed = {one.name.partition("/")[0] for one in recorded_attempts(target.owner.get("status") or {})}
    times: list[float | None] = [target.history.update.since_s]
    for group in groups:
        new = [one for one in group.pods if one.revision == target.goal.hash]
        if group.is_ready:
            times += [parse_timestamp(one.condition("Ready").get("lastTransitionTime")) for one in new]
        elif str(group.ordinal) not in failed:
            times += [one.created_at_s for one in new]
    return max(one for one in times if one is not None)


def _notes(target: DesiredState, now_s: float, *, is_done: bool) -> Iterator[Annotate]:
    update = target.history.update
    if not update.uid:
        return
    if target.is_restarted:
        yield _note(target, {names.ROLLED_OUT_SINCE: timestamp_of(now_s), names.FAILED: None, names.REACHED: None})
    elif is_done and update.hash != target.current.hash and target.first_updated_ordinal and not update.reached:
        yield _note(target, {names.REACHED: timestamp_of(now_s)})


def _note(target: DesiredState, annotations: dict[str, str | None]) -> Annotate:
    update = target.history.update
    return Annotate(CONTROLLER_REVISIONS, update.key, update.uid, annotations)


def rollout_events(target: DesiredState, now: RolloutProgress) -> Iterator[KubeEvent]:
    """Events where the phase differs from the status. Groups that start or recover are no rollout."""
    before = target.owner.get("status") or {}
    reasons = {one.get("type"): one.get("reason") for one in before.get("conditions") or ()}
    if reasons.get("Progressing", "UpToDate") == now.phase:
        return
    was_changing = before.get("currentRevision") != before.get("updateRevision")
    if now.phase == BLOCKED:
        yield KubeEvent("Warning", BLOCKED, now.message)
    elif now.phase == PAUSED:
        yield KubeEvent("Normal", "RolloutPaused", now.message)
    elif now.phase == "InProgress" and target.current.hash != target.history.update.hash:
        yield KubeEvent("Normal", "RolloutStarted", now.message)
    elif now.phase == "UpToDate" and was_changing:
        yield KubeEvent("Normal", "RolloutDone", now.message)
