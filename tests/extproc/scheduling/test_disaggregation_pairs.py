# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode pairs: always in one group, never without a decode engine, and only where the transfer pays."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints.in_flight import begin_request
from extproc.endpoints.learned_speeds import PromptCost
from extproc.endpoints.table import EndpointConfig, EndpointTable
from extproc.refusals import BadRequest, NoEndpoint
from extproc.scheduling.builtin_pickers import (
    CACHED,
    LOCAL,
    NO_PREFILL,
    SENT_ON,
    PairParameters,
    PrefillDecodePairs,
    PrefixAware,
    PrefixAwareParameters,
)
from extproc.scheduling.disaggregation import ExpectedSeconds, UncachedTokens
from extproc.scheduling.picker import RequestDemandByRow, RequestFacts, View
from tests.extproc.breakers import trip

ROLES = PairParameters("group", {"role": "prefill"}, {"role": "decode"})
COSTS = PrefixAware(PrefixAwareParameters())
PICKER = PrefillDecodePairs(ROLES, COSTS, ExpectedSeconds(512.0))
BY_LENGTH = PrefillDecodePairs(ROLES, COSTS, UncachedTokens(512.0))


def view_of(*endpoints: str, input_tokens: float = 4000.0, cached: dict[int, float] | None = None) -> View:
    """Endpoints as ``p/g1`` (prefill in group g1) or ``d/g2``."""
    table = EndpointTable()
    roles = {"p": "prefill", "d": "decode"}
    table.replace_endpoints(
        {
            f"e{number}:1": EndpointConfig({"role": roles[one[0]], "group": one[2:]})
            for number, one in enumerate(endpoints)
        }
    )
    held = np.zeros(len(table.addresses))
    for row, tokens in (cached or {}).items():
        held[row] = tokens
    demand = RequestDemandByRow(held, PromptCost().prefill_work(input_tokens - held, held))
    return View(table, demand, RequestFacts("m", input_tokens), 0.0)


def test_the_least_busy_prefill_engine_decides_the_group() -> None:
    view = view_of("p/a", "d/a", "p/b", "d/b")
    begin_request(view.table, 0, work=50_000, now=0.0)
    pick = PICKER.pick(view, rng=random.Random(0))
    assert (pick.rows, pick.prefill_row, pick.stage) == ([3], 2, SENT_ON)


def test_reasons_count_only_endpoints_of_the_role() -> None:
    view = msgspec.structs.replace(view_of("p/a", "d/a", "d/a"), wants_reasons=True)
    decode, prefill = PICKER.pick(view, rng=random.Random(0)).reasons
    assert (list(decode.candidates), list(prefill.candidates)) == ([1, 2], [0])


def test_a_prompt_that_is_nearly_cached_where_it_is_decoded_stays_there() -> None:
    view = view_of("p/a", "d/a", "d/a", cached={1: 3600})
    pick = PICKER.pick(view, rng=random.Random(0))
    assert (pick.rows[0], pick.prefill_row, pick.stage) == (1, None, CACHED)
    # 3488 of 4000 are cached: 512 missing is not less than 512
    view = view_of("p/a", "d/a", cached={1: 3488})
    assert BY_LENGTH.pick(view, rng=random.Random(0)).prefill_row == 0
    pick = PICKER.pick(view, rng=random.Random(0))
    assert (pick.prefill_row, pick.stage) == (None, LOCAL)


def test_answers_that_would_be_stopped_send_the_prefill_on() -> None:
    view = view_of("p/a", "d/a", cached={1: 2000})
    assert PICKER.pick(view, rng=random.Random(0)).prefill_row is None
    for _ in range(20):
        begin_request(view.table, 1, work=0, now=0.0)
    assert PICKER.pick(view, rng=random.Random(0)).prefill_row == 0


def test_decode_engines_help_where_prefill_engines_have_a_queue() -> None:
    view = view_of("p/a", "d/a")
    assert PICKER.pick(view, rng=random.Random(0)).prefill_row == 0
    begin_request(view.table, 0, work=500_000, now=0.0)
    assert PICKER.pick(view, rng=random.Random(0)).prefill_row is None
    # a rule by length alone waits in that queue
    assert BY_LENGTH.pick(view, rng=random.Random(0)).prefill_row == 0


def test_the_prefill_engine_with_the_faster_link_is_taken() -> None:
    picker = PrefillDecodePairs(ROLES, COSTS, ExpectedSeconds(512.0))
    for _ in range(100):
        picker.transfers.learn("e0:1", "e2:1", tokens=4000, seconds=0.4)
        picker.transfers.learn("e1:1", "e2:1", tokens=4000, seconds=0.1)
    view = view_of("p/a", "p/a", "d/a")
    for _ in range(20):
        begin_request(view.table, 2, work=0, now=0.0)
    for seed in range(10):
        assert picker.pick(view, rng=random.Random(seed)).prefill_row == 1


