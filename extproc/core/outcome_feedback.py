# SPDX-License-Identifier: Apache-2.0
"""Estimates are learned from outcomes, and the health of endpoints from outcomes and from their absence.

Each outcome is joined with its assignment by the request's ticket.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.token_estimates import ASSUMED_BYTES_PER_TOKEN
from extproc.core.breakers import change_breaker
from extproc.core.effects import EngineModelsListed, HealthChanged
from extproc.core.request_states import RequestState
from extproc.endpoints.breaker import UNKNOWN_PASS
from extproc.endpoints.breaker_ranks import breaker_key, set_breaker
from extproc.endpoints.engine_reports import apply_report, record_latency
from extproc.endpoints.health import EngineFailure
from extproc.endpoints.in_flight import finish_prefill
from extproc.endpoints.learned_speeds import learn_prefill_rate, learn_service_time, typical_prefill_rate
from extproc.endpoints.outliers import mostly_fails, record_bad_answer, record_good_answer
from extproc.engines.engine_responses import is_engine_error
from extproc.prefix.approximate_index import ConversationTurn
from extproc.scheduling.model_check import update_missing_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.effects import Effect
    from extproc.core.peer_events import AdapterChanged, EngineReported
    from extproc.core.request_record import DispatchedRequest, Outcome, RequestRecord
    from extproc.endpoints.breaker import Breaker, BreakerPass
    from extproc.endpoints.health import EndpointHealth
    from extproc.scheduling.pool import Pool

# Between two searches for engines that are silent.
SWEEP_S: Final = 1.0
# Statuses by which an engine, or Envoy on its behalf, reports that it could not accept the request at all.
_UNAVAILABLE: Final = frozenset({502, 503, 504})
_INTERNAL: Final = 500
# Envoy tries these on the next endpoint; if that one answers the same, the request itself may be the reason.
_MAYBE_THE_REQUEST: Final = frozenset({429, _INTERNAL})
# Of an endpoint that says that it has too much to do, and not for how long, or for less. Who answers at once has no
# load, and would look like the best choice.
_LOAD_PAUSE_S: Final = 1.0
# Successful probes in a row that close the breaker of an endpoint or ModelServer that was judged by many answers; for
# one that could not be reached, one is enough.
_NEEDED: Final = 3
# An endpoint is silent if it answers nothing for this long and so many typical answers, its backlog not counted.
_SILENCE_S: Final = 2.0
_SILENCE_ANSWERS: Final = 4.0
_BACKLOG_MARGIN: Final = 3.0
# A streamed token is a hundred bytes and more: an engine that writes is faster than this by far.
_SLOWEST_BYTES_PER_S: Final = 10.0
_WEIGHT: Final = 0.05
_MIN_TOKENS_FOR_RATIO: Final = 64
_BYTES_PER_TOKEN_BOUNDS: Final = (0.5, 16.0)
# A prediction may be off by the blocks of both sides: ours grow with the prompt, the engine's are 16 tokens or more.
_TOLERATED_SHARE: Final = 0.1
_TOLERATED_TOKENS: Final = 64.0
# A prefix is in the cache once its prefill is done, not when it was sent.
_PREFILL_GRACE_S: Final = 1.0
# An engine that sends more at once has no stream to speak of.
_MOST_PER_EVENT: Final = 100.0


def record_endpoint_outcome(run: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect]) -> None:
    """Count the outcome for the endpoint that was chosen, for the one that answered in its place, and for the
    ModelServer.
    """
    table, first = run.pool.table, run.assignment.endpoint
    was_passed_over = bool(outcome.served) and outcome.served != first.address
    served_row = table.row_of(outcome.served) if was_passed_over else None
    for server, address in _failed_before(run, outcome) if outcome.refused else ():
        # Envoy was elsewhere, and has come back
        if server in run.reserves:
            _count_passed_over(run.as_served_by_fallback(run.reserves[server]), outcome, address, now, out)
    if not run.is_part:
        _count_at_server(run, outcome, _failure_of(run, outcome, _row_that_answered(run, outcome)), now, out)
    if _is_load(outcome):
        # what the first endpoint answered is not known: probably the same
        _hold_off(run, table.row_of(outcome.served), outcome, now)
        _release(run)
    elif was_passed_over and run.sent.checks_refusal and not is_engine_error(outcome.status):
        _check_refusal(run, outcome, now, out)
    else:
        if first.address in outcome.refused:
            _release(run)
        elif table.is_current(first):
            _count_first(run, outcome, now, out, was_passed_over=was_passed_over)
        if served_row is not None and outcome.served not in outcome.refused:
            failure = _failure_of(run, outcome, served_row)
            if failure is not None or not _is_inconclusive(outcome):
                _count(run, served_row, UNKNOWN_PASS, failure, now, out)


def _count_first(
    run: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect], *, was_passed_over: bool
) -> None:
    first, is_inconclusive = run.assignment.endpoint, _is_inconclusive(outcome)
    failure = EngineFailure.PASSED_OVER if was_passed_over else _failure_of(run, outcome, first.row)
    if failure is None and is_inconclusive:
        _release(run)
        return
    # of one whose request ended before the next endpoint answered, nobody knows
    is_unavailable = failure is EngineFailure.SILENT or (
        not is_inconclusive
        and (outcome.status in _UNAVAILABLE or (was_passed_over and outcome.status not in _MAYBE_THE_REQUEST))
    )
    _count(run, first.row, first.passed, failure, now, out, is_unavailable=is_unavailable)


def _is_load(outcome: Outcome) -> bool:
    """Whether the endpoint works, and asks for a pause: that is no failure."""
    return outcome.status == 429 or (outcome.status == 503 and outcome.retry_after_s is not None)


def _hold_off(run: DispatchedRequest, row: int | None, outcome: Outcome, now: float) -> None:
    if row is not None:
        _pause(run.pool, run.pool.table.addresses[row], outcome.retry_after_s, now)


def _pause(pool: Pool, address: str, pause_s: float | None, now: float) -> None:
    """The endpoint has asked to be left alone for so long; None: it did not say. A provider asks for all of its
    addresses: its limit is of the key.
    """
    table, asking = pool.table, pool.table.row_of(address)
    if asking is None:
        return
    for row in [asking] if pool.spec.provider is None else list(table.active_rows):
        set_breaker(table, row, table.breakers[row].after_pause_request(max(_LOAD_PAUSE_S, pause_s or 0.0), now))


def _release(run: DispatchedRequest) -> None:
    """The request has shown nothing of its endpoint: if it was a probe, the next one may go."""
    table, first = run.pool.table, run.assignment.endpoint
    if first.passed.ticket and table.is_current(first):
        breaker = table.breakers[first.row]
        if breaker.is_current_result(first.passed, run.sent_at_s):
            set_breaker(table, first.row, breaker.without_probe_lease(first.passed.ticket))


def release_untried_probes(run: DispatchedRequest) -> None:
    """The request has reached none of its engines: those that come next may be the probes that it was."""
    _release(run)
    breaker, passed = run.pool.breaker, run.assignment.passed
    if passed.ticket and breaker.is_current_result(passed, run.sent_at_s):
        run.pool.breaker = breaker.without_probe_lease(passed.ticket)


def _count_at_server(
    run: DispatchedRequest, outcome: Outcome, failure: EngineFailure | None, now: float, out: list[Effect]
) -> None:
    """The ModelServer fails where clients get 5xx or nothing: how answers ended and what they lacked says less. If
    another one answers, it may have been busy; but a probe has failed. Servers of classical models answer 500, or
    INTERNAL, to tensors that the model rejects: that is no failure, or a client could shut the others out.
    """
    pool, passed = run.pool, run.assignment.passed
    breaker, health = pool.breaker, pool.health
    if not breaker.is_current_result(passed, run.sent_at_s):
        return
    is_passed_over = failure is EngineFailure.PASSED_OVER
    rejects = outcome.status == _INTERNAL and pool.spec.protocol != "OpenAI"
    has_failed = not (_is_load(outcome) or rejects) and failure in {EngineFailure.ERROR, EngineFailure.SILENT}
    has_failed = has_failed or (is_passed_over and bool(passed.ticket))
    after = breaker.without_probe_lease(passed.ticket)
    if has_failed and health.should_count_failure(run.sent.tenant):
        health.count_answer(run.sent.tenant, has_failed=True)
        if breaker.trips or mostly_fails(health):
            after = breaker.after_failure(passed.ticket, pool.name, now, needed=_NEEDED)
    elif not has_failed and not is_passed_over and 200 <= outcome.status < 300 and not _is_inconclusive(outcome):
        health.count_answer(run.sent.tenant, has_failed=False)
        after = breaker.after_success(passed.ticket, now)
    if after.generation == breaker.generation:
        pool.breaker = after
    else:
        change_breaker(pool, None, after, out, is_news=True)


def _row_that_answered(run: DispatchedRequest, outcome: Outcome) -> int:
    row = run.pool.table.row_of(outcome.served)
    return run.assignment.endpoint.row if row is None else row


def _check_refusal(run: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect]) -> None:
    """The first endpoint refused the request, and Envoy asked the next one: what that one answers shows the reason."""
    table, first, served_row = run.pool.table, run.assignment.endpoint, run.pool.table.row_of(outcome.served)
    is_the_request = outcome.status >= 400
    if table.is_current(first):
        if is_the_request:
            table.healths[first.row].checks_refusals_until_s = 0.0
            _release(run)
        elif outcome.status:
            table.healths[first.row].start_refusal_check(now)
            _count(run, first.row, first.passed, EngineFailure.REFUSED, now, out, is_evidence=True)
    if served_row is not None and not is_the_request and not _is_inconclusive(outcome):
        _count(run, served_row, UNKNOWN_PASS, _failure_of(run, outcome, served_row), now, out)


def record_attempt_outcomes(
    run: DispatchedRequest, outcome: Outcome, now: float, out: list[Effect], *, is_ours: bool
) -> None:
    """Another ModelServer has answered: the endpoints of all attempts before have failed, or refused the prompt.

    Of times nothing is learned, as they count from the request's arrival.
    """
    runs = {
        run.pool.name: run,
        **{server: run.as_served_by_fallback(reserve) for server, reserve in run.reserves.items()},
    }
    if run.assignment.endpoint.address in outcome.refused:
        _release(run)
    failed = _failed_before(run, outcome)
    for server, address in failed:
        if server in outcome.pauses:
            _pause(runs[server].pool, address, outcome.pauses[server], now)
        else:
            _count_passed_over(runs[server], outcome, address, now, out)
    own = [address for server, address in failed if server == run.pool.name]
    passed_on = EngineFailure.PASSED_OVER if own else EngineFailure.REFUSED
    passed_on = passed_on if outcome.errors.isdisjoint(own) else EngineFailure.ERROR
    _count_at_server(run, outcome, passed_on, now, out)
    there = runs.get(outcome.served_by)
    row = None if there is None else there.pool.table.row_of(outcome.served)
    if there is None or row is None or outcome.status == 0 or outcome.has_left:
        return
    failure = _failure_of(there, outcome, row)
    if failure is None and _is_inconclusive(outcome):
        return
    _count_at_server(there, outcome, failure, now, out)
    if _is_load(outcome):
        _hold_off(there, row, outcome, now)
    elif outcome.served not in outcome.refused:
        _count(there, row, UNKNOWN_PASS, failure, now, out)
    if 200 <= outcome.status < 300:
        there.pool.caches.record(row, there.sent.chain, now)
        _count_tokens(there, outcome, is_ours=is_ours)
        _learn_output(there, outcome, is_ours=is_ours)
        _learn_turn(there, outcome)


def _failed_before(run: DispatchedRequest, outcome: Outcome) -> list[tuple[str, str]]:
    return [one for one in _tried_before(run, outcome) if one[1] not in outcome.refused]


def _tried_before(run: DispatchedRequest, outcome: Outcome) -> list[tuple[str, str]]:
    """The ModelServer and address of each attempt before the last. Of a request of another process, only the first is
    known. After a refusal, those ModelServers that take the request come first.
    """
    if run.attempts is None:
        return [(run.pool.name, run.assignment.endpoint.address)]
    left, takers = list(zip(run.attempts.servers, run.attempts.addresses, strict=True)), dict(run.attempts.refusals)
    found, asked = list[tuple[str, str]](), set[str]()
    while left and len(found) < outcome.attempts - 1:
        server, address = left.pop(0)
        found.append((server, address))
        if address in outcome.refused:
            asked.add(server)
            may = {*takers.get(outcome.refused[address], ())} - asked
            left = [one for one in left if one[0] in may] + [one for one in left if one[0] not in may]
    return found


def _count_passed_over(run: DispatchedRequest, outcome: Outcome, address: str, now: float, out: list[Effect]) -> None:
    """Another model has served the request. So it may be the reason, where the endpoint has answered 500, or has served
    another request since.
    """
    table, first = run.pool.table, run.assignment.endpoint
    row = table.row_of(address)
    if row is not None and (address != first.address or table.is_current(first)):
        passed = first.passed if address == first.address else UNKNOWN_PASS
        health, is_error = table.healths[row], address in outcome.errors
        failure = EngineFailure.ERROR if is_error else EngineFailure.PASSED_OVER
        if is_error or health.served_at_s > run.sent_at_s:
            _count(run, row, passed, failure, now, out, is_evidence=health.should_count_failure(run.sent.tenant))
        else:
            _count(run, row, passed, failure, now, out, is_unavailable=True)


def _is_inconclusive(outcome: Outcome) -> bool:
    """Whether the client left, or a time limit was over, before the engine could show what it would have answered."""
    has_left = outcome.has_left and outcome.status < 400 and outcome.prompt_tokens is None
    return outcome.status == 0 or has_left or outcome.has_timed_out


def _failure_of(run: DispatchedRequest, outcome: Outcome, row: int) -> EngineFailure | None:
    if _is_inconclusive(outcome):
        is_silent = _is_slow(outcome) and run.pool.table.healths[row].served_at_s < run.sent_at_s
        return EngineFailure.SILENT if is_silent and _had_time(run, outcome) else None
    if is_engine_error(outcome.status):
        return EngineFailure.ERROR
    if outcome.status >= 400:
        return EngineFailure.REFUSED
    if outcome.was_cut:
        return EngineFailure.CUT
    has_no_usage = outcome.prompt_tokens is None and not outcome.is_encoded
    is_expected = run.sent.expects_usage and run.pool.reports_usage
    return EngineFailure.NO_USAGE if has_no_usage and is_expected else None


def _had_time(run: DispatchedRequest, outcome: Outcome) -> bool:
    """Whether any engine would have answered by then. A route's limit says so; a client may wait as briefly as it likes
    for as many requests as it likes.
    """
    if outcome.has_timed_out and not outcome.is_own_limit:
        return True
    return bool(run.pool.typical_duration_s) and outcome.duration_s - run.sent.waited_s > _patience_s(run)


def _is_slow(outcome: Outcome) -> bool:
    """Whether nothing was answered, or next to nothing for the time that it took."""
    if outcome.ttfb_s is None or outcome.answer_bytes is None:
        return outcome.ttfb_s is None
    return outcome.answer_bytes < _SLOWEST_BYTES_PER_S * (outcome.duration_s - outcome.ttfb_s)


def _count(
    run: DispatchedRequest,
    row: int,
    passed: BreakerPass,
    failure: EngineFailure | None,
    now: float,
    out: list[Effect],
    *,
    is_unavailable: bool = False,
    is_evidence: bool | None = None,
) -> None:
    """``passed``: with what the request has passed the endpoint's breaker. ``is_unavailable``: one such failure is
    enough to open it. ``is_evidence``: whether a failure counts against the endpoint; None: that of a refusal is
    judged, and any other counts.
    """
    pool, health, breaker = run.pool, run.pool.table.healths[row], run.pool.table.breakers[row]
    if failure is None and run.is_on_time and not run.is_part:
        _learn_duration(run, now)
    if not breaker.is_current_result(passed, run.sent_at_s):
        return
    if failure is None:
        record_good_answer(pool.table, row, now=now, tenant=run.sent.tenant)
        _set_breaker(pool, row, breaker.after_success(passed.ticket, now), out)
        return
    if is_evidence is None:
        is_evidence = failure is not EngineFailure.REFUSED or _is_evidence(run, health, now)
    if run.is_on_time and is_evidence and record_bad_answer(pool.table, row, failure, tenant=run.sent.tenant):
        out.append(HealthChanged(pool.name, pool.table.addresses[row], failure))
    if is_unavailable or (health.is_suspect and is_evidence):
        key, needed = breaker_key(pool.name, pool.table.addresses[row]), _NEEDED if health.is_suspect else 1
        is_costly = failure is EngineFailure.SILENT
        after = breaker.after_failure(passed.ticket, key, now, needed=needed, is_costly=is_costly)
    elif failure in {EngineFailure.PASSED_OVER, EngineFailure.SILENT} or health.is_suspect:
        after = breaker.without_probe_lease(passed.ticket)
    else:
        # it refuses or fails this request, but it is reachable
        after = breaker.after_success(passed.ticket, now)
    _set_breaker(pool, row, after, out)


def _set_breaker(pool: Pool, row: int, after: Breaker, out: list[Effect]) -> None:
    before = pool.table.breakers[row]
    if after.generation != before.generation:
        change_breaker(pool, row, after, out, is_news=True)
    elif after is not before:
        set_breaker(pool.table, row, after)


def _is_evidence(run: DispatchedRequest, health: EndpointHealth, now: float) -> bool:
    """Whether a refusal counts against its endpoint."""
    if run.sent.checks_refusal is not None:
        health.start_refusal_check(now)
        if not run.sent.checks_refusal:
            return False
    return health.should_count_refusal(run.sent.tenant, hash((*run.sent.chain[-1:], run.sent.tail)))


def _learn_duration(run: DispatchedRequest, now: float) -> None:
    pool, took_s = run.pool, now - run.sent_at_s
    pool.typical_duration_s += (_WEIGHT if pool.typical_duration_s else 1.0) * (took_s - pool.typical_duration_s)


def _patience_s(run: DispatchedRequest) -> float:
    """After so long without any answer of its engine, a request is overdue."""
    prefill = run.assignment.prefilled_by
    backlog_s = run.assignment.tokens_ahead / float(run.pool.table.prefill_rate[prefill.row])
    return _SILENCE_S + _SILENCE_ANSWERS * run.pool.typical_duration_s + _BACKLOG_MARGIN * backlog_s


class SilentEngineSweep:
    """Counts a request as a failure if its engine has answered neither it nor any other since it was sent.

    A running request has no outcome before it ends, and a long answer is no failure. But an engine that has requests
    and ends none of them, while the others do, hangs.
    """

    def __init__(self, records: Mapping[str, RequestRecord]) -> None:
        self._records = records
        # by pool: when it is time for the next check
        self.sweep_at_s: dict[str, float] = {}

    def sweep(self, pool: Pool, now: float, out: list[Effect]) -> None:
        """Called with a request once a second; checks single requests only where an engine is silent."""
        self.sweep_at_s[pool.name] = now + SWEEP_S
        if not _has_silent_engine(pool, now):
            return
        for record in self._records.values():
            if record.run is not None and record.run.pool is pool and record.state is RequestState.RUNNING:
                _count_if_overdue(record.run, now, out)


def _has_silent_engine(pool: Pool, now: float) -> bool:
    if not pool.typical_duration_s:
        return False
    limit_s, table = _SILENCE_S + _SILENCE_ANSWERS * pool.typical_duration_s, pool.table
    return any(table.in_flight[row] and now - table.healths[row].served_at_s > limit_s for row in table.active_rows)


def _count_if_overdue(run: DispatchedRequest, now: float, out: list[Effect]) -> None:
    table, first = run.pool.table, run.assignment.endpoint
    if not run.is_on_time or not table.is_current(first):
        return
    if now - max(run.sent_at_s, table.healths[first.row].served_at_s) > _patience_s(run):
        is_probe = bool(first.passed.ticket)
        _count(run, first.row, first.passed, EngineFailure.SILENT, now, out, is_unavailable=is_probe)
        run.is_on_time = False


def apply_engine_report(pools: Mapping[str, Pool], event: EngineReported, now: float, out: list[Effect]) -> None:
    """Apply an engine's report, read by this process or by another."""
    pool = pools.get(event.server)
    row = pool.table.row_of(event.address) if pool is not None else None
    if pool is None or row is None:
        return
    if event.models is not None:
        models = event.models if pool.slots is None else pool.slots.with_recent_changes(row, event.models, now)
        loras, base = pool.table.loras[row], event.base_models
        pool.table.set_loras(
            row, msgspec.structs.replace(loras, served=models, base=base, context_tokens=event.context_tokens)
        )
        pool.table.healths[row].listed_at_s = now
        if update_missing_model(pool, row):
            out.append(EngineModelsListed(pool.name, event.address, pool.table.healths[row].lacks_model, base))
        return
    apply_report(pool.table, row, event.state, now)
    if event.has_restarted:
        pool.apis_without_model.clear()
        pool.caches.on_cache_lost(row)
        if pool.slots is not None:
            pool.slots.on_engine_restart(row)
    if event.cache is not None:
        pool.caches.set_cache_config(row, event.cache)
        pool.table.kv_capacity_tokens[row] = event.cache.total_tokens


