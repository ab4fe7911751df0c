# SPDX-License-Identifier: Apache-2.0
"""How far a Model is, in KServe's words, and how long it was so far."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Phase = Literal["Pending", "Standby", "Loading", "Loaded", "FailedToLoad"]
Transition = Literal["UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"]

# Reasons that waiting does not mend; others, such as a pod without a node or one that is lost, may pass.
_LOADING_FAILED: Final = frozenset(
    {
        *("ModelLoadFailed", "RuntimeUnhealthy", "PodFailed", "BlockedByFailedLoad"),
        *("ImagePullFailed", "ContainerConfigFailed"),
    }
)


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    """``wanted``, ``there``, ``ready`` and ``updated``: replicas. ``is_current``: its ModelInfer has what the Model
    says, and says itself that it has done it. ``is_blocked``: the new revision does not become ready. ``is_scheduled``:
    a pod has a node. ``failure``: a reason and a message, of a pod or of the ModelInfer.
    """

    name: str
    wanted: int = 0
    there: int = 0
    ready: int = 0
    updated: int = 0
    is_current: bool = False
    is_blocked: bool = False
    is_scheduled: bool = False
    failure: tuple[str, str] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it does not load, and trying again alone will not help."""
        return self.is_blocked or (self.failure is not None and self.failure[0] in _LOADING_FAILED)

    @property
    def is_settled(self) -> bool:
        """Whether everything that is wanted is there, in the newest revision, and nothing else."""
        return self.is_current and self.there == self.ready == self.updated == self.wanted


def phase_of(backends: Sequence[BackendState]) -> Phase:
    """The best that any backend has reached: requests go where one serves."""
    if any(one.ready for one in backends):
        return "Loaded"
    if not any(one.wanted for one in backends):
        return "Standby"
    trying = [one for one in backends if one.wanted]
    if all(one.has_failed for one in trying):
        return "FailedToLoad"
    return "Loading" if any(one.is_scheduled for one in trying) else "Pending"


def transition_of(backends: Sequence[BackendState]) -> Transition:
    """Whether what runs is what is written."""
    if any(one.is_blocked or (one.has_failed and not one.is_settled) for one in backends):
        return "BlockedByFailedLoad"
    return "UpToDate" if all(one.is_settled for one in backends) else "InProgress"


def phase_fields(phase: Phase, before: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """Fields of the status. ``before``: the status as it is. The present stay is added when it ends."""
    last, since = before.get("phase"), before.get("phaseSince")
    times = {one["name"]: one["seconds"] for one in before.get("phaseTimes") or ()}
    if phase == last and since:
        return {"phase": phase, "phaseSince": since, "phaseTimes": _listed(times)}
    if last and since:
        stayed_s = now_s - datetime.fromisoformat(since).timestamp()
        times[last] = round(times.get(last, 0.0) + max(stayed_s, 0.0), 1)
    return {"phase": phase, "phaseSince": _written(now_s), "phaseTimes": _listed(times)}


def _listed(times: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "seconds": times[name]} for name in sorted(times)]


def _written(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
