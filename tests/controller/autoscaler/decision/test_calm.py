# SPDX-License-Identifier: Apache-2.0
"""Where signals say that nothing goes on, a whole look at them finds the same, whatever gateways say or do in
between.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.autoscaler.decision.signals import Signals
from controller.autoscaler.decision.situation import Waiting
from extproc.api.status_pages import Counted, Demand, EngineDemand, ServerDemand

if TYPE_CHECKING:
    from controller.autoscaler.decision.signals import ServerSignals

LLAMA, QWEN = "default/llama", "default/qwen"
GATEWAYS = ("attache/g-0", "attache/g-1", "default/own")
ENGINES = ("10.0.0.1:8000", "10.0.0.2:8000")
IDLE = ServerDemand(counted={"m": Counted(arrivals=3, finished=3)}, engines={one: EngineDemand() for one in ENGINES})


class Speaker:
    """A gateway whose servers are idle most of the time; it restarts now and then, and is silent at times."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self._lives = 0
        self._silent_until_s = 0.0
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._lives += 1
        self._born_at_s, self._sequence, self._arrivals = now, 0, 0
        self._servers = {LLAMA: IDLE, QWEN: IDLE}

    def speak(self, now: float) -> Demand | None:
        if now < self._silent_until_s:
            return None
        if self._rng.random() < 0.003:
            self._silent_until_s = now + self._rng.uniform(0, 10)
        if self._rng.random() < 0.003:
            self._begin(now)
        self._sequence += 1
        if self._rng.random() < 0.3:
            name = self._rng.choice((LLAMA, QWEN))
            self._servers = {**self._servers, name: self._page(now)}
        if self._rng.random() < 0.003:
            self._servers = {LLAMA: self._servers[LLAMA]}
        slot = "x" if self.name == GATEWAYS[0] else ""
        return Demand(f"{self.name}{self._lives}", self._sequence, now - self._born_at_s, self._servers, slot)

    def _page(self, now: float) -> ServerDemand:
        rng = self._rng
        goes_on = rng.random() < 0.02
        if goes_on:
            self._arrivals += rng.randrange(2)
        engine = EngineDemand(
            in_flight=int(goes_on and rng.random() < 0.3),
            waiting=rng.choice((None, 0.0, float(goes_on))),
            report_age_s=rng.choice((None, 0.5, 2.0)),
            kv_usage=rng.random(),
            prefill_tokens_per_s=None if now < 300 else 9000.0,
        )
        return ServerDemand(
            counted={"m": Counted(arrivals=self._arrivals, finished=self._arrivals)},
            queued=int(goes_on and rng.random() < 0.3),
            engines=dict.fromkeys(ENGINES[: 1 if goes_on and rng.random() < 0.2 else 2], engine),
        )


def is_idle(found: ServerSignals) -> bool:
    reports = [one.report for one in found.engines.values()]
    does_nothing = not any(one.in_flight or one.waiting or one.running for one in reports)
    return found.waiting == Waiting() and does_nothing and not found.freshness.silent and found.freshness.gateways > 0


def is_known(found: ServerSignals) -> dict[str, bool]:
    return {address: one.prefill_tokens_per_s is None for address, one in found.engines.items()}


@pytest.mark.parametrize("seed", range(6))
def test_while_the_version_is_the_same_all_is_as_idle_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    made = Signals(("attache",))
    speakers = [Speaker(one, rng) for one in GATEWAYS]
    seen: dict[tuple[int, ...], ServerSignals] = {}
    now, agreed = 0.0, 0
    for step in range(1500):
        now += rng.uniform(0.1, 1.0)
        if step % 500 == 0:
            made.follow([QWEN], now)
        made.follow([LLAMA, QWEN], now)
        made.present([one for one in GATEWAYS if step % 300 > 20 or one != GATEWAYS[1]], now)
        for one in speakers:
            message = one.speak(now)
            if message is not None:
                made.hear(one.name, message, now)
        made.tick(now)
        at_s = now + rng.uniform(0.0, 0.1)
        servers = [LLAMA, QWEN] if seed % 2 else [LLAMA]
        calm, found = made.calm(servers, at_s), made.of(servers, at_s)
        if calm is None:
            continue
        before = seen.setdefault(calm.version, found)
        assert is_idle(found)
        assert is_known(found) == is_known(before)
        assert found.traffic.counters(-1) == before.traffic.counters(-1)
        assert found.freshness.age_s <= at_s - calm.told_at_s + 1e-9
        assert all(one.report.at_s >= calm.told_at_s - 1e-9 for one in found.engines.values())
        agreed += found is not before
    assert agreed > 25