def apply_adapter_change(pools: Mapping[str, Pool], event: AdapterChanged, now: float) -> None:
    """Another process has changed which adapters an engine has."""
    pool = pools.get(event.server)
    row = pool.table.row_of(event.address) if pool is not None else None
    if pool is not None and row is not None and pool.slots is not None and event.adapter in pool.slots.sources:
        pool.slots.record_change(row, event.adapter, event.change, now, is_ours=False)


def update_estimates(run: DispatchedRequest, outcome: Outcome, now: float, *, is_ours: bool, has_limits: bool) -> None:
    """Correct the estimates of the pool and its endpoints.

    ``is_ours``: this process decided the request. ``has_limits``: its route reserves tokens, so their estimate matters.
    """
    if run.sent.waited_s and outcome.ttfb_s is not None:
        # engines are judged by the time since dispatch
        outcome = msgspec.structs.replace(outcome, ttfb_s=max(0.0, outcome.ttfb_s - run.sent.waited_s))
    _learn_endpoint(run, outcome, now)
    if outcome.ttfb_s is not None and outcome.served == run.assignment.endpoint.address:
        finish_prefill(run.pool.table, run.assignment.prefilled_by, now)
    if not 200 <= outcome.status < 300:
        return
    _count_tokens(run, outcome, is_ours=is_ours)
    _learn_output(run, outcome, is_ours=is_ours)
    _learn_bytes_per_token(run, outcome, has_limits=has_limits)
    if run.has_stored_prompt and run.input_estimate is not None and outcome.prompt_tokens is not None:
        run.input_estimate.learn_stored_prompt(outcome.prompt_tokens)
    _learn_turn(run, outcome)
    if outcome.served != run.assignment.endpoint.address:
        return
    _learn_service_time(run, outcome, now)
    if run.prefilled_by:
        _learn_transfer(run, outcome)
    else:
        _learn_rate(run, outcome)
        _learn_prefix(run, outcome)
    _learn_latency(run, outcome)


