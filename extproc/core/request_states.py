# SPDX-License-Identifier: Apache-2.0
"""The states of a request and the events that are legal in each, as one table.

    ABSENT ──▶ ASKING_LIMITS ──▶ ASKING_GUARD ──▶ ASKING_TOKENS ──▶ AWAITING_ENGINE ──▶ LOADING ──▶ QUEUED
                                                                                                      ▼
                                                    ABSENT ◀── ENDED or SETTLED ◀── RUNNING ◀── PREFILLING

Any of the states before RUNNING may be skipped, and a refusal ends them. A queued request whose turn comes when its
adapter is gone waits for it again; one whose server has lost its last engine waits for the next one. A prefilling
request counts at both of its engines. A running request has two ends, in any order: its stream closes (FINISHED), and
its outcome becomes known (OUTCOME).
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

# The event is known to come late or twice, and changes nothing.
IGNORED: Final[frozenset[RequestState]] = frozenset()
# What it does or waits for, in spans and on the console.
StepName = Literal["limits", "guard", "tokenize", "engine", "adapter", "queue", "prefill"]


class RequestState(enum.IntEnum):
    """Where a request stands, in the order of its way to an engine and from there.

    ABSENT: there is no record of it, not yet or not any more.
    """

    ABSENT = 0
    ASKING_LIMITS = enum.auto()
    # its limits have granted it, and the guard of its route has not answered
    ASKING_GUARD = enum.auto()
    ASKING_TOKENS = enum.auto()
    # its server has no engine that can take it
    AWAITING_ENGINE = enum.auto()
    # its adapter is being loaded, or waits for room at an engine
    LOADING = enum.auto()
    QUEUED = enum.auto()
    # its engines are picked, and one of them computes its prompt for the other
    PREFILLING = enum.auto()
    # sent to an engine, and its stream is open
    RUNNING = enum.auto()
    # the same, and its outcome is known
    SETTLED = enum.auto()
    # its stream is closed, and its outcome is not known yet
    ENDED = enum.auto()


class RequestEvent(enum.IntEnum):
    """An event of a request."""

    ARRIVED = 0
    # another process sent it to an engine
    STARTED_ELSEWHERE = 1
    # the answer to its request for a grant, to its guard or for tokens, or that there is none
    ANSWERED = 2
    # what it waited for is there: an engine, its adapter, its turn; or the prefill engine has answered, well or not
    GRANTED = 3
    # it waited too long, or gave way to another
    GIVEN_UP = 4
    # its client went away before it was answered
    LEFT = 5
    # its stream is closed
    FINISHED = 6
    OUTCOME = 7
    # its outcome does not come: too many have ended since
    FORGOTTEN = 8
    # the last engine that could take it has gone
    ENGINES_GONE = 9


class IllegalEvent(Exception):
    """An event or a message is not legal in this state; nothing was changed. ``subject``: the request or stream."""

    def __init__(self, event: object, state: object, subject: str, advice: str = "") -> None:
        super().__init__(f"{event} is not legal while {subject} is in state {state}{f'; {advice}' if advice else ''}")


# Where it is held although its server has engines.
_BEHIND_ENGINES: Final = tuple(
    one for one in RequestState if RequestState.AWAITING_ENGINE < one < RequestState.PREFILLING
)


def _to(*states: RequestState) -> frozenset[RequestState]:
    return frozenset(states)


def _on(state: RequestState) -> frozenset[RequestState]:
    """To any later step up to an engine, as each may be skipped; behind the engines also to the same or an earlier one,
    as what it gave may be gone; or it is refused.
    """
    back = (one for one in _BEHIND_ENGINES if one <= state)
    return _to(*(one for one in RequestState if state < one <= RequestState.RUNNING), *back, RequestState.ABSENT)


_GONE: Final = _to(RequestState.ABSENT)
# Events of other processes and outcomes come late, or more than once.
_LATE: Final = {RequestEvent.STARTED_ELSEWHERE: IGNORED, RequestEvent.OUTCOME: IGNORED}
# Until an engine gets it.
_BEFORE: Final = {**_LATE, RequestEvent.LEFT: _GONE, RequestEvent.FINISHED: _GONE}
_HELD: Final = {**_BEFORE, RequestEvent.GIVEN_UP: _GONE}
_HELD_AT_ENGINES: Final = {**_HELD, RequestEvent.ENGINES_GONE: _to(RequestState.AWAITING_ENGINE)}

# What may happen in each state, and the states that it may lead to. Any other event is a mistake of its sender.
TRANSITIONS: Final[dict[RequestState, dict[RequestEvent, frozenset[RequestState]]]] = {
    RequestState.ABSENT: {
        **_LATE,
        RequestEvent.ARRIVED: _on(RequestState.ABSENT),
        RequestEvent.STARTED_ELSEWHERE: _to(RequestState.RUNNING, RequestState.ABSENT),
        RequestEvent.ANSWERED: IGNORED,  # its client went away meanwhile; what was granted is given back
        RequestEvent.LEFT: IGNORED,
        RequestEvent.FINISHED: IGNORED,
    },
    **{
        state: {**_BEFORE, RequestEvent.ANSWERED: _on(state)}
        for state in (RequestState.ASKING_LIMITS, RequestState.ASKING_GUARD, RequestState.ASKING_TOKENS)
    },
    RequestState.AWAITING_ENGINE: {**_HELD, RequestEvent.GRANTED: _on(RequestState.AWAITING_ENGINE)},
    **{state: {**_HELD_AT_ENGINES, RequestEvent.GRANTED: _on(state)} for state in _BEHIND_ENGINES},
    # after a failure, it goes to another prefill engine
    RequestState.PREFILLING: {
        **_BEFORE,
        RequestEvent.GRANTED: _to(RequestState.PREFILLING, RequestState.RUNNING, RequestState.ABSENT),
    },
    RequestState.RUNNING: {
        **_LATE,
        RequestEvent.LEFT: _GONE,  # the answer reached no gateway, so no engine got the request
        RequestEvent.FINISHED: _to(RequestState.ENDED),
        RequestEvent.OUTCOME: _to(RequestState.SETTLED),
    },
    RequestState.SETTLED: {**_LATE, RequestEvent.LEFT: _GONE, RequestEvent.FINISHED: _GONE},
    RequestState.ENDED: {
        **_LATE,
        RequestEvent.LEFT: IGNORED,
        RequestEvent.FINISHED: IGNORED,
        RequestEvent.OUTCOME: _GONE,
        RequestEvent.FORGOTTEN: _GONE,
    },
}


def _states_that_take(event: RequestEvent) -> frozenset[RequestState]:
    return frozenset(state for state, legal in TRANSITIONS.items() if legal.get(event))


# Something outside of the core is asked for it.
ASKING: Final = _states_that_take(RequestEvent.ANSWERED)
# It is held here.
WAITING: Final = _states_that_take(RequestEvent.GIVEN_UP)
# It is held for something that only its server's engines have.
WAITING_AT_ENGINES: Final = _states_that_take(RequestEvent.ENGINES_GONE)
# Its stream waits for a decision, and that time is not the answer's.
HELD: Final = _states_that_take(RequestEvent.GRANTED)
# It counts at its engines: bytes may still flow.
IN_FLIGHT: Final = _to(RequestState.PREFILLING, RequestState.RUNNING, RequestState.SETTLED)

STEP_NAMES: Final[Mapping[RequestState, StepName]] = MappingProxyType(
    {
        RequestState.ASKING_LIMITS: "limits",
        RequestState.ASKING_GUARD: "guard",
        RequestState.ASKING_TOKENS: "tokenize",
        RequestState.AWAITING_ENGINE: "engine",
        RequestState.LOADING: "adapter",
        RequestState.QUEUED: "queue",
        RequestState.PREFILLING: "prefill",
    }
)

# TRANSITIONS by the positions of a state and an event, None where the event is illegal: the request path reads it at
# every event.
SUCCESSORS: Final = tuple(tuple(TRANSITIONS[state].get(event) for event in RequestEvent) for state in RequestState)
