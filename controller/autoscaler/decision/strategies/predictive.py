# SPDX-License-Identifier: Apache-2.0
"""The work of some time ahead, from the past: Holt's linear trend, or a season's profile. A lower bound only.

Each ``window`` gives one observation: arrivals a second. From these:

- Holt (1957): level and trend, smoothed exponentially; the trend is damped (Gardner and McKenzie, 1985), as no trend
  goes on for ever. The forecast for h windows ahead is level + trend * (phi + phi**2 + ... + phi**h).
- With ``season``: the mean of the same time in past seasons, newer ones counting more, times how today compares with
  them so far. It needs one whole season; until then Holt's method alone answers.

The largest forecast between now and ``lead`` ahead counts: replicas that are needed on the way are needed too. From
requests to replicas it is the same work as in the strategy Work, at ``utilization``. Without enough observations the
strategy recommends nothing, and the other strategies decide. The means of past seasons outlive a restart of the
manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.shared_types import Utilization
from controller.api.strategies import LearnedState, StrategyType
from controller.autoscaler.decision.decision import Recommendation
from controller.autoscaler.decision.offered_load import estimate_offered_load
from controller.autoscaler.decision.replica_performance import request_work
from extproc.api.quantities import Duration
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation

# Places of a profile: at most so many, whatever the season and the window.
MOST_PLACES: Final = 288
_DIGITS: Final = 3
# Of what can be measured: requests a second, seconds.
_MOST: Final = 1e15
_LEVEL: Final = 0.3
_TREND: Final = 0.1
_DAMPING: Final = 0.9
_FEWEST: Final = 6
_MOST_STEPS: Final = 500
_NEWEST_SEASON: Final = 0.5
# How today compares with past seasons, over this many observations, and at most by this factor.
_TODAY: Final = 0.2
_MOST_FACTOR: Final = 3.0


class PredictiveParameters(Spec, frozen=True):
    """The work of some time ahead. ``season``: the period after which load repeats; without it, only the trend of
    Holt's method.
    ``lead``: how far ahead; left out, the measured start time. ``utilization``: as in the strategy Work.
    ``window``: of one observation.
    """

    season: Duration | None = None
    lead: Duration | None = None
    utilization: Utilization = 0.8
    window: Duration = Duration("30s")


class PredictiveMemory(msgspec.Struct, frozen=True):
    """``observed_at_s``: of the last observation. ``count``: of observations. ``level`` and ``trend``: arrivals a
    second, and their growth in a window. ``profile``: arrivals a second by place in the season; negative: never seen.
    ``factor``: of today over the profile. ``season_s``: the season that the profile is of.
    """

    observed_at_s: float
    count: int = 0
    level: float = 0.0
    trend: float = 0.0
    profile: tuple[float, ...] = ()
    factor: float = 1.0
    season_s: float = 0.0


class SavedSeason(msgspec.Struct, frozen=True):
    """``profile``: rounded to three digits, finer than its accuracy. ``season_s``: length of the season."""

    profile: tuple[float, ...]
    season_s: float


def season_to_save(memory: object) -> SavedSeason | None:
    """What of a strategy's memory is slow to learn; None if nothing is."""
    if not isinstance(memory, PredictiveMemory) or max(memory.profile, default=-1.0) < 0:
        return None
    return SavedSeason(tuple(float(f"{one:.{_DIGITS}g}") for one in memory.profile[:MOST_PLACES]), memory.season_s)


def restore_season(kept: SavedSeason, now_s: float) -> PredictiveMemory | None:
    """The memory after a restart: level, trend and today's ratio are measured anew; the profile is kept. None for
    implausible values.
    """
    is_possible = len(kept.profile) <= MOST_PLACES and 0 <= kept.season_s <= _MOST
    if not is_possible or not all(0 <= one <= _MOST for one in kept.profile):
        return None
    return PredictiveMemory(now_s, profile=kept.profile, season_s=kept.season_s)