def forget_missing_adapter(run: DispatchedRequest, outcome: Outcome, now: float) -> None:
    """An engine that answers 404 has the request's adapter no more: it has restarted, or another client unloaded it."""
    slots, row, adapter = run.pool.slots, run.pool.table.row_of(outcome.served), run.assignment.adapter
    if slots is None or row is None or adapter is None or outcome.status != 404:
        return
    if run.sent_at_s >= slots.loaded_at_s(row, adapter):
        slots.record_change(row, adapter, "gone", now, is_ours=True)


def _learn_endpoint(run: DispatchedRequest, outcome: Outcome, now: float) -> None:
    table, first = run.pool.table, run.assignment.endpoint
    was_passed_over = bool(outcome.served) and outcome.served != first.address
    served_row = table.row_of(outcome.served)
    if was_passed_over and served_row is not None:
        run.pool.caches.record(served_row, run.sent.chain, now)


def _learn_turn(run: DispatchedRequest, outcome: Outcome) -> None:
    """The engine that answered now has the answer in its cache, too."""
    row = run.pool.table.row_of(outcome.served)
    if row is not None and outcome.completion_tokens:
        caches = run.pool.caches
        answer_bytes = outcome.completion_tokens * caches.bytes_per_token
        caches.index.record_turn(row, run.sent.chain, ConversationTurn(run.sent.tail, answer_bytes))


