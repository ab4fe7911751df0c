# SPDX-License-Identifier: Apache-2.0
"""The tokens that a request pays for: one rule, for budgets and limits at once and for the rows of the usage log.

1. A request that reached no engine, or whose answer is an error, pays nothing. But an engine has worked for a request
   that a time limit of the gateway ended.
2. What the answer reports is believed, as far as it could be written in the time: an engine cannot charge at will.
3. What it does not report is estimated. Input: what was reserved. Output of a whole answer: the events of its stream,
   else what was reserved. Output of one that was cut: the events of its stream, else what its engine writes in the time
   that it had, else its bytes; never more than was requested. So nobody gains by hanging up before the end.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.pricing import TokenCounts
from extproc.api.usage_log import UsageCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.usage_log import UsageContext

# No engine means a number of tokens above this one: it counts as not reported.
MOST_TOKENS: Final = 100_000_000
# Of one answer. The fastest accelerators write some 3,000 tokens a second; what is measured as no time may be a
# millisecond, or a clock that was set back.
_FASTEST_TOKENS_PER_MS: Final = 5
_AT_ONCE_TOKENS: Final = 1_000
_MOST_PER_EVENT: Final = 1_000.0
# Bytes of an answer for each token, where nothing else is known: an event of a stream, and plain text.
_BYTES_PER_EVENT: Final = 200
_BYTES_PER_TOKEN: Final = 4
# Envoy's response flags of an answer that did not come to its end, as log lines and as messages name them.
TIME_LIMITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "UT": "upstream_request_timeout",
        "DT": "duration_timeout",
        "SI": "stream_idle_timeout",
        "UMSDR": "upstream_max_stream_duration_reached",
    }
)
# Envoy's details of an answer of its own at such a limit.
TIMEOUT_DETAILS: Final = frozenset(
    {"response_timeout", "upstream_response_timeout", "stream_idle_timeout", "max_duration_timeout"}
)
CLIENT_LEFT: Final = "DC"
CUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **TIME_LIMITS,
        CLIENT_LEFT: "downstream_connection_termination",
        "DR": "downstream_remote_reset",
        "UC": "upstream_connection_termination",
        "UR": "upstream_remote_reset",
        "UF": "upstream_connection_failure",
        "LR": "local_reset",
        "DPE": "downstream_protocol_error",
        "UPE": "upstream_protocol_error",
        "OM": "overload_manager",
    }
)


class ExpectedTokens(msgspec.Struct, frozen=True):
    """What was known of a request when it was sent to an engine.

    ``input_tokens``, ``output_tokens``: reserved. ``answers``: number of requested answers, over all its prompts;
    ``most_output``: the requested maximum of tokens, over all answers; None: there is none. ``token_us``: the time in
    which its engine writes a token of an answer, in microseconds; 0: not known yet. ``tokens_per_event``: of a stream.
    ``held_ms``: how long it was held. ``in_background``: its engine goes on when its client has disconnected.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    answers: int = 1
    most_output: int | None = None
    token_us: int = 0
    tokens_per_event: float = 1.0
    held_ms: float = 0.0
    is_streamed: bool = False
    in_background: bool = False


class AnswerOutcome(msgspec.Struct, frozen=True):
    """How a request ended. Durations count from its first byte.

    ``status``: 0 if the client left before there was one. ``has_engine``: it reached one. ``is_cut``: the answer did
    not come to its end, whoever ended it; ``has_timed_out``: a time limit of the gateway did. ``duration_ms``: until
    the end of the request. ``first_byte_us``: of the answer's body; None: there was none. ``bytes``: of the body; None:
    not known.
    """

    status: int
    has_engine: bool
    is_cut: bool
    has_timed_out: bool
    counts: UsageCounts
    duration_ms: int
    first_byte_us: int | None
    bytes: int | None


class UsedTokens(msgspec.Struct, frozen=True):
    """``is_estimated``: some of them are estimates."""

    counts: TokenCounts
    is_estimated: bool


