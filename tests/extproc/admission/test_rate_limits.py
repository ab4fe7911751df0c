# SPDX-License-Identifier: Apache-2.0
"""Rate limits: which bucket, how much of it, and what refusals say."""

from __future__ import annotations

import pytest

from extproc.admission.identity import ANONYMOUS_CALLER, Caller
from extproc.admission.limit_refusals import headers_of_grants
from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import RequestUsage, RouteLimits, api_key_charges
from extproc.admission.token_estimates import InputEstimate
from extproc.api.admission import KeyRateLimit, RateLimit
from extproc.api.model_route import ModelRoute, ModelRouteSpec, RouteRule, TargetModel
from extproc.api.spec import Metadata
from extproc.refusals import RateLimited
from extproc.wire_names import truncate_name

ALICE = Caller(tenant="acme", user="alice", api_key="acme-1")
BOB = Caller(tenant="acme", user="bob", api_key="acme-2")
CAROL = Caller(tenant="bell", user="alice", api_key="bell-1")
USAGE = RequestUsage(input_tokens=100.0, output_tokens=50.0)


def route(*limits: RateLimit) -> RouteLimits:
    rules = (RouteRule(target_models=(TargetModel(model_server_name="llama"),)),)
    spec = ModelRouteSpec(rules=rules, model_name="llama", rate_limits=limits)
    return RouteLimits(ModelRoute(metadata=Metadata(name="chat"), spec=spec))


@pytest.mark.parametrize(
    ("limit", "buckets"),
    [
        (RateLimit(per="Tenant", requests=1), 2),
        # users of the same name in two tenants are two
        (RateLimit(per="User", requests=1), 3),
        (RateLimit(per="ApiKey", requests=1), 3),
        (RateLimit(per="Route", requests=1), 1),
        (RateLimit(per="Header", header="X-Team", requests=1), 2),
    ],
)
def test_whose_bucket(limit: RateLimit, buckets: int) -> None:
    headers = [{"x-team": "red"}, {"x-team": "red"}, {"x-team": "blue"}]
    asked = [
        route(limit).charges(caller, given, USAGE) for caller, given in zip((ALICE, BOB, CAROL), headers, strict=True)
    ]
    assert len({charges[0].key for charges in asked}) == buckets


@pytest.mark.parametrize(
    ("limit", "holders"),
    [
        (RateLimit(requests=1), "alice bob carol"),
        (RateLimit(requests=1, tenants=("acme",)), "alice bob"),
        (RateLimit(requests=1, users=("alice",)), "alice carol"),
        (RateLimit(requests=1, tenants=("acme",), users=("alice",)), "alice"),
        (RateLimit(requests=1, api_keys=("bell-1", "acme-2")), "bob carol"),
        (RateLimit(requests=1, tenants=("other",)), ""),
    ],
)
def test_for_whom_a_limit_holds(limit: RateLimit, holders: str) -> None:
    callers = {"alice": ALICE, "bob": BOB, "carol": CAROL}
    limits = route(limit)
    assert [name for name, caller in callers.items() if limits.charges(caller, {}, USAGE)] == holders.split()


def test_a_limit_for_others_holds_for_those_whom_no_limit_names() -> None:
    limits = route(
        RateLimit(requests=100, tenants=("acme",)),
        RateLimit(requests=3, per="User", users=("alice",)),
        RateLimit(requests=10, others=True),
        RateLimit(requests=1000, per="Route"),
    )
    granted = {
        name: [round(charge.limit.capacity) for charge in limits.charges(caller, {}, USAGE)]
        for name, caller in {"alice": ALICE, "bob": BOB, "carol": CAROL, "dora": Caller(tenant="dent")}.items()
    }
    assert granted == {"alice": [100, 3, 1000], "bob": [100, 1000], "carol": [3, 1000], "dora": [10, 1000]}


def test_a_limit_that_names_callers_of_long_names_holds_for_them() -> None:
    name = "x" * 300
    assert route(RateLimit(requests=1, tenants=(name,))).charges(Caller(tenant=truncate_name(name)), {}, USAGE)


