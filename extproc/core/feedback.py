# SPDX-License-Identifier: Apache-2.0
"""What outcomes teach: each is joined with its assignment by the request's ticket."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.estimates import ASSUMED_BYTES_PER_TOKEN
from extproc.admission.limits import NO_USAGE, Usage
from extproc.endpoints.costs import learn_prefill_rate, typical_rate
from extproc.endpoints.engine_reports import apply_report, record_latency
from extproc.endpoints.ledger import finish_prefill
from extproc.prefix.turns import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.peer_events import AdapterChanged, EngineSaid
    from extproc.core.record import Run
    from extproc.core.types import Outcome
    from extproc.scheduling.pool import Pool

_WEIGHT: Final = 0.05
_MIN_TOKENS_FOR_RATIO: Final = 64
_BYTES_PER_TOKEN_BOUNDS: Final = (0.5, 16.0)
# A prediction may be off by the blocks of both sides: ours grow with the prompt, the engine's are 16 tokens or more.
_TOLERATED_SHARE: Final = 0.1
_TOLERATED_TOKENS: Final = 64.0
# Of one answer. The fastest accelerators write some 3,000 tokens a second; what is measured as no time may be a
# millisecond, or a clock that was set back.
_FASTEST_TOKENS_PER_S: Final = 5_000.0
_AT_ONCE_TOKENS: Final = 1_000.0
# A prefix is in the cache once its prefill is done, not when it was sent.
_PREFILL_GRACE_S: Final = 1.0


def take_report(pools: Mapping[str, Pool], event: EngineSaid, now: float) -> None:
    """Apply an engine's report, read by this process or by another."""
    pool = pools.get(event.server)
    row = pool.table.row_of(event.address) if pool is not None else None
    if pool is None or row is None:
        return
    if event.models is not None:
        models = event.models if pool.slots is None else pool.slots.corrected(row, event.models, now)
        pool.table.set_loras(row, msgspec.structs.replace(pool.table.loras[row], served=models))
        return
    apply_report(pool.table, row, event.state, now)
    if event.has_restarted:
        pool.caches.cache_lost(row)
        if pool.slots is not None:
            pool.slots.restarted(row)
    if event.cache is not None:
        pool.caches.set_cache_config(row, event.cache)
        pool.table.kv_capacity_tokens[row] = event.cache.total_tokens


def take_change(pools: Mapping[str, Pool], event: AdapterChanged, now: float) -> None:
    """Another process has changed which adapters an engine has."""
    pool = pools.get(event.server)
    row = pool.table.row_of(event.address) if pool is not None else None
    if pool is not None and row is not None and pool.slots is not None and event.adapter in pool.slots.sources:
        pool.slots.change(row, event.adapter, event.change, now, is_ours=False)


def learn(run: Run, outcome: Outcome, now: float, *, is_ours: bool, has_limits: bool) -> None:
    """Correct what is known of the pool and its endpoints.

    ``is_ours``: this process decided the request. ``has_limits``: its route reserves tokens, so their estimate matters.
    """
    if run.waited_s and outcome.ttfb_s is not None:
        # engines are judged by the time since dispatch
        outcome = msgspec.structs.replace(outcome, ttfb_s=max(0.0, outcome.ttfb_s - run.waited_s))
    _learn_endpoint(run, outcome, now)
    if outcome.ttfb_s is not None and outcome.served == run.assignment.endpoint.address:
        finish_prefill(run.pool.table, run.assignment.prefilled_by, now)
    if not 200 <= outcome.status < 300:
        return
    _count_tokens(run, outcome, is_ours=is_ours)
    _learn_output(run, outcome, is_ours=is_ours)
    _learn_bytes_per_token(run, outcome, has_limits=has_limits)
    _learn_turn(run, outcome)
    if outcome.served == run.assignment.endpoint.address:
        _learn_rate(run, outcome)
        _learn_prefix(run, outcome)


