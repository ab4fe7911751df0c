# SPDX-License-Identifier: Apache-2.0
"""Which tier a request takes: by worked cases, and for every set of candidates, hostile ones too."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.cost_tiers import TierCandidate, TierPolicy, choose_tier, cost_order

POLICY = TierPolicy(ttft_s=1.0, tpot_s=0.05)


def tier(
    cost: int | None,
    ttft_s: float | None = 0.1,
    tpot_s: float | None = 0.02,
    *,
    idle_s: float | None = 0.1,
    **rest: bool,
) -> TierCandidate:
    return TierCandidate(
        f"tier-{cost}",
        cost,
        "USD",
        ttft_s,
        tpot_s,
        idle_ttft_s=idle_s,
        idle_tpot_s=None if idle_s is None else 0.02,
        **rest,
    )


CPU = tier(1, ttft_s=6.0, tpot_s=0.2, idle_s=6.0)
L40, H100 = tier(10), tier(30)
BUSY_L40, BUSY_H100 = tier(10, ttft_s=3.0), tier(30, ttft_s=2.0)


@pytest.mark.parametrize(
    ("candidates", "policy", "taken", "reason"),
    [
        # whatever the order of the rule
        ((H100, CPU, L40), POLICY, 2, "holds"),
        # nothing to hold: the cheapest
        ((H100, CPU, L40), TierPolicy(), 1, "holds"),
        # a slow objective holds on the CPU, a tight one on the H100 alone
        ((H100, CPU, L40), TierPolicy(ttft_s=10.0), 1, "holds"),
        ((CPU, L40, tier(30, tpot_s=0.01)), TierPolicy(tpot_s=0.015), 2, "holds"),
        # its home is busy: the dearer one, or the cheaper one, or neither
        ((CPU, BUSY_L40, H100), POLICY, 2, "up"),
        ((CPU, BUSY_L40, BUSY_H100), TierPolicy(ttft_s=1.0, spill="Never"), 1, "misses"),
        ((CPU, BUSY_L40, BUSY_H100), POLICY, 2, "up"),
        # 6 s against 3 s: the cheaper one is worse
        ((CPU, BUSY_L40, H100), TierPolicy(ttft_s=1.0, spill="Down"), 1, "misses"),
        ((CPU, tier(10, ttft_s=60.0), H100), TierPolicy(ttft_s=1.0, spill="Down"), 0, "down"),
        ((CPU, tier(10, ttft_s=60.0), tier(30, ttft_s=90.0)), TierPolicy(ttft_s=1.0, spill="UpOrDown"), 0, "down"),
        # unknown predictions are tried
        ((tier(5, None, None, idle_s=None), L40), POLICY, 0, "holds"),
        # no price: the last resort, however good
        ((tier(None), L40), POLICY, 1, "holds"),
        ((tier(None), BUSY_L40), POLICY, 0, "up"),
        ((tier(None), tier(None, ttft_s=0.2)), POLICY, 0, "holds"),
    ],
)
def test_the_tier_of_a_request(
    candidates: tuple[TierCandidate, ...], policy: TierPolicy, taken: int, reason: str
) -> None:
    choice = choose_tier(candidates, policy)
    assert (choice.taken, choice.reason) == (taken, reason)


def test_a_request_waits_for_its_home_while_the_dearer_tier_would_still_hold() -> None:
    policy = TierPolicy(ttft_s=1.0, wait_s=2.0)
    home = tier(10, ttft_s=3.0, holds_back=True)
    choice = choose_tier((home, tier(30, ttft_s=0.3)), policy)
    assert (choice.taken, choice.reason) == (0, "waits")
    # 0.7 s are left, of which a part is kept for what the prediction does not see
    assert choice.ask_again_s == pytest.approx(0.56)
    later = choose_tier((home, tier(30, ttft_s=0.3)), policy, 0.7)
    assert (later.taken, later.reason) == (1, "up")
    # nobody holds: the whole wait
    assert choose_tier((home, tier(30, ttft_s=1.5)), policy, 0.5).ask_again_s == pytest.approx(1.5)
    # without a queue there is nothing to wait in
    assert choose_tier((BUSY_L40, H100), policy).reason == "up"


def test_another_currency_is_not_compared() -> None:
    candidates = (L40, TierCandidate("yen", 1, "JPY", 0.1, 0.01))
    assert cost_order(candidates) == [0, 1]
    assert choose_tier(candidates, POLICY).taken == 0


TIMES = st.none() | st.floats(0, 1e9) | st.sampled_from([math.inf, math.nan, 0.0])
CANDIDATES = st.lists(
    st.builds(
        TierCandidate,
        st.just("tier"),
        st.none() | st.integers(0, 10**24),
        st.sampled_from(["USD", "EUR"]),
        TIMES,
        TIMES,
        TIMES,
        TIMES,
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
POLICIES = st.builds(
    TierPolicy,
    st.none() | st.floats(0.001, 100),
    st.none() | st.floats(0.001, 100),
    st.floats(0, 100),
    st.sampled_from(["Up", "Down", "UpOrDown", "Never"]),
)


@given(CANDIDATES, POLICIES, st.floats(0, 1000))
def test_never_a_dearer_tier_while_a_cheaper_one_holds(
    candidates: list[TierCandidate], policy: TierPolicy, waited_s: float
) -> None:
    choice, order = choose_tier(candidates, policy, waited_s), cost_order(candidates)
    taken, home = order.index(choice.taken), order.index(choice.home)
    holders = [place for place, one in enumerate(order) if choice.misses[one] <= 1]
    if choice.reason != "waits":
        assert not [place for place in holders if place < taken]
    if holders and policy.spill in ("Up", "UpOrDown") and choice.reason != "waits":
        assert taken == holders[0]
    directions = {"holds": taken == home, "waits": taken == home, "misses": taken == home}
    assert directions.get(choice.reason, taken > home if choice.reason == "up" else taken < home)
    assert choice.reason != "up" or policy.spill in ("Up", "UpOrDown")
    assert choice.reason != "down" or policy.spill in ("Down", "UpOrDown")
    # a wait ends
    assert (choice.ask_again_s > 0) == (choice.reason == "waits")
    assert waited_s + choice.ask_again_s <= max(policy.wait_s, waited_s) + 1e-9


@given(CANDIDATES, POLICIES)
def test_with_nothing_known_the_cheapest_is_taken(candidates: list[TierCandidate], policy: TierPolicy) -> None:
    unknown = [TierCandidate(one.server, one.cost_micros, one.currency) for one in candidates]
    choice = choose_tier(unknown, policy)
    assert (choice.taken, choice.reason) == (cost_order(unknown)[0], "holds")