def test_a_group_without_a_ready_decode_engine_is_never_picked() -> None:
    view = view_of("p/a", "d/b", "p/b")
    begin_request(view.table, 2, work=500_000, now=0.0)
    for seed in range(20):
        pick = BY_LENGTH.pick(view, rng=random.Random(seed))
        assert (pick.rows, pick.prefill_row) == ([1], 2)
    view = view_of("p/a", "d/a", "p/b", "d/b")
    trip(view.table, 1, 0.0)
    assert PICKER.pick(view, rng=random.Random(0)).rows == [3]


def test_a_group_without_prefill_serves_whole_requests() -> None:
    pick = PICKER.pick(view_of("d/a", "d/a"), rng=random.Random(0))
    assert (len(pick.rows), pick.prefill_row, pick.stage) == (2, None, NO_PREFILL)


def test_decode_engines_that_cannot_prefill_never_get_a_prompt_alone() -> None:
    roles = msgspec.structs.replace(ROLES, decodes_alone=False)
    picker = PrefillDecodePairs(roles, COSTS, UncachedTokens(0))
    short = view_of("d/a", "p/b", "d/b", input_tokens=10.0, cached={0: 10.0, 2: 10.0})
    for seed in range(10):
        pick = picker.pick(short, rng=random.Random(seed))
        assert (pick.rows, pick.prefill_row) == ([2], 1)
    with pytest.raises(NoEndpoint, match="No prefill engine"):
        picker.pick(view_of("d/a", "d/b"), rng=random.Random(0))


def test_an_engine_that_has_just_failed_is_tried_where_no_pair_can_be_formed_without_it() -> None:
    picker = PrefillDecodePairs(msgspec.structs.replace(ROLES, decodes_alone=False), COSTS, UncachedTokens(0))
    view = view_of("p/a", "d/a", "p/b", "d/b")
    trip(view.table, 0, 0.0)
    for seed in range(10):
        pick = picker.pick(view, rng=random.Random(seed))
        assert (pick.rows, pick.prefill_row) == ([3], 2)
    # each group has one that is well
    trip(view.table, 3, 0.0)
    assert picker.pick(view, rng=random.Random(0)).prefill_row is not None
    view = view_of("p/a", "d/a")
    trip(view.table, 0, 0.0)
    assert picker.pick(view, rng=random.Random(0)).prefill_row == 0
    # decode engines that can prefill do so
    assert BY_LENGTH.pick(view, rng=random.Random(0)).prefill_row is None


def test_what_needs_one_engine_alone_is_refused_where_none_can_prefill() -> None:
    picker = PrefillDecodePairs(msgspec.structs.replace(ROLES, decodes_alone=False), COSTS, UncachedTokens(0))
    view = view_of("p/a", "d/a")

    def whole(reason: str) -> View:
        return msgspec.structs.replace(view, request=msgspec.structs.replace(view.request, whole=reason))

    with pytest.raises(BadRequest, match="several answers"):
        picker.pick(whole("answers"), rng=random.Random(0))
    # what computes no prompt needs no prefill engine
    pick = picker.pick(whole("no_prompt"), rng=random.Random(0))
    assert (pick.rows, pick.prefill_row) == ([1], None)


def test_without_any_decode_engine_the_refusal_says_so() -> None:
    with pytest.raises(NoEndpoint, match="No decode engine"):
        PICKER.pick(view_of("p/a", "p/b"), rng=random.Random(0))


def test_the_subset_of_the_gateway_holds_for_both_roles() -> None:
    view = view_of("p/a", "d/a", "p/b", "d/b")
    eligible = np.zeros(len(view.table.addresses), np.bool_)
    eligible[[0, 1, 3]] = True
    view = msgspec.structs.replace(view, eligible=eligible)
    begin_request(view.table, 0, work=500_000, now=0.0)
    pick = PICKER.pick(view, rng=random.Random(0))
    assert (pick.rows, pick.prefill_row) == ([3], None)


@given(
    st.lists(st.sampled_from(["p/a", "d/a", "p/b", "d/b", "p/c", "d/c", "p/", "d/"]), min_size=1, max_size=20),
    st.lists(
        st.tuples(st.integers(0, 10), st.floats(0, 1e5), st.floats(0, 4000), st.booleans()), min_size=20, max_size=20
    ),
    st.integers(0, 50),
)
def test_pairs_never_cross_groups(
    endpoints: list[str], states: list[tuple[int, float, float, bool]], seed: int
) -> None:
    view = view_of(*endpoints, cached={row: states[row][2] for row in range(len(endpoints))})
    for row in range(len(endpoints)):
        view.table.in_flight[row], view.table.backlog_tokens[row] = states[row][0], states[row][1]
        if states[row][3]:
            trip(view.table, row, 0.0)
    if not any(one.startswith("d") for one in endpoints):
        with pytest.raises(NoEndpoint):
            PICKER.pick(view, rng=random.Random(seed))
        return
    pick = PICKER.pick(view, rng=random.Random(seed))
    groups = {endpoints[row][2:] for row in pick.rows}
    assert all(endpoints[row].startswith("d") for row in pick.rows)
    if pick.prefill_row is not None:
        assert endpoints[pick.prefill_row].startswith("p")
        assert groups == {endpoints[pick.prefill_row][2:]}
    assert len(groups) == 1
