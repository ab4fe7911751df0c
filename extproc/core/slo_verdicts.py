# SPDX-License-Identifier: Apache-2.0
"""Whether what became of a request has kept what its class is promised.

A request is judged once, when its outcome is known, for each objective of its class:

======================================================  ======================================================
what became of it                                        each objective
======================================================  ======================================================
refused by extproc: full queues, no engine, own faults   missed
refused for a limit or budget of its caller, or 4xx      does not count
the engine's or the gateway's 408, 429 or 5xx            missed
an answer that the engine or a time limit cut            missed
the client left                                          missed if the target had passed, TTFT met if content had come
                                                         in time; else does not count
a whole answer                                           met or missed by its time
======================================================  ======================================================

TTFT and TPOT are of streamed answers alone: nobody sees the first token of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extproc.api.slo import ObjectiveName
from extproc.engines.engine_responses import is_engine_error

if TYPE_CHECKING:
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.core.request_record import DispatchedRequest, Outcome
    from extproc.refusals import Refusal


class SloVerdict(msgspec.Struct, frozen=True):
    """Of one objective. ``is_met``: None if the request does not count."""

    objective: ObjectiveName
    is_met: bool | None


class AnswerLatencies(msgspec.Struct, frozen=True):
    """What an answer took, in seconds; None: there was none. ``ttft_s``: until its first content. ``tpot_s``: for each
    further token, on average.
    """

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


def answer_latencies(run: DispatchedRequest, outcome: Outcome) -> AnswerLatencies:
    """Of an answer. Where the gateway has found no content in a whole stream, its first byte counts."""
    if not run.sent.is_streamed:
        return AnswerLatencies(None, None, outcome.duration_s)
    first_s, content_s = outcome.ttfb_s, outcome.first_content_s
    if content_s is None and _has_left(outcome):
        # a first event may have no more than a role
        first_s = None
    # measured by a clock that may be set meanwhile
    elif content_s is not None and (first_s or 0.0) <= content_s <= outcome.duration_s:
        first_s = content_s
    # answers of one request are written side by side
    steps = (outcome.completion_tokens or 0) / max(1, run.sent.answers) - 1
    tpot_s = max(0.0, outcome.duration_s - first_s) / steps if first_s is not None and steps > 0 else None
    return AnswerLatencies(first_s, tpot_s, outcome.duration_s)


def _has_left(outcome: Outcome) -> bool:
    # 0: before there was a status
    return outcome.has_left or outcome.is_cut or not outcome.status


def judge_outcome(one: ObjectiveClass, run: DispatchedRequest, outcome: Outcome) -> tuple[SloVerdict, ...]:
    """Of a request that an engine got."""
    if run.expected.in_background or (outcome.status >= 400 and not is_engine_error(outcome.status)):
        return _all(one, is_streamed=run.sent.is_streamed, is_met=None)
    if outcome.was_cut or outcome.has_timed_out or (outcome.status and not 200 <= outcome.status < 400):
        return _all(one, is_streamed=run.sent.is_streamed, is_met=False)
    times = answer_latencies(run, outcome)
    has_left = _has_left(outcome)
    return tuple(
        SloVerdict(name, _kept(name, target_s, times, has_left=has_left))
        for name, target_s in one.targets_s.items()
        if run.sent.is_streamed or name == "e2e"
    )


def judge_refusal(one: ObjectiveClass, refusal: Refusal, *, is_streamed: bool) -> tuple[SloVerdict, ...]:
    """Of a request that extproc has refused."""
    return _all(one, is_streamed=is_streamed, is_met=None if refusal.is_of_caller else False)


def judge_client_left(one: ObjectiveClass, waited_s: float, *, is_streamed: bool) -> tuple[SloVerdict, ...]:
    """Of a request whose client has left before an engine got it, ``waited_s`` after it came."""
    times = AnswerLatencies(None, None, waited_s)
    return tuple(
        SloVerdict(name, _kept(name, target_s, times, has_left=True))
        for name, target_s in one.targets_s.items()
        if is_streamed or name == "e2e"
    )


def _all(one: ObjectiveClass, *, is_streamed: bool, is_met: bool | None) -> tuple[SloVerdict, ...]:
    return tuple(SloVerdict(name, is_met) for name in one.targets_s if is_streamed or name == "e2e")


def _kept(name: ObjectiveName, target_s: float, times: AnswerLatencies, *, has_left: bool) -> bool | None:
    """None: it cannot be known, or is nobody's fault but the client's."""
    if name == "tpot":
        return None if times.tpot_s is None else times.tpot_s <= target_s
    if name == "ttft" and times.ttft_s is not None:
        return times.ttft_s <= target_s
    # without content, or until the end
    if has_left:
        return False if times.e2e_s > target_s else None
    return times.e2e_s <= target_s
