# SPDX-License-Identifier: Apache-2.0
"""Conditions of objects: the wanted ones, and their merge with the object's status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.kube.api_resources import key_of
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller.kube.api_resources import Object

Truth = Literal["True", "False", "Unknown"]

_LONGEST: Final = 4096
_NOTHING: Final[tuple[object, ...]] = (None, {}, [], ())
# Messages of conditions that are as they should be.
NO_MISTAKE: Final = "it has no mistake"
IN_DIRECTORY: Final = "it is in the directory"


class WantedCondition(msgspec.Struct, frozen=True):
    """A condition without its times. ``generation``: the one that it is about, if it is not that of the status."""

    type: str
    status: Truth
    reason: str
    message: str = ""
    generation: int | None = None


class WantedListItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a list in a status. ``identity``: the fields that distinguish it from the others. ``fields``: the
    remaining ones.
    """

    identity: Mapping[str, Any]
    conditions: tuple[WantedCondition, ...]
    fields: Mapping[str, Any] = {}


class WantedStatusList(msgspec.Struct, frozen=True, kw_only=True):
    """A list of a status whose items have conditions of their own: ``listeners`` of a Gateway, ``parents`` of a route.

    ``controller``: items with another ``controllerName`` belong to another controller and stay; empty: all are ours.
    ``gateway``: of ours, only those about this Gateway are this role's; empty: all.
    """

    name: str
    entries: tuple[WantedListItem, ...]
    controller: str = ""
    gateway: str = ""

    def is_ours(self, item: Mapping[str, Any], namespace: str) -> bool:
        """Whether ``item`` of an object in ``namespace`` is this role's to write and to remove."""
        if self.controller and item.get("controllerName") != self.controller:
            return False
        parent = item.get("parentRef") or {}
        return (
            not self.gateway or object_key(parent.get("namespace") or namespace, parent.get("name", "")) == self.gateway
        )


class WantedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that an object of this generation should have. ``fields``: beside the conditions. ``lists``: whose
    items have conditions. ``is_plain``: the status has no ``observedGeneration`` of its own.
    """

    kind: str
    key: str
    generation: int
    conditions: tuple[WantedCondition, ...]
    fields: Mapping[str, Any] = {}
    lists: tuple[WantedStatusList, ...] = ()
    is_plain: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether other controllers write into its lists, too."""
        return any(one.controller for one in self.lists)


def condition_true(type_: str, message: str = "") -> WantedCondition:
    """A condition that is as it should be."""
    return WantedCondition(type_, "True", type_, message)


def condition_false(type_: str, reason: str, message: str) -> WantedCondition:
    """A condition that is False; ``message`` has the correction."""
    return WantedCondition(type_, "False", reason, message[:_LONGEST])


def merge_status(wanted: WantedStatus, observed: Mapping[str, Any], now: str) -> dict[str, Any] | None:
    """The status to write, or None if ``observed`` already contains it. ``now``: RFC 3339.

    The time of a condition changes only when its status does.
    """
    status: dict[str, Any] = dict(wanted.fields)
    if not wanted.is_plain:
        status["observedGeneration"] = wanted.generation
    if wanted.conditions:
        status["conditions"] = _conditions(wanted.conditions, observed, wanted.generation, now)
    namespace = namespace_of(wanted.key)
    for one in wanted.lists:
        status[one.name] = _items(one, observed.get(one.name) or (), wanted.generation, now, namespace)
    return None if _contains(status, observed) else status


def status_to_write(kind: str, thing: Object, status: Mapping[str, Any], now: str) -> dict[str, Any] | None:
    """The status of ``thing`` that has all of ``status`` and nothing of an earlier one; None if it is as it should be.

    ``status`` has conditions without times: they are those of the object where the condition's status stays. One
    without ``observedGeneration`` is about the generation of ``thing``.
    """
    before = thing.get("status") or {}
    conditions = tuple(
        WantedCondition(
            one["type"], one["status"], one["reason"], one.get("message", ""), one.get("observedGeneration")
        )
        for one in status.get("conditions") or ()
    )
    # empty ones are left out: a map whose last item an applier takes away becomes null, which schemas refuse
    fields = {name: value for name, value in status.items() if name != "conditions" and value not in _NOTHING}
    generation = thing["metadata"].get("generation", 0)
    wanted = WantedStatus(kind=kind, key=key_of(thing), generation=generation, conditions=conditions, fields=fields)
    new = merge_status(wanted, before, now)
    if new is not None:
        return new
    # the schema's defaults, 0 and nothing, come back of themselves
    if not any(before[name] for name in before.keys() - fields.keys() - {"conditions", "observedGeneration"}):
        return None
    return merge_status(wanted, {"conditions": before.get("conditions") or []}, now)


