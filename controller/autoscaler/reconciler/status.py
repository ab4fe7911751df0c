# SPDX-License-Identifier: Apache-2.0
"""A binding's status and Events, from the result of a reconciliation; nothing in them changes each time."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from controller.autoscaler.reconciler.target_resolver import PROBLEMS, ResolvedTarget, TargetProblem
from controller.kube.api_resources import timestamp_of
from controller.kube.reconcile_plan import KubeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.autoscaler.decision.decision import Decision, Rule, StageDecision
    from controller.autoscaler.decision.situation import Situation
    from controller.autoscaler.reconciler.result import ReconciliationResult, TargetAction

_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")
# Rules of a decision's steps that limited the recommendation of the strategies.
LIMITING: Final[frozenset[Rule]] = frozenset({"Limited", "ScalingLimited", "Schedule", "Budget"})
_LONGEST: Final = 1000
_MISSING: Final = "DataMissing"
_AWAITED: Final = "DataAwaited"
# Messages of these conditions have numbers that change all the time: they stay while status and reason do.
_STEADY: Final = frozenset({"MetricsAvailable", "ScalingLimited", "CapacityBlocked"})


def unknown_recommendation_reasons(stage: StageDecision) -> list[str]:
    """Why its strategies have no recommendation."""
    return [one.reason for one in stage.recommendations if one.replicas is None]


def mask_numbers(text: str) -> str:
    """The same for all numbers in it."""
    return _NUMBERS.sub("#", text)


def binding_status(result: ReconciliationResult, before: Mapping[str, Any]) -> dict[str, Any]:
    """The whole status. ``before``: the binding's current one."""
    known = {one.get("type"): one for one in before.get("conditions") or ()}
    status: dict[str, Any] = {
        "targets": list(_targets(result, {one.get("name"): one for one in before.get("targets") or ()})),
        "conditions": [_steady(one, known.get(one["type"])) for one in _conditions(result, known)],
    }
    for name in ("lastScaledAt", "lastDecision"):
        if before.get(name):
            status[name] = before[name]
    if result.scaled:
        at = datetime.fromtimestamp(result.now_s, UTC)
        status["lastScaledAt"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        message = "; ".join(f"{one.name} from {one.before} to {one.after}: {one.reason}" for one in result.scaled)
        status["lastDecision"] = message[:_LONGEST]
    return status


def binding_events(
    result: ReconciliationResult, status: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[KubeEvent]:
    """One for each write, and one for each condition whose change a user should notice."""
    for one in result.scaled:
        yield KubeEvent("Normal", "Scaled", f"{one.what}: from {one.before} to {one.after} replicas; {one.reason}")
    known = {one.get("type"): (one.get("status"), one.get("reason")) for one in before.get("conditions") or ()}
    for condition in status["conditions"]:
        type_, said = condition["type"], (condition["status"], condition["reason"])
        # TargetsResolved reports these already
        if known.get(type_) == said or (type_ == "ScalingActive" and condition["reason"] in PROBLEMS):
            continue
        event = _event(type_, *said)
        if event is not None:
            yield KubeEvent(event[0], event[1], condition["message"])


def action_texts(result: ReconciliationResult) -> Mapping[str, str]:
    """What was done about each target, for people."""
    scaled = {one.name: f"scaled from {one.before} to {one.after}" for one in result.scaled}
    said: dict[str, str] = {}
    for step in result.steps:
        name = step.target.spec.name
        waits = result.waits_for.get(name)
        if name in scaled:
            said[name] = scaled[name]
        elif step.held:
            said[name] = f"not written: {step.held}"
        elif name in result.refused:
            said[name] = f"not written: {result.refused[name]}"
        elif waits:
            said[name] = f"waits for {', '.join(waits[:5])}"
        elif step.replicas is None:
            said[name] = "nothing is known"
        else:
            said[name] = "as it is"
    return said


def _event(type_: str, truth: str, reason: str) -> Any:  # noqa: ANN401 - a pair of literals, or None
    match type_, truth:
        case "TargetsResolved", "False":
            return "Warning", reason
        case "MetricsAvailable", "False":
            return None if reason == _AWAITED else ("Warning", "FailedGetMetrics")
        case "ScalingActive", "False":
            return ("Normal", "ManualChangeHonoured") if reason == "ManualHold" else ("Warning", reason)
        case "ScalingLimited", "True":
            return "Normal", "ScalingLimited"
        case "CapacityBlocked", "True":
            return "Warning", "CapacityBlocked"
    return None


def _targets(result: ReconciliationResult, before: Mapping[Any, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    steps = {one.target.spec.name: one for one in result.steps}
    scaled = {one.name: one for one in result.scaled}
    ready = {one.name: _ready(one.engines) for each in result.situations for one in each.targets}
    for target in result.resolved:
        name, step = target.spec.name, steps.get(target.spec.name)
        said: dict[str, Any] = {"name": name}
        if target.found is not None:
            said["current"] = scaled[name].after if name in scaled else target.found.replicas
            said["ready"] = ready.get(name, 0)
        if step is not None and step.replicas is not None:
            said["desired"] = step.replicas
        reason = result.refused.get(name, "")[:_LONGEST]
        reason = reason or _reason(_problem(target, result), step, result.waits_for.get(name, ()))
        old = before.get(name) or {}
        # reasons have numbers that change all the time; another cause is news
        is_same = all(old.get(one) == said.get(one) for one in ("current", "desired", "ready"))
        if is_same and mask_numbers(old.get("reason") or "") == mask_numbers(reason):
            reason = old.get("reason", "")
        yield {**said, "reason": reason} if reason else said


def _ready(engines: Sequence[Any]) -> int:
    return sum(one.state.value == "ready" for one in engines)


def _problem(target: ResolvedTarget, result: ReconciliationResult) -> TargetProblem | None:
    """Another autoscaler is no problem where decisions are only reported."""
    problem, policy = target.problem, result.policy
    is_advisory = policy is not None and policy.mode in ("Export", "Recommend")
    return None if is_advisory and problem is not None and problem.reason == "OtherAutoscaler" else problem


def _reason(problem: TargetProblem | None, step: TargetAction | None, waits_for: Sequence[str]) -> str:
    if problem is not None and problem.forbids:
        return problem.message[:_LONGEST]
    if step is None:
        return ""
    if step.held and not step.is_report_only:
        return step.held[:_LONGEST]
    if waits_for:
        return "engines finish what they have before they go"
    return step.decided.reason[:_LONGEST]


def _conditions(result: ReconciliationResult, before: Mapping[Any, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """``before``: those of the binding, by type."""
    yield _resolved(result)
    if result.decision is not None:
        # data missing before a manager's restart are not awaited again
        was_missing = before.get("MetricsAvailable", {}).get("reason") == _MISSING
        is_awaited = result.awaits_data and not was_missing
        yield _available(result.decision, result.situations, _AWAITED if is_awaited else _MISSING)
    yield _active(result)
    if result.decision is not None:
        yield _limited(result.decision, result.resolved)
        yield _blocked(result)


def _resolved(result: ReconciliationResult) -> dict[str, Any]:
    problems = [problem for one in result.resolved if (problem := _problem(one, result)) is not None]
    if problems:
        gravest = min(problems, key=lambda one: PROBLEMS.index(one.reason))
        message = "; ".join(dict.fromkeys(one.message for one in problems))
        return _condition("TargetsResolved", truth=False, reason=gravest.reason, message=message)
    return _condition("TargetsResolved", truth=True, reason="Resolved", message="all targets are there")


def _available(decision: Decision, situations: Sequence[Situation], otherwise: str) -> dict[str, Any]:
    unknown = [one for one in decision.stages if one.combined is None]
    if not unknown and decision.stages:
        return _condition("MetricsAvailable", truth=True, reason="DataFound", message="demand is known")
    silent = sorted({name for one in situations for name in one.freshness.silent})
    said = "; ".join(dict.fromkeys(reason for one in unknown for reason in unknown_recommendation_reasons(one)))
    also = f"; silent gateways: {', '.join(silent)}" if silent else ""
    message = (said or "no strategy knows the demand") + also
    return _condition("MetricsAvailable", truth=False, reason=otherwise, message=message)


def _active(result: ReconciliationResult) -> dict[str, Any]:
    if result.problem is not None:
        return _condition("ScalingActive", truth=False, reason=result.problem[0], message=result.problem[1])
    mode = "Auto" if result.policy is None else result.policy.mode
    holds = [one for one in result.steps if one.hold is not None]
    # who writes nothing needs no right to write, but a target
    is_writer = mode in ("Auto", "ScaleUpOnly")
    barred = [
        one.problem
        for one in result.resolved
        if one.problem is not None and (one.found is None or (is_writer and not one.may_write))
    ]
    if mode != "Paused" and barred and len(barred) == len(result.resolved):
        said = "; ".join(dict.fromkeys(one.message for one in barred))
        return _condition("ScalingActive", truth=False, reason=barred[0].reason, message=said)
    if mode == "Paused":
        return _condition("ScalingActive", truth=False, reason="Paused", message="the mode of the policy is Paused")
    if holds and is_writer:
        said = "; ".join(
            f"{one.target.spec.name}: {one.hold.writer} has set {one.hold.replicas} replicas, which stay until "
            f"{timestamp_of(one.hold.until_s)}"
            for one in holds
            if one.hold is not None
        )
        return _condition("ScalingActive", truth=False, reason="ManualHold", message=said)
    if result.refused:
        said = "; ".join(f"{name}: {why}" for name, why in result.refused.items())
        return _condition("ScalingActive", truth=False, reason="WriteRefused", message=said)
    reason = {"Recommend": "Recommending", "Export": "Exporting"}.get(mode, "Scaling")
    message = "; ".join((f"the mode of the policy is {mode}", *result.bad_schedules))
    return _condition("ScalingActive", truth=True, reason=reason, message=message)


def _limited(decision: Decision, resolved: Sequence[ResolvedTarget]) -> dict[str, Any]:
    """Bounds of what is not there limit nothing."""
    for stage in decision.stages if any(one.found is not None for one in resolved) else ():
        for step in stage.steps:
            if step.rule in LIMITING and step.after != step.before:
                return _condition("ScalingLimited", truth=True, reason=step.rule, message=step.reason)
    return _condition(
        "ScalingLimited", truth=False, reason="NotLimited", message="the strategies get what they ask for"
    )


def _blocked(result: ReconciliationResult) -> dict[str, Any]:
    decision = result.decision
    blocked = [] if decision is None else [f"{name}: {why}" for name, why in decision.blocked.items()]
    message = "; ".join([*blocked, *(f"{name}: {why}" for name, why in result.without_nodes.items())])
    if message:
        reason = "NoCapacity" if blocked else "NoSuchAccelerator"
        return _condition("CapacityBlocked", truth=True, reason=reason, message=message)
    return _condition("CapacityBlocked", truth=False, reason="NotBlocked", message="engines find nodes")


def _condition(type_: str, *, truth: bool, reason: str, message: str) -> dict[str, Any]:
    return {"type": type_, "status": "True" if truth else "False", "reason": reason, "message": message[:_LONGEST]}


def _steady(condition: dict[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    same = known is not None and all(known.get(one) == condition[one] for one in ("status", "reason"))
    if known is None or not same or condition["type"] not in _STEADY:
        return condition
    message = known.get("message", "")
    # another cause is news
    if condition["type"] == "MetricsAvailable" and mask_numbers(message) != mask_numbers(condition["message"]):
        return condition
    return {**condition, "message": message}
