# SPDX-License-Identifier: Apache-2.0
"""How well objectives are kept: counters for Prometheus, and counts by the hour over each objective's window.

Labels come from the configuration. An objective that leaves it takes its counts along.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.slo import LONGEST_WINDOW_S
from extproc.api.status_page_contents import SloObjectiveCounts
from extproc.core.effects import SloMissPredicted
from extproc.metrics.exposition import DeferredHistogramFamily, MetricFamily, PiecewiseCollector
from extproc.metrics.label_cardinality import BusiestNames
from extproc.wire_names import truncate_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.admission.slo_classes import ObjectiveClass
    from extproc.api.slo import ObjectiveName
    from extproc.core.effects import OutcomeJoined, RequestSloJudged

_HOUR_S: Final = 3600.0
_MOST_IN_HOUR: Final = 2**30
# In hours: a clock that is set back further was wrong before.
_MOST_BACK: Final = 24
_LABELS: Final = ("route", "class", "objective")
_REQUESTS: Final = MetricFamily(
    "attache_slo_requests",
    "Requests by objective, and whether it was met: good, bad.",
    (*_LABELS, "result"),
    "counter",
)
_EXCLUDED: Final = MetricFamily(
    "attache_slo_excluded_requests",
    "Requests that do not count for an objective: the client's own errors, and those it left early.",
    _LABELS,
    "counter",
)
_UNMEETABLE: Final = MetricFamily(
    "attache_slo_unmeetable_requests",
    "Requests that were predicted to miss an objective, of classes that refuse them: moved, refused.",
    ("route", "class", "result"),
    "counter",
)
_SHARE: Final = MetricFamily("attache_slo_share", "Share of requests that are to meet the objective.", _LABELS)
_TARGET: Final = MetricFamily("attache_slo_target_seconds", "What requests are to take at most.", _LABELS)
# Objectives whose hours are kept; 17 KB each with the longest window.
MOST_KEPT: Final = 4_096

Key = tuple[str, str, str]
_TIMES: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_TIMES: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_ANSWER_LABELS: Final = ("model", "server", "class")
# Combinations of labels; adapters and routes of a large cluster may be thousands.
MOST_ANSWER_SERIES: Final = 300
# A histogram is 17 lines; a gateway has thousands of tenants.
MOST_TIMED_TENANTS: Final = 50
_OTHER: Final = "(others)"
OTHERS: Final = (_OTHER, _OTHER, _OTHER)


class _Hours:
    """Good and bad requests of each hour of a window. Time that goes back a little counts into the newest hour."""

    def __init__(self, window_s: float) -> None:
        # the window's first hour is there in part
        self._slots = int(window_s // _HOUR_S) + 1
        self._good, self._bad = (array("I", bytes(4 * self._slots)) for _ in range(2))
        self._newest = 0

    def count(self, hour: int, *, is_met: bool) -> None:
        if hour > self._newest:
            self._advance(hour)
        elif self._newest - hour > _MOST_BACK:
            self._rewind(hour)
        (self._good if is_met else self._bad)[self._newest % self._slots] += 1

    def _advance(self, hour: int) -> None:
        """Forget what is older than the window before ``hour``."""
        for one in range(min(hour - self._newest, self._slots)):
            slot = (hour - one) % self._slots
            self._good[slot] = self._bad[slot] = 0
        self._newest = hour

    def _rewind(self, hour: int) -> None:
        """The clock was far ahead: forget what was counted after ``hour``."""
        for one in range(min(self._newest - hour, self._slots)):
            slot = (self._newest - one) % self._slots
            self._good[slot] = self._bad[slot] = 0
        self._newest = hour

    def resized(self, window_s: float) -> _Hours:
        """The same counts over another window."""
        other = _Hours(window_s)
        other.fill(self.counts(self._newest))
        return other

    def fill(self, counts: Iterable[tuple[int, int, int]]) -> None:
        """Add counts that were kept elsewhere."""
        for hour, good, bad in sorted(counts):
            if hour > self._newest:
                self._advance(hour)
            slot = hour % self._slots
            good, bad = self._good[slot] + good, self._bad[slot] + bad  # noqa: PLW2901 - what both know
            if hour > self._newest - self._slots and 0 <= min(good, bad) <= max(good, bad) <= _MOST_IN_HOUR:
                self._good[slot], self._bad[slot] = good, bad

    def counts(self, hour: int) -> list[tuple[int, int, int]]:
        """Hours with requests, as hours since 1970, good and bad; of the window that ends with ``hour``."""
        oldest = max(hour, self._newest) - self._slots + 1
        return [
            (one, good, bad)
            for one in range(max(0, oldest), self._newest + 1)
            for good, bad in [(self._good[one % self._slots], self._bad[one % self._slots])]
            if good or bad
        ]


class _Counter(msgspec.Struct):
    """One objective of one class. ``hours``: None beyond ``MOST_KEPT``."""

    window_s: float
    hours: _Hours | None
    good: int = 0
    bad: int = 0
    excluded: int = 0


class ObjectiveSeries(PiecewiseCollector):
    """``wall_clock``: seconds since 1970."""

    families = (_REQUESTS, _EXCLUDED, _UNMEETABLE, _SHARE, _TARGET)

    def __init__(self, registry: CollectorRegistry, wall_clock: Callable[[], float]) -> None:
        self._classes: Callable[[], Iterable[ObjectiveClass]] = tuple
        self._wall_clock = wall_clock
        self._counters: dict[Key, _Counter] = {}
        # by route, class and result
        self._unmeetable = Counter[Key]()
        # grows with every request that counts
        self.changes = 0
        registry.register(self)

    def set_source(self, classes: Callable[[], Iterable[ObjectiveClass]]) -> None:
        """``classes``: those of the configuration in use."""
        self._classes = classes

    def count(self, judged: RequestSloJudged | SloMissPredicted) -> None:
        """A request is over; or it was moved or refused, as it would have missed an objective."""
        if isinstance(judged, SloMissPredicted):
            of = judged.forecast.objectives
            self._unmeetable[of.route, of.name, judged.forecast.result] += 1
            return
        objectives, hour = judged.objectives, int(self._wall_clock() // _HOUR_S)
        for one in judged.verdicts:
            counter = self._counter(objectives, one.objective)
            if one.is_met is None:
                counter.excluded += 1
                continue
            if one.is_met:
                counter.good += 1
            else:
                counter.bad += 1
            self.changes += 1
            if counter.hours is not None:
                counter.hours.count(hour, is_met=one.is_met)

    def report(self) -> Iterator[SloObjectiveCounts]:
        """Each objective of the configuration, with its hours."""
        hour = int(self._wall_clock() // _HOUR_S)
        for one, name in self._configured():
            counter = self._counter(one, name)
            yield SloObjectiveCounts(
                route=one.route,
                name=one.name,
                objective=name,
                target_s=one.targets_s[name],
                share=one.share,
                window_s=one.window_s,
                excluded=counter.excluded,
                hours=[] if counter.hours is None else counter.hours.counts(hour),
            )

    def restore(self, kept: Iterable[SloObjectiveCounts]) -> None:
        """Go on with the hours of an earlier process; objectives that are no longer there are left out."""
        known = {(one.route, one.name, name): one for one, name in self._configured()}
        newest = int(self._wall_clock() // _HOUR_S)
        for found in kept:
            key = (found.route, found.name, found.objective)
            if key in known:
                hours = self._counter(known[key], found.objective).hours
                if hours is not None:
                    hours.fill(one for one in found.hours if 0 <= one[0] <= newest)

    def subtract_counts(self, kept: Iterable[SloObjectiveCounts]) -> None:
        """Take out hours that were restored or reported before."""
        self.restore(
            msgspec.structs.replace(one, hours=[(hour, -good, -bad) for hour, good, bad in one.hours]) for one in kept
        )

    def clear(self) -> None:
        """Count from zero: a successor goes on with what was counted."""
        self._counters.clear()

    def exposition_chunks(self) -> Iterator[str]:
        """All objectives of the configuration, from 0 on."""
        configured = [((one.route, one.name, name), one, name) for one, name in self._configured()]
        for key in self._counters.keys() - {key for key, _, _ in configured}:
            del self._counters[key]
        counters = {key: self._counter(one, name) for key, one, name in configured}
        yield from _REQUESTS.exposition_chunks(
            _REQUESTS.line((*key, "good"), one.good) + _REQUESTS.line((*key, "bad"), one.bad)
            for key, one in counters.items()
        )
        yield from _EXCLUDED.exposition_chunks(_EXCLUDED.line(key, one.excluded) for key, one in counters.items())
        yield from _UNMEETABLE.exposition_chunks(self._unmeetable_lines())
        yield from _SHARE.exposition_chunks(_SHARE.line(key, one.share) for key, one, _ in configured)
        yield from _TARGET.exposition_chunks(_TARGET.line(key, one.targets_s[name]) for key, one, name in configured)

    def _unmeetable_lines(self) -> Iterator[str]:
        refusing = {(one.route, one.name) for one in self._classes() if one.refuses}
        for key in [one for one in self._unmeetable if one[:2] not in refusing]:
            del self._unmeetable[key]
        for route, name in sorted(refusing):
            keys = [(route, name, result) for result in ("moved", "fallback", "refused")]
            yield "".join(_UNMEETABLE.line(key, self._unmeetable[key]) for key in keys)

    def _configured(self) -> list[tuple[ObjectiveClass, ObjectiveName]]:
        return [(one, name) for one in self._classes() for name in one.targets_s]

    def _counter(self, objectives: ObjectiveClass, name: ObjectiveName) -> _Counter:
        key = (objectives.route, objectives.name, name)
        counter, window_s = self._counters.get(key), min(objectives.window_s, LONGEST_WINDOW_S)
        if counter is None:
            hours = _Hours(window_s) if len(self._counters) < MOST_KEPT else None
            counter = self._counters[key] = _Counter(window_s, hours)
        elif counter.window_s != window_s:
            counter.window_s = window_s
            counter.hours = None if counter.hours is None else counter.hours.resized(window_s)
        return counter


class AnswerTimeHistograms:
    """Histograms of answers by model, ModelServer and class: that of the objectives, or else the queue's band. And by
    tenant, of the ``MOST_TIMED_TENANTS`` with the most answers of late.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        gates: Callable[[], Mapping[str, FlowControlGate]],
        clock: Callable[[], float],
    ) -> None:
        def histograms(what: str, text: str, bounds: tuple[float, ...]) -> DeferredHistogramFamily:
            return DeferredHistogramFamily(f"attache_request_{what}_seconds", text, bounds, _ANSWER_LABELS, registry)

        def of_tenants(what: str, text: str) -> DeferredHistogramFamily:
            return DeferredHistogramFamily(f"attache_tenant_{what}_seconds", text, _TIMES, ("tenant",), registry)

        self._gates = gates
        self._clock = clock
        self._tenants = BusiestNames(MOST_TIMED_TENANTS, others=_OTHER, forget=self._forget_tenants)
        self._tenant_ttft = of_tenants("ttft", "Until the first content of streamed answers, by tenant.")
        self._tenant_duration = of_tenants("duration", "Until the end of whole answers, by tenant.")
        self._ttft = histograms("ttft", "Until the first content of streamed answers.", _TIMES)
        self._tpot = histograms("tpot", "For each further token of streamed answers.", _TOKEN_TIMES)
        self._duration = histograms("duration", "Until the end of whole answers.", _TIMES)
        self._held = histograms("held", "What extproc held requests, for whatever reason.", _TIMES)

    def observe(self, settled: OutcomeJoined) -> None:
        """An answer is whole."""
        times = settled.times
        if times is None:
            return
        labels = self._labels(settled)
        tenant = self._tenants.count_request(settled.tenant, self._clock())
        self._duration.observe(times.e2e_s, *labels)
        self._tenant_duration.observe(times.e2e_s, tenant)
        self._held.observe(settled.waited_s, *labels)
        if times.ttft_s is not None:
            self._ttft.observe(times.ttft_s, *labels)
            self._tenant_ttft.observe(times.ttft_s, tenant)
        if times.tpot_s is not None:
            self._tpot.observe(times.tpot_s, *labels)

    def _forget_tenants(self, lost: frozenset[str]) -> None:
        for one in (self._tenant_ttft, self._tenant_duration):
            one.forget("tenant", lost)

    def _labels(self, settled: OutcomeJoined) -> tuple[str, str, str]:
        labels = truncate_name(settled.model) or _OTHER, settled.server, self._class_of(settled)
        is_known = self._duration.has(*labels) or len(self._duration) < MOST_ANSWER_SERIES
        return labels if is_known else OTHERS

    def _class_of(self, settled: OutcomeJoined) -> str:
        if settled.objectives is not None:
            return settled.objectives.name
        gate = self._gates().get(settled.server)
        return "" if gate is None else gate.queue.band_of(settled.priority).spec.name
