# SPDX-License-Identifier: Apache-2.0
"""Whether a decision still stands: nothing but time has changed, and time changes nothing yet.

Most bindings are idle most of the time. One rests if nothing has arrived for longer than any window, nothing waits or
runs, all engines serve, and its last decision left everything as it is for reasons that do not end by themselves. Its
decision then stands until something changes, a schedule's bounds end, or a few periods have passed: speeds and what
other bindings leave of nodes may move meanwhile, and are looked at then. ``stands`` finds that out from new situations;
where it is known without them that nothing has changed, ``still`` does. Policies with other laws than ``Work``, with
metrics or panic never rest, nor does a binding that waits to go to zero.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.scaling_laws import WorkParameters
from controller.autoscaler.decision.behavior import Past
from controller.autoscaler.decision.memory import Memory, Rest, StageMemory
from controller.autoscaler.decision.rules import not_for_scale_in, too_old
from controller.autoscaler.decision.situation import EngineState, Situation, Target
from controller.autoscaler.decision.stage import LEAST_KNOWN_S, behavior_of
from controller.autoscaler.decision.strategies.work import WorkMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.autoscaler.decision.decision import Decision

# A decision stands at most so long, and so many periods: after six the past would count as unknown.
_MOST_S: Final = 30.0
_MOST_PERIODS: Final = 4.5
# Windows of the law, and a bin more; and at least the other windows that are looked at.
_WINDOWS: Final = 17
_LEAST_STILL_S: Final = 300.0
# Rules that keep what there is without waiting for a time.
_LASTING: Final = frozenset({"ScalingLimited", "Schedule", "KeepOne"})


def rest_of(
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    situations: Sequence[Situation],
    memory: Memory,
    decision: Decision,
    *,
    free: Mapping[str, int] | None,
) -> Rest | None:
    """None if time alone may change the decision, or something goes on."""
    if not (_may_rest(policy, situations) and _changes_nothing(decision)):
        return None
    if any(target.set_by or target.blocked for one in situations for target in one.targets):
        return None
    if not all(_is_steady(one, policy, decision.at_s) for one in memory.stages.values()):
        return None
    if not all(_is_idle(one, policy) for one in situations):
        return None
    until_s = decision.at_s + min(_MOST_S, _MOST_PERIODS * policy.period)
    return Rest(decision, min(until_s, memory.bounds.until_s), policy, binding, free, _seen(situations))


def stands(
    rest: Rest,
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    situations: Sequence[Situation],
    *,
    free: Mapping[str, int] | None,
) -> bool:
    """Whether the decision of ``rest`` would be made again."""
    return (
        _still_applies(rest, policy, binding, situations[0].now_s)
        and rest.free == free
        and rest.seen == _seen(situations)
        and all(_is_idle(one, policy) for one in situations)
    )


def still(
    memory: Memory,
    policy: AutoscalingPolicySpec,
    binding: AutoscalingPolicyBinding,
    now_s: float,
    told_at_s: float,
) -> tuple[Decision, Memory] | None:
    """The last decision and what to remember, if it stands where nothing but time has changed since it last did: no
    situation has to be made for that. None: it may not. ``told_at_s``: no data are older.
    """
    rest = memory.rest
    if rest is None or not _still_applies(rest, policy, binding, now_s):
        return None
    staleness = policy.staleness
    if now_s - told_at_s > min(staleness.soft, staleness.hard):
        return None
    return rest.decision, rested(memory, now_s)


def _still_applies(rest: Rest, policy: AutoscalingPolicySpec, binding: AutoscalingPolicyBinding, now_s: float) -> bool:
    return rest.decision.at_s <= now_s < rest.until_s and rest.policy == policy and rest.binding.spec == binding.spec


def rested(memory: Memory, now_s: float) -> Memory:
    """As if it had been decided again."""
    return msgspec.structs.replace(memory, stages={name: _rested(one, now_s) for name, one in memory.stages.items()})


def _rested(memory: StageMemory, now_s: float) -> StageMemory:
    """The time since the last decision stays what it is: speeds are smoothed over it."""
    past = memory.past
    recommendations = tuple([msgspec.structs.replace(one, at_s=now_s) for one in past.recommendations])
    laws = {name: one.without_load(now_s) if isinstance(one, WorkMemory) else one for name, one in memory.laws.items()}
    return msgspec.structs.replace(memory, past=Past(recommendations, past.changes), laws=laws)


def _may_rest(policy: AutoscalingPolicySpec, situations: Sequence[Situation]) -> bool:
    is_simple = not policy.metrics and policy.panic is None and all(one.name == "Work" for one in policy.strategies)
    return is_simple and (policy.scale_to_zero is None or all(one.current == 0 for one in situations))


def _changes_nothing(decision: Decision) -> bool:
    """And not for a reason that ends by itself."""
    return (
        not decision.lacks
        and all(one.desired is not None and one.desired == one.current for one in decision.targets)
        and all(step.rule in _LASTING for stage in decision.stages for step in stage.steps)
        and all(one.replicas == 0.0 for stage in decision.stages for one in stage.recommendations)
    )


def _is_steady(memory: StageMemory, policy: AutoscalingPolicySpec, now_s: float) -> bool:
    """Whether nothing remembered waits for its time."""
    window_s = behavior_of(policy).scale_down.stabilization_window_seconds or 0
    return (
        now_s - memory.began_at_s >= max(LEAST_KNOWN_S, window_s)
        and memory.panic is None
        and len(memory.past.recommendations) == 1
        and not any(one.at(now_s) for one in memory.blockages.values())
    )


def _is_idle(situation: Situation, policy: AutoscalingPolicySpec) -> bool:
    waiting = situation.waiting
    if waiting.requests or waiting.at_zero or waiting.tokens:
        return False
    for one in situation.engines:
        report = one.report
        if one.state is not EngineState.READY or report is None or report.in_flight or report.waiting or report.running:
            return False
    if too_old(situation, policy) or not_for_scale_in(situation, policy):
        return False
    return _is_still(situation, policy)


def _is_still(situation: Situation, policy: AutoscalingPolicySpec) -> bool:
    """Whether nothing has arrived or ended in any window that is looked at."""
    traffic, now_s = situation.traffic, situation.now_s
    times = traffic.times
    if len(times) <= 1:
        return False
    longest_s = max([_WINDOWS * (one.work or WorkParameters()).window for one in policy.strategies])
    first = max(0, bisect_right(times, now_s - max(_LEAST_STILL_S, longest_s)) - 1)
    old, new = traffic.counters(first), traffic.counters(len(times) - 1)
    return (old.arrivals, old.refused, old.finished) == (new.arrivals, new.refused, new.finished)


def _seen(situations: Sequence[Situation]) -> tuple[object, ...]:
    return tuple([(one.objective, [_seen_of(target) for target in one.targets]) for one in situations])


def _seen_of(target: Target) -> tuple[object, ...]:
    return (
        target.spec,
        target.current,
        target.blocked,
        target.room,
        target.pools,
        target.set_by,
        target.speed is None,
        [one.name for one in target.engines],
    )
