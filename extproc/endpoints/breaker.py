# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers: one for each endpoint, and one for each ModelServer.

=========  ==========================================  ==========================================================
state      who gets through                            how it ends
=========  ==========================================  ==========================================================
closed     all; of an endpoint that has just closed,   a failure opens it (``outliers.py`` has which)
           a part that grows for 10 s
open       nobody                                      the pause ends: 1 s, then twice as long after each failure
                                                       of a probe, 30 s at most, each by up to a fifth longer or
                                                       shorter
half-open  one probe at a time; of a ModelServer's     ``needed`` probes succeed: closed. One fails: open
           requests, one in a hundred beside it
=========  ==========================================  ==========================================================

Open becomes half-open by the time alone, so there is no timer that could be lost.

**Generations.** Each change begins a generation. A request notes that of its dispatch, and its result changes nothing
if the generation is another one by then: neither a late failure nor a late success says how the endpoint is now.

**Probes.** A probe holds a lease, which ends with its result. A probe whose stream has ended is given some seconds for
its result, and one that takes long lets another one go; its own result still counts. So a probe without a result
delays the next one, and shuts nobody out.

**Several processes** repeat each other's requests and results, and so each other's breakers; pauses are jittered by a
hash of the breaker's key, so that they are equal everywhere. Only one of them may begin a probe: second by second the
next one in an order by rendezvous hashing (Thaler and Ravishankar 1998). Where one has other news than the others, the
later generation holds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
import xxhash

_INITIAL_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_JITTER: Final = 0.2
# After so many failures the pause is 8 s.
_COSTLY_TRIPS: Final = 3
# An engine that answers nothing keeps its probe until the client gives up: others must not follow every second.
_MIN_LEASE_S: Final = 5.0
# Outcomes come after the ends of streams, in batches.
_OUTCOME_S: Final = 2.0
# Probes whose results still count, the earliest first; the results of others change nothing.
_MOST_PROBES: Final = 64
SLOW_START_S: Final = 10.0
_LEAST_SHARE: Final = 0.1
# Of the requests of a ModelServer that is half-open, beside the probe.
_TRICKLE: Final = 0.01
# Each second another process may begin the probe, but for the last part, in which news of one may be on its way.
_TURN_S: Final = 1.0
_TURN_USED_S: Final = 0.8
_LONGEST_WAIT_S: Final = 3600.0
# A peer's later one is no generation: numbers on the wire are bounded.
_MOST_GENERATION: Final = 1 << 53


