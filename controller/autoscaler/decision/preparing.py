# SPDX-License-Identifier: Apache-2.0
"""A situation with what is remembered of its targets: smoothed speeds, relative capacities, measured start times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.decision.allocation.blocked import Blockage, judge
from controller.autoscaler.decision.behavior import Past, Scaled
from controller.autoscaler.decision.freshness import with_fresh_metrics
from controller.autoscaler.decision.load import PerRequest
from controller.autoscaler.decision.memory import MOST_TURNS, TURNS_COUNT_S, StageMemory
from controller.autoscaler.decision.speeds import seconds_of_replica, smoothed
from controller.autoscaler.decision.start_times import StartTimes, expected_start_s
from controller.autoscaler.decision.zero import followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.autoscaler.decision.situation import Situation, Speed, Target

# Where the mix of requests is not known yet, speeds are compared by this one.
_TYPICAL_REQUEST: Final = PerRequest(prefill_work=1000.0, prompt_tokens=1000.0, output_tokens=200.0)
# The mix of requests in which targets are compared.
# Of a replica, in those of the first target.
_MOST_CAPACITY: Final = 1000.0
_MIX_WINDOW_S: Final = 120.0
# Replicas that grow again after this share of them had gone, or one, follow noise; after more, they follow the load.
_SMALL_SWING: Final = 0.2
_NO_STARTS: Final = StartTimes()
_NEVER_BLOCKED: Final = Blockage()
# So many periods without a decision are a gap.
_GAP_PERIODS: Final = 6


def prepared(
    situation: Situation, before: StageMemory | None, policy: AutoscalingPolicySpec
) -> tuple[Situation, StageMemory]:
    """The situation with smoothed speeds, relative capacities and measured start times, and the memory that knows
    them.
    """
    now_s = situation.now_s
    memory = before or StageMemory(began_at_s=now_s, decided_at_s=now_s, active_at_s=now_s)
    elapsed_s = max(0.0, now_s - memory.decided_at_s)
    began_at_s = memory.began_at_s if elapsed_s <= _GAP_PERIODS * policy.period else now_s
    speeds: dict[str, Speed] = {}
    starts: dict[str, StartTimes] = {}
    for target in situation.targets:
        speed = smoothed(memory.speeds.get(target.name), target.speed, elapsed_s)
        if speed is not None:
            speeds[target.name] = speed
        starts[target.name] = memory.starts.get(target.name, _NO_STARTS).seen(target)
    capacities = _capacities(situation, speeds)
    targets = tuple(
        _known(one, capacities[one.name], speeds.get(one.name), starts[one.name]) for one in situation.targets
    )
    blockages = {one.name: judge(one, memory.blockages.get(one.name, _NEVER_BLOCKED), now_s) for one in targets}
    targets = tuple(
        one if one.blocked or not (why := blockages[one.name].at(now_s)) else msgspec.structs.replace(one, blocked=why)
        for one in targets
    )
    situation = with_fresh_metrics(msgspec.structs.replace(situation, targets=targets), policy.staleness)
    memory = msgspec.structs.replace(
        _noticed(memory, situation),
        began_at_s=began_at_s,
        decided_at_s=now_s,
        speeds=speeds,
        starts=starts,
        blockages=blockages,
    )
    return situation, followed(memory, situation)


def _noticed(memory: StageMemory, situation: Situation) -> StageMemory:
    """With the change of replicas since the last look, whoever made it."""
    now_s, current = situation.now_s, situation.current
    turned = tuple(at_s for at_s in memory.turned_at_s if now_s - at_s < TURNS_COUNT_S)
    if memory.current is None or memory.current == current:
        return msgspec.structs.replace(memory, current=current, turned_at_s=turned)
    fell_from = memory.fell_from
    if current < memory.current:
        fell_from = memory.current if fell_from is None else fell_from
    elif fell_from is not None:
        if fell_from - memory.current <= max(1.0, _SMALL_SWING * fell_from):
            turned = (*turned, now_s)[-MOST_TURNS:]
        fell_from = None
    past = Past(memory.past.recommendations, (*memory.past.changes, Scaled(now_s, current - memory.current)))
    woken_at_s = now_s if memory.current == 0 else memory.woken_at_s
    return msgspec.structs.replace(
        memory, current=current, past=past, woken_at_s=woken_at_s, fell_from=fell_from, turned_at_s=turned
    )


def _known(target: Target, relative: float, speed: Speed | None, starts: StartTimes) -> Target:
    return msgspec.structs.replace(
        target, speed=speed, capacity=relative, start_s=expected_start_s(starts, target.start_s)
    )


def _capacities(situation: Situation, speeds: Mapping[str, Speed]) -> dict[str, float]:
    """Of each target, in replicas of the first: by the time that the present mix of requests takes.

    Targets whose speed is unknown keep what they came with.
    """
    targets = situation.targets
    given = {target.name: target.capacity for target in targets}
    first = speeds.get(targets[0].name)
    if len(targets) == 1 or first is None:
        return given | {targets[0].name: 1.0}
    mix = _mix(situation)
    stage = targets[0].spec.stage
    of_first_s = seconds_of_replica(mix, first, stage, situation.objective)
    return {
        target.name: _ratio(of_first_s, seconds_of_replica(mix, speeds[target.name], stage, situation.objective))
        if target.name in speeds
        else target.capacity
        for target in targets
    }


def _ratio(of_first_s: float, of_this_s: float) -> float:
    """What is beyond all bounds was declared or learned wrongly."""
    if not (of_first_s > 0 and of_this_s > 0):
        return 1.0
    return min(_MOST_CAPACITY, max(1 / _MOST_CAPACITY, of_first_s / of_this_s))


def _mix(situation: Situation) -> PerRequest:
    """The mean request of the last minutes."""
    rates = situation.traffic.rates(_MIX_WINDOW_S, situation.now_s)
    if rates is None or rates.arrivals <= 0 or rates.finished <= 0:
        return _TYPICAL_REQUEST
    return PerRequest(
        prefill_work=rates.prefill_work / rates.arrivals,
        prompt_tokens=rates.prompt_tokens / rates.finished,
        output_tokens=rates.output_tokens / rates.finished,
    )
