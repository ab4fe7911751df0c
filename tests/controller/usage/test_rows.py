# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.usage.rows import MOST_LINE_BYTES, MOST_NAME, BadLine, UsageRow, parse_usage_line
from extproc.api.usage_log import FallbackContext, TranslatedAnswer, UsageCounts, UsageLine
from extproc.wire_names import truncate_name
from tests.usage_lines import NOON_S, PRICE, context, counts, line, text


def row(one: UsageLine) -> UsageRow:
    return parse_usage_line(text(one), NOON_S + 10.0)


def test_a_line_becomes_the_row_of_its_request() -> None:
    found = row(line(usage=counts(first_content_us=90_000.0)))
    assert (found.id, found.request_id, found.at_us) == ("r1", "x-r1", NOON_S * 1_000_000)
    assert (found.tenant, found.key, found.user, found.route) == ("team-a", "key-1", "alice", "default/llama")
    assert (found.input, found.cached, found.output) == (100, 40, 20)
    # 60 tokens at 1, 40 at 0.1 and 20 at 2 micro-units
    assert (found.cost_micros, found.price_id, found.currency) == (104, "p1", "USD")
    assert (found.ttft_us, found.duration_us, found.finish) == (90_000, 1_500_000, "stop")
    assert not found.is_estimated
    assert not found.is_degraded
    assert not found.is_failed


def test_the_time_of_arrival_stands_in_the_line_as_text() -> None:
    assert (
        parse_usage_line(b'{"id": "x", "at": "1795849247.925", "status": 200}', 1_795_849_248.0).at_us
        == 1_795_849_247_925_000
    )


def test_without_a_first_content_the_first_byte_counts() -> None:
    assert row(line()).ttft_us == 120_000
    assert row(line(first_byte_us=None)).ttft_us is None


def test_without_an_end_of_the_answer_the_end_of_the_request_counts() -> None:
    assert row(line(duration_us=None, duration_ms=1_700)).duration_us == 1_700_000


def test_an_unpriced_request_has_no_cost_and_is_seen() -> None:
    found = row(line(of=context(price=None)))
    assert found.is_unpriced
    assert (found.cost_micros, found.price_id, found.currency) == (None, None, "")


@pytest.mark.parametrize(
    "one",
    [
        line(of=context(refused="rate_limit_exceeded"), status=429, usage=None, served=None),
        line(status=500, usage=None),
        line(status=400),
        line(flags="UT", status=504, served=None, usage=None),
        # an engine's own 504
        line(status=504, usage=None),
        # the client left before an engine was asked
        line(status=0, flags="DC", served=None, usage=None),
    ],
)
def test_what_no_engine_answered_costs_nothing(one: UsageLine) -> None:
    found = row(one)
    assert (found.input, found.output, found.cost_micros, found.currency) == (0, 0, 0, "")
    assert not found.is_unpriced
    assert not found.is_estimated


@pytest.mark.parametrize(
    ("one", "ended", "is_failed"),
    [
        (line(), "whole", False),
        (line(of=context(refused="rate_limit_exceeded"), status=429, usage=None, served=None), "refused", False),
        # its own refusal for want of engines, whatever Envoy makes of it
        (line(of=context(refused="no_endpoint"), status=503, flags="UAEX", served=None), "refused", False),
        (line(status=400), "rejected", False),
        (line(status=413, served=None, context=None, flags=None), "rejected", False),
        (line(flags="DC"), "client", False),
        (line(flags="DC", status=0, served=None), "client", False),
        (line(flags="UR,DC"), "client", False),
        (line(status=500), "engine", True),
        (line(flags="UC"), "engine", True),
        (line(flags="UF,URX", status=503, served=None), "engine", True),
        (line(flags="UH", status=503, served=None), "engine", True),
        (line(flags="UT", status=504), "timeout", True),
        (line(flags="SI"), "timeout", True),
        # extproc is away
        (line(status=503, served=None, context=None, flags="UAEX"), "gateway", True),
        (line(status=500, served=None, context=None), "gateway", True),
        (line(flags="OM"), "gateway", True),
    ],
)
def test_how_a_request_ended(one: UsageLine, ended: str, *, is_failed: bool) -> None:
    found = row(one)
    assert (found.ended, found.is_failed) == (ended, is_failed)


def test_an_answer_of_the_response_cache_is_a_whole_one_that_costs_nothing() -> None:
    found = row(line(of=context(refused="cache_hit"), usage=None, served=None))
    assert (found.ended, found.refused, found.is_failed) == ("whole", "cache_hit", False)
    assert (found.input, found.output, found.cost_micros or 0, found.is_unpriced) == (0, 0, 0, False)


def test_a_row_can_be_joined_with_what_extproc_logs() -> None:
    found = row(line(of=context(streamed=True)))
    assert (found.ticket, found.endpoint, found.streamed) == ("t1", "10.0.0.1:8000", True)


def test_callers_without_a_tenant_are_anonymous_whoever_has_read_them() -> None:
    assert {row(one).tenant for one in (line(context=None), line(of=context(tenant="")))} == {"anonymous"}


