# SPDX-License-Identifier: Apache-2.0
"""Metrics of ModelServers without engines, from the effects of a core."""

from __future__ import annotations

import json
import random

from extproc.core.request_states import WAITING, RequestState
from extproc.metrics.admission_metrics import _BY_STATE
from extproc.metrics.decision_log import DecisionLog
from extproc.metrics.request_metrics import Metrics
from tests.extproc.core.zero import ACTIVATION, GATE, SMALL, Zero, engine


def test_who_waits_how_long_and_what_a_start_took() -> None:
    zero = Zero()
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0, waiting_in=zero.core.meter.waiting_in)

    def sample(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"server": SMALL})

    assert sample("attache_activation_waiting") is None
    zero.ask(2)
    assert sample("attache_activation_waiting") == 2
    assert sample("attache_wanted_engines") == 2
    zero.passes(12.0)
    zero.have(SMALL, engine(1))
    for effect in zero.effects:
        metrics.count_effect(effect)
    assert sample("attache_activation_waiting") is None
    assert sample("attache_engine_wait_seconds_sum") == 24.0
    assert sample("attache_engine_start_seconds_sum") == 12.0


def test_every_wait_has_a_gauge() -> None:
    # adapters and queues have their own
    assert {*_BY_STATE, RequestState.LOADING, RequestState.QUEUED} == WAITING


def test_those_that_wait_for_their_turn_wait_for_no_engine() -> None:
    zero = Zero(small=[engine(1)], more=f"{ACTIVATION}\n{GATE}")
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0, waiting_in=zero.core.meter.waiting_in)
    zero.ask(5)
    assert zero.core.count_requests(RequestState.QUEUED) == 3
    assert metrics.registry.get_sample_value("attache_activation_waiting", {"server": SMALL}) is None
    zero.have(SMALL)
    assert metrics.registry.get_sample_value("attache_activation_waiting", {"server": SMALL}) == 3


def test_a_line_of_the_decision_log_says_how_long_a_request_waited_for_an_engine() -> None:
    zero, lines = Zero(), list[bytes]()
    log = DecisionLog(lines.append, share=1.0, rng=random.Random(0), wall_clock=lambda: 0.0)
    zero.explains = True
    zero.ask(1)
    zero.passes(7.0)
    zero.have(SMALL, engine(1))
    for end in zero.decisions():
        log.log_decision(end)
    assert json.loads(b"".join(lines))["engine_wait_s"] == 7.0
