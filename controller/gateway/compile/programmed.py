# SPDX-License-Identifier: Apache-2.0
"""The condition Programmed: whether those who follow the directory use an object as it is now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import GATEWAY_FILE, file_name
from controller.gateway.compile.conditions import Wanted, WantedStatus, fails, holds
from extproc.config.report import ConfigReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROGRAMMED: Final = "Programmed"


class Follower(msgspec.Struct, frozen=True):
    """Somebody who uses the directory. ``name``: for people. ``report``: None if there is none, since it does not answer.
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
    def waiting(self) -> str:
        """What it waits for."""
        if self.report is None:
            return f"{self.name} does not answer"
        return self.report.waiting or f"{self.name} has not taken it yet"


def with_use(
    wanted: WantedStatus,
    observed: Mapping[str, Any],
    digests: Mapping[str, str],
    followers: Sequence[Follower],
) -> WantedStatus:
    """``wanted`` with what the followers say. ``observed``: the status of the object as it is. ``digests``: of the files
    that the directory should have.

    Endpoints come and go, and each time a file is new. An object that was in use stays so until its generation changes,
    so that pods do not turn its condition this way and that.
    """
    file = GATEWAY_FILE if wanted.kind == "GatewayConfig" else file_name(wanted.kind, wanted.key)
    digest = digests.get(file)
    if digest is None or not any(one.type == PROGRAMMED and one.status == "True" for one in wanted.conditions):
        return wanted
    programmed = _programmed(file, digest, followers, was_used=_was_used(observed, wanted.generation))
    conditions = [programmed if one.type == PROGRAMMED else one for one in wanted.conditions]
    if wanted.kind == "GatewayConfig" and not any(one.type == "ResolvedRefs" for one in conditions):
        conditions.extend(_keys(followers))
    return msgspec.structs.replace(wanted, conditions=tuple(conditions))


def is_settled(statuses: Iterable[WantedStatus]) -> bool:
    """Whether nothing is still on its way."""
    return not any(one.status == "Unknown" for status in statuses for one in status.conditions)


def _programmed(file: str, digest: str, followers: Sequence[Follower], *, was_used: bool) -> Wanted:
    behind = [one for one in followers if not one.uses(file, digest)]
    refusing = next((one for one in behind if one.refused), None)
    why = next((one.refused for one in followers if one.refused), "")
    if not behind or was_used:
        users = [one.name for one in followers if not one.is_writer]
        said = f"in use by {' and '.join(users)}" if users else "in the directory; nobody is asked whether it is in use"
        return holds(PROGRAMMED, f"{said}; no change is used: {why}" if why else said)
    if refusing is not None:
        reason = "GatewayConfigInvalid" if refusing.is_writer else "Refused"
        return fails(PROGRAMMED, reason, f"{refusing.name} does not use it: {refusing.refused}")
    return Wanted(PROGRAMMED, "Unknown", "Pending", behind[0].waiting)


def _was_used(observed: Mapping[str, Any], generation: int) -> bool:
    known = (one for one in observed.get("conditions") or () if one.get("type") == PROGRAMMED)
    return any(one.get("status") == "True" and one.get("observedGeneration") == generation for one in known)


def _keys(followers: Sequence[Follower]) -> Iterable[Wanted]:
    """Keys and key sets are read by the bundle's writer, which says what is missing."""
    reports = [one.report for one in followers if one.report is not None]
    missing = sorted({text for report in reports for text in report.missing_keys})
    if missing:
        said = f"whoever uses one of these keys is refused until it is there: {'; '.join(missing)}"
        return [fails("ResolvedRefs", "KeyNotFound", said)]
    return [holds("ResolvedRefs", "no key or key set is missing")] if len(reports) > 1 else []
