# SPDX-License-Identifier: Apache-2.0
"""What outcomes, and outcomes that do not come, say of the health of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.effects import HealthChanged
from extproc.core.states import State
from extproc.endpoints.health import Failure
from extproc.endpoints.outliers import record_bad_answer, record_failure, record_good_answer, record_success

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.effects import Effect
    from extproc.core.record import Record, Run
    from extproc.core.types import Outcome
    from extproc.scheduling.pool import Pool

# Statuses by which an engine, or Envoy on its behalf, says that it could not take the request at all.
_UNAVAILABLE: Final = frozenset({502, 503, 504})
# Envoy tries these on the next endpoint; if that one answers the same, the request itself may be the reason.
_MAYBE_THE_REQUEST: Final = frozenset({429, 500})
_WEIGHT: Final = 0.05
# An endpoint is silent if it answers nothing for this long and so many typical answers, its backlog not counted.
_SILENCE_S: Final = 2.0
_SILENCE_ANSWERS: Final = 4.0
_BACKLOG_MARGIN: Final = 3.0
# A streamed token is a hundred bytes and more: an engine that writes is faster than this by far.
_SLOWEST_BYTES_PER_S: Final = 10.0
_SWEEP_S: Final = 1.0


def judge(run: Run, outcome: Outcome, now: float, out: list[Effect]) -> None:
    """Count the outcome for the endpoint that was chosen, and for the one that answered in its place."""
    table, first = run.pool.table, run.assignment.endpoint
    was_passed_over = bool(outcome.served) and outcome.served != first.address
    if table.is_current(first):
        failure = Failure.PASSED_OVER if was_passed_over else _failure_of(run, outcome, first.row)
        is_unavailable = (
            outcome.status in _UNAVAILABLE
            or failure is Failure.SILENT
            or (was_passed_over and outcome.status not in _MAYBE_THE_REQUEST)
        )
        if failure is not None or was_passed_over or not _says_nothing(outcome):
            _count(run, first.row, failure, now, out, is_unavailable=is_unavailable)
    served_row = table.row_of(outcome.served)
    if was_passed_over and served_row is not None and not _says_nothing(outcome):
        _count(run, served_row, _failure_of(run, outcome, served_row), now, out)


def _says_nothing(outcome: Outcome) -> bool:
    """Whether the client left before the engine could show what it would have answered."""
    return outcome.status == 0 or (outcome.has_left and outcome.status < 400 and outcome.prompt_tokens is None)


def _failure_of(run: Run, outcome: Outcome, row: int) -> Failure | None:
    if _says_nothing(outcome):
        went_unheard = _is_slow(outcome) and outcome.duration_s - run.waited_s > _patience_s(run)
        is_silent = run.pool.table.healths[row].served_at_s < run.sent_at_s
        return Failure.SILENT if went_unheard and is_silent and run.pool.typical_duration_s else None
    if outcome.status >= 500 or outcome.status in {408, 429}:
        return Failure.ERROR
    if outcome.status >= 400:
        return Failure.REFUSED
    if outcome.was_cut:
        return Failure.CUT
    has_no_usage = outcome.prompt_tokens is None and run.expects_usage and run.pool.reports_usage
    return Failure.NO_USAGE if has_no_usage else None


def _is_slow(outcome: Outcome) -> bool:
    """Whether nothing was answered, or next to nothing for the time that it took."""
    if outcome.ttfb_s is None or outcome.answer_bytes is None:
        return outcome.ttfb_s is None
    return outcome.answer_bytes < _SLOWEST_BYTES_PER_S * (outcome.duration_s - outcome.ttfb_s)


def _count(
    run: Run, row: int, failure: Failure | None, now: float, out: list[Effect], *, is_unavailable: bool = False
) -> None:
    """``is_unavailable``: one such failure is enough to avoid the endpoint."""
    pool, health = run.pool, run.pool.table.healths[row]
    if failure is None:
        if run.is_on_time:
            _learn_duration(run, now)
        if record_good_answer(pool.table, row, now=now, sent_at_s=run.sent_at_s):
            out.append(HealthChanged(pool.name, pool.table.addresses[row], None))
        if not health.is_suspect or (health.probe_at_s and run.sent_at_s >= health.probe_at_s):
            record_success(pool.table, row)
        return
    is_news = False
    if run.is_on_time and not (failure is Failure.REFUSED and health.is_repeated(hash((*run.chain[-1:], run.tail)))):
        is_news = record_bad_answer(pool.table, row, failure, now=now)
    if is_news:
        out.append(HealthChanged(pool.name, pool.table.addresses[row], failure))
    if is_unavailable or health.is_suspect:
        record_failure(pool.table, row, now, sent_at_s=run.sent_at_s, is_costly=failure is Failure.SILENT)
    elif failure not in {Failure.PASSED_OVER, Failure.SILENT}:
        # it refuses or fails this request, but it is there
        record_success(pool.table, row)


def _learn_duration(run: Run, now: float) -> None:
    pool, took_s = run.pool, now - run.sent_at_s
    pool.typical_duration_s += (_WEIGHT if pool.typical_duration_s else 1.0) * (took_s - pool.typical_duration_s)


def _patience_s(run: Run) -> float:
    """After so long without any answer of its engine, a request is overdue."""
    prefill = run.assignment.prefilled_by
    backlog_s = run.assignment.tokens_ahead / float(run.pool.table.prefill_rate[prefill.row])
    return _SILENCE_S + _SILENCE_ANSWERS * run.pool.typical_duration_s + _BACKLOG_MARGIN * backlog_s


class OverdueRequests:
    """Counts requests as failures whose engine answers nothing: not them, and no other since they were sent.

    Nothing is known of a request that runs before it ends, and a long answer is no failure. But an engine that has
    requests and ends none of them, while the others do, hangs.
    """

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = records
        # by pool
        self._swept_at_s: dict[str, float] = {}

    def sweep(self, pool: Pool, now: float, out: list[Effect]) -> None:
        """Called with every request; looks once a second, and at single requests only where an engine is silent."""
        if now < self._swept_at_s.get(pool.name, 0.0) + _SWEEP_S:
            return
        self._swept_at_s[pool.name] = now
        if not _has_silent_engine(pool, now):
            return
        for record in self._records.values():
            if record.run is not None and record.run.pool is pool and record.state is State.RUNNING:
                _count_if_overdue(record.run, now, out)


def _has_silent_engine(pool: Pool, now: float) -> bool:
    if not pool.typical_duration_s:
        return False
    limit_s, table = _SILENCE_S + _SILENCE_ANSWERS * pool.typical_duration_s, pool.table
    return any(table.in_flight[row] and now - table.healths[row].served_at_s > limit_s for row in table.active_rows)


def _count_if_overdue(run: Run, now: float, out: list[Effect]) -> None:
    table, first = run.pool.table, run.assignment.endpoint
    if not run.is_on_time or not table.is_current(first):
        return
    if now - max(run.sent_at_s, table.healths[first.row].served_at_s) > _patience_s(run):
        _count(run, first.row, Failure.SILENT, now, out)
        run.is_on_time = False
