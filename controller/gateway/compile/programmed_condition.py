# SPDX-License-Identifier: Apache-2.0
"""Programmed and Available: whether all consumers of the directory use an object as it is now, and its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import GATEWAY_FILE, file_name
from controller.kube.conditions import (
    WantedCondition,
    WantedStatus,
    WantedStatusList,
    condition_false,
    condition_true,
    find_list_item,
)
from extproc.api.status_page_contents import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PROGRAMMED: Final = "Programmed"
_AVAILABLE: Final = "Available"
# Kinds whose objects are written into the one GatewayConfig; the others have files of their own.
_IN_GATEWAY_FILE: Final = ("GatewayConfig", "Gateway")


class ConfigConsumer(msgspec.Struct, frozen=True):
    """A process that reads the directory. ``name``: for people. ``report``: None if it does not answer. ``is_writer``:
    it is the one that writes the directory.
    """

    name: str
    report: ConfigReport | None
    is_writer: bool = False

    def has_loaded(self, file: str, digest: str) -> bool:
        """Whether it uses this file with this content."""
        return self.report is not None and self.report.files.get(file) == digest

    @property
    def refusal(self) -> str:
        """Why it takes nothing new; empty if it does."""
        return "" if self.report is None else self.report.refused

    @property
    def serves_nothing(self) -> bool:
        """Whether it serves nothing, not even what it served before."""
        return self.report is not None and self.report.has_nothing

    def is_warming(self, server: str) -> bool:
        """Whether it has engines of this ModelServer, and uses none of them yet."""
        return self.report is not None and server in self.report.warming

    @property
    def wait_reason(self) -> str:
        """What it waits for."""
        if self.report is None:
            return f"{self.name} does not answer"
        return self.report.waiting or f"{self.name} has not taken it yet"


def add_programmed_condition(
    wanted: WantedStatus,
    observed: Mapping[str, Any],
    digests: Mapping[str, str],
    consumers: Sequence[ConfigConsumer],
) -> WantedStatus:
    """``wanted`` with the consumers' reports. ``observed``: the status of the object as it is. ``digests``: of the
    files that the directory should have.

    Files change with each endpoint. An object that was in use counts as used until its generation changes, and so does
    a ModelServer that was available, so that pods do not flip their conditions.
    """
    file = GATEWAY_FILE if wanted.kind in _IN_GATEWAY_FILE else file_name(wanted.kind, wanted.key)
    digest = digests.get(file)
    if digest is None:
        return wanted

    def as_used(conditions: tuple[WantedCondition, ...], before: Mapping[str, Any]) -> tuple[WantedCondition, ...]:
        """``before``: the object's status, or the item of a list in it, as it is."""
        if not _is_programmed(conditions):
            return conditions
        programmed = _programmed(file, digest, consumers, was_used=_was_true(before, PROGRAMMED, wanted.generation))
        return tuple(programmed if one.type == PROGRAMMED else one for one in conditions)

    conditions = as_used(wanted.conditions, observed)
    if wanted.kind == "GatewayConfig" and _is_programmed(wanted.conditions):
        conditions += () if any(one.type == "ResolvedRefs" for one in conditions) else tuple(_keys(consumers))
    if wanted.kind == "ModelServer":
        if not _was_true(observed, _AVAILABLE, wanted.generation):
            conditions = _with_acknowledgement(conditions, wanted.key, file, digest, consumers)
        conditions = _with_breaker(_with_wrong_model(conditions, wanted.key, consumers), wanted.key, consumers)
    return msgspec.structs.replace(
        wanted, conditions=conditions, lists=tuple(_list_as_used(one, observed, as_used) for one in wanted.lists)
    )


def are_statuses_known(statuses: Iterable[WantedStatus]) -> bool:
    """Whether no status waits for a consumer's report."""
    return not any(one.status == "Unknown" for status in statuses for one in _all_conditions(status))


def _all_conditions(status: WantedStatus) -> Iterator[WantedCondition]:
    yield from status.conditions
    for found in status.lists:
        for entry in found.entries:
            yield from entry.conditions


def _list_as_used(
    wanted: WantedStatusList,
    observed: Mapping[str, Any],
    as_used: Callable[[tuple[WantedCondition, ...], Mapping[str, Any]], tuple[WantedCondition, ...]],
) -> WantedStatusList:
    items = observed.get(wanted.name) or ()
    entries = [
        msgspec.structs.replace(one, conditions=as_used(one.conditions, find_list_item(one.identity, items)))
        for one in wanted.entries
    ]
    return msgspec.structs.replace(wanted, entries=tuple(entries))