def with_failure(
    status: Mapping[str, Any] | None, before: Mapping[str, Any], type_: str, truth: str, *, reason: str, message: str
) -> dict[str, Any]:
    """A status with the failure in its condition ``type_``. Without a planned one, the object's other fields stay."""
    found = dict(before if status is None else status)
    failure = {"type": type_, "status": truth, "reason": reason, "message": message}
    found["conditions"] = [*(one for one in found.get("conditions") or () if one["type"] != type_), failure]
    return found


def condition_transitions(status: Mapping[str, Any], observed: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The conditions whose status or reason has changed, for Events, those of lists' items as well; a condition that
    was not there before counts as unchanged. The message of a listener's condition begins with the listener's name.
    """
    known = {about: (one.get("status"), one.get("reason")) for about, one in _all_conditions(observed)}
    found = [(about, one) for about, one in _all_conditions(status) if one.get("status") != "Unknown"]
    return [one for about, one in found if known.get(about) != (one["status"], one["reason"])]


def find_list_item(identity: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The item of a list that has this identity; an empty one if there is none."""
    return next((one for one in items if all(one.get(name) == value for name, value in identity.items())), {})


def _conditions(
    wanted: Iterable[WantedCondition], observed: Mapping[str, Any], generation: int, now: str
) -> list[dict[str, Any]]:
    known = {one.get("type"): one for one in observed.get("conditions") or ()}
    return [_condition(one, known.get(one.type), generation, now) for one in wanted]


def _items(
    wanted: WantedStatusList, observed: Sequence[Mapping[str, Any]], generation: int, now: str, namespace: str
) -> list[Mapping[str, Any]]:
    """Other controllers' items as they are, then ours."""
    items = [one for one in observed if not wanted.is_ours(one, namespace)]
    for entry in wanted.entries:
        known = find_list_item(entry.identity, observed)
        conditions = _conditions(entry.conditions, known, generation, now)
        items.append({**entry.identity, **entry.fields, "conditions": conditions})
    return items


def _contains(status: Mapping[str, Any], observed: Mapping[str, Any]) -> bool:
    """Whether all of ``status`` is in ``observed``, in whatever order its conditions and items are."""
    for name, value in status.items():
        known = observed.get(name)
        if isinstance(value, list):
            known = known or []
            if name == "conditions":
                known = [one for one in known if any(one.get("type") == mine["type"] for mine in value)]
            if len(value) != len(known) or any(one not in known for one in value):
                return False
        elif known != value:
            return False
    return True


def _all_conditions(status: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """With what each is about."""
    for one in status.get("conditions") or ():
        yield ("", one.get("type", "")), one
    for name in ("listeners", "parents"):
        for item in status.get(name) or ():
            identity = item.get("name") or msgspec.json.encode(item.get("parentRef"), order="deterministic").decode()
            for one in item.get("conditions") or ():
                told = _of_listener(item["name"], one) if item.get("name") else one
                yield (f"{item.get('controllerName', '')} {identity}", one.get("type", "")), told


def _of_listener(name: str, condition: Mapping[str, Any]) -> Mapping[str, Any]:
    message = condition.get("message") or f"{condition.get('type')} is {condition.get('status')}"
    return {**condition, "message": f"listener {name}: {message}"}


def _condition(wanted: WantedCondition, known: Mapping[str, Any] | None, generation: int, now: str) -> dict[str, Any]:
    same = known is not None and known.get("status") == wanted.status
    return {
        "type": wanted.type,
        "status": wanted.status,
        "reason": wanted.reason,
        "message": wanted.message,
        "observedGeneration": generation if wanted.generation is None else wanted.generation,
        "lastTransitionTime": known.get("lastTransitionTime", now) if same and known is not None else now,
    }