class PredictiveStrategy(msgspec.Struct, frozen=True):
    """``parameters``: of the strategy."""

    parameters: PredictiveParameters = PredictiveParameters()
    name: str = "Predictive"

    def recommend(
        self, situation: Situation, memory: PredictiveMemory | None
    ) -> tuple[Recommendation, PredictiveMemory | None]:
        """By the forecast for the time when a replica that starts now is ready."""
        memory = self._observed(situation, memory)
        first = situation.targets[0]
        load = estimate_offered_load(situation.traffic, window_s=self.parameters.window, now_s=situation.now_s)
        if memory.count < _FEWEST or load is None or load.per_request is None or first.speed is None:
            return Recommendation(self.name, None, f"{memory.count} observations, too few for a forecast"), memory
        lead_s = self.parameters.lead if self.parameters.lead is not None else first.start_s
        rate, method = self._forecast(memory, situation.now_s, lead_s)
        work = request_work(load.per_request, first.speed, first.spec.stage)
        replicas = rate * work.total_s / self.parameters.utilization
        reason = f"{rate:.3g} requests/s at most within {lead_s:.0f} s by {method}"
        inputs = {"arrivals_per_s_forecast": rate, "ahead_s": lead_s, "observations": float(memory.count)}
        return Recommendation(self.name, replicas, reason, inputs), memory

    def _observed(self, situation: Situation, memory: PredictiveMemory | None) -> PredictiveMemory:
        """With the arrivals of each window that has ended; windows without data are passed over."""
        now_s, window_s = situation.now_s, self.parameters.window
        if memory is None:
            return PredictiveMemory(now_s, profile=(-1.0,) * self._places, season_s=self._season_s)
        if now_s - memory.observed_at_s < window_s:
            return memory
        rates = situation.traffic.rates(window_s, now_s)
        if rates is None or situation.freshness.silent:
            return msgspec.structs.replace(memory, observed_at_s=now_s)
        value = rates.arrivals
        if memory.count == 0:
            level, trend = value, 0.0
        else:
            expected = memory.level + _DAMPING * memory.trend
            level = expected + _LEVEL * (value - expected)
            trend = _DAMPING * memory.trend + _TREND * (level - memory.level - _DAMPING * memory.trend)
        return self._with_season(memory, now_s, value, level, trend)

    def _with_season(
        self, memory: PredictiveMemory, now_s: float, value: float, level: float, trend: float
    ) -> PredictiveMemory:
        profile, factor = memory.profile, memory.factor
        if len(profile) != self._places or memory.season_s != self._season_s:
            profile = (-1.0,) * self._places
        if profile:
            place = self._place(now_s - self.parameters.window / 2)
            known = profile[place]
            if known > 0:
                ratio = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, value / known))
                factor += _TODAY * (ratio - factor)
            new = value if known < 0 else known + self._weight * (value - known)
            profile = (*profile[:place], new, *profile[place + 1 :])
        return PredictiveMemory(now_s, memory.count + 1, level, trend, profile, factor, self._season_s)

    def _forecast(self, memory: PredictiveMemory, now_s: float, lead_s: float) -> tuple[float, str]:
        window_s = self.parameters.window
        steps = min(_MOST_STEPS, max(1, round(lead_s / window_s)))
        if memory.profile and min(memory.profile) >= 0:
            places = {self._place(now_s + step * window_s) for step in range(steps + 1)}
            return max(memory.profile[place] for place in places) * memory.factor, "past seasons"
        reach = _DAMPING * (1 - _DAMPING**steps) / (1 - _DAMPING)
        return max(0.0, memory.level, memory.level + memory.trend * reach), "its trend"

    @property
    def _season_s(self) -> float:
        """0: there is none."""
        return float(self.parameters.season or 0.0)

    @property
    def _places(self) -> int:
        season_s = self.parameters.season
        return 0 if season_s is None else max(1, min(MOST_PLACES, int(season_s / self.parameters.window)))

    @property
    def _weight(self) -> float:
        """Of one observation in its place, where several of each season fall."""
        season_s = self.parameters.season or 0.0
        return _NEWEST_SEASON / max(1.0, season_s / self._places / self.parameters.window)

    def _place(self, at_s: float) -> int:
        season_s = self.parameters.season or 1.0
        return int(at_s % season_s / season_s * self._places) % self._places


PREDICTIVE: Final = StrategyType(
    summary="the past repeated",
    make=lambda parameters, _: PredictiveStrategy(parameters),
    defaults=PredictiveParameters(),
    is_lower_bound=True,
    kept=LearnedState(SavedSeason, season_to_save, restore_season),
)
