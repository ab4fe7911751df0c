# SPDX-License-Identifier: Apache-2.0
"""A profile: filters, then weighted scores, then a choice, with the reasons."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from extproc.refusals import NoEndpoint
from extproc.scheduling.framework import NamedFilter, NamedScorer, Profile
from extproc.scheduling.plugins.filters import HealthyFilter, LeastRequestFilter
from extproc.scheduling.plugins.load_scorers import KvCacheUtilizationScorer, PrefixCacheScorer, QueueScorer
from extproc.scheduling.plugins.score_selectors import MaxScoreSelector
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.picker import View

# llm-d's default weights
DEFAULT = Profile(
    filters=(),
    scorers=(
        NamedScorer("queue-scorer", QueueScorer(), 2.0),
        NamedScorer("kv-cache-utilization-scorer", KvCacheUtilizationScorer(), 2.0),
        NamedScorer("prefix-cache-scorer", PrefixCacheScorer(), 3.0),
    ),
    selector=MaxScoreSelector(),
)


def explained(view: View) -> View:
    return msgspec.structs.replace(view, wants_reasons=True)


def test_scores_are_weighted_and_added_as_llm_d_does() -> None:
    view = view_of(3, waiting=[0, 4, 8], kv_usage=[0.9, 0.5, 0.1], cached=[0, 500, 900])
    ranking = DEFAULT.pick(explained(view), rng=random.Random(0))
    # 2 * 1 + 2 * 0.1 + 0; 2 * 0.5 + 2 * 0.5 + 3 * 0.5; 0 + 2 * 0.9 + 3 * 0.9
    totals = sum(one.weight * one.values for one in ranking.reasons[0].scored)
    assert totals == pytest.approx([2.2, 3.5, 4.5])
    assert ranking.rows == [2, 1, 0]
    assert [one.name for one in ranking.reasons[0].scored] == [one.name for one in DEFAULT.scorers]


def test_filters_narrow_in_order_and_record_what_they_kept() -> None:
    filters = (NamedFilter("queue", LeastRequestFilter()), NamedFilter("healthy", HealthyFilter()))
    profile = Profile(filters, DEFAULT.scorers, MaxScoreSelector())
    view = view_of(4, waiting=[0, 50, 2, 3], retry_at_s=[5, 0, 0, 0], now_s=1.0)
    ranking = profile.pick(explained(view), rng=random.Random(0))
    assert ranking.reasons[0].after_filters == (("queue", (0, 2, 3)), ("healthy", (2, 3)))
    assert ranking.reasons[0].rows == (2, 3)
    assert sorted(ranking.rows) == [2, 3]
    assert view.table.is_active.sum() == 4, "the table is only read"


def test_the_filter_that_excludes_the_last_endpoint_is_named() -> None:
    profile = Profile((NamedFilter("short-queues", LeastRequestFilter()),), (), MaxScoreSelector())
    with pytest.raises(NoEndpoint, match="short-queues"):
        profile.pick(view_of(2, waiting=[50, 50]), rng=random.Random(0))
    with pytest.raises(NoEndpoint, match="No engine is ready"):
        DEFAULT.pick(view_of(0), rng=random.Random(0))


def test_scores_are_clipped_to_their_range() -> None:
    class Wild:
        def score(self, view: object, candidates: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> object:
            del view
            return np.where(np.arange(candidates.size) % 2, 7.0, -7.0)

    profile = Profile((), (NamedScorer("wild", Wild()),), MaxScoreSelector())  # type: ignore[arg-type]
    ranking = profile.pick(explained(view_of(4)), rng=random.Random(0))
    assert ranking.reasons[0].scored[0].values.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_the_ranking_has_the_requested_length() -> None:
    long = view_of(10)
    assert len(DEFAULT.pick(long, rng=random.Random(0)).rows) == 4
    assert len(DEFAULT.pick(msgspec.structs.replace(long, choices=1), rng=random.Random(0)).rows) == 1
    assert len(Profile((), (), MaxScoreSelector(max_num_of_endpoints=2)).pick(long, rng=random.Random(0)).rows) == 2
