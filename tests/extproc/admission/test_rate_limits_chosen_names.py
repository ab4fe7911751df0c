# SPDX-License-Identifier: Apache-2.0
"""Names that clients choose are bounded, and take nobody else's place."""

from __future__ import annotations

import pytest

from extproc.admission.identity import Caller
from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import MOST_NAMES, OTHERS, ClientChosenNames, RequestUsage
from extproc.api.admission import RateLimit
from extproc.refusals import RateLimited
from tests.extproc.admission.test_rate_limits import route

ONE = RequestUsage(1.0, 1.0)
LIMIT = RateLimit(per="Header", header="x-who", unit="hour", requests=1)


def test_a_name_keeps_its_account_whoever_else_comes() -> None:
    names = ClientChosenNames()
    first = names.account_name("acme", "a" * 40_000, 0.0, idle_s=60.0)
    assert len(first) == 32
    others = {names.account_name("acme", f"name-{number}", 1.0, idle_s=60.0) for number in range(3 * MOST_NAMES)}
    assert len(others) == MOST_NAMES
    assert OTHERS in others
    assert names.account_name("acme", "a" * 40_000, 2.0, idle_s=60.0) == first
    # another owner has a bound of its own
    assert names.account_name("bell", "name-2999", 2.0, idle_s=60.0) != OTHERS


def test_a_name_gives_up_its_place_when_its_account_would_be_full_again() -> None:
    names = ClientChosenNames()
    for number in range(MOST_NAMES):
        names.account_name("acme", f"name-{number}", float(number), idle_s=3600.0)
    assert names.account_name("acme", "new", 3599.0, idle_s=3600.0) == OTHERS
    assert names.account_name("acme", "new", 3600.0, idle_s=3600.0) != OTHERS
    # one place was free, no more
    assert names.account_name("acme", "newer", 3600.0, idle_s=3600.0) == OTHERS


def test_new_values_of_a_header_are_no_new_allowance_without_end() -> None:
    limits, one, granted = LocalLimits(), route(LIMIT), 0
    for number in range(3 * MOST_NAMES):
        charges = one.charges(Caller(tenant="acme"), {"x-who": f"{number}"}, ONE, 0.0)
        try:
            limits.reserve(charges, 0.0)
        except RateLimited:
            continue
        granted += 1
    assert granted == MOST_NAMES + 1


def test_values_of_one_tenant_push_out_no_bucket_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.local_limits.MAX_BUCKETS", 10)
    limits, one = LocalLimits(), route(LIMIT, RateLimit(requests=1, unit="hour"))
    bell = one.charges(Caller(tenant="bell"), {"x-who": "me"}, ONE, 0.0)
    limits.reserve(bell, 0.0)
    for number in range(3 * MOST_NAMES):
        header, _ = one.charges(Caller(tenant="acme"), {"x-who": f"{number}" * 1_000}, ONE, 0.0)
        try:
            limits.reserve([header], 0.0)
        except RateLimited:
            continue
    for charge in bell:
        with pytest.raises(RateLimited):
            limits.reserve([charge], 0.0)
    assert limits.bucket_count <= MOST_NAMES + 4
