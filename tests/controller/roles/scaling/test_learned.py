# SPDX-License-Identifier: Apache-2.0
"""What was learned of a binding fits into its annotation, and comes back from it."""

from __future__ import annotations

import random

from controller.autoscale.memory import Memory, StageMemory, decoded, encoded
from controller.autoscale.season import MOST_PLACES, PredictiveMemory
from controller.autoscale.situation import Speed
from controller.autoscale.start_times import Start, StartTimes, expected_start_s
from controller.roles.scaling.learned import packed, unpacked


def test_the_largest_binding_fits_and_comes_back() -> None:
    rng = random.Random(1)
    names = [f"llama-3-70b-instruct-{index}"[:20] for index in range(16)]

    def starts() -> StartTimes:
        pods = (f"{rng.getrandbits(160):x}-{rng.getrandbits(40):x}" for _ in range(32))
        return StartTimes(tuple(Start(pod, rng.uniform(10, 600)) for pod in pods))

    def stage(targets: list[str]) -> StageMemory:
        season = PredictiveMemory(0.0, profile=tuple(rng.uniform(0, 99) for _ in range(MOST_PLACES)), season_s=86400.0)
        speeds = {one: Speed(rng.uniform(1e3, 1e5), rng.random(), rng.random() / 1e6) for one in targets}
        known = {one: starts() for one in targets}
        return StageMemory(began_at_s=0.0, decided_at_s=0.0, laws={"Predictive": season}, speeds=speeds, starts=known)

    memory = Memory({"Prefill": stage(names[:8]), "Decode": stage(names[8:])})
    text = packed(encoded(memory))
    assert text
    again = decoded(unpacked(text), 5.0)
    assert again.stages["Decode"].starts == memory.stages["Decode"].starts
    assert again.stages["Prefill"].speeds == memory.stages["Prefill"].speeds
    season = again.stages["Prefill"].laws["Predictive"]
    assert isinstance(season, PredictiveMemory)
    assert len(season.profile) == MOST_PLACES


def test_measured_starts_count_before_what_the_target_says_after_a_restart_too() -> None:
    stage = StageMemory(began_at_s=0.0, decided_at_s=0.0, starts={"main": StartTimes((Start("a", 33.0),))})
    again = decoded(unpacked(packed(encoded(Memory({"Both": stage})))), 5.0)
    assert expected_start_s(again.stages["Both"].starts["main"], 240.0) == 33.0


def test_what_is_not_ours_is_nothing() -> None:
    assert unpacked("no base64!") == b""
    assert packed(b"") == ""
