# SPDX-License-Identifier: Apache-2.0
"""Two prefix scorers on two tiers of caches are two: each scores by what its own tier holds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from extproc.endpoints.table import EndpointTable
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.scheduling.cache_estimator import CacheEstimator, Prompt
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.framework import ConfiguredPicker

TIERED = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: approx-prefix-cache-producer, name: gpu}
  - {type: approx-prefix-cache-producer, name: cpu, parameters: {autoTune: false, lruCapacityPerServer: 10000}}
  - {type: approx-prefix-cache-producer, name: unnamed, parameters: {autoTune: false, lruCapacityPerServer: 7}}
  - {type: prefix-cache-scorer, name: on-gpu, parameters: {prefixMatchInfoProducerName: gpu}}
  - {type: prefix-cache-scorer, name: on-cpu, parameters: {prefixMatchInfoProducerName: cpu}}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: on-gpu}, {pluginRef: on-cpu, weight: 0.5}]}
"""


def picker(text: str = TIERED) -> ConfiguredPicker:
    return picker_from_text("epp.yaml", text, BUILT_IN).picker


def notes(text: str) -> tuple[str, ...]:
    return picker_from_text("epp.yaml", text, BUILT_IN).notes


def prompt(number: int) -> Prompt:
    return Prompt(f"prompt {number:04} ".encode() * 400, "m")


def test_a_producer_with_a_capacity_that_a_scorer_names_is_a_tier() -> None:
    # 16 tokens a block unless the file says otherwise
    assert picker().tiers == {"cpu": 160_000.0}
    assert picker(TIERED.replace("10000}", "10000, blockSizeTokens: 64}")).tiers == {"cpu": 640_000.0}
    assert picker(TIERED.replace("autoTune: false", "autoTune: true")).tiers == {}
    assert "cpu: a tier of its own, of 160000 tokens at each endpoint" in notes(TIERED)


def test_each_scorer_scores_by_its_own_tier() -> None:
    view = view_of(3, cached=[400, 0, 0])
    cpu = np.zeros(len(view.table.addresses))
    cpu[:3] = [600, 900, 0]
    view = msgspec.structs.replace(
        view, demand=msgspec.structs.replace(view.demand, tiers={"cpu": cpu}), wants_reasons=True
    )
    (reasons,) = picker().pick(view, rng=random.Random(0)).reasons
    scored = {one.name: one.values.tolist() for one in reasons.scored}
    assert scored["on-gpu"] == pytest.approx([0.4, 0.0, 0.0])
    assert scored["on-cpu"] == pytest.approx([0.6, 0.9, 0.0])


def test_scorers_of_one_estimate_are_told() -> None:
    same = TIERED.replace("prefixMatchInfoProducerName: cpu", "prefixMatchInfoProducerName: gpu")
    assert any("on-gpu and on-cpu score by one estimate of cached prefixes" in note for note in notes(same))
    assert not any("by one estimate" in note for note in notes(TIERED))


@pytest.mark.parametrize(("tier_tokens", "is_held"), [(3_000.0, False), (500_000.0, True)])
def test_a_tier_holds_as_much_as_its_capacity(tier_tokens: float, is_held: bool) -> None:
    estimator, table = CacheEstimator(), EndpointTable()
    table.replace_endpoints(["e0:1", "e1:1"])
    estimator.configure(has_events=False, tiers={"cpu": tier_tokens})
    for number in range(10):
        estimator.record_sent(0, estimator.estimate_prompt(prompt(number), table, 0.0), 0.0)
    # each prompt has some 1,300 tokens
    first = estimator.estimate_prompt(prompt(0), table, 1.0).demand.cached_by("cpu")
    assert (first[0] > 0) == is_held
    assert estimator.estimate_prompt(prompt(9), table, 1.0).demand.cached_by("cpu")[0] > 1000
    assert first[1] == 0
    # the engine restarts: what was in host memory is gone, too
    estimator.on_cache_lost(0)
    assert estimator.estimate_prompt(prompt(9), table, 2.0).demand.cached_by("cpu")[0] == 0


def test_tiers_that_stay_keep_what_they_remember() -> None:
    estimator, table = CacheEstimator(), EndpointTable()
    table.replace_endpoints(["e0:1"])
    for _ in range(2):
        estimator.configure(has_events=False, tiers={"cpu": 100_000.0})
        estimator.record(0, estimator.estimate_prompt(prompt(1), table, 0.0).chain, 0.0)
    assert estimator.estimate_prompt(prompt(1), table, 1.0).demand.cached_by("cpu")[0] > 1000
    estimator.configure(has_events=False, tiers={"cpu": 200_000.0})
    assert estimator.estimate_prompt(prompt(1), table, 1.0).demand.cached_by("cpu")[0] == 0
    estimator.configure(has_events=False, tiers={})
    assert estimator.estimate_prompt(prompt(1), table, 1.0).demand.tiers == {}