def _is_programmed(conditions: Iterable[WantedCondition]) -> bool:
    return any(one.type == PROGRAMMED and one.status == "True" for one in conditions)


def _programmed(file: str, digest: str, consumers: Sequence[ConfigConsumer], *, was_used: bool) -> WantedCondition:
    behind = [one for one in consumers if not one.has_loaded(file, digest)]
    refusing = next((one for one in behind if one.refusal), None)
    why = next((one.refusal for one in consumers if one.refusal), "")
    # an object that was in use stays so, unless a consumer reports its loss
    if not behind or (was_used and not any(one.serves_nothing for one in consumers)):
        users = [one.name for one in consumers if not one.is_writer]
        message = (
            f"in use by {' and '.join(users)}" if users else "in the directory; nobody is asked whether it is in use"
        )
        return condition_true(PROGRAMMED, f"{message}; no change is used: {why}" if why else message)
    if refusing is not None:
        reason = "GatewayConfigInvalid" if refusing.is_writer else "Refused"
        return condition_false(PROGRAMMED, reason, f"{refusing.name} does not use it: {refusing.refusal}")
    return WantedCondition(PROGRAMMED, "Unknown", "Pending", behind[0].wait_reason)


def _with_available(
    conditions: tuple[WantedCondition, ...], change: Callable[[WantedCondition], WantedCondition]
) -> tuple[WantedCondition, ...]:
    """``change``: of Available, where it is True."""
    return tuple(change(one) if one.type == _AVAILABLE and one.status == "True" else one for one in conditions)


def _with_acknowledgement(
    conditions: tuple[WantedCondition, ...], key: str, file: str, digest: str, consumers: Sequence[ConfigConsumer]
) -> tuple[WantedCondition, ...]:
    """It becomes available once all consumers have its endpoints and send requests there."""
    behind = next((one for one in consumers if not one.has_loaded(file, digest)), None)
    warming = next((one for one in consumers if one.is_warming(key)), None)
    if behind is not None:
        why = behind.refusal or behind.wait_reason
    elif warming is not None:
        why = f"{warming.name} uses its first endpoints once Envoy has them"
    else:
        return conditions
    return _with_available(conditions, lambda _: WantedCondition(_AVAILABLE, "Unknown", "Pending", why))


def _with_wrong_model(
    conditions: tuple[WantedCondition, ...], key: str, consumers: Sequence[ConfigConsumer]
) -> tuple[WantedCondition, ...]:
    """Available has endpoints, and names a ``model`` that none of them lists. Some engines take any name."""
    reports = [one.report for one in consumers if one.report is not None]
    problem = next((one.wrong_models[key] for one in reports if key in one.wrong_models), "")
    if not problem:
        return conditions
    return _with_available(
        conditions,
        lambda one: msgspec.structs.replace(one, reason="ModelNotListed", message=f"{one.message}; {problem}"),
    )


def _with_breaker(
    conditions: tuple[WantedCondition, ...], key: str, consumers: Sequence[ConfigConsumer]
) -> tuple[WantedCondition, ...]:
    """It is not available while some process refuses its requests because they fail."""
    reports = [one.report for one in consumers if one.report is not None]
    problem = next((one.open_breakers[key] for one in reports if key in one.open_breakers), "")
    if not problem:
        return conditions
    return _with_available(
        conditions, lambda one: condition_false(_AVAILABLE, "BreakerOpen", f"{one.message}; {problem}")
    )


def _was_true(observed: Mapping[str, Any], type_: str, generation: int) -> bool:
    known = (one for one in observed.get("conditions") or () if one.get("type") == type_)
    return any(one.get("status") == "True" and one.get("observedGeneration") == generation for one in known)


def _keys(consumers: Sequence[ConfigConsumer]) -> Iterable[WantedCondition]:
    """Keys and key sets are read by the bundle's writer, which reports missing ones."""
    reports = [one.report for one in consumers if one.report is not None]
    missing = sorted({text for report in reports for text in report.missing_keys})
    if missing:
        message = f"whoever uses one of these keys is refused until it is there: {'; '.join(missing)}"
        return [condition_false("ResolvedRefs", "KeyNotFound", message)]
    return [condition_true("ResolvedRefs", "no key or key set is missing")] if len(reports) > 1 else []