def lost_adapter(run: Run, outcome: Outcome, now: float) -> None:
    """An engine that answers 404 has the request's adapter no more: it has restarted, or somebody else unloaded it."""
    slots, row, adapter = run.pool.slots, run.pool.table.row_of(outcome.served), run.assignment.adapter
    if slots is None or row is None or adapter is None or outcome.status != 404:
        return
    if run.sent_at_s >= slots.loaded_at_s(row, adapter):
        slots.change(row, adapter, "gone", now, is_ours=True)


def _learn_endpoint(run: Run, outcome: Outcome, now: float) -> None:
    table, first = run.pool.table, run.assignment.endpoint
    was_passed_over = bool(outcome.served) and outcome.served != first.address
    served_row = table.row_of(outcome.served)
    if was_passed_over and served_row is not None:
        run.pool.caches.record(served_row, run.chain, now)


def _learn_turn(run: Run, outcome: Outcome) -> None:
    """The engine that answered now has the answer in its cache, too."""
    row = run.pool.table.row_of(outcome.served)
    if row is not None and outcome.completion_tokens:
        caches = run.pool.caches
        answer_bytes = outcome.completion_tokens * caches.bytes_per_token
        caches.index.record_turn(row, run.chain, Turn(run.tail, answer_bytes))


def _count_tokens(run: Run, outcome: Outcome, *, is_ours: bool) -> None:
    if outcome.cached_tokens is not None:
        run.pool.reports_cached_tokens = True
    if outcome.prompt_tokens is not None:
        run.pool.reports_usage = True
    row = run.pool.table.row_of(outcome.served)
    if is_ours and row is not None and outcome.prompt_tokens is not None:
        run.pool.table.prompt_tokens[row] += outcome.prompt_tokens
        run.pool.table.cached_tokens[row] += outcome.cached_tokens or 0


def _learn_output(run: Run, outcome: Outcome, *, is_ours: bool) -> None:
    if outcome.completion_tokens is None or not run.answers:
        return
    caches, tokens = run.pool.caches, outcome.completion_tokens / run.answers
    caches.output_tokens += _WEIGHT * (tokens - caches.output_tokens)
    # of a request of another process it is not known whether it had a bound
    if is_ours and math.isinf(run.most_output):
        run.pool.output_estimate.learn(tokens)


def usage_of(run: Run, outcome: Outcome) -> Usage:
    """The tokens that a request used, as reported; none if no engine answered it.

    If the client hung up, or the gateway's time limit ended the request, output is not reported. It is estimated from
    the time and the engine's time per token, all answers together, at most the requested maximum: nobody gains by
    hanging up just before the end.
    """
    was_given_up = bool(outcome.served) and (outcome.status == 0 or outcome.has_timed_out)
    if outcome.prompt_tokens is None and not 200 <= outcome.status < 300 and not was_given_up:
        return NO_USAGE
    reserved = _reserved(run)
    if outcome.completion_tokens is None:
        output_tokens = min(run.most_output, _may_have_written(run, outcome))
    else:
        output_tokens = min(_most_believed(run, outcome), float(outcome.completion_tokens))
    return Usage(
        input_tokens=reserved.input_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens,
        output_tokens=output_tokens,
    )


def _reserved(run: Run) -> Usage:
    return run.reserved if run.limited is None else run.limited


def _most_believed(run: Run, outcome: Outcome) -> float:
    """The most output that an engine may report.

    More than was asked for is believed, as engines may read fields that we do not, and what they wrote was had. But no
    more than can be written in the time, which the gateway has measured: an engine cannot charge a tenant at will.
    """
    writing_s = max(0.0, outcome.duration_s - run.waited_s)
    in_time = run.answers * (_FASTEST_TOKENS_PER_S * writing_s + _AT_ONCE_TOKENS)
    return in_time if math.isinf(run.most_output) else max(run.most_output, in_time)


