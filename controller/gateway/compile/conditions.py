# SPDX-License-Identifier: Apache-2.0
"""Conditions of objects: what is wanted, and how it is merged with what the object already says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Truth = Literal["True", "False", "Unknown"]

_LONGEST: Final = 4096
# Messages of conditions that are as they should be.
NO_MISTAKE: Final = "it has no mistake"
IN_DIRECTORY: Final = "it is in the directory"


class Wanted(msgspec.Struct, frozen=True):
    """A condition without its times."""

    type: str
    status: Truth
    reason: str
    message: str = ""


class WantedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that an object of this generation should have. ``fields``: beside the conditions."""

    kind: str
    key: str
    generation: int
    conditions: tuple[Wanted, ...]
    fields: Mapping[str, Any] = {}


def holds(type_: str, message: str = "") -> Wanted:
    """A condition that is as it should be."""
    return Wanted(type_, "True", type_, message)


def fails(type_: str, reason: str, message: str) -> Wanted:
    """A condition that is not; ``message`` says what to do."""
    return Wanted(type_, "False", reason, message[:_LONGEST])


def merged(wanted: WantedStatus, observed: Mapping[str, Any], now: str) -> dict[str, Any] | None:
    """The status to write, or None if ``observed`` says all of it already. ``now``: RFC 3339.

    The time of a condition changes only when its status does.
    """
    known = {one.get("type"): one for one in observed.get("conditions") or ()}
    conditions = [_condition(one, known.get(one.type), wanted.generation, now) for one in wanted.conditions]
    status = {**wanted.fields, "observedGeneration": wanted.generation, "conditions": conditions}
    return None if all(observed.get(name) == value for name, value in status.items()) else status


def transitions(status: Mapping[str, Any], observed: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The conditions whose status or reason is not what it was, for Events; what is not known yet is none."""
    known = {one.get("type"): (one.get("status"), one.get("reason")) for one in observed.get("conditions") or ()}
    found = [one for one in status["conditions"] if one["status"] != "Unknown"]
    return [one for one in found if known.get(one["type"]) != (one["status"], one["reason"])]


def _condition(wanted: Wanted, known: Mapping[str, Any] | None, generation: int, now: str) -> dict[str, Any]:
    same = known is not None and known.get("status") == wanted.status
    return {
        "type": wanted.type,
        "status": wanted.status,
        "reason": wanted.reason,
        "message": wanted.message,
        "observedGeneration": generation,
        "lastTransitionTime": known.get("lastTransitionTime", now) if same and known is not None else now,
    }
