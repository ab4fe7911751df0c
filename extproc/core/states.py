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
IGNORED: Final[frozenset[State]] = frozenset()
# What it does or waits for, in spans and on the console.
StepName = Literal["limits", "guard", "tokenize", "engine", "adapter", "queue", "prefill"]


class State(enum.IntEnum):
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


class Event(enum.IntEnum):
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
_BEHIND_ENGINES: Final = tuple(one for one in State if State.AWAITING_ENGINE < one < State.PREFILLING)


def _to(*states: State) -> frozenset[State]:
    return frozenset(states)


def _on(state: State) -> frozenset[State]:
    """To any later step up to an engine, as each may be skipped; behind the engines also to the same or an earlier one,
    as what it gave may be gone; or it is refused.
    """
    back = (one for one in _BEHIND_ENGINES if one <= state)
    return _to(*(one for one in State if state < one <= State.RUNNING), *back, State.ABSENT)


_GONE: Final = _to(State.ABSENT)
# Events of other processes and outcomes come late, or more than once.
_LATE: Final = {Event.STARTED_ELSEWHERE: IGNORED, Event.OUTCOME: IGNORED}
# Until an engine gets it.
_BEFORE: Final = {**_LATE, Event.LEFT: _GONE, Event.FINISHED: _GONE}
_HELD: Final = {**_BEFORE, Event.GIVEN_UP: _GONE}
_HELD_AT_ENGINES: Final = {**_HELD, Event.ENGINES_GONE: _to(State.AWAITING_ENGINE)}

# What may happen in each state, and the states that it may lead to. Any other event is a mistake of its sender.
TRANSITIONS: Final[dict[State, dict[Event, frozenset[State]]]] = {
    State.ABSENT: {
        **_LATE,
        Event.ARRIVED: _on(State.ABSENT),
        Event.STARTED_ELSEWHERE: _to(State.RUNNING, State.ABSENT),
        Event.ANSWERED: IGNORED,  # its client went away meanwhile; what was granted is given back
        Event.LEFT: IGNORED,
        Event.FINISHED: IGNORED,
    },
    **{
        state: {**_BEFORE, Event.ANSWERED: _on(state)}
        for state in (State.ASKING_LIMITS, State.ASKING_GUARD, State.ASKING_TOKENS)
    },
    State.AWAITING_ENGINE: {**_HELD, Event.GRANTED: _on(State.AWAITING_ENGINE)},
    **{state: {**_HELD_AT_ENGINES, Event.GRANTED: _on(state)} for state in _BEHIND_ENGINES},
    # after a failure, it goes to another prefill engine
    State.PREFILLING: {**_BEFORE, Event.GRANTED: _to(State.PREFILLING, State.RUNNING, State.ABSENT)},
    State.RUNNING: {
        **_LATE,
        Event.LEFT: _GONE,  # the answer reached no gateway, so no engine got the request
        Event.FINISHED: _to(State.ENDED),
        Event.OUTCOME: _to(State.SETTLED),
    },
    State.SETTLED: {**_LATE, Event.LEFT: _GONE, Event.FINISHED: _GONE},
    State.ENDED: {
        **_LATE,
        Event.LEFT: IGNORED,
        Event.FINISHED: IGNORED,
        Event.OUTCOME: _GONE,
        Event.FORGOTTEN: _GONE,
    },
}


def _states_that_take(event: Event) -> frozenset[State]:
    return frozenset(state for state, legal in TRANSITIONS.items() if legal.get(event))


# Something outside of the core is asked for it.
ASKING: Final = _states_that_take(Event.ANSWERED)
# It is held here.
WAITING: Final = _states_that_take(Event.GIVEN_UP)
# It is held for something that only its server's engines have.
WAITING_AT_ENGINES: Final = _states_that_take(Event.ENGINES_GONE)
# Its stream waits for a decision, and that time is not the answer's.
HELD: Final = _states_that_take(Event.GRANTED)
# It counts at its engines: bytes may still flow.
IN_FLIGHT: Final = _to(State.PREFILLING, State.RUNNING, State.SETTLED)

STEP_NAMES: Final[Mapping[State, StepName]] = MappingProxyType(
    {
        State.ASKING_LIMITS: "limits",
        State.ASKING_GUARD: "guard",
        State.ASKING_TOKENS: "tokenize",
        State.AWAITING_ENGINE: "engine",
        State.LOADING: "adapter",
        State.QUEUED: "queue",
        State.PREFILLING: "prefill",
    }
)

# TRANSITIONS by the positions of a state and an event, None where the event is illegal: the request path reads it at
# every event.
SUCCESSORS: Final = tuple(tuple(TRANSITIONS[state].get(event) for event in Event) for state in State)
