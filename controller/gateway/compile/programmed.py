# SPDX-License-Identifier: Apache-2.0
"""The condition Programmed: whether those who follow the directory use an object as it is now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import GATEWAY_FILE, file_name
from controller.kube.conditions import Wanted, WantedList, WantedStatus, fails, holds, item_about
from extproc.api.status_pages import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PROGRAMMED: Final = "Programmed"
# Kinds whose objects are written into the one GatewayConfig; the others have files of their own.
_IN_GATEWAY_FILE: Final = ("GatewayConfig", "Gateway")


class Consumer(msgspec.Struct, frozen=True):
    """Somebody who uses the directory. ``name``: for people. ``report``: None if there is none, since it does not
    answer.
    ``is_writer``: it is the one who writes the directory.
    """

    name: str
    report: ConfigReport | None
    is_writer: bool = False

    def uses(self, file: str, digest: str) -> bool:
        """Whether it uses this file with this content."""
        return self.report is not None and self.report.files.get(file) == digest

    @property
    def refused(self) -> str:
        """Why it takes nothing new; empty if it does."""
        return "" if self.report is None else self.report.refused

    @property
    def has_nothing(self) -> bool:
        """Whether it serves nothing, not even what it served before."""
        return self.report is not None and self.report.has_nothing

    @property
    def waiting(self) -> str:
        """What it waits for."""
        if self.report is None:
            return f"{self.name} does not answer"
        return self.report.waiting or f"{self.name} has not taken it yet"


def with_use(
    wanted: WantedStatus,
    observed: Mapping[str, Any],
    digests: Mapping[str, str],
    consumers: Sequence[Consumer],
) -> WantedStatus:
    """``wanted`` with what the consumers say. ``observed``: the status of the object as it is. ``digests``: of the
    files that the directory should have.

    Endpoints come and go, and each time a file is new. An object that was in use stays so until its generation changes,
    so that pods do not turn its condition this way and that.
    """
    file = GATEWAY_FILE if wanted.kind in _IN_GATEWAY_FILE else file_name(wanted.kind, wanted.key)
    digest = digests.get(file)
    if digest is None:
        return wanted

    def as_used(conditions: tuple[Wanted, ...], before: Mapping[str, Any]) -> tuple[Wanted, ...]:
        """``before``: the object's status, or the item of a list in it, as it is."""
        if not _is_programmed(conditions):
            return conditions
        programmed = _programmed(file, digest, consumers, was_used=_was_used(before, wanted.generation))
        return tuple(programmed if one.type == PROGRAMMED else one for one in conditions)

    conditions = as_used(wanted.conditions, observed)
    if wanted.kind == "GatewayConfig" and _is_programmed(wanted.conditions):
        conditions += () if any(one.type == "ResolvedRefs" for one in conditions) else tuple(_keys(consumers))
    return msgspec.structs.replace(
        wanted, conditions=conditions, lists=tuple(_list_as_used(one, observed, as_used) for one in wanted.lists)
    )


def is_settled(statuses: Iterable[WantedStatus]) -> bool:
    """Whether nothing is still on its way."""
    return not any(one.status == "Unknown" for status in statuses for one in _all_conditions(status))


def _all_conditions(status: WantedStatus) -> Iterator[Wanted]:
    yield from status.conditions
    for found in status.lists:
        for entry in found.entries:
            yield from entry.conditions


def _list_as_used(
    wanted: WantedList,
    observed: Mapping[str, Any],
    as_used: Callable[[tuple[Wanted, ...], Mapping[str, Any]], tuple[Wanted, ...]],
) -> WantedList:
    items = observed.get(wanted.name) or ()
    entries = [
        msgspec.structs.replace(one, conditions=as_used(one.conditions, item_about(one.identity, items)))
        for one in wanted.entries
    ]
    return msgspec.structs.replace(wanted, entries=tuple(entries))


def _is_programmed(conditions: Iterable[Wanted]) -> bool:
    return any(one.type == PROGRAMMED and one.status == "True" for one in conditions)


def _programmed(file: str, digest: str, consumers: Sequence[Consumer], *, was_used: bool) -> Wanted:
    behind = [one for one in consumers if not one.uses(file, digest)]
    refusing = next((one for one in behind if one.refused), None)
    why = next((one.refused for one in consumers if one.refused), "")
    # what was used before is used still, unless somebody has lost it
    if not behind or (was_used and not any(one.has_nothing for one in consumers)):
        users = [one.name for one in consumers if not one.is_writer]
        said = f"in use by {' and '.join(users)}" if users else "in the directory; nobody is asked whether it is in use"
        return holds(PROGRAMMED, f"{said}; no change is used: {why}" if why else said)
    if refusing is not None:
        reason = "GatewayConfigInvalid" if refusing.is_writer else "Refused"
        return fails(PROGRAMMED, reason, f"{refusing.name} does not use it: {refusing.refused}")
    return Wanted(PROGRAMMED, "Unknown", "Pending", behind[0].waiting)


def _was_used(observed: Mapping[str, Any], generation: int) -> bool:
    known = (one for one in observed.get("conditions") or () if one.get("type") == PROGRAMMED)
    return any(one.get("status") == "True" and one.get("observedGeneration") == generation for one in known)


def _keys(consumers: Sequence[Consumer]) -> Iterable[Wanted]:
    """Keys and key sets are read by the bundle's writer, which says what is missing."""
    reports = [one.report for one in consumers if one.report is not None]
    missing = sorted({text for report in reports for text in report.missing_keys})
    if missing:
        said = f"whoever uses one of these keys is refused until it is there: {'; '.join(missing)}"
        return [fails("ResolvedRefs", "KeyNotFound", said)]
    return [holds("ResolvedRefs", "no key or key set is missing")] if len(reports) > 1 else []
