# SPDX-License-Identifier: Apache-2.0
"""Forecasts from the past."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.autoscaler.decision.situation import Freshness
from controller.autoscaler.decision.strategies.predictive import (
    PredictiveMemory,
    PredictiveParameters,
    PredictiveStrategy,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.situations import situation_of, target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.autoscaler.decision.decision import Recommendation


def followed(
    rate: Callable[[float], float],
    seconds: int,
    *,
    freshness: Freshness | None = None,
    season: str | None = None,
    lead: str = "120s",
) -> tuple[Recommendation, PredictiveMemory]:
    """What the strategy says after so long, looking every 30 s."""
    strategy = PredictiveStrategy(
        PredictiveParameters(season=Duration(season) if season else None, lead=Duration(lead))
    )
    memory, found, points, arrivals = None, None, [], 0.0
    for at_s in range(0, seconds + 1, 10):
        arrivals += 10 * rate(at_s)
        totals = TrafficTotals(
            arrivals=arrivals,
            finished=arrivals,
            prompt_tokens=1000 * arrivals,
            output_tokens=200 * arrivals,
            prefill_work=1000 * arrivals,
        )
        points.append(TrafficPoint(float(at_s), totals))
        if at_s % 30 == 0:
            situation = situation_of(
                target_of(ready=2), traffic=Traffic(tuple(points[-20:])), now_s=float(at_s), freshness=freshness
            )
            found, memory = strategy.recommend(situation, memory)
    assert found is not None
    assert memory is not None
    return found, memory


def test_constant_load_stays_what_it_is() -> None:
    found, _ = followed(lambda _: 4.0, 1200)
    # 4 * 0.21 s at 0.8
    assert found.replicas == pytest.approx(1.05)


def test_a_rise_is_continued_and_damped() -> None:
    found, _ = followed(lambda at_s: 4.0 + at_s / 100, 1200)
    rate = found.inputs["arrivals_per_s_forecast"]
    # 16 a second now; a straight line would have 17.2 in two minutes
    assert 15.5 < rate < 17.3


def test_a_fall_is_not_foreseen() -> None:
    found, memory = followed(lambda at_s: 20.0 - at_s / 100, 1200)
    assert found.inputs["arrivals_per_s_forecast"] == pytest.approx(memory.level)


def test_with_few_observations_it_does_not_know() -> None:
    assert followed(lambda _: 4.0, 90)[0].replicas is None


def test_the_last_season_foretells_the_next() -> None:
    def hourly(at_s: float) -> float:
        return 10.0 + 8.0 * math.sin(2 * math.pi * at_s / 3600)

    # two hours, and 10 minutes into the third: at 12 minutes the hour before had 17.6
    found, _ = followed(hourly, 2 * 3600 + 600, season="1h")
    assert "past seasons" in found.reason
    assert found.inputs["arrivals_per_s_forecast"] == pytest.approx(hourly(720), rel=0.05)


def test_today_may_be_busier_than_ever() -> None:
    found, memory = followed(lambda at_s: 10.0 if at_s < 3600 else 20.0, 2 * 3600 - 60, season="1h")
    assert memory.factor == pytest.approx(2.0, rel=0.05)
    assert found.inputs["arrivals_per_s_forecast"] > 18


def test_silent_gateways_are_not_observed() -> None:
    _, memory = followed(lambda _: 4.0, 300, freshness=Freshness(gateways=2, silent=("b",)))
    assert memory.count == 0


def test_its_memory_is_bounded() -> None:
    strategy = PredictiveStrategy(PredictiveParameters(season=Duration("7d")))
    _, memory = strategy.recommend(situation_of(target_of()), None)
    assert memory is not None
    assert len(memory.profile) == 288
    assert len(msgspec.json.encode(memory)) < 3000