def _count_tokens(run: DispatchedRequest, outcome: Outcome, *, is_ours: bool) -> None:
    if outcome.cached_tokens is not None:
        run.pool.reports_cached_tokens = True
    if outcome.prompt_tokens is not None:
        run.pool.reports_usage = True
    row = run.pool.table.row_of(outcome.served)
    if is_ours and row is not None and outcome.prompt_tokens is not None:
        run.pool.table.prompt_tokens[row] += outcome.prompt_tokens
        run.pool.table.cached_tokens[row] += outcome.cached_tokens or 0


def _learn_output(run: DispatchedRequest, outcome: Outcome, *, is_ours: bool) -> None:
    if outcome.completion_tokens is None or not run.sent.answers:
        return
    caches, tokens = run.pool.caches, outcome.completion_tokens / run.sent.answers
    caches.output_tokens += _WEIGHT * (tokens - caches.output_tokens)
    if outcome.events and not (outcome.is_cut or outcome.has_left or outcome.was_cut):
        per_event = min(_MOST_PER_EVENT, max(1.0, outcome.completion_tokens / outcome.events))
        run.pool.tokens_per_event += _WEIGHT * (per_event - run.pool.tokens_per_event)
    # of a request of another process it is not known whether it had a bound
    if is_ours and math.isinf(run.most_output):
        run.pool.output_estimate.learn(tokens)


