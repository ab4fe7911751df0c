# SPDX-License-Identifier: Apache-2.0
"""Our own gang scheduling: pods are made when there is room for all of a group."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.plan import Delete, Happened
from controller.models.model_infer.changes import Missing
from controller.models.model_infer.conditions import Problem
from controller.models.model_infer.draining import deletion
from controller.models.model_infer.gang import Form, form_of, specs
from controller.models.model_infer.recovery import FORGOTTEN_AFTER_S, NO_ROOM, Attempt, attempts_of
from controller.models.model_infer.room import Places, total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.target import Target

# nodes change without being told to us
_LOOK_EACH_S: Final = 15.0


class Ganged(msgspec.Struct, frozen=True, kw_only=True):
    """``form``: how groups are held together. ``missing``: pods that may be made. ``problems``: of groups that wait.
    ``deleted``: pods of groups that are given up. ``attempts``: for the status.
    """

    form: Form | None
    missing: tuple[Missing, ...] = ()
    problems: tuple[Problem, ...] = ()
    deleted: tuple[Delete, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    events: tuple[Happened, ...] = ()
    look_again_at_s: float | None = None


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    missing: tuple[Missing, ...] = ()
    problems: tuple[Problem, ...] = ()
    look_again_at_s: float | None = None


class _GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    groups: frozenset[int] = frozenset()
    deleted: tuple[Delete, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    events: tuple[Happened, ...] = ()
    look_again_at_s: float | None = None


def gang_of(
    missing: Sequence[Missing],
    groups: Sequence[Group],
    target: Target,
    observed: Observed,
    now_s: float,
) -> Ganged:
    """Schedulers that know gangs need nothing but marks."""
    form = form_of(target, observed)
    if form != "Hold":
        return Ganged(form=form, missing=tuple(missing))
    known = _known(target, now_s)
    gone = _given_up(groups, target, observed, known, now_s)
    attempts = tuple({one.name: one for one in (*known, *gone.attempts)}.values())
    rest = [one for one in missing if one.place.group not in gone.groups]
    kept = _held(rest, groups, target, observed, attempts, now_s)
    times = [one for one in (gone.look_again_at_s, kept.look_again_at_s) if one is not None]
    times += [_forgotten_s(one, target) for one in attempts]
    return Ganged(
        form=form,
        missing=kept.missing,
        problems=kept.problems,
        deleted=gone.deleted,
        attempts=attempts,
        events=gone.events,
        look_again_at_s=min(times, default=None),
    )


def _known(target: Target, now_s: float) -> list[Attempt]:
    """Groups that were given up, until they have had time to try again and to run for a while."""
    found = attempts_of(target.owner.get("status") or {})
    return [one for one in found if one.reason == NO_ROOM and now_s < _forgotten_s(one, target)]


def _forgotten_s(attempt: Attempt, target: Target) -> float:
    gang = target.spec.template.gang
    return attempt.at_s + FORGOTTEN_AFTER_S + (gang.timeout if gang is not None else 0.0)


def _held(
    missing: Sequence[Missing],
    groups: Sequence[Group],
    target: Target,
    observed: Observed,
    attempts: Sequence[Attempt],
    now_s: float,
) -> _Held:
    """Of the ``missing`` pods, those of groups for which there is room."""
    by_group: dict[int, list[Missing]] = defaultdict(list)
    for one in missing:
        by_group[one.place.group].append(one)
    waits = {one.name: one.at_s + one.wait_s for one in attempts}
    places = None if observed.room is None else Places(observed.room)
    if places is not None:
        for pod in (pod for group in groups for pod in group.pods if pod.is_waiting):
            places.place([pod.thing.get("spec") or {}])
    begun = {one.ordinal for one in groups if not one.is_going}
    made: list[Missing] = []
    problems: list[Problem] = []
    times: list[float] = []
    for ordinal, found in sorted(by_group.items()):
        until_s = waits.get(_name(ordinal), 0.0)
        asked = [_spec(one) for one in found] if ordinal in begun else specs(found[0].revision, target)
        left_over = None if places is None or now_s < until_s else places.place(asked)
        if now_s < until_s:
            problems.append(Problem(NO_ROOM, f"group {ordinal} was given up for want of room, and waits"))
            times.append(until_s)
        elif left_over is not None:
            problems.append(Problem(NO_ROOM, _no_room(ordinal, len(asked), left_over)))
            times.append(now_s + _LOOK_EACH_S)
        else:
            made += found
    return _Held(missing=tuple(made), problems=tuple(problems), look_again_at_s=min(times, default=None))


def _given_up(
    groups: Sequence[Group], target: Target, observed: Observed, known: Sequence[Attempt], now_s: float
) -> _GivenUp:
    """Groups that hold room without being able to start. Later each time, so that others get the room meanwhile."""
    gang = target.spec.template.gang
    before = {one.name: one for one in known}
    ordinals: set[int] = set()
    deleted: list[Delete] = []
    attempts: list[Attempt] = []
    events: list[Happened] = []
    times: list[float] = []
    for group in groups:
        since_s = _incomplete_since(group, target)
        if gang is None or since_s is None:
            continue
        if now_s < since_s + gang.timeout:
            times.append(since_s + gang.timeout)
            continue
        ordinals.add(group.ordinal)
        deleted += [deletion(one, observed.lost_nodes) for one in group.pods if not one.is_going]
        old = before.get(_name(group.ordinal))
        attempts.append(
            Attempt(name=_name(group.ordinal), count=old.count + 1 if old else 1, at_s=now_s, reason=NO_ROOM)
        )
        said = (
            f"group {group.ordinal} found no room for all of its pods within {gang.timeout}, and gives up what it has"
        )
        events.append(Happened("Warning", NO_ROOM, said))
    return _GivenUp(
        groups=frozenset(ordinals),
        deleted=tuple(deleted),
        attempts=tuple(attempts),
        events=tuple(events),
        look_again_at_s=min(times, default=None),
    )


def _incomplete_since(group: Group, target: Target) -> float | None:
    """When the oldest pod without a node was made. None if enough replicas have one to start, or no pod has: those that
    wait hold nothing.
    """
    gang = target.spec.template.gang
    waiting = [one.created_at_s for one in group.pods if one.is_waiting]
    if gang is None or not waiting or len(waiting) == len(group.pods) or group.is_ready:
        return None
    later = {one.name for one in target.spec.template.roles if one.starts_after}
    for role in group.revision.roles:
        count = target.replicas_of(group.revision, role.name)
        needed = 0 if role.name in later else min(count, gang.min_role_replicas.get(role.name, count))
        placed = [one for one in group.of_role(role.name) if one.live and not any(pod.is_waiting for pod in one.live)]
        if len(placed) < needed:
            return min(waiting)
    return None


def _spec(missing: Missing) -> Mapping[str, Any]:
    template = missing.role.entry if missing.place.index == 0 or missing.role.worker is None else missing.role.worker
    return template.spec


def _no_room(ordinal: int, count: int, spec: Mapping[str, Any]) -> str:
    asked = ", ".join(f"{amount} {name}" for name, amount in total([spec]).items()) or "a place"
    return f"group {ordinal} waits until its {count} pods find room together; one of them asks for {asked}"


def _name(ordinal: int) -> str:
    return f"{ordinal}/gang"