def test_a_slash_in_a_tenants_name_makes_it_nobody_elses_user() -> None:
    callers = Caller(tenant="acme", user="eu/bob"), Caller(tenant="acme/eu", user="bob"), Caller("acme%2Feu", "bob")
    limits = route(RateLimit(per="User", requests=1))
    assert len({limits.charges(caller, {}, USAGE)[0].key for caller in callers}) == 3


def test_every_number_of_a_limit_has_its_own_bucket_and_share_of_the_usage() -> None:
    limit = RateLimit(unit="hour", requests=10, input_tokens=3600, output_tokens=7200, total_tokens=9000, burst=0.5)
    charges = {charge.resource: charge for charge in route(limit).charges(ALICE, {}, USAGE)}
    assert {name: charge.amount for name, charge in charges.items()} == {
        "requests": 1.0,
        "input_tokens": 100.0,
        "output_tokens": 50.0,
        "total_tokens": 150.0,
    }
    assert (charges["input_tokens"].limit.rate, charges["input_tokens"].limit.capacity) == (1.0, 1800.0)


@pytest.mark.parametrize(
    ("unit", "rate"), [("second", 60.0), ("minute", 1.0), ("hour", 60 / 3600), ("day", 60 / 86400)]
)
def test_units(unit: str, rate: float) -> None:
    (charge,) = route(RateLimit(unit=unit, requests=60)).charges(ALICE, {}, USAGE)  # type: ignore[arg-type]  # parametrized
    assert charge.limit.rate == pytest.approx(rate)


def test_all_charges_are_reserved_or_none() -> None:
    limits, charges = LocalLimits(), route(RateLimit(requests=2, total_tokens=200)).charges(ALICE, {}, USAGE)
    limits.reserve(charges, 0.0)
    with pytest.raises(RateLimited, match="total tokens per minute of this tenant: the request needs 150, 50 of 200"):
        limits.reserve(charges, 0.0)
    # the refusal took no request from the other bucket
    small = route(RateLimit(requests=2, total_tokens=200)).charges(ALICE, {}, RequestUsage(10.0, 10.0))
    assert limits.reserve(small, 0.0).levels == [0.0, 30.0]


def test_a_request_that_was_never_dispatched_is_refunded() -> None:
    limits, charges = LocalLimits(), route(RateLimit(requests=1, total_tokens=150)).charges(ALICE, {}, USAGE)
    limits.settle(limits.reserve(charges, 0.0), None, 0.0)
    assert limits.reserve(charges, 0.0).levels == [0.0, 0.0]


def test_a_dispatched_request_counts_as_one_and_by_its_tokens() -> None:
    limits, charges = LocalLimits(), route(RateLimit(requests=2, output_tokens=100)).charges(ALICE, {}, USAGE)
    limits.settle(limits.reserve(charges, 0.0), RequestUsage(100.0, 5.0), 0.0)
    assert limits.reserve(charges, 0.0).levels == [0.0, 45.0]


def test_a_refusal_names_the_bucket_with_the_longest_wait() -> None:
    limits = LocalLimits()
    slow, fast = RateLimit(unit="hour", requests=1), RateLimit(per="User", unit="second", total_tokens=150)
    charges = route(slow, fast).charges(ALICE, {}, USAGE)
    limits.reserve(charges, 0.0)
    with pytest.raises(RateLimited) as caught:
        limits.reserve(charges, 0.5)
    assert caught.value.retry_after_s == 3600
    assert caught.value.error_type == "requests"
    assert caught.value.headers["x-ratelimit-reset-requests"] == "1h0m0s"
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "75"