def test_names_of_callers_are_cut_and_escaped_alike_whoever_has_read_them() -> None:
    for name, stored in (("x" * 200, truncate_name("x" * 200)), ("(others)", "((others)")):
        for one in (line(context=None, tenant=name, user=name), line(of=context(tenant=name, user=name))):
            assert (row(one).tenant, row(one).user) == (stored, stored)


@pytest.mark.parametrize(
    ("one", "tokens", "is_estimated"),
    [
        # usage so far, as engines with continuous_usage_stats report it
        (line(flags="DC", usage=counts(completion_tokens=7.0, events=7.0)), (100, 7), False),
        # usage of the beginning alone, as in the Messages API
        (line(flags="DC", usage=counts(completion_tokens=1.0, events=12.0)), (100, 12), True),
        # no usage yet: events of the stream, and the estimate of the prompt
        (line(flags="DC", usage=UsageCounts(events=12.0)), (90, 12), True),
        # nobody counted: 4 bytes of an answer are a token, 200 of a stream
        (line(flags="DC", usage=None, answer_bytes=80), (90, 20), True),
        (line(flags="DC", usage=None, answer_bytes=2_000, of=context(streamed=True)), (90, 10), True),
        # never more than was expected
        (line(flags="DC", usage=None, answer_bytes=2_000_000), (90, 50), True),
        # an engine that puts four tokens into each event
        (line(flags="DC", usage=UsageCounts(events=12.0), of=context(tokens_per_event=4.0)), (90, 48), True),
        # before the first byte of a stream: the prompt alone
        (line(flags="DC", status=0, usage=None, first_byte_us=None, of=context(streamed=True)), (90, 0), True),
        # before that of a plain answer: its engine has worked, 1.5 s at 100 ms a token
        (line(flags="DC", status=0, usage=None, first_byte_us=None, of=context(token_us=100_000)), (90, 15), True),
        (line(flags="DC", usage=None, first_byte_us=500_000, of=context(token_us=100_000, answers=3)), (90, 30), True),
        (line(flags="DC", usage=None, of=context(token_us=1_000, most_output=60)), (90, 60), True),
        # an engine cannot charge at will: 5,000 tokens a second, and 1,000
        (line(usage=counts(completion_tokens=9e7)), (100, 8_500), True),
        (line(usage=counts(completion_tokens=9e7), of=context(most_output=10_000)), (100, 10_000), True),
        # a time limit of the gateway, which answers 504: the engine has worked until then
        (line(flags="UT", status=504, usage=None, answer_bytes=100), (90, 50), True),
        (line(flags="UT", status=504, usage=UsageCounts(events=12.0)), (90, 12), True),
        # whole answers without usage
        (line(usage=None), (90, 50), True),
        (line(usage=UsageCounts(events=33.0)), (90, 33), True),
        # embeddings
        (line(usage=UsageCounts(prompt_tokens=8.0), of=context(output_tokens=0)), (8, 0), False),
    ],
)
def test_a_request_pays_for_what_was_made(one: UsageLine, tokens: tuple[int, int], *, is_estimated: bool) -> None:
    found = row(one)
    assert (found.input, found.output) == tokens
    assert found.is_estimated is is_estimated
    assert found.cost_micros


def test_a_request_without_extproc_is_degraded_and_its_server_is_that_of_envoys_cluster() -> None:
    found = row(line(context=None, tenant="team-b", client="key-2", model="llama", cluster="server/default/llama"))
    assert (found.tenant, found.key, found.model, found.server) == ("team-b", "key-2", "llama", "default/llama")
    assert (found.is_degraded, found.is_unpriced, found.api, found.input) == (True, True, "CHAT", 100)


def test_what_an_http_route_led_to_another_server_used_no_engine() -> None:
    found = row(line(context=None, path="/shop", usage=None, cluster="backend/default/shop"))
    assert (found.is_degraded, found.is_unpriced, found.server) == (False, False, "")


def test_counts_that_contradict_each_other_are_made_to_fit() -> None:
    found = row(line(usage=counts(cached_tokens=500.0, created_tokens=9.0, reasoning_tokens=99.0)))
    assert (found.cached, found.written, found.reasoning) == (100, 0, 20)


@pytest.mark.parametrize("number", [-1.0, 1e18, 1e300])
def test_a_number_of_tokens_that_cannot_be_counts_as_not_reported(number: float) -> None:
    found = row(line(usage=counts(completion_tokens=number, events=5.0)))
    assert (found.output, found.is_estimated) == (5, True)


