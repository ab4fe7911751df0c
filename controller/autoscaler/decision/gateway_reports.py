# SPDX-License-Identifier: Apache-2.0
"""What one gateway reports: its extproc processes, what each has counted of a ModelServer, and its engines.

Counters of a process only add up while it lives; a process that takes another one's slot replaces it. Absurd values are
left out. What all gateways report of an engine is merged into one signal.
"""

from __future__ import annotations

import math
from operator import add, sub
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from controller.autoscaler.decision.situation import EngineReport
from controller.autoscaler.decision.traffic import MOST_COUNTED, NONE_OF_TPOT, NONE_OF_TTFT, Sums
from extproc.api.status_pages import EngineDemand, ServerDemand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.api.status_pages import Demand


class EngineSignal(msgspec.Struct, frozen=True, gc=False):
    """One engine. ``role``: ``prefill``, ``decode``, or empty for both. ``last_report_s``: when a gateway last spoke of
    it.
    ``reported_at_s``: when the engine itself last said something; None if it never did. ``prefill_tokens_per_s``,
    ``step_s``, ``step_s_per_token``: its learned speed, the mean of the gateways; None where nobody has learned it.
    """

    report: EngineReport
    role: str = ""
    last_report_s: float = 0.0
    reported_at_s: float | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    step_s_per_token: float | None = None


def merged(said: Iterable[tuple[ServerDemand, float]]) -> dict[str, EngineSignal]:
    """By address. ``said``: what each process says of a ModelServer, and when it was heard.

    Requests are each process's own and add up. Reports are the same, seen by all: the newest counts.
    """
    several = list(said)
    if len(several) == 1:
        server, last_report_s = several[0]
        return {address: _of_one(engine, last_report_s) for address, engine in server.engines.items()}
    by_address: dict[str, list[tuple[EngineDemand, float]]] = {}
    for server, last_report_s in several:
        for address, engine in server.engines.items():
            by_address.setdefault(address, []).append((engine, last_report_s))
    return {address: _merged(found) for address, found in by_address.items()}


def _of_one(one: EngineDemand, last_report_s: float) -> EngineSignal:
    """As ``_merged`` of what a single process says, which is the most frequent case."""
    reported_at_s = None if one.report_age_s is None else last_report_s - one.report_age_s
    return EngineSignal(
        EngineReport(
            last_report_s if reported_at_s is None else reported_at_s,
            one.in_flight,
            one.in_flight_tokens,
            one.waiting,
            one.running,
            one.kv_usage,
            one.kv_capacity_tokens,
        ),
        one.role,
        last_report_s,
        reported_at_s,
        one.prefill_tokens_per_s,
        one.step_s,
        one.step_s_per_token,
    )