def test_a_charge_beyond_the_capacity_has_no_retry_after() -> None:
    charges = route(RateLimit(output_tokens=40)).charges(ALICE, {}, USAGE)
    with pytest.raises(
        RateLimited, match="and the limit of this tenant grants no more than 40 at once; shorten"
    ) as caught:
        LocalLimits().reserve(charges, 0.0)
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize(
    ("limit", "caller", "begin"),
    [
        (RateLimit(unit="hour", requests=1), ALICE, "requests per hour of this tenant"),
        (RateLimit(per="User", unit="day", input_tokens=100), ALICE, "input tokens per day of this user"),
        (RateLimit(per="ApiKey", unit="second", output_tokens=50), ALICE, "output tokens per second of this API key"),
        (RateLimit(per="Route", total_tokens=150), ALICE, "total tokens per minute of all callers of this route"),
        (RateLimit(per="Header", header="X-Team", requests=1), ALICE, "requests per minute of this value of X-Team"),
        # names that a caller does not have are one name
        (RateLimit(requests=1), ANONYMOUS_CALLER, "requests per minute of all anonymous callers"),
        (
            RateLimit(per="User", requests=1),
            Caller("acme"),
            "requests per minute of all callers of this tenant without a user",
        ),
        (RateLimit(per="ApiKey", requests=1), Caller("acme"), "requests per minute of all callers without an API key"),
    ],
)
def test_a_refusal_says_what_is_limited_and_whose_limit_it_is(limit: RateLimit, caller: Caller, begin: str) -> None:
    limits, charges = LocalLimits(), route(limit).charges(caller, {"x-team": "secret team"}, USAGE)
    limits.reserve(charges, 0.0)
    with pytest.raises(RateLimited, match=rf"^Rate limit reached for {begin}: the request needs ") as caught:
        limits.reserve(charges, 0.0)
    assert not any(name in str(caught.value) for name in ("acme", "alice", "secret"))


def test_a_refusal_by_a_limit_that_a_key_has_itself_says_so() -> None:
    limits, charges = LocalLimits(), api_key_charges([KeyRateLimit(unit="month", requests=1)], ALICE, USAGE)
    limits.reserve(charges, 0.0)
    with pytest.raises(RateLimited, match=r"for requests per month of this API key on all routes: the request needs 1"):
        limits.reserve(charges, 0.0)


def test_headers_are_those_of_the_emptiest_bucket() -> None:
    limits = LocalLimits()
    charges = route(RateLimit(input_tokens=1000), RateLimit(per="User", output_tokens=60, unit="hour")).charges(
        ALICE, {}, USAGE
    )
    assert headers_of_grants([limits.reserve(charges, 0.0)]) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "50m0s",
    }


def test_buckets_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.local_limits.MAX_BUCKETS", 10)
    limits, one = LocalLimits(), route(RateLimit(requests=1))
    for number in range(30):
        limits.reserve(one.charges(Caller(tenant=f"t{number}"), {}, USAGE), 0.0)
    assert limits.bucket_count == 10


def test_reservations_of_another_process_count_here() -> None:
    limits, (charge,) = LocalLimits(), route(RateLimit(requests=10)).charges(ALICE, {}, USAGE)
    limits.spend_unreserved(charge.key, charge.limit, 9.0, 0.0)
    assert limits.reserve([charge], 0.0).levels == [0.0]
    limits.spend_unreserved(charge.key, charge.limit, -50.0, 0.0)
    assert limits.reserve([charge], 0.0).levels == [9.0]


def test_an_estimate_is_rarely_too_low() -> None:
    estimate = InputEstimate()
    # a template of 40 tokens, and text of 5 bytes a token where 4 are believed
    assert estimate.tokens(100, 4.0) == pytest.approx(1.1 * (25 + 16))
    estimate.learn(prompt_bytes=100, bytes_per_token=4.0, tokens=60)
    assert estimate.tokens(100, 4.0) >= 60
    estimate.learn(prompt_bytes=40_000, bytes_per_token=4.0, tokens=12_000)
    assert estimate.tokens(40_000, 4.0) >= 12_000
    for _ in range(2000):
        estimate.learn(prompt_bytes=40_000, bytes_per_token=4.0, tokens=10_000)
    assert estimate.tokens(40_000, 4.0) < 10_400


def test_a_guess_of_the_output_never_exceeds_what_a_bucket_holds() -> None:
    limits = route(RateLimit(output_tokens=500), RateLimit(total_tokens=800))
    guess, said = RequestUsage(100.0, 1000.0, RequestUsage(100.0, 0.0)), RequestUsage(100.0, 1000.0)
    assert [charge.amount for charge in limits.charges(ALICE, {}, guess)] == [500.0, 800.0]
    assert [charge.amount for charge in limits.charges(ALICE, {}, said)] == [1000.0, 1100.0]
    # a prompt that alone is too long is still refused
    assert limits.charges(ALICE, {}, RequestUsage(900.0, 1000.0, RequestUsage(900.0, 0.0)))[1].amount == 900.0
