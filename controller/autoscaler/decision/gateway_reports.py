# SPDX-License-Identifier: Apache-2.0
"""The reports of one gateway: its extproc processes, the counters of each for a ModelServer, and its engines.

Counters of a process only grow; a process that takes another one's slot replaces it. Implausible values are left out.
The reports of all gateways about an engine are merged into one signal.
"""

from __future__ import annotations

import math
from operator import add, sub
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from controller.autoscaler.decision.situation import EngineReport
from controller.autoscaler.decision.traffic import MOST_COUNTED, NONE_OF_TPOT, NONE_OF_TTFT, TrafficCounters
from extproc.api.status_page_contents import EngineDemand, ServerDemand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from extproc.api.status_page_contents import ProcessDemand

# No process counts as much, nor does an engine have as many; and no server has as many engines or models.
MOST: Final = 1e15
MOST_ENGINES: Final = 4096
MOST_MODELS: Final = 1000
_LONGEST_ADDRESS: Final = 100
_ROLES: Final = frozenset({"prefill", "decode"})
_GOOD_ROLES: Final = _ROLES | {""}
Value = TypeVar("Value")
# They report once a second.
SILENT_AFTER_S: Final = 3.0
# Most tracked processes of a gateway, ended ones included.
_MOST_PROCESSES: Final = 64
_LONGEST_SLOT: Final = 100
_LONGEST_INSTANCE: Final = 400


class EngineSignal(msgspec.Struct, frozen=True, gc=False):
    """One engine. ``role``: ``prefill``, ``decode``, or empty for both. ``last_report_s``: time of the last gateway
    report about it. ``reported_at_s``: time of the engine's own last report; None if there was none.
    ``prefill_tokens_per_s``, ``step_s``, ``step_s_per_token``: its learned speed, the mean of the gateways; None where
    none has learned it.
    """

    report: EngineReport
    role: str = ""
    last_report_s: float = 0.0
    reported_at_s: float | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    step_s_per_token: float | None = None


def engine_signals_by_address(report: Iterable[tuple[ServerDemand, float]]) -> dict[str, EngineSignal]:
    """By address. ``said``: each process's report of a ModelServer, and when it arrived.

    Requests are each process's own and are summed. Engine reports are the same engine seen by all: the newest counts.
    """
    several = list(report)
    if len(several) == 1:
        server, last_report_s = several[0]
        return {address: _of_one(engine, last_report_s) for address, engine in server.engines.items()}
    by_address: dict[str, list[tuple[EngineDemand, float]]] = {}
    for server, last_report_s in several:
        for address, engine in server.engines.items():
            by_address.setdefault(address, []).append((engine, last_report_s))
    return {address: _merged(found) for address, found in by_address.items()}


def _of_one(one: EngineDemand, last_report_s: float) -> EngineSignal:
    """As ``engine_signals_by_address`` for a single process, which is the most frequent case."""
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


class ReportedServer(msgspec.Struct):
    """What one process reports of one ModelServer. ``server``: its last report, unchanged; None if the process no
    longer reports the server. ``highest``: the maximum of each counter, so that one which falls and rises again adds
    nothing.
    """

    server: ServerDemand | None = None
    highest: TrafficCounters = msgspec.field(default_factory=TrafficCounters)

    def store(self, report: ServerDemand) -> TrafficCounters | None:
        """Store the report; returns the growth of its counters since the last one, None if nothing has grown."""
        before, self.server = self.server, report
        if before is report:
            return None
        if before is not None and (before.counted, before.ttft, before.tpot) == (
            report.counted,
            report.ttft,
            report.tpot,
        ):
            return None
        highest, counters = self.highest, _counters(report)
        return TrafficCounters(
            _grown(highest.counters, counters),
            NONE_OF_TTFT if before is not None and before.ttft == report.ttft else _rise(highest.ttft, report.ttft),
            NONE_OF_TPOT if before is not None and before.tpot == report.tpot else _rise(highest.tpot, report.tpot),
        )