def test_texts_have_bounds_and_no_zeros() -> None:
    found = row(line(of=context(model="m" * 5_000, served_model="m" * 5_000, user="a\0b")))
    assert (len(found.model), len(found.served_model), found.user) == (128, MOST_NAME, "ab")


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        text(line())[:-30],
        b"[1,2]",
        b'{"id": "\xff\xfe", "at": 1, "status": 200}',
        b'{"id": "x", "at": NaN, "status": 200}',
        b'{"id": "x", "at": 1e999, "status": 200}',
        b'{"id": "x", "at": "now", "status": 200}',
        b'{"id": "x", "at": "nan", "status": 200}',
        b'{"id": "x", "at": 1, "status": 99999999999999999999999999}',
        b'{"id": "", "at": 1, "status": 200}',
        b'{"id": "x", "at": -1, "status": 200}',
        b'{"id": "x", "at": 1, "status": 200, "context": "{"}',
        b'{"id": "x", "at": 1, "status": 200, "context": "[]"}',
        b"[" * 100_000,
        text(line(path="x" * MOST_LINE_BYTES)),
        text(line(at=NOON_S + 1e9)),
    ],
)
def test_a_hostile_line_is_a_bad_line(bad: bytes) -> None:
    with pytest.raises(BadLine) as raised:
        parse_usage_line(bad, NOON_S)
    assert len(str(raised.value)) < 200


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = st.sampled_from(
    [*msgspec.structs.asdict(line()), *(f"usage.{one}" for one in msgspec.structs.asdict(counts()))]
)


@given(changes=st.dictionaries(_FIELDS, _JSON, max_size=4), cut=st.integers(0, 2_000), noise=st.binary(max_size=3))
def test_whatever_stands_in_a_line_gives_a_bounded_row_or_a_bad_line(
    changes: dict[str, Any], cut: int, noise: bytes
) -> None:
    data: dict[str, Any] = msgspec.to_builtins(line())
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        (data["usage"] if part and isinstance(data["usage"], dict) else data)[field] = value
    for encoded in (json.dumps(data).encode(), json.dumps(data).encode()[:cut] + noise):
        try:
            found = parse_usage_line(encoded, NOON_S + 10.0)
        except BadLine:
            continue
        for value in msgspec.structs.asdict(found).values():
            assert value is None or isinstance(value, bool | int | str)
            if isinstance(value, str):
                assert len(value) <= MOST_NAME
                assert "\0" not in value
                value.encode()
            elif value is not None:
                assert -(2**63) < value < 2**63


def test_a_row_has_the_fallback_that_served() -> None:
    there = FallbackContext("default/small", "small-model", msgspec.structs.replace(PRICE, id="p2"), degraded=True)
    of = context(fallbacks=(there,))
    served = row(line(of=of, cluster="server/default/small", attempts=3))
    assert (served.server, served.served_model, served.price_id) == ("default/small", "small-model", "p2")
    assert (served.is_degraded, served.attempts, served.model) == (True, 3, "llama")
    own = row(line(of=of, cluster="server/default/llama"))
    assert (own.server, own.price_id, own.is_degraded) == ("default/llama", "p1", False)
    # of another cluster, nothing is known
    assert row(line(of=of, cluster="server/default/other")).server == "default/llama"
    at_once = row(line(of=context(server="default/small", degraded=True), cluster="server/default/small"))
    assert at_once.is_degraded


def translated(
    *, attempts: float = 2.0, details: str = "via_upstream", cut: bool | None = None, **more: object
) -> UsageLine:
    seen = TranslatedAnswer("10.0.0.9:1", attempts, details, cut)
    return line(cluster="attache-translator", served="/x/translator.sock", translated=seen, **more)


def test_a_row_of_a_translated_request_names_its_engine() -> None:
    found = row(translated())
    assert (found.endpoint, found.attempts, found.server, found.ended) == ("10.0.0.9:1", 2, context().server, "whole")
    assert (found.input, found.cost_micros) == (row(line()).input, row(line()).cost_micros)
    assert row(translated(attempts=float("nan"))).attempts == 0
    late = row(translated(status=504, details="upstream_response_timeout", usage=None))
    assert (late.ended, late.is_failed) == ("timeout", True)
    assert late.input > 0


@pytest.mark.parametrize(("cut", "ended"), [(True, "engine"), (None, "gateway")])
def test_a_translated_stream_is_cut_by_its_engine_or_by_the_translators_end(cut: bool | None, ended: str) -> None:
    found = row(translated(cut=cut, flags="UPE"))
    assert (found.ended, found.endpoint) == (ended, "10.0.0.9:1")


def test_a_translated_answer_whose_engine_reports_no_usage_costs_as_one_without_usage() -> None:
    """The answer has zeros in that case."""
    zeros = UsageCounts(prompt_tokens=0.0, completion_tokens=0.0)
    found, plain = row(translated(usage=zeros)), row(line(usage=UsageCounts()))
    assert found.output > 0
    assert (found.input, found.output, found.is_estimated) == (plain.input, plain.output, plain.is_estimated)


def test_a_translated_request_of_which_nothing_came_back_is_a_failure_of_the_gateway() -> None:
    lost = line(cluster="attache-translator", served="/x/translator.sock", status=503, flags="UC", usage=None)
    found = row(lost)
    assert (found.ended, found.endpoint, found.input) == ("gateway", "", 0)
    left = row(line(cluster="attache-translator", served="/x/translator.sock", status=0, flags="DC", usage=None))
    assert (left.ended, left.endpoint) == ("client", "")
    assert left.input > 0
