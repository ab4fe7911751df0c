# SPDX-License-Identifier: Apache-2.0
"""A decision that stands while nothing changes says the same as one made anew each time, whatever happens in
between.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.api.autoscaling import (
    AutoscalingPolicySpec,
    Behavior,
    LatencyObjective,
    Panic,
    ScaleToZero,
    ScalingRules,
    Schedule,
    Strategy,
)
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.resting import still
from controller.autoscaler.decision.situation import EngineReport, Freshness, Waiting
from controller.autoscaler.decision.traffic import Traffic
from extproc.api.quantities import Duration
from tests.controller.autoscaler.decision.fluid import Fluid, target_spec
from tests.controller.autoscaler.decision.situations import (
    NOW_S,
    binding_of,
    situation_of,
    spec_of,
    target_of,
    traffic_of,
)

if TYPE_CHECKING:
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.memory import Memory
    from controller.autoscaler.decision.situation import Situation, Target

POLICIES = {
    "default": AutoscalingPolicySpec(),
    "objective": AutoscalingPolicySpec(objective=LatencyObjective(ttft=Duration("2s"), tpot=Duration("40ms"))),
    "slow up": AutoscalingPolicySpec(
        behavior=Behavior(ScalingRules(stabilization_window_seconds=60), ScalingRules(stabilization_window_seconds=300))
    ),
    "at once": AutoscalingPolicySpec(behavior=Behavior(scale_down=ScalingRules(stabilization_window_seconds=0))),
    "zero": AutoscalingPolicySpec(scale_to_zero=ScaleToZero(idle=Duration("5m"))),
    "schedule": AutoscalingPolicySpec(
        schedules=(Schedule(start="7,37 * * * *", duration=Duration("4m"), time_zone="UTC", min_replicas=3),)
    ),
    "up only": AutoscalingPolicySpec(mode="ScaleUpOnly"),
}
HISTORY_S = 5400.0


class Scene(Fluid):
    """Bursts, long calm, silent gateways, and replicas that somebody sets; the same with and without rests. ``skips``:
    where nothing but time has changed, no situation is made.
    """

    def __init__(self, policy: AutoscalingPolicySpec, seed: int, *, rests: bool, skips: bool = False) -> None:
        rng = random.Random(seed)
        self._bursts = sorted(
            (rng.uniform(0, HISTORY_S), rng.choice((20.0, 200.0)), rng.choice((0.2, 5.0, 30.0))) for _ in range(3)
        )
        policy = msgspec.structs.replace(policy, period=Duration("5s"))
        spec = target_spec(least=0 if policy.scale_to_zero is not None else 1)
        super().__init__(policy, self._rate, noise=0.0, seed=seed, start_s=rng.choice((20.0, 90.0)), spec=spec)
        self._silent_at_s, self._set_at_s = rng.uniform(0, HISTORY_S), rng.uniform(0, HISTORY_S)
        self._rests, self._skips = rests, skips
        self.skipped = 0
        self._seen: tuple[object, ...] = ()

    def _rate(self, at_s: float) -> float:
        return sum(rate for begun_s, length_s, rate in self._bursts if begun_s <= at_s < begun_s + length_s)

    def look(self) -> Decision:
        """With what happens beside load."""
        at_s = self.now_s - self.began_s
        is_silent = 0 <= at_s - self._silent_at_s < 100
        self.freshness = Freshness(silent=("g",) if is_silent else ())
        if 0 <= at_s - self._set_at_s < 5:
            self.set(4)
        if not self._rests and self.memory is not None:
            self.memory = msgspec.structs.replace(self.memory, rest=None)
        before, self._seen = self._seen, self._state()
        if self._skips and self.memory is not None and before == self._seen:
            found = still(self.memory, self.policy, self.binding, self.now_s, self.now_s)
            if found is not None:
                self.skipped += 1
                decision, self.memory = found
                self.decisions.append(decision)
                return decision
        return super().look()

    def _state(self) -> tuple[object, ...]:
        """All but time."""
        found = self.situation()
        engines = [(one.name, one.state, one.report and one.report.in_flight) for one in found.engines]
        return found.traffic.points[-1].totals, found.waiting, found.freshness, engines


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", POLICIES)
def test_histories_with_and_without_rests_are_the_same(name: str, seed: int) -> None:
    with_rests, without = (Scene(POLICIES[name], seed, rests=rests) for rests in (True, False))
    with_skips = Scene(POLICIES[name], seed, rests=True, skips=True)
    for scene in (with_rests, without, with_skips):
        scene.run(HISTORY_S)
    for scene in (with_rests, with_skips):
        assert [one.targets for one in scene.decisions] == [one.targets for one in without.decisions]
        assert scene.history == without.history
    assert with_skips.skipped > 0.05 * len(without.decisions)
    made = len({id(one) for one in with_rests.decisions})
    assert len({id(one) for one in without.decisions}) == len(without.decisions)
    assert made < 0.9 * len(with_rests.decisions)


def situation(now_s: float, **changes: Any) -> Situation:  # noqa: ANN401 - of any field
    """Idle. ``changes``: of the situation."""
    found = situation_of(target_of(), traffic=traffic_of(0.0, now_s=now_s, before=7.0), now_s=now_s)
    return msgspec.structs.replace(found, **changes)


def resting(policy: AutoscalingPolicySpec, now_s: float = NOW_S) -> tuple[Decision, Memory]:
    """The last decision of ten minutes without load, and what is remembered."""
    memory, binding = None, binding_of(spec_of())
    for second in range(-600, 1, 5):
        _, memory = decide(policy, binding, [situation(now_s + second)], memory, now_s + second)
    assert memory is not None
    assert memory.rest is not None
    # where it stands is not made again
    assert now_s < memory.rest.until_s <= now_s + 30
    return memory.rest.decision, msgspec.structs.replace(
        memory, rest=msgspec.structs.replace(memory.rest, until_s=now_s + 22.5)
    )


def anew(policy: AutoscalingPolicySpec, now_s: float, found: Situation, *, least: int = 1, free: int = 4) -> bool:
    """Whether another decision is made after one that rests."""
    before, memory = resting(policy)
    if free != 4:
        assert memory.rest is not None
        memory = msgspec.structs.replace(memory, rest=msgspec.structs.replace(memory.rest, free={"h100": 4}))
    binding = binding_of(spec_of(least=least))
    after, _ = decide(policy, binding, [found], memory, now_s, free=None if free == 4 else {"h100": free})
    return after is not before


def busy(**report: Any) -> tuple[Target, ...]:  # noqa: ANN401 - of any field
    """``report``: of its engine."""
    one = target_of()
    engines = tuple(msgspec.structs.replace(each, report=EngineReport(NOW_S, **report)) for each in one.engines)
    return (msgspec.structs.replace(one, engines=engines),)


def test_an_idle_binding_rests_for_some_periods() -> None:
    policy = POLICIES["default"]
    assert not anew(policy, NOW_S + 5, situation(NOW_S + 5))
    assert not anew(policy, NOW_S + 22, situation(NOW_S + 22))
    assert anew(policy, NOW_S + 23, situation(NOW_S + 23))


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting": Waiting(requests=1)},
        {"waiting": Waiting(at_zero=1)},
        {"freshness": Freshness(silent=("g",))},
        {"freshness": Freshness(unreported=("e",))},
        {"freshness": Freshness(cut_off_s=40.0)},
        {"freshness": Freshness(age_s=16.0)},
        {"freshness": Freshness(gateways=0)},
        {"targets": (target_of(ready=2),)},
        {"targets": (target_of(ready=1, starting=1),)},
        {"targets": (target_of(ready=0, starting=1),)},
        {"targets": (msgspec.structs.replace(target_of(), blocked="no node"),)},
        {"targets": (msgspec.structs.replace(target_of(), set_by="somebody", set_at_s=NOW_S),)},
        {"targets": (msgspec.structs.replace(target_of(), room=3),)},
        {"targets": (msgspec.structs.replace(target_of(), current=2),)},
        {"targets": busy(in_flight=1)},
        {"targets": busy(waiting=1.0)},
        {"targets": busy(running=1.0)},
        {"traffic": traffic_of(lambda at_s: float(at_s == -1), now_s=NOW_S + 5, before=7.0)},
        {"traffic": Traffic()},
        {"objective": LatencyObjective(tpot=Duration("40ms"))},
    ],
)
def test_what_changes_ends_the_rest_at_once(changes: dict[str, Any]) -> None:
    assert anew(POLICIES["default"], NOW_S + 5, situation(NOW_S + 5, **changes))


def test_another_spec_or_more_room_ends_the_rest() -> None:
    policy = POLICIES["default"]
    assert anew(policy, NOW_S + 5, situation(NOW_S + 5), least=2)
    assert anew(policy, NOW_S + 5, situation(NOW_S + 5), free=5)
    before, memory = resting(policy)
    changed = msgspec.structs.replace(policy, period=Duration("4s"))
    after, _ = decide(changed, binding_of(spec_of()), [situation(NOW_S + 5)], memory, NOW_S + 5)
    assert after is not before


def stands(told_s: float = 5.0, after_s: float = 5.0, **changes: Any) -> bool:  # noqa: ANN401 - of any field
    """Whether a decision stands so long after it, with data that were told so long after it. ``changes``: of the
    policy.
    """
    policy = POLICIES["default"]
    decision, memory = resting(policy)
    assert memory.rest is not None
    found = still(
        memory,
        msgspec.structs.replace(policy, **changes) if changes else policy,
        memory.rest.binding,
        NOW_S + after_s,
        NOW_S + told_s,
    )
    assert found is None or found[0] is decision
    return found is not None


def test_where_only_time_has_changed_it_stands_as_long_as_the_rest_with_data_that_are_not_old() -> None:
    assert stands()
    assert stands(told_s=-10.0)
    assert not stands(told_s=-10.1)
    assert stands(told_s=22.0, after_s=22.0)
    assert not stands(told_s=23.0, after_s=23.0)
    assert not stands(after_s=-30.0)
    assert not stands(period=Duration("4s"))


def test_what_did_not_rest_does_not_stand_without_a_look() -> None:
    policy = POLICIES["default"]
    _, memory = resting(policy)
    assert memory.rest is not None
    binding = memory.rest.binding
    assert still(msgspec.structs.replace(memory, rest=None), policy, binding, NOW_S + 5, NOW_S + 5) is None
    assert still(memory, policy, binding_of(spec_of(least=2)), NOW_S + 5, NOW_S + 5) is None


def test_a_rest_ends_with_the_bounds_of_schedules() -> None:
    # NOW_S is 20:26:40, so the schedule begins 20 s later
    policy = AutoscalingPolicySpec(
        schedules=(Schedule(start="27 * * * *", duration=Duration("4m"), time_zone="UTC", min_replicas=3),)
    )
    memory, binding, ends_s = None, binding_of(spec_of()), []
    for second in range(-600, 20, 5):
        _, memory = decide(policy, binding, [situation(NOW_S + second)], memory, NOW_S + second)
        ends_s += [memory.rest.until_s] if memory.rest is not None else []
    assert max(ends_s) == NOW_S + 20
    decision, _ = decide(policy, binding, [situation(NOW_S + 20)], memory, NOW_S + 20)
    assert decision.targets[0].desired == 3


@pytest.mark.parametrize(
    "policy",
    [
        AutoscalingPolicySpec(strategies=(Strategy(name="Work"), Strategy(name="Predictive"))),
        AutoscalingPolicySpec(strategies=(Strategy(name="Concurrency"),)),
        AutoscalingPolicySpec(panic=Panic()),
        AutoscalingPolicySpec(scale_to_zero=ScaleToZero(idle=Duration("1h"))),
    ],
)
def test_what_may_change_by_time_alone_never_rests(policy: AutoscalingPolicySpec) -> None:
    memory, binding = None, binding_of(spec_of())
    for second in range(-600, 1, 5):
        _, memory = decide(policy, binding, [situation(NOW_S + second)], memory, NOW_S + second)
        assert memory.rest is None
