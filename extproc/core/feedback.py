"""What the end of a request teaches: Envoy's access log entry, joined with the assignment by its ticket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.admission.gate import Gate
from extproc.admission.limits import NO_USAGE, Grant, Usage
from extproc.admission.queued_request import QueuedRequest
from extproc.endpoints.backoff import record_failure, record_success
from extproc.endpoints.engine_reports import record_latency
from extproc.endpoints.ledger import finish_prefill
from extproc.endpoints.prefill_rate import learn_prefill_rate, typical_rate
from extproc.prefix.turns import Tail, Turn
from extproc.scheduling.pool import Assignment, Pool

_WEIGHT: Final = 0.05
_MIN_TOKENS_FOR_RATIO: Final = 64
_BYTES_PER_TOKEN_BOUNDS: Final = (0.5, 16.0)
# Statuses by which an engine, or Envoy on its behalf, says that it could not take the request at all.
_UNAVAILABLE: Final = frozenset({502, 503, 504})
# A prediction may be off by the blocks of both sides: ours grow with the prompt, the engine's are 16 tokens or more.
_TOLERATED_SHARE: Final = 0.1
_TOLERATED_TOKENS: Final = 64.0
# A prefix is in the cache once its prefill is done, not when it was sent.
_PREFILL_GRACE_S: Final = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """One access log entry. What Envoy did not see is None; ``status`` 0: the client left before there was one.

    Times count from the request's arrival, what it was held included.
    """

    ticket: str
    status: int
    served: str
    duration_s: float
    ttfb_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


class Sent(msgspec.Struct):
    """A request between its pick and its access log entry."""

    pool: Pool
    assignment: Assignment
    chain: Sequence[int]
    # the prompt beyond its whole blocks
    tail: Tail
    prompt_bytes: int
    is_streamed: bool
    sent_at_s: float
    is_settled: bool = False
    # False: another process sent it, and counts it
    is_ours: bool = True
    # in its server's queue, if there is one, how long it was held there, and what its flow was charged
    gate: Gate | None = None
    queued: QueuedRequest | None = None
    waited_s: float = 0.0
    charged: float = 0.0
    reserved: Usage = NO_USAGE
    # what was asked for
    most_output: float = math.inf
    grants: tuple[Grant, ...] = ()


def learn(sent: Sent, outcome: Outcome, now: float) -> None:
    """Correct what is known of the pool and its endpoints."""
    if sent.waited_s and outcome.ttfb_s is not None:
        # engines are judged by the time since it went
        outcome = msgspec.structs.replace(outcome, ttfb_s=max(0.0, outcome.ttfb_s - sent.waited_s))
    _learn_place(sent, outcome, now)
    if outcome.ttfb_s is not None and outcome.served == sent.assignment.endpoint.address:
        finish_prefill(sent.pool.table, sent.assignment.prefilled_by, now)
    if not 200 <= outcome.status < 300:
        return
    _count_tokens(sent, outcome)
    _learn_output(sent, outcome)
    _learn_bytes_per_token(sent, outcome)
    _learn_turn(sent, outcome)
    if outcome.served == sent.assignment.endpoint.address:
        _learn_rate(sent, outcome)
        _learn_prefix(sent, outcome)


def _learn_place(sent: Sent, outcome: Outcome, now: float) -> None:
    table, first = sent.pool.table, sent.assignment.endpoint
    was_passed_over = bool(outcome.served) and outcome.served != first.address
    if table.is_current(first):
        if was_passed_over or outcome.status in _UNAVAILABLE:
            record_failure(table, first.row, now)
        elif outcome.status:
            record_success(table, first.row)
    served_row = table.row_of(outcome.served)
    if was_passed_over and served_row is not None:
        sent.pool.caches.index.record(served_row, sent.chain, now)


def _learn_turn(sent: Sent, outcome: Outcome) -> None:
    """The engine that answered now holds the answer, too."""
    row = sent.pool.table.row_of(outcome.served)
    if row is not None and outcome.completion_tokens:
        caches = sent.pool.caches
        answer_bytes = outcome.completion_tokens * caches.bytes_per_token
        caches.turns.record(row, sent.chain, Turn(sent.tail, answer_bytes))


def _count_tokens(sent: Sent, outcome: Outcome) -> None:
    if outcome.cached_tokens is not None:
        sent.pool.reports_cached_tokens = True
    row = sent.pool.table.row_of(outcome.served)
    if sent.is_ours and row is not None and outcome.prompt_tokens is not None:
        sent.pool.table.prompt_tokens[row] += outcome.prompt_tokens
        sent.pool.table.cached_tokens[row] += outcome.cached_tokens or 0


def _learn_output(sent: Sent, outcome: Outcome) -> None:
    if outcome.completion_tokens is not None:
        caches = sent.pool.caches
        caches.output_tokens += _WEIGHT * (outcome.completion_tokens - caches.output_tokens)


def usage_of(sent: Sent, outcome: Outcome) -> Usage:
    """What a request took, as reported. A request that no engine answered took nothing.

    Where the client hung up, nobody says what was written by then: as much as the engine writes in that time, by its time per
    token, and no more than was asked for. So nobody gains by hanging up just before the end.
    """
    has_left = outcome.status == 0 and bool(outcome.served)
    if outcome.prompt_tokens is None and not 200 <= outcome.status < 300 and not has_left:
        return NO_USAGE
    return Usage(
        input_tokens=sent.reserved.input_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens,
        output_tokens=_written(sent, outcome) if outcome.completion_tokens is None else outcome.completion_tokens,
    )


def _written(sent: Sent, outcome: Outcome) -> float:
    if outcome.ttfb_s is None and sent.is_streamed:
        return 0.0
    row = sent.pool.table.row_of(outcome.served)
    tpot_s = float(sent.pool.table.tpot_s[row]) if row is not None else 0.0
    if not tpot_s:
        return sent.reserved.output_tokens
    writing_s = outcome.duration_s - (sent.waited_s if outcome.ttfb_s is None else outcome.ttfb_s)
    return min(sent.most_output, max(0.0, writing_s) / tpot_s)


def _learn_bytes_per_token(sent: Sent, outcome: Outcome) -> None:
    tokens = outcome.prompt_tokens
    caches = sent.pool.caches
    if tokens is not None and sent.grants:
        sent.pool.input_estimate.learn(
            prompt_bytes=sent.prompt_bytes, bytes_per_token=caches.bytes_per_token, tokens=tokens
        )
    if tokens is not None and tokens >= _MIN_TOKENS_FOR_RATIO:
        low, high = _BYTES_PER_TOKEN_BOUNDS
        ratio = min(high, max(low, sent.prompt_bytes / tokens))
        # the first answer says more than what was assumed
        weight = max(_WEIGHT, 1 / (1.25 + caches.ratio_samples))
        caches.ratio_samples += 1
        caches.bytes_per_token *= (ratio / caches.bytes_per_token) ** weight
        caches.fit_blocks()


def _learn_rate(sent: Sent, outcome: Outcome) -> None:
    # a plain answer's first byte comes with its last
    if not sent.is_streamed or outcome.ttfb_s is None or not sent.pool.table.is_current(sent.assignment.prefilled_by):
        return
    pool, assignment = sent.pool, sent.assignment
    pool.typical_ttft_s += _WEIGHT * (outcome.ttfb_s - pool.typical_ttft_s)
    cost, row = pool.caches.prompt_cost, assignment.prefilled_by.row
    ahead = max(0.0, assignment.tokens_ahead - assignment.work)
    cached = float(outcome.cached_tokens or 0)
    uncached = assignment.input_tokens - assignment.cached_tokens
    if outcome.prompt_tokens is not None:
        uncached = outcome.prompt_tokens - cached
    own = cost.work(uncached, cached)
    rate = float(pool.table.prefill_rate[row])
    seconds = (outcome.ttfb_s - ahead / rate) * rate / typical_rate(pool.table)
    cost.learn(uncached=uncached, cached=cached, seconds=seconds, share=own / (own + ahead + 1.0))
    tokens_ahead = ahead + own + cost.overhead
    learn_prefill_rate(pool.table, row, tokens_ahead=tokens_ahead, ttft_s=outcome.ttfb_s)
    if pool.table.is_current(assignment.endpoint):
        written = (outcome.completion_tokens or 0) - 1
        tpot_s = (outcome.duration_s - sent.waited_s - outcome.ttfb_s) / written if written > 0 else None
        record_latency(pool.table, assignment.endpoint.row, ttft_s=outcome.ttfb_s, tpot_s=tpot_s)
        if tpot_s is not None and assignment.in_flight_tokens:
            now_there = float(pool.table.in_flight_tokens[assignment.endpoint.row]) + assignment.tokens
            pool.caches.answer_cost.learn(tokens=(assignment.in_flight_tokens + now_there) / 2, tpot_s=tpot_s)


def _learn_prefix(sent: Sent, outcome: Outcome) -> None:
    """Compare the predicted cached tokens with the reported ones.

    vLLM leaves the field out when it is 0, so silence counts as 0 once the pool's engines are known to report it.
    """
    pool, assignment = sent.pool, sent.assignment
    place = assignment.prefilled_by
    if not pool.reports_cached_tokens or outcome.prompt_tokens is None or assignment.last_used_at_s is None:
        return
    if not pool.table.is_current(place):
        return
    index, reported = pool.caches.index, outcome.cached_tokens or 0
    missing = assignment.indexed_tokens - reported
    if missing <= max(_TOLERATED_TOKENS, _TOLERATED_SHARE * assignment.indexed_tokens):
        index.confirm(place.row)
        expected = assignment.cached_tokens - assignment.indexed_tokens
        if not assignment.is_precise and expected >= _TOLERATED_TOKENS:
            pool.caches.turns.learn(expected=expected, found=reported - assignment.indexed_tokens)
    elif sent.sent_at_s - assignment.last_used_at_s > _PREFILL_GRACE_S + 2 * pool.typical_ttft_s:
        index.correct(place.row, assignment.last_used_at_s)
