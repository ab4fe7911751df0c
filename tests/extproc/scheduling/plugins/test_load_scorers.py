# SPDX-License-Identifier: Apache-2.0
"""Scores worked out by hand, and properties of all scorers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.learned_speeds import PromptCost
from extproc.engines.metrics import LoraState
from extproc.scheduling.plugins.affinity import LoraAffinityScorer, SessionAffinityScorer
from extproc.scheduling.plugins.latency import CostScorer, LatencyScorer, LeastLatencyScorer, RandomScorer
from extproc.scheduling.plugins.load_scorers import (
    ActiveRequestsScorer,
    KvCacheUtilizationScorer,
    LeastRequestScorer,
    LMetricScorer,
    LoadAwareScorer,
    NoHitLruScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsScorer,
    TokenLoadScorer,
)
from extproc.scheduling.sessions import session_token
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    import random

    from extproc.scheduling.framework import Scorer, View


def scores(plugin: Scorer, view: View) -> list[float]:
    active = view.table.is_active
    return [float(value) for value in plugin.score(view, active)[active]]


@pytest.mark.parametrize(
    ("plugin", "columns", "expected"),
    [
        # (max - x) / (max - min): (8 - x) / 6
        (QueueScorer(), {"waiting": [2, 5, 8]}, [1.0, 0.5, 0.0]),
        (QueueScorer(), {"waiting": [4, 4, 4]}, [1.0, 1.0, 1.0]),
        (RunningRequestsScorer(), {"running": [10, 0, 5]}, [0.0, 1.0, 0.5]),
        # (max - c) / max: (8 - c) / 8
        (ActiveRequestsScorer(), {"in_flight": [8, 4, 0]}, [0.0, 0.5, 1.0]),
        (ActiveRequestsScorer(idle_threshold=4, max_busy_score=0.5), {"in_flight": [8, 6, 4]}, [0.0, 0.125, 1.0]),
        (ActiveRequestsScorer(), {"in_flight": [0, 0, 0]}, [1.0, 1.0, 1.0]),
        # half of what is left of 128
        (LoadAwareScorer(), {"waiting": [0, 64, 500]}, [0.5, 0.25, 0.0]),
        (LoadAwareScorer(threshold=10), {"waiting": [0, 5, 10]}, [0.5, 0.25, 0.0]),
        # base = F + 100 max(F - R, 0): 1, 3, 2 + 100
        (LeastRequestScorer(), {"in_flight": [1, 3, 2], "running": [1, 3, 1]}, [101 / 102, 99 / 102, 0.0]),
        (LeastRequestScorer(), {"in_flight": [0, 0, 0], "running": [5, 0, 0]}, [1.0, 1.0, 1.0]),
        (KvCacheUtilizationScorer(), {"kv_usage": [0.0, 0.25, 1.0]}, [1.0, 0.75, 0.0]),
        (CostScorer(), {"price": [4.0, 1.0, 2.0]}, [0.0, 1.0, 2 / 3]),
        # half TTFT, half TPOT; each (max - x) / (max - min), 0.5 without data
        (LeastLatencyScorer(), {"ttft_s": [0.1, 0.2, 0.3], "tpot_s": [0.03, 0.02, 0.01]}, [0.5, 0.5, 0.5]),
        (LeastLatencyScorer(), {"ttft_s": [0.1, 0.2, 0.0], "tpot_s": [0.01, 0.02, 0.0]}, [1.0, 0.0, 0.5]),
        (LeastLatencyScorer(1.0), {"ttft_s": [0.1, 0.2, 0.3], "tpot_s": [0.03, 0.02, 0.01]}, [1.0, 0.5, 0.0]),
    ],
)
def test_scores_are_those_of_the_formula(
    plugin: Scorer, columns: dict[str, list[float]], expected: list[float]
) -> None:
    assert scores(plugin, view_of(3, **columns)) == pytest.approx(expected)


def test_token_load_counts_what_waits_and_what_this_prompt_adds() -> None:
    # the prompt's work: 1000 * (1 + 500/20000) = 1025; with 600 cached: 400 * (1 + 800/20000) = 416
    view = view_of(3, cached=[0, 600, 0], backlog_tokens=[0, 0, 3000])
    assert PromptCost().prefill_work(1000.0, 0.0) == 1025
    assert scores(TokenLoadScorer(queue_threshold_tokens=4100), view) == pytest.approx(
        [1 - 1025 / 4100, 1 - 416 / 4100, 1 - 4025 / 4100]
    )


def test_lmetric_is_the_least_product_of_uncached_tokens_and_requests() -> None:
    # 1000 * 1, 500 * 3, 200 * 2
    view = view_of(3, cached=[0, 500, 800], in_flight=[0, 2, 1])
    assert scores(LMetricScorer(), view) == pytest.approx([500 / 1100, 0.0, 1.0])


def test_prefix_cache_is_the_share_and_if_asked_the_length() -> None:
    view = view_of(3, input_tokens=8192, cached=[0, 4096, 8192])
    assert scores(PrefixCacheScorer(), view) == pytest.approx([0.0, 0.5, 1.0])
    # half the length, squared: 0.4 of 0.25, and 0.6 of the share 0.5
    assert scores(PrefixCacheScorer(match_length_weight=0.4), view) == pytest.approx([0.0, 0.4, 1.0])


def test_uncached_prompts_go_where_the_last_one_is_longest_ago() -> None:
    assert scores(NoHitLruScorer(), view_of(3, cold_prompt_at_s=[20, 0, 10])) == pytest.approx([0.0, 1.0, 0.5])
    assert scores(NoHitLruScorer(), view_of(3, cached=[0, 5, 0], cold_prompt_at_s=[20, 0, 10])) == [0.5] * 3
    assert scores(NoHitLruScorer(), view_of(1)) == [1.0]


def test_an_adapter_is_best_where_it_is_loaded_then_where_there_is_room() -> None:
    view = view_of(5, adapter="sql")
    view.table.loras[:5] = [
        LoraState(frozenset({"sql"}), max_active=1),
        LoraState(frozenset({"a"}), max_active=2),
        LoraState(frozenset({"a", "b"}), frozenset({"sql"}), max_active=2),
        LoraState(frozenset({"a", "b"}), max_active=2),
        LoraState(frozenset({"a"}), frozenset({"a"}), max_active=2),
    ]
    assert scores(LoraAffinityScorer(), view) == [1.0, 0.8, 0.6, 0.0, 0.8]
    assert scores(LoraAffinityScorer(), view_of(2)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (session_token("e1:1"), [0, 1, 0]),
        (session_token("gone:1"), [0, 0, 0]),
        ("not base64!", [0, 0, 0]),
        ("", [0, 0, 0]),
    ],
)
def test_a_session_goes_back_to_its_endpoint(token: str, expected: list[float]) -> None:
    assert scores(SessionAffinityScorer(), view_of(3, headers={"x-session-token": token})) == expected


LOAD: list[Scorer] = [
    QueueScorer(),
    RunningRequestsScorer(),
    ActiveRequestsScorer(),
    LoadAwareScorer(),
    TokenLoadScorer(),
    LeastRequestScorer(),
]
ALL: list[Scorer] = [
    *LOAD,
    *(
        KvCacheUtilizationScorer(),
        PrefixCacheScorer(),
        PrefixCacheScorer(match_length_weight=0.5),
        NoHitLruScorer(),
        CostScorer(),
    ),
    *(LeastLatencyScorer(), LatencyScorer(), LatencyScorer(headroom_selection_strategy="most")),
]
ENDPOINT = st.fixed_dictionaries(
    {
        "waiting": st.integers(0, 200),
        "running": st.integers(0, 256),
        "in_flight": st.integers(0, 300),
        "kv_usage": st.floats(0, 1),
        "backlog_tokens": st.floats(0, 1e7),
        "cold_prompt_at_s": st.integers(0, 5),
        "cached": st.floats(0, 1000),
        "ttft_s": st.floats(0, 10),
        "tpot_s": st.floats(0, 1),
        "price": st.floats(0.1, 10),
    }
)
ENDPOINTS = st.lists(ENDPOINT, min_size=1, max_size=12)


def view_from(endpoints: list[dict[str, float]]) -> View:
    columns = {name: [endpoint[name] for endpoint in endpoints] for name in endpoints[0]}
    return view_of(len(endpoints), **columns)


def test_a_latency_objective_is_met_closely_or_missed_least() -> None:
    # TTFT: (backlog + 1025) / 10000 s = 102.5, 602.5, 1602.5 ms; objective 1000: headroom 0.8 times 897.5, 397.5,
    # -602.5
    backlogs = [0, 5000, 15000]
    headers = {"x-llm-d-slo-ttft-ms": "1000", "x-llm-d-slo-tpot-ms": "0"}
    assert scores(LatencyScorer(), view_of(3, backlog_tokens=backlogs, headers=headers)) == pytest.approx(
        [0.5, 1.0, 0.4]
    )
    most = LatencyScorer(headroom_selection_strategy="most")
    assert scores(most, view_of(3, backlog_tokens=backlogs, headers=headers)) == pytest.approx([1.0, 0.5, 0.4])
    # without an objective all miss it, and the fastest misses least
    assert scores(LatencyScorer(), view_of(3, backlog_tokens=backlogs)) == pytest.approx([0.4, 0.4 * 2 / 3, 0.0])
    assert scores(LatencyScorer(), view_of(1, headers={"x-slo-ttft-ms": "soon"})) == pytest.approx([0.4])


def test_an_untrusted_objective_is_ignored() -> None:
    view = view_of(1, headers={"x-slo-ttft-ms": "60000"})
    own = msgspec.structs.replace(view, request=msgspec.structs.replace(view.request, is_trusted=False))
    assert scores(LatencyScorer(), view) != scores(LatencyScorer(), own) == pytest.approx([0.4])


def test_noise_is_uniform_and_different_for_each_request() -> None:
    drawn = np.array([scores(RandomScorer(), view_of(4, now_s=0.001 * number)) for number in range(2000)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean(axis=0) == pytest.approx([0.5] * 4, abs=0.03)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.08


@given(ENDPOINTS, st.sampled_from(ALL))
def test_scores_lie_between_0_and_1(endpoints: list[dict[str, float]], plugin: Scorer) -> None:
    found = np.array(scores(plugin, view_from(endpoints)))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (found <= 1).all()


@given(ENDPOINTS, st.sampled_from(ALL), st.randoms())
def test_scores_do_not_depend_on_the_order_of_endpoints(
    endpoints: list[dict[str, float]], plugin: Scorer, rng: random.Random
) -> None:
    order = list(range(len(endpoints)))
    rng.shuffle(order)
    before = scores(plugin, view_from(endpoints))
    after = scores(plugin, view_from([endpoints[position] for position in order]))
    assert after == pytest.approx([before[position] for position in order])


@given(ENDPOINTS, st.sampled_from(LOAD), st.data())
def test_more_load_never_raises_a_load_score(
    endpoints: list[dict[str, float]], plugin: Scorer, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(endpoints) - 1))
    loaded = [dict(endpoint) for endpoint in endpoints]
    for name in ("waiting", "in_flight", "backlog_tokens"):
        loaded[position][name] += data.draw(st.integers(0, 50))
    more = data.draw(st.integers(0, 50))
    # what an engine runs, we have sent
    loaded[position]["running"] += more
    loaded[position]["in_flight"] += more
    before, after = scores(plugin, view_from(endpoints)), scores(plugin, view_from(loaded))
    assert after[position] <= before[position] + 1e-9


@given(ENDPOINTS, st.sampled_from(ALL))
def test_excluded_endpoints_do_not_change_scores(endpoints: list[dict[str, float]], plugin: Scorer) -> None:
    view = view_from(endpoints)
    size = view.table.is_active.size
    extreme = view_from([*endpoints, {**endpoints[0], "waiting": 10_000, "running": 10_000, "in_flight": 10_000}])
    candidates = np.zeros(extreme.table.is_active.size, np.bool_)
    candidates[: len(endpoints)] = True
    alone = plugin.score(view, view.table.is_active)[: len(endpoints)]
    assert plugin.score(extreme, candidates)[: len(endpoints)] == pytest.approx(alone)
    assert size <= extreme.table.is_active.size
