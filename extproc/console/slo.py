# SPDX-License-Identifier: Apache-2.0
"""What the console shows of objectives, by this worker's counts: those with the least error budget left come first."""

from __future__ import annotations

from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.metrics.slo_attainment import merge_attainments

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from extproc.api.status_page_contents import SloObjectiveCounts

_MOST: Final = 50
_MOST_WORST: Final = 20
_HOUR_S: Final = 3600


class ObjectiveView(msgspec.Struct, frozen=True, rename="camel"):
    """``share``: promised over ``window_s``. ``attained``: of ``requests``, None without any. ``budget_left``: of the
    error budget, negative if more than that is used. ``burn_rate``: of this hour and the one before.
    """

    route: str
    name: str
    objective: str
    target_s: float
    share: float
    window_s: float
    attained: float | None
    requests: int
    bad: int
    excluded: int
    budget_left: float | None
    burn_rate: float | None


class WorstHour(msgspec.Struct, frozen=True, rename="camel"):
    """``at``: its beginning, Unix. ``bad`` of ``requests`` missed the objective."""

    route: str
    name: str
    objective: str
    at: int
    bad: int
    requests: int
    bad_share: float


class ObjectivesAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """``objectives``: the first of ``count``. ``worst``: the hours of these in which most requests missed them."""

    worker: int
    workers: int
    count: int
    objectives: tuple[ObjectiveView, ...]
    worst: tuple[WorstHour, ...]


def objectives_answer(
    counts: Iterable[SloObjectiveCounts], *, find: str, now_s: float, worker: int, workers: int
) -> Generator[None, None, ObjectivesAnswer]:
    """``find``: a part of routes' or classes' names. Yields where others may have their turn."""
    hour, text = int(now_s // _HOUR_S), find.lower()
    views: list[ObjectiveView] = []
    worst: list[WorstHour] = []
    for one in counts:
        yield
        if text and text not in one.route.lower() and text not in one.name.lower():
            continue
        (found,) = merge_attainments([one])
        requests, bad = found.requests, found.missed_requests
        views.append(
            ObjectiveView(
                route=one.route,
                name=one.name,
                objective=one.objective,
                target_s=one.target_s,
                share=one.share,
                window_s=one.window_s,
                attained=1.0 - bad / requests if requests else None,
                requests=requests,
                bad=bad,
                excluded=one.excluded,
                budget_left=found.budget_left if requests else None,
                burn_rate=found.burn_rate(hour),
            )
        )
        hours = [
            WorstHour(one.route, one.name, one.objective, at * _HOUR_S, missed, every, missed / every)
            for at, missed, every in found.worst_hours(3)
        ]
        worst = nlargest(_MOST_WORST, [*worst, *hours], key=_missed)
    return ObjectivesAnswer(worker, workers, len(views), tuple(nsmallest(_MOST, views, key=_by_budget)), tuple(worst))


def _missed(one: WorstHour) -> tuple[int, int]:
    return one.bad, one.at


def _by_budget(one: ObjectiveView) -> tuple[float, str, str, str]:
    return 1.0 if one.budget_left is None else one.budget_left, one.route, one.name, one.objective
