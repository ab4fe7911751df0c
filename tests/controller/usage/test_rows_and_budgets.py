# SPDX-License-Identifier: Apache-2.0
"""A budget is charged what the row of the request says, however its answer ended."""

from __future__ import annotations

import math
from functools import cache

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.usage.rows import make_usage_row
from extproc.api.charged_tokens import CUTS
from extproc.api.usage_log import UsageContext, UsageCounts, UsageLine
from extproc.core.effects import Decision, OutcomeJoined
from extproc.streams.access_log import read_outcome
from extproc.streams.messages import HttpAccessLogEntry
from tests.examples import examples
from tests.extproc.core.test_limit_accounting_budgets import SERVER, Process
from tests.extproc.scenes import request
from tests.usage_lines import NOON_S

PRICING = (
    "pricing: [{perMillion: {input: 3, output: 10, cachedInput: 0.5, cacheWrite: 4, reasoning: 20},"
    " perRequest: '0.0001', tiers: [{aboveInputTokens: 2000, perMillion: {input: 5}}]}]\n"
)


@cache
def process() -> Process:
    budgets = "{name: b, window: Month, max: {money: '1000000'}}"
    return Process(
        budgets, servers={"llama": SERVER + PRICING}, gateway_spec="usageLog: {path: /var/lib/attache/usage.log}"
    )


class Ending(msgspec.Struct, frozen=True):
    """What Envoy sees of an answer, and writes twice."""

    status: int
    flags: tuple[str, ...]
    served: str
    counts: UsageCounts
    duration_ms: int
    first_byte_us: int | None
    answer_bytes: int

    def entry(self, ticket: str) -> HttpAccessLogEntry:
        made = HttpAccessLogEntry()
        made.response.response_code.value = self.status
        made.response.response_body_bytes = self.answer_bytes
        common = made.common_properties
        # a duration is in nanoseconds, of which Envoy writes whole milliseconds into lines
        common.duration.seconds, rest_ms = divmod(self.duration_ms, 1_000)
        common.duration.nanos = rest_ms * 1_000_000 + 999_000
        if self.first_byte_us is not None:
            common.custom_tags["ttft_us"] = str(self.first_byte_us)
        for flag in self.flags:
            setattr(common.response_flags, CUTS[flag], True)
        metadata = common.metadata.filter_metadata
        metadata["attache"].fields["ticket"].string_value = ticket
        metadata["attache.served"].fields["host"].string_value = self.served
        for name, value in msgspec.structs.asdict(self.counts).items():
            if isinstance(value, float):
                metadata["attache.usage"].fields[name].number_value = value
        return made

    def line(self) -> UsageLine:
        return UsageLine(
            id="r1",
            at=float(NOON_S),
            status=self.status,
            path="/v1/chat/completions",
            usage=self.counts,
            served=self.served,
            duration_ms=self.duration_ms,
            first_byte_us=self.first_byte_us,
            answer_bytes=self.answer_bytes,
            flags=",".join(self.flags),
        )


_NUMBERS = st.none() | st.integers(0, 5_000).map(float) | st.just(9e7) | st.just(1.5) | st.just(1e12)
_ENDINGS = st.builds(
    Ending,
    status=st.sampled_from([0, 200, 200, 202, 301, 404, 429, 500, 503, 504]),
    flags=st.lists(st.sampled_from(sorted(CUTS)), max_size=2).map(tuple),
    served=st.sampled_from(["10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.9:8000", ""]),
    counts=st.builds(
        UsageCounts,
        prompt_tokens=_NUMBERS,
        completion_tokens=_NUMBERS,
        cached_tokens=_NUMBERS,
        created_tokens=_NUMBERS,
        reasoning_tokens=_NUMBERS,
        events=_NUMBERS,
    ),
    duration_ms=st.integers(0, 100_000),
    first_byte_us=st.none() | st.integers(0, 10**7),
    answer_bytes=st.integers(0, 10**6),
)
_LEFT = Ending(200, ("DC",), "10.0.0.1:8000", UsageCounts(), 10_000, 1_000_000, 5_000)


@settings(max_examples=examples(300), deadline=None)
@given(
    ending=_ENDINGS,
    stream=st.booleans(),
    most=st.none() | st.integers(1, 2_000),
    answers=st.integers(1, 3),
    tpot_s=st.sampled_from([0.0, 0.01, 0.0123]),
    per_event=st.sampled_from([1.0, 3.337]),
)
@example(ending=_LEFT, stream=False, most=700, answers=2, tpot_s=0.0123, per_event=1.0)
@example(ending=_LEFT, stream=True, most=None, answers=1, tpot_s=0.0, per_event=1.0)
def test_one_answer_costs_the_same_in_its_row_and_in_budgets(
    ending: Ending, *, stream: bool, most: int | None, answers: int, tpot_s: float, per_event: float
) -> None:
    core = process().core
    pool = core.pools["default/llama"]
    # answers of the examples before may have opened them
    core.reset_breakers(pool.name, "", 0.0)
    pool.table.tpot_s[:], pool.tokens_per_event = tpot_s, per_event
    fields = {} if most is None else {"max_tokens": most}
    arrival = request(core, headers={"x-attache-tenant": "a"}, stream=stream, n=answers, **fields)
    own, _ = core.arrive(arrival, 0.0)
    assert isinstance(own, Decision)
    assert own.usage is not None
    before = process().left(0.0)
    settled = next(
        one for one in core.on_outcome(read_outcome(ending.entry(own.ticket)), 1.0) if isinstance(one, OutcomeJoined)
    )
    core.on_stream_closed(own.ticket, 1.0)
    # as it stands in the line
    context = msgspec.json.decode(msgspec.json.encode(own.usage), type=UsageContext)
    row = make_usage_row(ending.line(), context, NOON_S + 10.0)
    used = settled.used
    assert (row.input, row.output, row.cost_micros) == (used.input_tokens, used.output_tokens, used.cost_micros)
    (grant,) = own.grants
    reserved = math.fsum(charge.amount for charge in grant.charges)
    assert process().left(0.0) - before == reserved - used.cost_micros
