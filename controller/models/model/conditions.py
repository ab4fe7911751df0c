# SPDX-License-Identifier: Apache-2.0
"""Conditions of a Model: Ready, and one for each kind of object that was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.kube.resources import Object

Condition = dict[str, Any]

# What says of each kind that it does its work.
_TOLD_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "ModelServer": ("Programmed", "Available"),
    "ModelRoute": ("Programmed",),
    "AutoscalingPolicyBinding": ("ScalingActive",),
}


def condition(type_: str, status: bool | None, reason: str, message: str) -> Condition:
    """As the status has it, without the generation and times."""
    said = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": type_, "status": said, "reason": reason, "message": message}


def of_children(type_: str, kind: str, things: Sequence[Object]) -> Condition:
    """True if all say that they work; False with those that do not; Unknown while one has not said."""
    if not things:
        return condition(type_, None, "NotMade", f"there is no {kind} yet")
    silent, failing = [], []
    for thing in things:
        name = thing["metadata"]["name"]
        for found in (condition_of(thing, about) for about in _TOLD_BY[kind]):
            if not found or found.get("status") == "Unknown":
                silent.append(name)
            elif found.get("status") == "False":
                failing.append(f"{kind} {name}: {found.get('reason')}: {found.get('message')}")
    if failing:
        return condition(type_, False, f"{kind}NotReady", "; ".join(failing))
    if silent:
        names = ", ".join(dict.fromkeys(silent))
        return condition(type_, None, "NotReported", f"no gateway has reported on {kind} {names} yet")
    return condition(type_, True, f"{kind}Ready", "")


def condition_of(thing: Object, type_: str) -> Mapping[str, Any]:
    """One condition of an object, of its present generation; empty if it has none."""
    status, generation = thing.get("status") or {}, thing["metadata"].get("generation")
    for one in status.get("conditions") or ():
        seen = one.get("observedGeneration", generation)
        if one.get("type") == type_ and (generation is None or seen >= generation):
            return one  # type: ignore[no-any-return]  # an object's JSON
    return {}