def _learn_bytes_per_token(run: DispatchedRequest, outcome: Outcome, *, has_limits: bool) -> None:
    tokens = outcome.prompt_tokens
    caches = run.pool.caches
    if not run.sent.prompt_bytes:
        return
    if tokens is not None and has_limits and run.input_estimate is not None:
        run.input_estimate.learn(
            prompt_bytes=run.sent.prompt_bytes,
            bytes_per_token=ASSUMED_BYTES_PER_TOKEN,
            tokens=tokens,
            prompts=run.prompts,
        )
    if tokens is not None and tokens >= _MIN_TOKENS_FOR_RATIO:
        low, high = _BYTES_PER_TOKEN_BOUNDS
        ratio = min(high, max(low, run.sent.prompt_bytes / tokens))
        # the first answer has more weight than the assumption
        weight = max(_WEIGHT, 1 / (1.25 + caches.ratio_samples))
        caches.ratio_samples += 1
        caches.bytes_per_token *= (ratio / caches.bytes_per_token) ** weight
        caches.fit_block_size()


def _learn_service_time(run: DispatchedRequest, outcome: Outcome, now: float) -> None:
    """Of requests whose bodies are not read: each counts as one token, so the tokens in flight are the requests."""
    assignment, table = run.assignment, run.pool.table
    is_unread = run.api is not None and run.api.spec.body == "unread"
    if not is_unread or not outcome.engine_s or not table.is_current(assignment.endpoint):
        return
    learn_service_time(
        table, assignment.endpoint.row, engine_s=outcome.engine_s, in_flight=assignment.in_flight_tokens, now=now
    )