def calm_one() -> Signals:
    """All gateways have spoken twice, the last time at 2 s."""
    made = Signals(("attache",))
    made.follow([LLAMA], 0.0)
    made.present(GATEWAYS[:1], 0.0)
    for second in (1, 2):
        made.hear(GATEWAYS[0], Demand("a", second, float(second), {LLAMA: _again()}), float(second))
    return made


def _again() -> ServerDemand:
    """An equal page that is another object, with reports of half a second ago."""
    engines = {one: EngineDemand(report_age_s=0.5, kv_usage=0.1) for one in ENGINES}
    return msgspec.structs.replace(IDLE, engines=engines)


def test_new_reports_of_idle_engines_change_no_version_and_its_age_is_that_of_the_oldest() -> None:
    made = calm_one()
    before = made.calm([LLAMA], 2.0)
    made.hear(GATEWAYS[0], Demand("a", 3, 3.0, {LLAMA: _again()}), 3.0)
    after = made.calm([LLAMA], 3.0)
    assert before is not None
    assert after is not None
    assert before.version == after.version
    assert (before.told_at_s, after.told_at_s) == (1.5, 2.0)


@pytest.mark.parametrize(
    "page",
    [
        msgspec.structs.replace(IDLE, queued=1),
        msgspec.structs.replace(IDLE, at_zero=1),
        msgspec.structs.replace(IDLE, counted={"m": Counted(arrivals=4, finished=3)}),
        msgspec.structs.replace(IDLE, ttft=(0, 1)),
        msgspec.structs.replace(IDLE, engines={ENGINES[0]: EngineDemand()}),
        msgspec.structs.replace(IDLE, engines={one: EngineDemand(in_flight=1) for one in ENGINES}),
        msgspec.structs.replace(IDLE, engines={one: EngineDemand(running=1.0) for one in ENGINES}),
        msgspec.structs.replace(IDLE, engines={one: EngineDemand(waiting=-1.0) for one in ENGINES}),
        msgspec.structs.replace(IDLE, engines={one: EngineDemand(step_s=0.01) for one in ENGINES}),
        None,
    ],
)
def test_whatever_goes_on_changes_the_version(page: ServerDemand | None) -> None:
    made = calm_one()
    before = made.calm([LLAMA], 2.0)
    made.hear(GATEWAYS[0], Demand("a", 3, 3.0, {} if page is None else {LLAMA: page}), 3.0)
    after = made.calm([LLAMA], 3.0)
    made.hear(GATEWAYS[0], Demand("a", 4, 4.0, {LLAMA: page or IDLE}), 4.0)
    made.hear(GATEWAYS[0], Demand("a", 5, 5.0, {LLAMA: _again()}), 5.0)
    made.hear(GATEWAYS[0], Demand("a", 6, 6.0, {LLAMA: _again()}), 6.0)
    later = made.calm([LLAMA], 6.0)
    assert before is not None
    assert after is None or after.version != before.version
    assert later is not None
    assert later.version != before.version


def test_nothing_is_calm_where_a_gateway_is_silent_missing_or_has_not_spoken_yet() -> None:
    made = calm_one()
    assert made.calm([LLAMA], 5.0) is not None
    assert made.calm([LLAMA], 5.1) is None
    assert made.calm([QWEN], 2.0) is None
    assert made.calm([], 2.0) is None
    made.present(GATEWAYS[:2], 2.0)
    assert made.calm([LLAMA], 2.0) is None
    made.present((), 2.0)
    assert made.calm([LLAMA], 2.0) is None


def test_another_process_changes_the_version() -> None:
    made = calm_one()
    before = made.calm([LLAMA], 2.0)
    for second in (1, 2):
        made.hear(GATEWAYS[0], Demand("b", second, 0.1, {LLAMA: _again()}), 2.0 + second)
    after = made.calm([LLAMA], 4.0)
    assert before is not None
    assert after is not None
    assert before.version != after.version