def expected_tokens_of(context: UsageContext) -> ExpectedTokens:
    """As the usage log has it."""
    return ExpectedTokens(
        input_tokens=context.input_tokens,
        output_tokens=context.output_tokens,
        answers=context.answers,
        most_output=context.most_output,
        token_us=context.token_us,
        tokens_per_event=context.tokens_per_event,
        held_ms=context.queued_ms,
        is_streamed=context.streamed,
        in_background=context.in_background,
    )


def used_tokens(expected: ExpectedTokens, answer: AnswerOutcome) -> UsedTokens | None:
    """None if the request pays nothing: no engine has worked for it."""
    is_answered = 200 <= answer.status < 300 or answer.status == 0 or answer.has_timed_out
    if not (answer.has_engine and is_answered):
        return None
    counts = answer.counts
    reported_input, reported_output = (
        valid_token_count(counts.prompt_tokens),
        valid_token_count(counts.completion_tokens),
    )
    whole_input = min(MOST_TOKENS, max(0, expected.input_tokens)) if reported_input is None else reported_input
    output, is_estimated = _output(expected, answer, reported_output)
    cached = min(valid_token_count(counts.cached_tokens) or 0, whole_input)
    tokens = TokenCounts(
        input=whole_input,
        cached=cached,
        written=min(valid_token_count(counts.created_tokens) or 0, whole_input - cached),
        output=output,
        reasoning=min(valid_token_count(counts.reasoning_tokens) or 0, output),
    )
    return UsedTokens(tokens, is_estimated or reported_input is None)


def valid_token_count(number: float | None) -> int | None:
    """None for what is no number of tokens."""
    return int(number) if number is not None and 0 <= number <= MOST_TOKENS else None


def _output(expected: ExpectedTokens, answer: AnswerOutcome, reported: int | None) -> tuple[int, bool]:
    """Tokens of the answer, and whether that is an estimate."""
    most = MOST_TOKENS if expected.most_output is None else min(MOST_TOKENS, max(0, expected.most_output))
    events = valid_token_count(answer.counts.events)
    written = (
        None if events is None else min(most, round(events * min(_MOST_PER_EVENT, max(1.0, expected.tokens_per_event))))
    )
    if reported is not None:
        believed = min(reported, _most_believed(expected, answer))
        # the Messages API reports some output at the beginning
        if answer.is_cut and written is not None and written > believed:
            return written, True
        return believed, believed != reported
    if expected.in_background or (written is None and not answer.is_cut):
        found = expected.output_tokens
    elif written is not None:
        found = written
    else:
        found = _output_of_cut(expected, answer)
    found = max(0, min(most, found))
    return found, found > 0


def _most_believed(expected: ExpectedTokens, answer: AnswerOutcome) -> int:
    """More than the requested maximum is believed: engines may read fields that extproc does not, and the client got
    the tokens. But no more than can be written in the time, which the gateway has measured.
    """
    writing_ms = _milliseconds(answer.duration_ms - expected.held_ms)
    in_time = max(0, expected.answers) * (_FASTEST_TOKENS_PER_MS * writing_ms + _AT_ONCE_TOKENS)
    return in_time if expected.most_output is None else max(expected.most_output, in_time)


def _output_of_cut(expected: ExpectedTokens, answer: AnswerOutcome) -> int:
    """All answers are written side by side, each in the engine's time for a token."""
    if answer.first_byte_us is None and expected.is_streamed:
        return 0
    if expected.token_us > 0:
        began_ms = expected.held_ms if answer.first_byte_us is None else answer.first_byte_us / 1_000
        writing_ms = _milliseconds(answer.duration_ms - began_ms)
        return max(0, expected.answers) * (writing_ms * 1_000 // expected.token_us)
    if answer.first_byte_us is None or answer.bytes is None or answer.status >= 400:
        # the bytes are those of the gateway's own answer
        return expected.output_tokens
    per_token = _BYTES_PER_EVENT if expected.is_streamed else _BYTES_PER_TOKEN
    return min(expected.output_tokens, max(0, answer.bytes) // per_token)


def _milliseconds(duration_ms: float) -> int:
    """Whole ones, of a bounded duration: clocks may be set back, and lines are hostile."""
    return int(min(duration_ms, 1e12)) if 0.0 < duration_ms < math.inf else 0