def _learn_rate(run: DispatchedRequest, outcome: Outcome) -> None:
    # a plain answer's first byte comes with its last
    if not run.sent.is_streamed or outcome.ttfb_s is None or not run.pool.table.is_current(run.assignment.prefilled_by):
        return
    pool, assignment = run.pool, run.assignment
    pool.typical_ttft_s += _WEIGHT * (outcome.ttfb_s - pool.typical_ttft_s)
    cost, row = pool.caches.prompt_cost, assignment.prefilled_by.row
    ahead = max(0.0, assignment.tokens_ahead - assignment.work)
    cached = float(outcome.cached_tokens or 0)
    uncached = assignment.input_tokens - assignment.cached_tokens
    if outcome.prompt_tokens is not None:
        uncached = outcome.prompt_tokens - cached
    own = cost.prefill_work(uncached, cached)
    rate = float(pool.table.prefill_rate[row])
    seconds = (outcome.ttfb_s - ahead / rate) * rate / typical_prefill_rate(pool.table)
    cost.learn(uncached=uncached, cached=cached, seconds=seconds, share=own / (own + ahead + 1.0))
    tokens_ahead = ahead + own + cost.overhead
    learn_prefill_rate(pool.table, row, tokens_ahead=tokens_ahead, ttft_s=outcome.ttfb_s)


