# SPDX-License-Identifier: Apache-2.0
"""What the strategy Predictive learned of a season outlives a restart of the manager."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from controller.autoscaler.decision.saved_state import BindingMemory, ServingStageMemory, decode_memory, encode_memory
from controller.autoscaler.decision.strategies.predictive import (
    MOST_PLACES,
    PredictiveMemory,
    PredictiveParameters,
    PredictiveStrategy,
    season_to_save,
)
from controller.autoscaler.decision.traffic import Traffic, TrafficPoint, TrafficTotals
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.situations import situation_of, target_of

if TYPE_CHECKING:
    from controller.autoscaler.decision.decision import Recommendation

HOURLY = PredictiveStrategy(PredictiveParameters(season=Duration("1h"), lead=Duration("60s")))


def arrivals(at_s: int) -> float:
    """So far: four a second, and forty in the last ten minutes of each hour."""
    hours, rest_s = divmod(at_s, 3600)
    return hours * (4.0 * 3000 + 40.0 * 600) + 4.0 * min(rest_s, 3000) + 40.0 * max(0, rest_s - 3000)


def looked(
    strategy: PredictiveStrategy, memory: PredictiveMemory | None, from_s: int, to_s: int
) -> tuple[Recommendation, PredictiveMemory | None]:
    """Every half minute."""
    found = None
    for now_s in range(from_s, to_s, 30):
        points = [_point(at_s) for at_s in range(max(0, now_s - 200), now_s + 1, 10)]
        situation = situation_of(target_of(ready=2), traffic=Traffic(tuple(points)), now_s=float(now_s))
        found, memory = strategy.recommend(situation, memory)
    assert found is not None
    return found, memory


def _point(at_s: int) -> TrafficPoint:
    done = arrivals(at_s)
    tokens = {"prompt_tokens": 1000 * done, "output_tokens": 200 * done, "prefill_work": 1000 * done}
    return TrafficPoint(float(at_s), TrafficTotals(arrivals=done, finished=done, **tokens))


def restarted(memory: PredictiveMemory | None, now_s: float) -> PredictiveMemory:
    stage = ServingStageMemory(began_at_s=0.0, decided_at_s=0.0, strategies={"Predictive": memory})
    known = decode_memory(encode_memory(BindingMemory({"Both": stage})), now_s).stages["Both"].strategies["Predictive"]
    assert isinstance(known, PredictiveMemory)
    return known


def test_a_manager_that_starts_anew_still_foresees_the_rush() -> None:
    _, memory = looked(HOURLY, None, 0, 7200 + 2400)
    # a minute before the rush: the trend knows nothing of it
    blind, _ = looked(HOURLY, None, 7200 + 2500, 7200 + 2970)
    knowing, _ = looked(HOURLY, restarted(memory, 7200 + 2500), 7200 + 2500, 7200 + 2970)
    assert blind.replicas is not None
    assert knowing.replicas is not None
    assert "its trend" in blind.reason
    assert "past seasons" in knowing.reason
    assert knowing.replicas > 5 * blind.replicas


def test_another_season_begins_anew() -> None:
    _, memory = looked(HOURLY, None, 0, 3660)
    daily = PredictiveStrategy(PredictiveParameters(season=Duration("2h"), window=Duration("60s")))
    assert daily._places == HOURLY._places
    _, after = looked(daily, restarted(memory, 3660), 3660, 3900)
    assert after is not None
    assert min(after.profile) < 0


def test_what_is_kept_is_small_and_nothing_is_kept_of_nothing() -> None:
    profile = tuple(math.pi * place for place in range(MOST_PLACES))
    kept = season_to_save(PredictiveMemory(0.0, profile=profile, season_s=86400.0))
    assert kept is not None
    assert kept.profile[:3] == (0.0, 3.14, 6.28)
    assert season_to_save(PredictiveMemory(0.0, profile=(-1.0, -1.0))) is None
    assert season_to_save(None) is None