def _may_have_written(run: Run, outcome: Outcome) -> float:
    """All answers are written side by side, each in the engine's time per token. Who refuses to say pays what is
    reserved; so does a whole plain answer that says nothing, as its tokens may be written afterwards (``background``).
    """
    if outcome.ttfb_s is None and run.is_streamed:
        return 0.0
    row = run.pool.table.row_of(outcome.served)
    tpot_s = float(run.pool.table.tpot_s[row]) if row is not None else 0.0
    is_silent = not run.is_streamed and 200 <= outcome.status < 300 and not (outcome.has_left or outcome.was_cut)
    if not tpot_s or run.declines_usage or is_silent:
        return _reserved(run).output_tokens
    writing_s = outcome.duration_s - (run.waited_s if outcome.ttfb_s is None else outcome.ttfb_s)
    return run.answers * max(0.0, writing_s) / tpot_s


def _learn_bytes_per_token(run: Run, outcome: Outcome, *, has_limits: bool) -> None:
    tokens = outcome.prompt_tokens
    caches = run.pool.caches
    if not run.prompt_bytes:
        return
    if tokens is not None and has_limits and run.input_estimate is not None:
        run.input_estimate.learn(
            prompt_bytes=run.prompt_bytes,
            bytes_per_token=ASSUMED_BYTES_PER_TOKEN,
            tokens=tokens,
            prompts=run.prompts,
        )
    if tokens is not None and tokens >= _MIN_TOKENS_FOR_RATIO:
        low, high = _BYTES_PER_TOKEN_BOUNDS
        ratio = min(high, max(low, run.prompt_bytes / tokens))
        # the first answer says more than what was assumed
        weight = max(_WEIGHT, 1 / (1.25 + caches.ratio_samples))
        caches.ratio_samples += 1
        caches.bytes_per_token *= (ratio / caches.bytes_per_token) ** weight
        caches.fit_blocks()


def _learn_rate(run: Run, outcome: Outcome) -> None:
    # a plain answer's first byte comes with its last
    if not run.is_streamed or outcome.ttfb_s is None or not run.pool.table.is_current(run.assignment.prefilled_by):
        return
    pool, assignment = run.pool, run.assignment
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
        # of each answer: all are written side by side
        written = (outcome.completion_tokens or 0) / max(1, run.answers) - 1
        tpot_s = (outcome.duration_s - run.waited_s - outcome.ttfb_s) / written if written > 0 else None
        record_latency(pool.table, assignment.endpoint.row, ttft_s=outcome.ttfb_s, tpot_s=tpot_s)
        if tpot_s is not None and assignment.in_flight_tokens:
            now_there = float(pool.table.in_flight_tokens[assignment.endpoint.row]) + assignment.tokens
            tokens = (assignment.in_flight_tokens + now_there) / 2
            pool.caches.answer_cost.learn(tokens=tokens, tpot_s=tpot_s)
            pool.caches.decode_speed.learn(tokens=tokens, tpot_s=tpot_s)


def _learn_prefix(run: Run, outcome: Outcome) -> None:
    """Compare the predicted cached tokens with the reported ones.

    vLLM leaves the field out when it is 0, so silence counts as 0 once the pool's engines are known to report it.
    """
    pool, assignment = run.pool, run.assignment
    endpoint = assignment.prefilled_by
    if not pool.reports_cached_tokens or outcome.prompt_tokens is None or assignment.last_used_at_s is None:
        return
    if not pool.table.is_current(endpoint):
        return
    index, reported = pool.caches.index, outcome.cached_tokens or 0
    missing = assignment.indexed_tokens - reported
    if missing <= max(_TOLERATED_TOKENS, _TOLERATED_SHARE * assignment.indexed_tokens):
        index.confirm(endpoint.row)
        expected = assignment.cached_tokens - assignment.indexed_tokens
        if not assignment.is_precise and expected >= _TOLERATED_TOKENS:
            index.turns.learn(expected=expected, found=reported - assignment.indexed_tokens)
    elif run.sent_at_s - assignment.last_used_at_s > _PREFILL_GRACE_S + 2 * pool.typical_ttft_s:
        index.correct(endpoint.row, assignment.last_used_at_s)