def sanitize_gauges(report: ServerDemand) -> ServerDemand:
    """With gauges that can be reckoned with."""
    return ServerDemand(
        model=report.model,
        counted=report.counted,
        ttft=report.ttft,
        tpot=report.tpot,
        queued=int(clamp_gauge(report.queued)),
        queued_tokens=clamp_gauge(report.queued_tokens),
        oldest_wait_s=clamp_gauge(report.oldest_wait_s),
        at_zero=int(clamp_gauge(report.at_zero)),
        engines={
            address: _engine(one)
            for address, one in _first(report.engines, MOST_ENGINES).items()
            if len(address) <= _LONGEST_ADDRESS
        },
    )


def clamp_gauge(value: float) -> float:
    """A count or an amount: from 0 to ``MOST``; 0 for what is no number."""
    if 0 <= value <= MOST:
        return value
    return MOST if value > MOST else 0.0


def _engine(report: EngineDemand) -> EngineDemand:
    if report.role in _GOOD_ROLES and _is_good(report):
        return report
    return EngineDemand(
        role=report.role if report.role in _ROLES else "",
        in_flight=int(clamp_gauge(report.in_flight)),
        in_flight_tokens=clamp_gauge(report.in_flight_tokens),
        waiting=_known(report.waiting),
        running=_known(report.running),
        kv_usage=None if report.kv_usage is None else min(1.0, clamp_gauge(report.kv_usage)),
        report_age_s=_known(report.report_age_s),
        kv_capacity_tokens=clamp_gauge(report.kv_capacity_tokens),
        prefill_tokens_per_s=_speed(report.prefill_tokens_per_s),
        step_s=_known(report.step_s),
        step_s_per_token=_known(report.step_s_per_token),
    )


def _is_good(report: EngineDemand) -> bool:
    """Whether nothing is to be corrected, as usual."""
    return (
        0 <= report.in_flight <= MOST
        and 0 <= report.in_flight_tokens <= MOST
        and 0 <= report.kv_capacity_tokens <= MOST
        and (report.waiting is None or 0 <= report.waiting <= MOST)
        and (report.running is None or 0 <= report.running <= MOST)
        and (report.kv_usage is None or 0 <= report.kv_usage <= 1)
        and (report.report_age_s is None or 0 <= report.report_age_s <= MOST)
        and (report.prefill_tokens_per_s is None or 0 < report.prefill_tokens_per_s <= MOST)
        and (report.step_s is None or 0 <= report.step_s <= MOST)
        and (report.step_s_per_token is None or 0 <= report.step_s_per_token <= MOST)
    )


def _known(value: float | None) -> float | None:
    return None if value is None else clamp_gauge(value)


def _speed(value: float | None) -> float | None:
    return value if value is not None and 0 < value <= MOST else None


def _counters(report: ServerDemand) -> list[float]:
    """Of all models, in the order of ``TrafficTotals``."""
    found = [0.0] * 7
    for one in _first(report.counted, MOST_MODELS).values():
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
            values = tuple(map(clamp_gauge, values))
        found = list(map(add, found, values))
    return found


def _grown(highest: list[float], report: list[float]) -> list[float]:
    """By how much the counters have grown; ``highest`` grows with them."""
    more = list(map(sub, report, highest))
    if min(more) >= 0:
        highest[:] = report
        return more
    for at, value in enumerate(more):
        if value > 0:
            highest[at] = report[at]
        else:
            more[at] = 0.0
    return more


def _rise(highest: list[int], report: tuple[int, ...]) -> list[int]:
    """By how much the buckets have grown; ``highest`` grows with them."""
    if len(report) == len(highest):
        more = list(map(sub, report, highest))
        # what no number is makes the sum none
        if min(more) >= 0 and sum(more) <= MOST_COUNTED and max(report) <= MOST_COUNTED:
            highest[:] = report
            return more
    more = [0] * len(highest)
    for at, count in enumerate(report[: len(highest)]):
        if highest[at] < count:
            value = min(MOST_COUNTED, count)
            more[at], highest[at] = value - highest[at], value
    return more


def _first(report: Mapping[str, Value], most: int) -> Mapping[str, Value]:
    return report if len(report) <= most else dict(list(report.items())[:most])


