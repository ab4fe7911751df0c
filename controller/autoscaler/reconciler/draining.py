# SPDX-License-Identifier: Apache-2.0
"""Which pods go when replicas become fewer, where the target's own controller would delete them at once.

They are marked first, so that gateways send them nothing new; the replicas are lowered once they have nothing left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.reconciler.names import DELETION_COST, DRAINING
from controller.autoscaler.reconciler.pods import PodView
from controller.models.model_infer.times import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.autoscaler.decision.situation import EngineReport

# until every gateway has heard of the mark and the last request that was on its way is counted
HEARD_S: Final = 3.0
_LOOK_EACH_S: Final = 1.0
# far below what people write
_FIRST: Final = "-1000000"


class Mark(msgspec.Struct, frozen=True):
    """Annotations to set on a pod, None removes; only while it still is the one with ``uid``."""

    pod: PodView
    annotations: Mapping[str, str | None]


class Draining(msgspec.Struct, frozen=True):
    """``marks``: to write now. ``may_go``: the replicas may be lowered. ``look_again_at_s``: when this may change by
    itself. ``waits_for``: pods that have something left, by name.
    """

    marks: tuple[Mark, ...] = ()
    may_go: bool = False
    look_again_at_s: float | None = None
    waits_for: tuple[str, ...] = ()


def drain(
    pods: Sequence[PodView],
    excess: int,
    reports: Mapping[str, EngineReport],
    *,
    is_ordered: bool,
    now_s: float,
    drain_s: float,
) -> Draining:
    """``excess``: how many replicas go. ``is_ordered``: those with the highest ordinals go. ``drain_s``: the longest
    that anything is waited for. ``reports``: by IP address; one of before the mark was heard says nothing.
    """
    leaving = victims(pods, excess, reports, is_ordered=is_ordered)
    names = {one.key for one in leaving}
    marks = undone(one for one in pods if one.key not in names)
    # what never served has nothing to finish
    serving = [one for one in leaving if one.is_ready]
    unmarked = [one for one in serving if one.draining_at_s is None]
    if drain_s > 0:
        marks += [Mark(one, {DRAINING: text_of(now_s), DELETION_COST: _FIRST}) for one in unmarked]
        if unmarked:
            return Draining(tuple(marks), look_again_at_s=now_s + HEARD_S)
        busy = [one for one in serving if not _is_done(one, reports, now_s, drain_s)]
        if busy:
            names_of = tuple(sorted(one.name for one in busy))
            return Draining(tuple(marks), look_again_at_s=now_s + _LOOK_EACH_S, waits_for=names_of)
    elif not is_ordered:
        marks += [Mark(one, {DELETION_COST: _FIRST}) for one in leaving if one.deletion_cost != _FIRST]
    return Draining(tuple(marks), may_go=True)


def undone(pods: Iterable[PodView]) -> list[Mark]:
    """Marks taken off pods that stay."""
    found: list[Mark] = []
    for one in pods:
        gone: dict[str, str | None] = {DRAINING: None} if one.draining_at_s is not None else {}
        if one.deletion_cost == _FIRST:
            gone[DELETION_COST] = None
        if gone and not one.is_going:
            found.append(Mark(one, gone))
    return found


def victims(
    pods: Sequence[PodView], excess: int, reports: Mapping[str, EngineReport], *, is_ordered: bool
) -> list[PodView]:
    """Who goes: the highest ordinals; or what does not serve, then what drains already, then the least busy, the
    youngest first among equals.
    """
    live = [one for one in pods if not one.is_ended and not one.is_going]
    if is_ordered:
        return sorted(live, key=_ordinal, reverse=True)[: max(0, excess)]

    def order(one: PodView) -> tuple[bool, bool, float, float, str]:
        return one.is_ready, one.draining_at_s is None, _busy_with(one, reports), -one.created_at_s, one.key

    return sorted(live, key=order)[: max(0, excess)]


def _ordinal(pod: PodView) -> tuple[int, str]:
    number = pod.name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1), pod.name


def _busy_with(pod: PodView, reports: Mapping[str, EngineReport]) -> float:
    """Where nobody knows, an engine may be as busy as can be."""
    report = reports.get(pod.ip)
    return float("inf") if report is None else requests_at(report)


def requests_at(report: EngineReport) -> float:
    """What was sent there, or what the engine itself says, whichever is more: others may send it requests, too."""
    return max(float(report.in_flight), (report.running or 0.0) + (report.waiting or 0.0))


def _is_done(pod: PodView, reports: Mapping[str, EngineReport], now_s: float, drain_s: float) -> bool:
    since_s = now_s if pod.draining_at_s is None else pod.draining_at_s
    if now_s >= since_s + drain_s:
        return True
    report = reports.get(pod.ip)
    heard = report is not None and report.at_s >= since_s + HEARD_S
    return heard and report is not None and requests_at(report) == 0