def _merged(several: list[tuple[EngineDemand, float]]) -> EngineSignal:
    newest, reported_at_s = max(
        ((one, -math.inf if one.report_age_s is None else at_s - one.report_age_s) for one, at_s in several),
        key=lambda found: found[1],
    )
    last_report_s = max(at_s for _, at_s in several)
    has_reported = reported_at_s > -math.inf
    return EngineSignal(
        report=EngineReport(
            at_s=reported_at_s if has_reported else last_report_s,
            in_flight=sum(one.in_flight for one, _ in several),
            in_flight_tokens=sum(one.in_flight_tokens for one, _ in several),
            waiting=newest.waiting,
            running=newest.running,
            kv_usage=newest.kv_usage,
            kv_capacity_tokens=newest.kv_capacity_tokens,
        ),
        role=next((one.role for one, _ in several if one.role), ""),
        last_report_s=last_report_s,
        reported_at_s=reported_at_s if has_reported else None,
        prefill_tokens_per_s=_mean(one.prefill_tokens_per_s for one, _ in several),
        step_s=_mean(one.step_s for one, _ in several),
        step_s_per_token=_mean(one.step_s_per_token for one, _ in several),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


# No process counts as much, nor does an engine have as many; and no server has as many engines or models.
MOST: Final = 1e15
MOST_ENGINES: Final = 4096
MOST_MODELS: Final = 1000
_LONGEST_ADDRESS: Final = 100
_ROLES: Final = frozenset({"prefill", "decode"})
_GOOD_ROLES: Final = _ROLES | {""}
Value = TypeVar("Value")


class ServerReports(msgspec.Struct):
    """What one process reports of one ModelServer. ``server``: its last report, unchanged; None if the process does not
    know the server any more. ``highest``: the most that each counter had, so that one which falls and rises again adds
    nothing.
    """

    server: ServerDemand | None = None
    highest: Sums = msgspec.field(default_factory=Sums)

    def take(self, said: ServerDemand) -> Sums | None:
        """Remember it; returns what it has counted since the last time, None if nothing."""
        before, self.server = self.server, said
        if before is said:
            return None
        if before is not None and (before.counted, before.ttft, before.tpot) == (said.counted, said.ttft, said.tpot):
            return None
        highest, counters = self.highest, _counters(said)
        return Sums(
            _grown(highest.counters, counters),
            NONE_OF_TTFT if before is not None and before.ttft == said.ttft else _rise(highest.ttft, said.ttft),
            NONE_OF_TPOT if before is not None and before.tpot == said.tpot else _rise(highest.tpot, said.tpot),
        )


def cleaned(said: ServerDemand) -> ServerDemand:
    """With gauges that can be reckoned with."""
    return ServerDemand(
        model=said.model,
        counted=said.counted,
        ttft=said.ttft,
        tpot=said.tpot,
        queued=int(bounded(said.queued)),
        queued_tokens=bounded(said.queued_tokens),
        oldest_wait_s=bounded(said.oldest_wait_s),
        at_zero=int(bounded(said.at_zero)),
        engines={
            address: _engine(one)
            for address, one in _first(said.engines, MOST_ENGINES).items()
            if len(address) <= _LONGEST_ADDRESS
        },
    )


def bounded(value: float) -> float:
    """A count or an amount: from 0 to ``MOST``; 0 for what is no number."""
    if 0 <= value <= MOST:
        return value
    return MOST if value > MOST else 0.0


def _engine(said: EngineDemand) -> EngineDemand:
    if said.role in _GOOD_ROLES and _is_good(said):
        return said
    return EngineDemand(
        role=said.role if said.role in _ROLES else "",
        in_flight=int(bounded(said.in_flight)),
        in_flight_tokens=bounded(said.in_flight_tokens),
        waiting=_known(said.waiting),
        running=_known(said.running),
        kv_usage=None if said.kv_usage is None else min(1.0, bounded(said.kv_usage)),
        report_age_s=_known(said.report_age_s),
        kv_capacity_tokens=bounded(said.kv_capacity_tokens),
        prefill_tokens_per_s=_speed(said.prefill_tokens_per_s),
        step_s=_known(said.step_s),
        step_s_per_token=_known(said.step_s_per_token),
    )


def _is_good(said: EngineDemand) -> bool:
    """Whether nothing is to be corrected, as usual."""
    return (
        0 <= said.in_flight <= MOST
        and 0 <= said.in_flight_tokens <= MOST
        and 0 <= said.kv_capacity_tokens <= MOST
        and (said.waiting is None or 0 <= said.waiting <= MOST)
        and (said.running is None or 0 <= said.running <= MOST)
        and (said.kv_usage is None or 0 <= said.kv_usage <= 1)
        and (said.report_age_s is None or 0 <= said.report_age_s <= MOST)
        and (said.prefill_tokens_per_s is None or 0 < said.prefill_tokens_per_s <= MOST)
        and (said.step_s is None or 0 <= said.step_s <= MOST)
        and (said.step_s_per_token is None or 0 <= said.step_s_per_token <= MOST)
    )


def _known(value: float | None) -> float | None:
    return None if value is None else bounded(value)


def _speed(value: float | None) -> float | None:
    return value if value is not None and 0 < value <= MOST else None


def _counters(said: ServerDemand) -> list[float]:
    """Of all models, in the order of ``Totals``."""
    found = [0.0] * 7
    for one in _first(said.counted, MOST_MODELS).values():
        values: tuple[float, ...] = (
            one.arrivals,
            one.refused,
            one.finished,
            one.prompt_tokens,
            one.cached_tokens,
            one.output_tokens,
            one.prefill_work,
        )
        # what is no number makes the sum none; whole numbers may be too large for one
        if not (min(values) >= 0 and max(values) <= MOST and sum(values) >= 0):
            values = tuple(map(bounded, values))
        found = list(map(add, found, values))
    return found


def _grown(highest: list[float], said: list[float]) -> list[float]:
    """By how much the counters have grown; ``highest`` grows with them."""
    more = list(map(sub, said, highest))
    if min(more) >= 0:
        highest[:] = said
        return more
    for at, value in enumerate(more):
        if value > 0:
            highest[at] = said[at]
        else:
            more[at] = 0.0
    return more


def _rise(highest: list[int], said: tuple[int, ...]) -> list[int]:
    """By how much the buckets have grown; ``highest`` grows with them."""
    if len(said) == len(highest):
        more = list(map(sub, said, highest))
        # what no number is makes the sum none
        if min(more) >= 0 and sum(more) <= MOST_COUNTED and max(said) <= MOST_COUNTED:
            highest[:] = said
            return more
    more = [0] * len(highest)
    for at, count in enumerate(said[: len(highest)]):
        if highest[at] < count:
            value = min(MOST_COUNTED, count)
            more[at], highest[at] = value - highest[at], value
    return more


def _first(said: Mapping[str, Value], most: int) -> Mapping[str, Value]:
    return said if len(said) <= most else dict(list(said.items())[:most])


# They say something once a second.
SILENT_AFTER_S: Final = 3.0
# Processes of a gateway that are remembered, those that have ended included.
_MOST_PROCESSES: Final = 64
_LONGEST_SLOT: Final = 100
_LONGEST_INSTANCE: Final = 400


class Process(msgspec.Struct):
    """``last_report_s``: when it spoke last. ``whole_since_s``: since when it has been heard without a gap; minus
    infinity: since it began. ``servers``: what it said of each.
    """

    name: str
    slot: str
    born_at_s: float
    last_report_s: float
    sequence: int
    whole_since_s: float
    servers: dict[str, ServerReports] = {}

    def is_silent(self, now: float) -> bool:
        """Whether it has not spoken for longer than it should."""
        return now - self.last_report_s > SILENT_AFTER_S


class Gateway(msgspec.Struct):
    """A pod, or another place where processes run. ``seen_at_s``: since when it is known. ``processes``: by name, all
    that spoke. ``slots``: when each was heard or heard of. ``gap_at_s``: the end of the last time in which a process
    may have counted what nobody heard.
    """

    seen_at_s: float
    processes: dict[str, Process] = {}
    slots: dict[str, float] = {}
    gap_at_s: float = -math.inf

    def ingest(self, said: Demand, now: float, *, follows_since_s: float) -> tuple[Process, float] | None:
        """The process that speaks, and until when it was heard before (or when it was born); None if this is no news.

        ``follows_since_s``: a process that was born later is known from its beginning.
        """
        if said.slot not in self.slots and (len(self.slots) >= _MOST_PROCESSES or len(said.slot) > _LONGEST_SLOT):
            return None
        self.slots.setdefault(said.slot, now)
        if not said.instance or len(said.instance) > _LONGEST_INSTANCE:
            return None
        known = self.processes.get(said.instance)
        if known is None:
            return self._meet(said, now, follows_since_s)
        if said.sequence <= known.sequence:
            return None
        before_s = known.last_report_s
        if known.is_silent(now):
            known.whole_since_s = now
        known.sequence, known.last_report_s, known.slot = said.sequence, now, said.slot
        return known, before_s

    def living(self, now: float) -> list[Process]:
        """Those that run, or may: all but those that another one has replaced."""
        found: list[Process] = []
        for slot in self.slots:
            found += self._of_slot(slot, now)
        return found

    def silent(self, now: float) -> Iterator[str]:
        """Slots of which nothing is heard, or not of every process."""
        if not self.slots and now - self.seen_at_s > SILENT_AFTER_S:
            yield ""
        for slot, since_s in self.slots.items():
            here = self._of_slot(slot, now)
            if any(one.is_silent(now) for one in here) or (not here and now - since_s > SILENT_AFTER_S):
                yield slot

    def is_without_reports(self) -> bool:
        """Whether it has not said anything yet."""
        return not self.processes

    def whole_since_s(self, now: float) -> float:
        """Since when nothing can be missing of what it counted."""
        if self.is_without_reports():
            return now
        return max([self.gap_at_s, *(one.whole_since_s for one in self.living(now))])

    def _meet(self, said: Demand, now: float, follows_since_s: float) -> tuple[Process, float]:
        """A process speaks for the first time."""
        born_at_s = now - bounded(said.age_s)
        begins = born_at_s >= follows_since_s and now - born_at_s <= SILENT_AFTER_S
        if any(
            one.slot == said.slot and born_at_s - one.last_report_s > SILENT_AFTER_S for one in self.processes.values()
        ):
            # what ended was silent before
            self.gap_at_s = max(self.gap_at_s, born_at_s)
        met = Process(said.instance, said.slot, born_at_s, now, said.sequence, -math.inf if begins else now)
        self.processes[met.name] = met
        self._forget(now)
        return met, born_at_s

    def _of_slot(self, slot: str, now: float) -> list[Process]:
        """A slot with a name has one process at a time. Else each process that begins replaces one that was silent
        then.
        """
        here = [one for one in self.processes.values() if one.slot == slot]
        if len(here) <= 1:
            return here
        here.sort(key=lambda one: one.born_at_s)
        if slot:
            return here[-1:]
        living = [one for one in here if not one.is_silent(now)]
        gone = [one for one in here if one.is_silent(now)]
        for one in living:
            replaced = next((other for other in gone if other.last_report_s <= one.born_at_s), None)
            if replaced is not None:
                gone.remove(replaced)
        return [*gone, *living]

    def _forget(self, now: float) -> None:
        """Those that ended first, if there were very many."""
        if len(self.processes) > _MOST_PROCESSES:
            living = {one.name for one in self.living(now)}
            ended = [one for one in self.processes.values() if one.name not in living]
            oldest = min(ended or self.processes.values(), key=lambda one: one.last_report_s)
            del self.processes[oldest.name]