class BreakerState(enum.IntEnum):
    """As the metric has it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2

    @property
    def text(self) -> str:
        """For people."""
        return self.name.lower().replace("_", "-")


class BreakerPass(msgspec.Struct, frozen=True, array_like=True):
    """With what a request has passed a breaker. ``generation``: the breaker's then, -1 if it is not known.
    ``ticket``: of the request if it is a probe, else empty.
    """

    generation: int = -1
    ticket: str = ""


UNKNOWN_PASS: Final = BreakerPass()
# Of a breaker that has never changed.
FIRST_PASS: Final = BreakerPass(0)


class Breaker(msgspec.Struct, frozen=True, array_like=True):
    """The state of one breaker. Instants are of the clock that callers pass as ``now``.

    ``trips``: openings since it was closed, 0 while it is closed. ``since_s``: the first of them. ``changed_at_s``: the
    beginning of the generation. ``reopen_at_s``: the end of the pause. ``needed``: successful probes that close it.
    ``probes``: by ticket, the end of its lease. ``not_before_s``: the endpoint has asked to be left alone until then,
    which is no failure.
    """

    generation: int = 0
    trips: int = 0
    since_s: float = 0.0
    changed_at_s: float = -math.inf
    reopen_at_s: float = 0.0
    needed: int = 0
    probes: Mapping[str, float] = {}
    not_before_s: float = 0.0

    def state(self, now: float) -> BreakerState:
        """As of ``now``."""
        if not self.trips:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.reopen_at_s else BreakerState.HALF_OPEN

    def passing_share(self, now: float) -> float:
        """Of the requests, the part that it lets through beside the probe."""
        match self.state(now):
            case BreakerState.CLOSED:
                return min(1.0, max(_LEAST_SHARE, (now - self.changed_at_s) / SLOW_START_S))
            case BreakerState.HALF_OPEN:
                return _TRICKLE
            case BreakerState.OPEN:
                return 0.0

    def is_steadily_closed(self, now: float) -> bool:
        """Whether it lets all requests through, and will until something happens."""
        return not self.trips and now >= self.changed_at_s + SLOW_START_S and now >= self.not_before_s

    def is_current_result(self, passed: BreakerPass, sent_at_s: float) -> bool:
        """Whether the result of a request may change anything. Without its generation, the time must do."""
        if passed.generation < 0:
            return sent_at_s >= self.changed_at_s
        return passed.generation == self.generation

    def leased_until_s(self, now: float) -> float:
        """When the lease of the probe ends; ``now`` if there is no probe."""
        return max([now, *self.probes.values()])

    def after_opening(self, key: str, now: float, *, needed: int, is_costly: bool = False) -> Breaker:
        """It fails, or a probe has failed. ``key``: of what it is the breaker. ``needed``: successful probes that
        close it. ``is_costly``: it answers nothing, so that a probe costs a client its whole timeout; the first pause
        is longer.
        """
        trips = max(self.trips, _COSTLY_TRIPS if is_costly else 0) + 1
        generation = self.generation + 1
        chance = _hash(f"{key}#{generation}") / 2**64
        pause_s = _pause_s(trips) * (1 + _JITTER * (2 * chance - 1))
        since_s = self.since_s if self.trips else now
        return Breaker(generation, trips, since_s, now, now + pause_s, needed, {}, self.not_before_s)

    def after_closing(self, now: float) -> Breaker:
        """It works again."""
        return Breaker(self.generation + 1, changed_at_s=now, not_before_s=self.not_before_s)

    def reset(self, now: float) -> Breaker:
        """An operator says that nothing is wrong with it."""
        return msgspec.structs.replace(self.after_closing(now), not_before_s=0.0)

    def with_probe_lease(self, ticket: str, now: float) -> Breaker:
        """The request is its probe, and no other follows for a while."""
        probes = {**self.probes, ticket: now + max(_MIN_LEASE_S, _pause_s(self.trips))}
        if len(probes) > _MOST_PROBES:
            del probes[next(iter(probes))]
        return msgspec.structs.replace(self, probes=probes)

    def after_probe_stream(self, ticket: str, now: float) -> Breaker:
        """The probe is over; its outcome will come, or never."""
        until_s = self.probes.get(ticket)
        if until_s is None:
            return self
        return msgspec.structs.replace(self, probes={**self.probes, ticket: min(until_s, now + _OUTCOME_S)})

    def without_probe_lease(self, ticket: str) -> Breaker:
        """The probe has shown nothing: its client left, or the request was at fault. The next one may go."""
        if ticket not in self.probes:
            return self
        return msgspec.structs.replace(self, probes={one: end for one, end in self.probes.items() if one != ticket})

    def after_success(self, ticket: str, now: float) -> Breaker:
        """A request of this generation was served."""
        if ticket not in self.probes:
            return self
        if self.needed <= 1:
            return self.after_closing(now)
        return msgspec.structs.replace(self.without_probe_lease(ticket), needed=self.needed - 1)

    def after_failure(self, ticket: str, key: str, now: float, *, needed: int, is_costly: bool = False) -> Breaker:
        """A request of this generation was not served, which is reason enough to open. ``key`` and the others: see
        ``after_opening``. While it is open only probes count: others were on their way, or had no better place to go.
        """
        if self.trips and ticket not in self.probes:
            return self
        return self.after_opening(key, now, needed=needed, is_costly=is_costly)

    def after_pause_request(self, seconds: float, now: float) -> Breaker:
        """It has asked for a pause of ``seconds``."""
        until_s = now + min(_LONGEST_WAIT_S, max(0.0, seconds))
        return self if until_s <= self.not_before_s else msgspec.structs.replace(self, not_before_s=until_s)

    def with_clock_shift(self, by_s: float) -> Breaker:
        """The same by another clock."""
        return Breaker(
            self.generation,
            self.trips,
            self.since_s + by_s,
            self.changed_at_s + by_s,
            self.reopen_at_s + by_s,
            self.needed,
            {ticket: end_s + by_s for ticket, end_s in self.probes.items()},
            self.not_before_s + by_s,
        )

    def merged(self, other: Breaker, now: float) -> Breaker:
        """What another process knows of it, by our clock. The later generation holds, then the one that is open."""
        if (other.generation, bool(other.trips)) <= (self.generation, bool(self.trips)):
            return self
        if not 0 <= other.generation <= _MOST_GENERATION:
            return self
        most_s = now + _MAX_PAUSE_S * (1 + _JITTER)
        # whatever the peer sends, it ends; NaN compares as False
        return Breaker(
            other.generation,
            min(64, max(0, other.trips)),
            min(other.since_s, now),
            min(other.changed_at_s, now),
            min(other.reopen_at_s, most_s),
            min(64, max(1, other.needed)),
            {ticket: min(end_s, most_s) for ticket, end_s in list(other.probes.items())[:_MOST_PROBES]},
            self.not_before_s,
        )


CLOSED: Final = Breaker()


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _pause_s(trips: int) -> float:
    return min(_MAX_PAUSE_S, _INITIAL_PAUSE_S * 2.0 ** min(max(0, trips - 1), 10))


class ProbeTurns:
    """Which of the processes that serve an endpoint may begin its probe."""

    def __init__(self, name: str = "", others: Callable[[], Collection[str]] = lambda: ()) -> None:
        """``name``: of this process. ``others``: those that are alive."""
        self._name = name
        self._others = others

    def next_probe_at_s(self, breaker: Breaker, key: str, now: float) -> float:
        """The next instant, ``now`` or later, at which this process may begin a probe. ``key``: of what it is the
        breaker.
        """
        free_at_s = max(breaker.leased_until_s(now), breaker.reopen_at_s)
        others = self._others()
        if not others:
            return free_at_s

        def weight(process: str) -> tuple[int, str]:
            return _hash(f"{process}|{key}|{breaker.generation}"), process

        order = sorted({self._name, *others}, key=weight)
        own, since_s = order.index(self._name), free_at_s - breaker.reopen_at_s
        turn = int(since_s / _TURN_S)
        if turn % len(order) == own and since_s - turn * _TURN_S < _TURN_USED_S:
            return free_at_s
        wait = (own - turn) % len(order) or len(order)
        return breaker.reopen_at_s + (turn + wait) * _TURN_S
