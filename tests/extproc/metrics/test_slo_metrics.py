# SPDX-License-Identifier: Apache-2.0
"""Counters of objectives, their hours over a window, and histograms of answers; all of them bounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.admission.slo_classes import ObjectiveClass
from extproc.core.effects import Decision, OutcomeJoined, RequestSloJudged
from extproc.core.request_record import Outcome, RequestHead
from extproc.core.slo_verdicts import AnswerLatencies, SloVerdict
from extproc.metrics import slo_metrics as module
from extproc.metrics.exposition import Registry
from extproc.metrics.slo_metrics import MOST_ANSWER_SERIES, MOST_TIMED_TENANTS, AnswerTimeHistograms, ObjectiveSeries
from tests.extproc.conftest import settle
from tests.extproc.scenes import core_of, request

if TYPE_CHECKING:
    from extproc.api.slo import ObjectiveName

HOUR = 3600.0
DAY = 24 * HOUR
# some midnight
START = 20_000 * DAY
CHAT = ObjectiveClass("default/chat", "chat", 0, {"ttft": 0.5}, 0.99, 2 * DAY)


class Clock:
    def __init__(self) -> None:
        self.at_s = START

    def __call__(self) -> float:
        return self.at_s


class Counted:
    def __init__(self, *classes: ObjectiveClass) -> None:
        self.clock, self.classes, self.registry = Clock(), list(classes or (CHAT,)), Registry()
        self.series = ObjectiveSeries(self.registry, self.clock)
        self.series.set_source(lambda: self.classes)

    def count(self, *met: bool | None, of: ObjectiveClass = CHAT, objective: ObjectiveName = "ttft") -> None:
        for one in met:
            self.series.count(RequestSloJudged(of, (SloVerdict(objective, one),)))

    def hours(self) -> list[tuple[int, int, int]]:
        """Since the start."""
        (found,) = self.series.report()
        return [(hour - int(START // HOUR), good, bad) for hour, good, bad in found.hours]

    def sample(self, name: str, **labels: str) -> float | None:
        usual = {"route": "default/chat", "class": "chat", "objective": "ttft"}
        return self.registry.get_sample_value(name, {**usual, **labels})


def test_series_are_there_from_the_start_and_count_each_request_once() -> None:
    counted = Counted()
    assert counted.sample("attache_slo_requests_total", result="bad") == 0
    assert counted.sample("attache_slo_share") == 0.99
    assert counted.sample("attache_slo_target_seconds") == 0.5
    counted.count(True, True, False, None)
    assert counted.sample("attache_slo_requests_total", result="good") == 2
    assert counted.sample("attache_slo_requests_total", result="bad") == 1
    assert counted.sample("attache_slo_excluded_requests_total") == 1


def test_hours_leave_the_window_one_by_one() -> None:
    counted = Counted()
    for _ in range(60):
        counted.count(True, False)
        counted.clock.at_s += HOUR
    # two days, and the part of the hour at their beginning
    assert counted.hours() == [(hour, 1, 1) for hour in range(60 - 48, 60)]
    counted.count(True)
    assert counted.hours()[0] == (12, 1, 1)
    assert counted.hours()[-1] == (60, 1, 0)
    counted.clock.at_s += 100 * DAY
    assert counted.hours() == []


def test_a_clock_that_is_set_back_loses_and_invents_nothing() -> None:
    counted = Counted()
    counted.clock.at_s += 5 * HOUR
    counted.count(True)
    counted.clock.at_s -= 4 * HOUR
    counted.count(False)
    assert counted.hours() == [(5, 1, 1)]
    counted.clock.at_s += 4 * HOUR
    counted.count(False)
    assert counted.hours() == [(5, 1, 2)]


def test_a_clock_that_was_years_ahead_does_not_hold_the_window() -> None:
    counted = Counted()
    counted.count(True)
    counted.clock.at_s += 1000 * DAY
    counted.count(False)
    counted.clock.at_s -= 1000 * DAY
    counted.count(True)
    assert counted.hours() == [(0, 1, 0)]
    counted.clock.at_s += HOUR
    counted.count(False)
    assert counted.hours() == [(0, 1, 0), (1, 0, 1)]


def test_another_window_keeps_what_is_in_it() -> None:
    counted = Counted()
    for _ in range(10):
        counted.count(True)
        counted.clock.at_s += HOUR
    counted.classes = [msgspec.structs.replace(CHAT, window_s=3 * HOUR)]
    counted.count(False, of=counted.classes[0])
    assert counted.hours() == [(7, 1, 0), (8, 1, 0), (9, 1, 0), (10, 0, 1)]
    counted.classes = [CHAT]
    assert counted.hours() == [(7, 1, 0), (8, 1, 0), (9, 1, 0), (10, 0, 1)]


def test_a_process_goes_on_with_the_hours_of_the_one_before() -> None:
    before, after = Counted(), Counted()
    before.count(True, False)
    before.clock.at_s += HOUR
    before.count(False)
    kept = list(before.series.report())
    gone = [msgspec.structs.replace(kept[0], route="default/gone")]
    after.clock.at_s += 2 * HOUR
    after.count(True)
    after.series.restore([*kept, *gone])
    assert after.hours() == [(0, 1, 1), (1, 0, 1), (2, 1, 0)]
    # counters begin anew, as Prometheus expects
    assert after.sample("attache_slo_requests_total", result="bad") == 0


def test_an_objective_that_leaves_the_configuration_takes_its_series_along() -> None:
    counted = Counted()
    counted.count(True)
    counted.classes = []
    assert counted.sample("attache_slo_requests_total", result="good") is None
    assert list(counted.series.report()) == []
    counted.classes = [CHAT]
    assert counted.sample("attache_slo_requests_total", result="good") == 0


def test_hours_are_kept_of_a_bounded_number_of_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 10)
    classes = [msgspec.structs.replace(CHAT, route=f"default/{number}") for number in range(30)]
    counted = Counted(*classes)
    for one in classes:
        counted.count(True, of=one)
    assert sum(1 for one in counted.series.report() if one.hours) == 10
    # all are counted for Prometheus
    assert counted.sample("attache_slo_requests_total", route="default/29", result="good") == 1


def test_a_client_adds_no_series_where_an_http_route_passes_on_the_name_that_it_wrote() -> None:
    server = "endpoints: [{address: '10.0.0.1:8000'}]\nmodelRewrites: [{models: [old], targets: [{model: new}]}]"
    route = "modelName: chat\nloraAdapters: [sql]"
    core, registry = core_of(servers={"llama": server}, routes={"chat": route}), Registry()
    times = AnswerTimeHistograms(registry, dict, lambda: 0.0)
    for name in ("m", "sql", "old", "x" * 10_000, "y"):
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
        own, _ = core.arrive(core.builder.build_for_server("default/llama", head, body), 0.0)
        assert isinstance(own, Decision)
        core.on_stream_closed(own.ticket, 4.0)
        served = own.assignment.endpoint.address
        settled = settle(core, Outcome(own.ticket, 200, served, 4.0, 0.3, 10, 5, 0), 4.0)
        assert settled is not None
        times.observe(settled)
    found = {
        name: registry.get_sample_value(
            "attache_request_duration_seconds_count", {"model": name, "server": "default/llama", "class": ""}
        )
        for name in ("m", "sql", "new", "(others)")
    }
    assert found == {"m": 1, "sql": 1, "new": 1, "(others)": 2}


def test_answers_are_measured_by_model_server_and_class() -> None:
    core, registry = core_of(servers={"llama": "endpoints: [{address: '10.0.0.1:8000'}]"}), Registry()
    own, _ = core.arrive(request(core), 0.0)
    assert isinstance(own, Decision)
    outcome = Outcome(own.ticket, 200, "10.0.0.1:8000", 4.0, None, None, None, None)
    times, taken = AnswerTimeHistograms(registry, dict, lambda: 0.0), AnswerLatencies(0.3, 0.02, 4.0)
    settled = OutcomeJoined("default/llama", own.assignment, outcome, model="m", waited_s=0.5, times=taken)
    for number in range(MOST_ANSWER_SERIES + 50):
        times.observe(msgspec.structs.replace(settled, model=f"m{number}"))
    times.observe(msgspec.structs.replace(settled, times=None))
    labels = {"model": "m0", "server": "default/llama", "class": ""}
    for what, value in (("ttft", 0.3), ("tpot", 0.02), ("duration", 4.0), ("held", 0.5)):
        assert registry.get_sample_value(f"attache_request_{what}_seconds_sum", labels) == pytest.approx(value)
    others = dict.fromkeys(("model", "server", "class"), "(others)")
    assert registry.get_sample_value("attache_request_ttft_seconds_count", others) == 50
    times.observe(msgspec.structs.replace(settled, model="m0", objectives=CHAT))
    # no new name, but one of those that are known
    assert registry.get_sample_value("attache_request_ttft_seconds_count", others) == 51
    assert sum(
        line.startswith("attache_request_ttft_seconds_count")
        for line in "".join(registry.exposition_chunks()).split("\n")
    ) == (MOST_ANSWER_SERIES + 1)
    # places of a ModelServer that has left are free
    registry.retain_only("server", {"default/other", "(others)"})
    times.observe(msgspec.structs.replace(settled, server="default/other"))
    new = {"model": "m", "server": "default/other", "class": ""}
    assert registry.get_sample_value("attache_request_ttft_seconds_count", new) == 1
    assert registry.get_sample_value("attache_request_ttft_seconds_count", others) == 51


def test_the_tenants_with_the_most_answers_have_histograms_of_their_own() -> None:
    core, registry, now = core_of(servers={"llama": "endpoints: [{address: '10.0.0.1:8000'}]"}), Registry(), [0.0]
    own, _ = core.arrive(request(core), 0.0)
    assert isinstance(own, Decision)
    outcome = Outcome(own.ticket, 200, "10.0.0.1:8000", 4.0, None, None, None, None)
    times = AnswerTimeHistograms(registry, dict, lambda: now[0])
    settled = OutcomeJoined("default/llama", own.assignment, outcome, model="m", times=AnswerLatencies(0.3, 0.02, 4.0))

    def answer(tenant: str, times_: int = 1) -> None:
        for _ in range(times_):
            times.observe(msgspec.structs.replace(settled, tenant=tenant))

    def count(tenant: str, what: str = "ttft") -> float | None:
        return registry.get_sample_value(f"attache_tenant_{what}_seconds_count", {"tenant": tenant})

    for number in range(MOST_TIMED_TENANTS):
        answer(f"t{number}", 2 + (number > 0))
    answer("large", 9)
    assert (count("t0"), count("t1", "duration"), count("large"), count("(others)")) == (2, 3, None, 9)
    now[0] = 61.0
    answer("large")
    assert (count("t0"), count("t0", "duration"), count("large"), count("(others)")) == (None, None, 1, 9)
    assert registry.get_sample_value("attache_tenant_ttft_seconds_sum", {"tenant": "t1"}) == pytest.approx(0.9)
