# SPDX-License-Identifier: Apache-2.0
"""Filters, trees of filters and handlers of earlier releases."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from extproc.engines.metrics import LoraState
from extproc.refusals import BadRequest
from extproc.scheduling.framework import NamedScorer, Profile
from extproc.scheduling.plugins.deprecated_types import (
    DecisionTreeParameters,
    HeaderBasedTestingFilter,
    LeastKvCacheFilter,
    LeastQueueFilter,
    LoraSoftAffinityFilter,
    LowQueueFilter,
    SloAwareProfileHandler,
)
from extproc.scheduling.plugins.load_scorers import QueueScorer
from extproc.scheduling.plugins.score_selectors import MaxScoreSelector
from tests.extproc.scheduling.plugins.views import view_of

TREE = {
    "current": {"pluginRef": "low"},
    "nextOnSuccess": {"decisionTree": {"current": {"pluginRef": "cache"}}},
    "nextOnFailure": {"pluginRef": "queue"},
}
FILTERS = {"low": LowQueueFilter(2), "cache": LeastKvCacheFilter(), "queue": LeastQueueFilter()}


def kept(plugin: object, view: object) -> list[int]:
    rows: list[int] = plugin.keep(view, view.table.is_active).nonzero()[0].tolist()  # type: ignore[attr-defined]
    return rows


def test_the_first_part_of_the_range_is_kept() -> None:
    # the range 0 to 10 over three endpoints: up to 3.33
    assert kept(LeastQueueFilter(), view_of(3, waiting=[0, 3, 10])) == [0, 1]
    assert kept(LeastKvCacheFilter(), view_of(3, kv_usage=[0.9, 0.3, 0.45])) == [1, 2]


def test_a_tree_goes_on_with_what_was_kept_or_with_all() -> None:
    tree = msgspec.convert(TREE, DecisionTreeParameters).with_plugins(FILTERS)
    # two short queues, of which the emptier cache
    assert kept(tree, view_of(3, waiting=[1, 2, 9], kv_usage=[0.9, 0.1, 0.0])) == [1]
    # none is short: the shortest of all
    assert kept(tree, view_of(3, waiting=[30, 20, 90])) == [0, 1]


def test_a_step_that_is_neither_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="either 'pluginRef' or 'decisionTree'"):
        msgspec.convert({"current": {"plugin": "low"}}, DecisionTreeParameters)


def test_adapters_are_preferred_where_they_are_and_then_where_there_is_room() -> None:
    view = view_of(3, adapter="law")
    view.table.set_loras(0, LoraState(active=frozenset({"law"}), max_active=1))
    view.table.set_loras(1, LoraState(active=frozenset({"tax"}), max_active=2))
    view.table.set_loras(2, LoraState(active=frozenset({"tax"}), max_active=1))
    assert kept(LoraSoftAffinityFilter(threshold=1.0), view) == [0]
    assert kept(LoraSoftAffinityFilter(threshold=0.0), view) == [1]
    assert kept(LoraSoftAffinityFilter(), view_of(3)) == [0, 1, 2]


def test_a_conformance_test_names_endpoints_with_or_without_ports() -> None:
    header = "test-epp-endpoint-selection"
    assert kept(HeaderBasedTestingFilter(), view_of(3, headers={header: "e1, e2:1"})) == [1, 2]
    assert kept(HeaderBasedTestingFilter(), view_of(3)) == []


def test_the_header_asks_for_the_profile_with_predictions() -> None:
    profiles = {
        "default": Profile((), (NamedScorer("queue", QueueScorer()),), MaxScoreSelector()),
        "slo": Profile((), (), MaxScoreSelector(), "slo"),
        "prefix": Profile((), (), MaxScoreSelector(), "prefix"),
    }
    handler = SloAwareProfileHandler()
    assert handler.needs(profiles) is None
    assert "no profile 'slo'" in (handler.needs({"default": profiles["default"]}) or "")

    def rows(header: str) -> set[int]:
        view = view_of(2, waiting=[5, 0], headers={"x-prediction-based-scheduling": header})
        picks = [handler.run(view, profiles, {}, random.Random(seed)) for seed in range(20)]
        return {pick.rows[0] for pick in picks}

    assert rows("false") == {1}
    assert rows("true") == {0, 1}
    with pytest.raises(BadRequest, match="write true or false"):
        rows("often")
    assert np.all(view_of(2).table.is_active[:2])