class ReportingProcess(msgspec.Struct):
    """``last_report_s``: time of its last report. ``whole_since_s``: start of the present span without a gap; minus
    infinity: no gap yet. ``servers``: its reports by ModelServer.
    """

    name: str
    slot: str
    born_at_s: float
    last_report_s: float
    sequence: int
    whole_since_s: float
    servers: dict[str, ReportedServer] = {}

    def is_silent(self, now: float) -> bool:
        """Whether its last report is older than the reporting interval allows."""
        return now - self.last_report_s > SILENT_AFTER_S


class ReportingGateway(msgspec.Struct):
    """A pod, or another place where processes run. ``seen_at_s``: time of the first message from it. ``processes``: all
    that have reported, by name. ``slots``: time of the last message of each. ``gap_at_s``: end of the last span with
    possibly lost counts.
    """

    seen_at_s: float
    processes: dict[str, ReportingProcess] = {}
    slots: dict[str, float] = {}
    gap_at_s: float = -math.inf

    def ingest(
        self, report: ProcessDemand, now: float, *, follows_since_s: float
    ) -> tuple[ReportingProcess, float] | None:
        """The reporting process, and the time of its report before (or its start); None if the report is not newer.

        ``follows_since_s``: start of the subscription; the reports of a process that started later are complete.
        """
        if report.slot not in self.slots and (len(self.slots) >= _MOST_PROCESSES or len(report.slot) > _LONGEST_SLOT):
            return None
        self.slots.setdefault(report.slot, now)
        if not report.instance or len(report.instance) > _LONGEST_INSTANCE:
            return None
        known = self.processes.get(report.instance)
        if known is None:
            return self._meet(report, now, follows_since_s)
        if report.sequence <= known.sequence:
            return None
        before_s = known.last_report_s
        if known.is_silent(now):
            known.whole_since_s = now
        known.sequence, known.last_report_s, known.slot = report.sequence, now, report.slot
        return known, before_s

    def live_processes(self, now: float) -> list[ReportingProcess]:
        """Those that run, or may: all but those that another one has replaced."""
        found: list[ReportingProcess] = []
        for slot in self.slots:
            found += self._of_slot(slot, now)
        return found

    def silent_slots(self, now: float) -> Iterator[str]:
        """Slots with a stale report, or with none for too long."""
        if not self.slots and now - self.seen_at_s > SILENT_AFTER_S:
            yield ""
        for slot, since_s in self.slots.items():
            here = self._of_slot(slot, now)
            if any(one.is_silent(now) for one in here) or (not here and now - since_s > SILENT_AFTER_S):
                yield slot

    def is_without_reports(self) -> bool:
        """Whether no report has arrived yet."""
        return not self.processes

    def gapless_since_s(self, now: float) -> float:
        """Since when nothing can be missing of what it counted."""
        if self.is_without_reports():
            return now
        return max([self.gap_at_s, *(one.whole_since_s for one in self.live_processes(now))])

    def _meet(self, report: ProcessDemand, now: float, follows_since_s: float) -> tuple[ReportingProcess, float]:
        """Add a process at its first report."""
        born_at_s = now - clamp_gauge(report.age_s)
        begins = born_at_s >= follows_since_s and now - born_at_s <= SILENT_AFTER_S
        if any(
            one.slot == report.slot and born_at_s - one.last_report_s > SILENT_AFTER_S
            for one in self.processes.values()
        ):
            # what ended was silent before
            self.gap_at_s = max(self.gap_at_s, born_at_s)
        met = ReportingProcess(
            report.instance, report.slot, born_at_s, now, report.sequence, -math.inf if begins else now
        )
        self.processes[met.name] = met
        self._forget(now)
        return met, born_at_s

    def _of_slot(self, slot: str, now: float) -> list[ReportingProcess]:
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
            living = {one.name for one in self.live_processes(now)}
            ended = [one for one in self.processes.values() if one.name not in living]
            oldest = min(ended or self.processes.values(), key=lambda one: one.last_report_s)
            del self.processes[oldest.name]
