# SPDX-License-Identifier: Apache-2.0
"""What the core asks its shell to do: each verb returns a list of these effects."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.admission.flows import QueuedRequest
from extproc.admission.limits import Charge, Grant, Usage
from extproc.core.explanation import Explanation
from extproc.core.peers import PeerEvent
from extproc.core.record import Arrival, LoadResult, Outcome
from extproc.endpoints.health import Failure
from extproc.errors import Refusal
from extproc.scheduling.pool import Assignment


class Decision(msgspec.Struct, frozen=True):
    """Answer: the request goes to these endpoints.

    ``body``: what to send instead of the client's body, None to send that. ``queued``: its entry in its server's queue,
    None without flow control, where it waited for ``waited_s``. ``was_held``: it waited there, or for its adapter for
    ``adapter_wait_s``, or for an engine of its server for ``engine_wait_s``. ``adds_usage``: we asked the engine for
    usage that the client did not ask for, so the client must not see it. ``policy``: the server's time limit and
    retries, as ``TrafficPolicy.route`` writes them.
    """

    ticket: str
    server: str
    assignment: Assignment
    body: bytes | None
    explanation: Explanation | None = None
    queued: QueuedRequest | None = None
    was_held: bool = False
    waited_s: float = 0.0
    adapter_wait_s: float = 0.0
    engine_wait_s: float = 0.0
    grants: tuple[Grant, ...] = ()
    adds_usage: bool = False
    policy: str = ""

    @property
    def held_s(self) -> float:
        """From its arrival to this decision."""
        return self.waited_s + self.adapter_wait_s + self.engine_wait_s


class Refused(msgspec.Struct, frozen=True):
    """Answer: the request is refused. ``was_held``: it waited in its server's queue, for its adapter or for an
    engine.
    """

    ticket: str
    refusal: Refusal
    arrival: Arrival
    queued: QueuedRequest | None = None
    was_held: bool = False


class AskLimits(msgspec.Struct, frozen=True):
    """Ask the shared store for a grant, then ``resume`` with a Grant, a Refusal, StoreAway if it does not answer, or
    None if there is no store.
    """

    ticket: str
    charges: Sequence[Charge]


class AskTokens(msgspec.Struct, frozen=True):
    """Ask for the prompt's tokens, then ``resume`` with them, or with None."""

    ticket: str
    arrival: Arrival


class Hold(msgspec.Struct, frozen=True):
    """The request waits for an engine to have room; a Decision or Refused with its ticket comes after ``longest_s`` at
    most.
    """

    ticket: str
    longest_s: float


class AwaitAdapter(msgspec.Struct, frozen=True):
    """The request waits for its adapter, and then maybe in the queue; a Decision or Refused with its ticket comes after
    ``longest_s`` at most.
    """

    ticket: str
    adapter: str
    longest_s: float


class AwaitEngine(msgspec.Struct, frozen=True):
    """The request waits for an engine of ``server``, which has none, and then maybe for its adapter and in the queue; a
    Decision or Refused with its ticket comes after ``longest_s`` at most.
    """

    ticket: str
    server: str
    longest_s: float


class WaitsForEngine(msgspec.Struct, frozen=True):
    """A request has begun to wait for an engine of ``server``, the first to do so: one must be started."""

    server: str


class EngineStarted(msgspec.Struct, frozen=True):
    """``server`` has an engine again. ``after_s``: since the first request began to wait for it."""

    server: str
    after_s: float


class LoadAdapter(msgspec.Struct, frozen=True):
    """Have the engine at ``address`` load an adapter, then ``take_load`` with a LoadResult.

    ``source``: where its weights are. ``unload``: the adapter that is unloaded first. ``timeout_s``: for all of it.
    """

    server: str
    address: str
    adapter: str
    source: str
    unload: str | None
    timeout_s: float


class LoadEnded(msgspec.Struct, frozen=True):
    """A load has ended, well or not."""

    result: LoadResult


class Left(msgspec.Struct, frozen=True):
    """The client of a held request went away."""

    ticket: str
    server: str
    queued: QueuedRequest


class SettleGrant(msgspec.Struct, frozen=True):
    """Settle a grant in the shared store. ``used=None`` refunds all: the request was never dispatched."""

    grant: Grant
    used: Usage | None


class Owe(msgspec.Struct, frozen=True):
    """The shared store is to be charged ``amount`` that was used without it; negative: less than was said before."""

    charge: Charge
    amount: float


class Tell(msgspec.Struct, frozen=True):
    """Tell the other processes."""

    event: PeerEvent


class Settled(msgspec.Struct, frozen=True):
    """An outcome was joined with the decision that led to it.

    ``is_ours``: this process decided the request. ``service``: its cost in weighted tokens, 0 without flow control.
    """

    server: str
    assignment: Assignment
    outcome: Outcome
    is_ours: bool = True
    queued: QueuedRequest | None = None
    service: float = 0.0


class HealthChanged(msgspec.Struct, frozen=True):
    """An endpoint became a suspect, fails in another way, or is trusted again (``failure`` None)."""

    server: str
    address: str
    failure: Failure | None


class Fault(msgspec.Struct, frozen=True):
    """Code has failed over something that can go on without it; to be logged. ``what``: could not be done.

    ``plugin``: of another package, by its name in the picker's file of ``server``; empty if the code is ours.
    """

    what: str
    error: BaseException
    server: str = ""
    plugin: str = ""


class WakeAt(msgspec.Struct, frozen=True):
    """Call ``tick`` at this time, or soon if it has passed: held requests may go then."""

    at_s: float


# What a request may have to wait for after ``arrive`` or ``resume``; held ones end with a Decision or Refused.
Held = AwaitEngine | AwaitAdapter | Hold
Pending = AskLimits | AskTokens | Held
# What each step of a request says of the request itself: its answer, or what it waits for.
RequestEffect = Decision | Refused | Pending
Effect = (
    Decision
    | Refused
    | AskLimits
    | AskTokens
    | AwaitEngine
    | WaitsForEngine
    | EngineStarted
    | AwaitAdapter
    | LoadAdapter
    | LoadEnded
    | Hold
    | Left
    | SettleGrant
    | Owe
    | Tell
    | Settled
    | HealthChanged
    | Fault
    | WakeAt
)
