# SPDX-License-Identifier: Apache-2.0
"""Whether a Model is Ready: what its objects report, and how long it waits for gateways to confirm its routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import parse_timestamp

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from controller.kube.api_resources import Object
    from controller.models.model.model_state import ResolvedModel

Condition = dict[str, Any]
Place = tuple[str, str]
"""Kind and name of an object that the Model has."""
# Conditions by which each kind reports that it works.
_TOLD_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "ModelServer": ("Programmed", "Available"),
    "ModelRoute": ("Programmed",),
    "AutoscalingPolicyBinding": ("ScalingActive",),
}
# Of a condition's message: others may write the texts that it joins, and a status that is too long is refused.
_LONGEST: Final = 4096
# A route or a server that nobody has made: no gateway can confirm it.
_NOT_MADE: Final = "NotMade"


def condition(type_: str, status: bool | None, reason: str, message: str) -> Condition:
    """As the status has it, without the generation and times."""
    text = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": type_, "status": text, "reason": reason, "message": message[:_LONGEST]}


def children_condition(type_: str, kind: str, things: Sequence[Object], changing: Collection[Place] = ()) -> Condition:
    """True if all report that they work; False with those that do not; Unknown while one has not reported.
    ``changing``: kinds and names of those that are about to be written, on which nobody has reported yet.
    """
    if not things:
        return condition(type_, None, _NOT_MADE, f"there is no {kind} yet")
    silent = [f"no gateway has reported on {kind} {name} yet" for of, name in changing if of == kind]
    failing = []
    for thing in things:
        name = thing["metadata"]["name"]
        if (kind, name) in changing:
            continue
        for found in (current_condition(thing, about) for about in _TOLD_BY[kind]):
            if found.get("status") == "False":
                failing.append(f"{kind} {name}: {found.get('reason')}: {found.get('message')}")
            elif found.get("status") != "True":
                silent.append(_why_unknown(kind, name, found))
    if failing:
        return condition(type_, False, f"{kind}NotReady", "; ".join(failing))
    if silent:
        return condition(type_, None, "NotReported", "; ".join(dict.fromkeys(silent)))
    return condition(type_, True, f"{kind}Ready", "")


def _why_unknown(kind: str, name: str, found: Mapping[str, Any]) -> str:
    message = found.get("message")
    return f"{kind} {name}: {message}" if message else f"no gateway has reported on {kind} {name} yet"


def current_condition(thing: Object, type_: str) -> Mapping[str, Any]:
    """One condition of an object, of its present generation; empty if it has none."""
    status, generation = thing.get("status") or {}, thing["metadata"].get("generation")
    for one in status.get("conditions") or ():
        seen = one.get("observedGeneration", generation)
        if one.get("type") == type_ and (generation is None or seen >= generation):
            return one  # type: ignore[no-any-return]  # an object's JSON
    return {}


class GatewayWait(msgspec.Struct, frozen=True):
    """How long a Model waits for what gateways have not confirmed. ``until_s``: from then on it is Ready without, as
    there may be no gateway. ``ready``: the condition Ready as it is: where it is True, what served the Model serves it
    meanwhile.
    """

    now_s: float
    until_s: float
    ready: Mapping[str, Any]

    @property
    def is_over(self) -> bool:
        """Whether it waits no longer."""
        return self.now_s >= self.until_s

    @property
    def was_ready(self) -> bool:
        """Whether the Model is Ready."""
        return self.ready.get("status") == "True"


def gateway_wait(
    before: Mapping[str, Any], phase_since: str, waits: Iterable[Condition], now_s: float, limit_s: float
) -> GatewayWait:
    """``before``: the status of the Model as it is. ``phase_since``: when the present phase began. ``waits``:
    conditions that gateways decide, as they are now; those that are Unknown count from when they became it.
    """
    known = {one.get("type"): one for one in before.get("conditions") or ()}
    since_s = [parse_timestamp(phase_since)]
    for one in waits:
        earlier = known.get(one["type"], {})
        if one["status"] == "Unknown":
            is_same = earlier.get("status") == "Unknown"
            since_s.append(parse_timestamp(earlier.get("lastTransitionTime")) if is_same else now_s)
    # one that is far in the future, which somebody else has written, would be waited for; clocks differ by less
    began_s = max((one for one in since_s if one is not None and one <= now_s + limit_s), default=-math.inf)
    return GatewayWait(now_s, began_s + limit_s, known.get("Ready", {}))


class ReadyParts(msgspec.Struct, frozen=True):
    """Conditions of a Model. ``shown``: all but Ready and those of its ``steps``. ``routed`` and ``servers``: of its
    ModelRoutes and its ModelServers. ``reached``: whether gateways have an engine of it; not shown by itself.
    """

    shown: Sequence[Condition]
    routed: Condition
    servers: Condition
    reached: Condition
    steps: Sequence[Condition]

    @property
    def unconfirmed(self) -> str:
        """What no gateway has confirmed, of that on which Ready depends; empty if there is nothing."""
        parts = [self.routed, self.reached, *self.steps]
        return "; ".join(dict.fromkeys(one["message"] for one in parts if one["status"] == "Unknown"))


def reached_condition(servers: Sequence[str], reported: Mapping[str, Mapping[str, Any]]) -> Condition:
    """Whether a gateway sends requests to an engine of one of ``servers``. ``reported``: Available, by ModelServer."""
    found = {name: reported.get(name, {}) for name in servers}
    if any(one.get("status") == "True" for one in found.values()):
        return condition("", True, "", "")
    silent = [_why_unknown("ModelServer", name, one) for name, one in found.items() if one.get("status") != "False"]
    if silent:
        return condition("", None, "NotReported", "; ".join(silent))
    return condition("", False, "NotAvailable", "no gateway has an engine of it yet")


def ready_condition(
    model: ResolvedModel, phase: str, failure: tuple[str, str] | None, parts: ReadyParts, wait: GatewayWait
) -> tuple[Condition, float | None]:
    """Ready, and when time alone changes it."""
    refusal = _not_serving(model, phase, failure, parts)
    if refusal is not None:
        return refusal, None
    is_waiting = parts.unconfirmed and not wait.is_over
    return _serving(parts.unconfirmed, wait), wait.until_s if is_waiting else None


def _not_serving(
    model: ResolvedModel, phase: str, failure: tuple[str, str] | None, parts: ReadyParts
) -> Condition | None:
    """Ready, if requests would not be answered; None if they would, or gateways have yet to report that."""
    if model.spec.stop:
        return condition("Ready", False, "Stopped", "spec.stop is true")
    if phase != "Loaded":
        reason, message = failure or (phase, "no replica is ready")
        return condition("Ready", False, reason, message)
    route, reached = parts.routed, parts.reached
    if route["status"] == "False" or route["reason"] == _NOT_MADE:
        return condition("Ready", False, route["reason"], f"no gateway serves it: {route['message']}")
    if reached["status"] == "False":
        return condition("Ready", False, reached["reason"], reached["message"])
    step = next((one for one in parts.steps if one["status"] == "False"), None)
    if step is not None:
        return condition("Ready", False, f"{step['type'].removesuffix('Ready')}NotReady", step["message"])
    return None


def _serving(unconfirmed: str, wait: GatewayWait) -> Condition:
    """Ready of a Model that has all that it needs. ``unconfirmed``: what no gateway has confirmed."""
    if not unconfirmed:
        return condition("Ready", True, "Serving", "")
    if wait.was_ready and not wait.is_over:
        # clients such as kubectl wait until the condition is about the newest generation
        about = wait.ready.get("observedGeneration")
        return {**condition("Ready", True, "Serving", ""), **({} if about is None else {"observedGeneration": about})}
    if wait.is_over:
        message = f"no gateway has confirmed that requests get to its engines: {unconfirmed}"
        return condition("Ready", True, "GatewayUnconfirmed", message)
    return condition("Ready", False, "WaitingForGateway", unconfirmed)
