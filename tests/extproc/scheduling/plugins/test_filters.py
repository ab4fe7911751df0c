# SPDX-License-Identifier: Apache-2.0
"""Which endpoints each filter keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.engines.metrics import LoraState
from extproc.scheduling.plugins.affinity import SessionAffinityFilter
from extproc.scheduling.plugins.filters import (
    ConcurrencyFilter,
    HealthyFilter,
    LeastRequestFilter,
    LoraLoadedFilter,
    MetricLimit,
    ModelLoadedFilter,
    PrefixCacheAffinityFilter,
    SaturationFilter,
    SubsetHintFilter,
    UtilizationFilter,
)
from extproc.scheduling.sessions import session_token
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.framework import Filter, View


def kept(plugin: Filter, view: View) -> list[int]:
    return [int(row) for row in plugin.keep(view, view.table.is_active).nonzero()[0]]


@pytest.mark.parametrize(
    ("plugin", "columns", "expected"),
    [
        (LeastRequestFilter(), {"waiting": [9, 10, 0]}, [0, 2]),
        (LeastRequestFilter(max_waiting_requests=5), {"waiting": [9, 10, 5]}, []),
        (HealthyFilter(), {"retry_at_s": [0, 7, 0]}, [0, 2]),
        (HealthyFilter(), {"retry_at_s": [9, 9, 9]}, [0, 1, 2]),
        # saturated at 5 waiting or 80% of the cache
        (SaturationFilter(), {"waiting": [4, 5, 0], "kv_usage": [0, 0, 0.8]}, [0]),
        (SaturationFilter(headroom=0.5), {"waiting": [7, 8, 0], "kv_usage": [0, 0, 1.0]}, [0, 2]),
        (SaturationFilter(), {"waiting": [9, 9, 9]}, [0, 1, 2]),
        (ConcurrencyFilter(max_concurrency=10), {"in_flight": [9, 10, 11]}, [0]),
        (ConcurrencyFilter(max_concurrency=10, headroom=0.1), {"in_flight": [9, 10, 11]}, [0, 1]),
        (ConcurrencyFilter(max_concurrency=1), {"in_flight": [9, 10, 11]}, [0, 1, 2]),
        (
            ConcurrencyFilter(concurrency_mode="tokens", max_token_concurrency=1000),
            {"in_flight": [500, 0, 0], "backlog_tokens": [999, 1000, 0], "backlog_at_s": [1, 1, 1]},
            [0, 2],
        ),
        (
            ConcurrencyFilter(concurrency_mode="hybrid", max_token_concurrency=1000),
            {"in_flight": [500, 0, 0], "backlog_tokens": [0, 1000, 0], "backlog_at_s": [1, 1, 1]},
            [2],
        ),
        (
            UtilizationFilter((MetricLimit("running-requests", 40), MetricLimit("waiting-queue", 0))),
            {"running": [40, 41, 0], "waiting": [0, 0, 1]},
            [0],
        ),
        (UtilizationFilter((MetricLimit("kv-cache-utilization", 0.8),)), {"kv_usage": [0.9, 0.9, 0.9]}, []),
        (
            UtilizationFilter((MetricLimit("active-requests", 1),), fallback_on_empty=True),
            {"in_flight": [2, 2, 3]},
            [0, 1, 2],
        ),
    ],
)
def test_filters_keep_the_documented_endpoints(
    plugin: Filter, columns: dict[str, list[float]], expected: list[int]
) -> None:
    assert kept(plugin, view_of(3, now_s=1.0, **columns)) == expected


def test_an_adapter_stays_where_it_is_loaded() -> None:
    view = view_of(3, adapter="sql")
    view.table.set_loras(1, LoraState(frozenset({"sql", "law"}), max_active=2))
    assert kept(LoraLoadedFilter(), view) == [1]
    view.table.set_loras(2, LoraState(served=frozenset({"sql"})))
    assert kept(LoraLoadedFilter(), view) == [1, 2], "an idle adapter is in no batch, but served all the same"
    assert kept(LoraLoadedFilter(), view_of(3)) == [0, 1, 2]


def test_a_model_is_served_by_endpoints_that_list_it_or_have_no_list() -> None:
    view = view_of(3)
    assert kept(ModelLoadedFilter(), view) == [0, 1, 2]
    view.table.set_loras(0, LoraState(served=frozenset({"m"})))
    view.table.set_loras(1, LoraState(served=frozenset({"other"})))
    assert kept(ModelLoadedFilter(), view) == [0, 2]


@pytest.mark.parametrize(
    ("hint", "expected"), [("e2:1, e0:1", [0, 2]), ("gone:1,e1:1", [1]), ("gone:1", []), ("", []), (None, [0, 1, 2])]
)
def test_a_subset_hint_is_obeyed_to_the_letter(hint: str | None, expected: list[int]) -> None:
    headers = {} if hint is None else {"x-gateway-destination-endpoint-subset": hint}
    assert kept(SubsetHintFilter(), view_of(3, headers=headers)) == expected


def test_a_session_stays_unless_its_endpoint_was_removed() -> None:
    bound = {"x-session-token": session_token("e1:1")}
    assert kept(SessionAffinityFilter(), view_of(3, headers=bound)) == [1]
    gone = {"x-session-token": session_token("e7:1")}
    assert kept(SessionAffinityFilter(), view_of(3, headers=gone)) == [0, 1, 2]


def test_a_cached_prompt_stays_until_the_wait_is_too_long() -> None:
    # rate 10,000/s: a backlog of 100,000 is 10 s
    sticky = PrefixCacheAffinityFilter()
    assert kept(sticky, view_of(3, cached=[850, 790, 0])) == [0]
    assert kept(sticky, view_of(3, cached=[790, 0, 0])) == [0, 1, 2]
    assert kept(sticky, view_of(3, cached=[900, 900, 900])) == [0, 1, 2]
    assert kept(sticky, view_of(2, cached=[900, 0], backlog_tokens=[100_000, 0])) == [0]
    assert kept(sticky, view_of(2, cached=[900, 0], backlog_tokens=[200_000, 0])) == [0, 1]
    calibrated = PrefixCacheAffinityFilter(peak_prefill_throughput=5_000)
    assert kept(calibrated, view_of(2, cached=[900, 0], backlog_tokens=[100_000, 0])) == [0, 1], "20 s at 5,000/s"
    eager = PrefixCacheAffinityFilter(max_ttft_penalty_ms=5000)
    assert kept(eager, view_of(2, cached=[900, 0], backlog_tokens=[100_000, 0])) == [0, 1]


def test_no_penalty_keeps_a_cached_prompt_however_long_it_waits() -> None:
    always = PrefixCacheAffinityFilter(max_ttft_penalty_ms=0)
    assert kept(always, view_of(2, cached=[900, 0], backlog_tokens=[9_000_000, 0])) == [0]


def test_a_penalty_in_tokens_of_older_releases() -> None:
    # what llm-d's optimized baseline once had: no penalty in time, one in waiting tokens
    tokens = PrefixCacheAffinityFilter(max_ttft_penalty_ms=0, max_tokens_in_flight_penalty=1000)
    assert kept(tokens, view_of(2, cached=[900, 0], backlog_tokens=[5_900, 5_000])) == [0]
    assert kept(tokens, view_of(2, cached=[900, 0], backlog_tokens=[6_100, 5_000])) == [0, 1]


def test_expected_latency_is_taken_by_the_learned_rate_though_a_throughput_is_given() -> None:
    # 10 s at the learned 10,000/s, 20 s at 5,000/s
    view = view_of(2, cached=[900, 0], backlog_tokens=[100_000, 0])
    learned = PrefixCacheAffinityFilter(peak_prefill_throughput=5_000, ttft_source="latencyPredictor")
    assert kept(learned, view) == [0]
    assert kept(PrefixCacheAffinityFilter(peak_prefill_throughput=0), view) == [0]


def test_parameters_are_read_under_llm_ds_names() -> None:
    text = b'{"affinityThreshold": 0.9, "maxTTFTPenaltyMs": 100}'
    assert msgspec.json.decode(text, type=PrefixCacheAffinityFilter) == PrefixCacheAffinityFilter(0.9, 100)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"affinity": 0.9}', type=PrefixCacheAffinityFilter)