def _learn_transfer(run: DispatchedRequest, outcome: Outcome) -> None:
    """From the end of a prefill to the first token: the KV cache's way, and one step of the decode engine."""
    protocol = run.pool.prefill_protocol
    if protocol is not None and protocol.is_beside:
        # it moves while the prefill runs
        return
    if run.sent.is_streamed and outcome.ttfb_s is not None and run.pool.transfers is not None:
        assignment = run.assignment
        run.pool.transfers.learn(
            run.prefilled_by, assignment.endpoint.address, tokens=assignment.moved_tokens, seconds=outcome.ttfb_s
        )


def _learn_latency(run: DispatchedRequest, outcome: Outcome) -> None:
    if not run.sent.is_streamed or outcome.ttfb_s is None:
        return
    pool, assignment = run.pool, run.assignment
    if pool.table.is_current(assignment.endpoint):
        # of each answer: all are written side by side
        written = (outcome.completion_tokens or 0) / max(1, run.sent.answers) - 1
        tpot_s = (outcome.duration_s - run.sent.waited_s - outcome.ttfb_s) / written if written > 0 else None
        record_latency(pool.table, assignment.endpoint.row, ttft_s=outcome.ttfb_s, tpot_s=tpot_s)
        if tpot_s is not None and assignment.in_flight_tokens:
            now_there = float(pool.table.in_flight_tokens[assignment.endpoint.row]) + assignment.tokens
            tokens = (assignment.in_flight_tokens + now_there) / 2
            pool.caches.answer_cost.learn(tokens=tokens, tpot_s=tpot_s)
            pool.caches.decode_speed.learn(tokens=tokens, tpot_s=tpot_s)
            pool.caches.decode_speed.learn_spread(tokens=assignment.in_flight_tokens, tpot_s=tpot_s)


def _learn_prefix(run: DispatchedRequest, outcome: Outcome) -> None:
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
        index.on_confirmed_prediction(endpoint.row)
        expected = assignment.cached_tokens - assignment.indexed_tokens
        if not assignment.is_precise and expected >= _TOLERATED_TOKENS:
            index.turns.learn_answer_share(expected=expected, found=reported - assignment.indexed_tokens)
    elif run.sent_at_s - assignment.last_used_at_s > _PREFILL_GRACE_S + 2 * pool.typical_ttft_s:
        index.on_missed_prediction(endpoint.row, assignment.last_used_at_s)
