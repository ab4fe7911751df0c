# SPDX-License-Identifier: Apache-2.0
"""Which requests admitters refuse."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import Shed
from extproc.scheduling.plugins.latency import LatencySloAdmitter, ProbabilisticAdmitter, SloHeadroomTierFilter
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.picker import View

TTFT = {"x-llm-d-slo-ttft-ms": "100"}


def of_priority(view: View, priority: int) -> View:
    return msgspec.structs.replace(view, request=msgspec.structs.replace(view.request, priority=priority))


def is_refused(plugin: LatencySloAdmitter | ProbabilisticAdmitter, view: View, priority: int = -1) -> bool:
    try:
        plugin.admit(of_priority(view, priority), random.Random(1))
    except Shed:
        return True
    return False


@pytest.mark.parametrize(
    ("plugin", "columns", "expected"),
    [
        # mean of max(0/5, 0.08/0.8) and max(1/5, 0) is 0.15; 300 * 0.15^5 = 0.02278
        (ProbabilisticAdmitter(), {"kv_usage": [0.08, 0], "waiting": [0, 1], "in_flight": [0, 1]}, 0.02278125),
        (ProbabilisticAdmitter(), {"kv_usage": [0.16, 0.16]}, 0.096),
        (ProbabilisticAdmitter(), {"kv_usage": [0.24, 0.24]}, 0.729),
        (ProbabilisticAdmitter(), {"kv_usage": [0.8, 0.8]}, 1.0),
        (ProbabilisticAdmitter(), {}, 0.0),
        (ProbabilisticAdmitter(power=1, k=0.5, kv_cache_util_threshold=1.0), {"kv_usage": [0.2, 0.6]}, 0.2),
        (ProbabilisticAdmitter(queue_depth_threshold=20, power=2, k=4), {"waiting": [4, 4], "in_flight": [4, 4]}, 0.16),
        # far beyond what a power of a number can hold
        (ProbabilisticAdmitter(power=1e6), {"waiting": [1e9, 1e9], "in_flight": [1e9, 1e9]}, 1.0),
    ],
)
def test_the_probability_follows_the_formula(
    plugin: ProbabilisticAdmitter, columns: dict[str, list[float]], expected: float
) -> None:
    assert math.isclose(plugin.refusal_probability(view_of(2, **columns)), expected, abs_tol=1e-9)


def test_only_negative_priorities_are_refused() -> None:
    full = view_of(2, kv_usage=[1, 1])
    assert [is_refused(ProbabilisticAdmitter(), full, priority) for priority in (-1, 0, 7)] == [True, False, False]


def test_the_share_refused_is_the_probability() -> None:
    view, rng = of_priority(view_of(1, kv_usage=[0.24]), -1), random.Random(3)
    refused = 0
    for _ in range(2000):
        try:
            ProbabilisticAdmitter().admit(view, rng)
        except Shed:
            refused += 1
    # 0.729 with a standard error of 0.01
    assert 0.69 < refused / 2000 < 0.77


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(0, 4),
    st.floats(0.01, 1),
    st.floats(0.1, 20),
    st.floats(0.01, 1e4),
)
def test_more_load_never_lowers_the_probability(
    usages: list[float], row: int, more: float, power: float, k: float
) -> None:
    plugin = ProbabilisticAdmitter(power=power, k=k)
    fuller = list(usages)
    fuller[row % len(usages)] = min(1.0, fuller[row % len(usages)] + more)
    before = plugin.refusal_probability(view_of(len(usages), kv_usage=usages))
    assert 0 <= before <= plugin.refusal_probability(view_of(len(usages), kv_usage=fuller)) + 1e-12 <= 1 + 2e-12


def busy(count: int = 2, *, headers: dict[str, str] | None = None, **columns: list[float]) -> View:
    """Endpoints in use whose speed is known: 5,000 tokens of work at 10,000 a second are 0.5 s."""
    columns = {
        "running": [1.0] * count,
        "kv_usage": [0.5] * count,
        "rate_samples": [9] * count,
        "backlog_tokens": [5000.0] * count,
        "in_flight": [1.0] * count,
        **columns,
    }
    return view_of(count, headers=TTFT if headers is None else headers, **columns)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (busy(), True),
        # no objective, or one that leaves time enough, or that one endpoint can meet
        (busy(headers={}), False),
        (busy(headers={"x-slo-ttft-ms": "2000"}), False),
        (busy(headers={"x-llm-d-slo-ttft-ms": "300"}, backlog_tokens=[5000.0, 0.0]), False),
        # one is idle, cold, or of unknown speed
        (busy(running=[1, 0], in_flight=[1, 0]), False),
        (busy(kv_usage=[0.5, 0.01]), False),
        (busy(rate_samples=[9, 0]), False),
        # 30 ms a token is too slow for one, and unknown of the other
        (busy(headers={"x-llm-d-slo-tpot-ms": "20"}, tpot_s=[0.03, 0.03]), True),
        (busy(headers={"x-llm-d-slo-tpot-ms": "20"}, tpot_s=[0.03, 0.0]), False),
    ],
)
def test_a_request_that_no_endpoint_can_serve_in_time_is_refused(view: View, *, expected: bool) -> None:
    assert is_refused(LatencySloAdmitter(), view) is expected
    assert not is_refused(LatencySloAdmitter(), view, priority=0)


def test_objectives_of_clients_that_nobody_vouches_for_do_not_count() -> None:
    view = busy()
    request = msgspec.structs.replace(view.request, is_trusted=False)
    assert not is_refused(LatencySloAdmitter(), msgspec.structs.replace(view, request=request))


def kept(plugin: SloHeadroomTierFilter, view: View) -> list[int]:
    return [int(row) for row in plugin.keep(view, view.table.is_active & (view.table.in_flight >= 0)).nonzero()[0]]


def test_endpoints_that_meet_the_objectives_are_kept() -> None:
    always, never = SloHeadroomTierFilter(epsilon_explore_neg=0), SloHeadroomTierFilter(epsilon_explore_neg=1)
    # 1,000 tokens of the prompt itself take 0.1 s and a little for attention
    view = busy(3, headers={"x-llm-d-slo-ttft-ms": "300"}, backlog_tokens=[0, 1000.0, 5000.0])
    assert kept(always, view) == [0, 1]
    assert kept(never, view) == [2], "the others, to see whether they are still slow"
    assert kept(always, busy(3, headers={}, backlog_tokens=[0, 1000.0, 5000.0])) == [0, 1, 2]
    assert kept(always, busy(3)) == [0, 1, 2], "all miss the objective"
    both = {"x-llm-d-slo-ttft-ms": "300", "x-llm-d-slo-tpot-ms": "20"}
    assert kept(always, busy(3, headers=both, backlog_tokens=[0, 1000.0, 0], tpot_s=[0.03, 0.01, 0.02])) == [1, 2]


def test_exploring_happens_as_often_as_configured() -> None:
    plugin = SloHeadroomTierFilter(epsilon_explore_neg=0.2)
    view = view_of(2, headers={"x-llm-d-slo-ttft-ms": "300"}, backlog_tokens=[0, 50_000.0], in_flight=[1, 1])
    # within 2 s a backlog of 5 s stays too long
    later = (msgspec.structs.replace(view, now_s=0.001 * number) for number in range(2000))
    # 400 expected, with a standard error of 18
    assert 320 < sum(kept(plugin, one) == [1] for one in later) < 480
