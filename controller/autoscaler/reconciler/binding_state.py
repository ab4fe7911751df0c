# SPDX-License-Identifier: Apache-2.0
"""The reconciler's state of one binding; a restart may lose it, and that never scales in."""

from __future__ import annotations

import asyncio
import base64
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.autoscaler.decision.decision import Decision, StageDecision
from controller.autoscaler.decision.traffic import Traffic
from controller.autoscaler.reconciler.accelerators import AcceleratorReservation
from controller.autoscaler.reconciler.bindings import BindingView, ManualOverride, is_changed_by_others, manual_override
from controller.autoscaler.reconciler.decision_records import BindingDecisionLog
from controller.autoscaler.reconciler.result import ReconciliationResult, ReplicaUpdate
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget, ResolvedTargets
from controller.kube.errors import Backoff, ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

log = logging.getLogger(__name__)

# A gateway is silent after so long; other sources are read once a period.
_LEAST_PATIENCE_S: Final = 3.0
_PATIENCE_PERIODS: Final = 6
_FIRST_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 60.0
# An object's annotations share 256 KiB.
_MOST_BYTES: Final = 65_536
_FIRST_S: Final = 60.0
_LONGEST_S: Final = 3600.0
# Of what a leader before has kept.
_MOST_FIRST_S: Final = 600.0
_NO_TRAFFIC: Final = Traffic()


class BackoffWriter:
    """Writes that change nothing but what people read: one that fails is tried again later, and delays no decision."""

    def __init__(self, what: str, rng: Random) -> None:
        self._what = what
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S, rng)
        self._until_s = 0.0

    async def attempt(self, key: str, write: Callable[[], Awaitable[object]]) -> bool:
        """Whether it is written. After a failure it is not tried before the back-off, or the server's Retry-After,
        ends.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._until_s:
            return False
        try:
            await write()
        except ClusterError as error:
            wait_s = self._backoff.record_failure(error)
            self._until_s = now_s + wait_s
            log.warning("%s: %s could not be written: %s; trying again in %.1f s", key, self._what, error, wait_s)
            return False
        self._backoff.reset()
        return True


class AnnotationWriteSchedule:
    """When to write what was learned of a binding's targets into its annotation, for the next leader: a minute after
    the last time, then two, four, and so on up to an hour.

    Speeds change a little all the time, and early changes are the largest. What an earlier leader kept is good enough
    for the first minutes, in which a new one has enough to write. Times are drawn at random, so that bindings that
    began together do not write together.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._due_s: float | None = None
        self._written: str | None = None
        self._wait_s = _FIRST_S

    def is_due(self, stored: str, now_s: float) -> bool:
        """``stored``: the annotation. Packing costs something, so it is done when it is due."""
        if self._due_s is None and stored:
            self._due_s, self._written = now_s + self._rng.uniform(_FIRST_S, _MOST_FIRST_S), stored
            self._wait_s = _MOST_FIRST_S
        return self._due_s is None or now_s >= self._due_s

    def next_annotation(self, kept: bytes, stored: str, now_s: float) -> str:
        """What to write now; empty if nothing is new."""
        before, text = stored if self._written is None else self._written, encode_annotation(kept)
        if not text or text == before:
            self._due_s, self._written = now_s + self._about(_FIRST_S), before
            return ""
        self._due_s, self._written = now_s + self._about(self._wait_s), text
        self._wait_s = min(_LONGEST_S, 2 * self._wait_s)
        return text

    def _about(self, wait_s: float) -> float:
        return wait_s * self._rng.uniform(0.5, 1.0)


def encode_annotation(kept: bytes) -> str:
    """As the annotation has it; empty if it would be too long."""
    text = base64.b64encode(zlib.compress(kept)).decode() if kept else ""
    return text if len(text) <= _MOST_BYTES else ""


def decode_annotation(text: str) -> bytes:
    """What was packed; empty for what is nothing of ours."""
    try:
        reader = zlib.decompressobj()
        return reader.decompress(base64.b64decode(text, validate=True), 1_000_000)
    except (ValueError, zlib.error):
        return b""


class BindingState(msgspec.Struct, kw_only=True):
    """``memory``: of the decision. ``first_decided_s``: when this process first decided. ``changed_s``: when replicas
    set by another writer were first observed, by target. ``resolution``: of its targets. ``ordered``: accelerators.
    ``unreported``: replicas written since the last status. ``conflicts``: of targets that others write repeatedly. The
    rest is for the metrics: ``view`` and ``result`` of the last reconciliation, the last ``stages``, the last known
    ``desired`` replicas, ``blocked``, and ``writes`` by target.
    """

    uid: str
    status_retry: BackoffWriter
    learned_retry: BackoffWriter
    conflicts: Backoff
    learned: AnnotationWriteSchedule
    log: BindingDecisionLog = msgspec.field(default_factory=BindingDecisionLog)
    memory: Any = None
    first_decided_s: float | None = None
    changed_s: dict[str, float] = {}
    resolution: ResolvedTargets | None = None
    ordered: AcceleratorReservation | None = None
    unreported: tuple[ReplicaUpdate, ...] = ()
    view: BindingView | None = None
    result: ReconciliationResult | None = None
    stages: tuple[StageDecision, ...] = ()
    desired: dict[str, int] = {}
    blocked: Mapping[str, str] = {}
    writes: dict[str, int] = {}

    def is_waiting_for_data(self, decision: Decision, period_s: float, now_s: float) -> bool:
        """Whether missing data may still arrive, as this process has just started."""
        if self.first_decided_s is None:
            self.first_decided_s = now_s
        is_unknown = not decision.stages or any(one.combined is None for one in decision.stages)
        return is_unknown and 0 <= now_s - self.first_decided_s < signal_wait_s(period_s)

    def manual_overrides(
        self, view: BindingView, resolved: Sequence[ResolvedTarget], hold_s: float, now_s: float
    ) -> dict[str, ManualOverride]:
        """Manual overrides by target. ``hold_s``: how long a change is kept."""
        found: dict[str, ManualOverride] = {}
        for one in resolved:
            name = one.spec.name
            if one.found is None or not is_changed_by_others(one.found, view.claim):
                self.changed_s.pop(name, None)
                continue
            seen_s = self.changed_s.setdefault(name, now_s)
            hold = manual_override(one.found, view.claim, seen_s, hold_s, now_s)
            if hold is not None:
                found[name] = hold
        return found

    def store_result(self, view: BindingView, result: ReconciliationResult) -> None:
        """For the metrics."""
        # two hours of traffic must not be kept twice
        situations = [msgspec.structs.replace(one, traffic=_NO_TRAFFIC) for one in result.situations]
        self.view, self.result = view, msgspec.structs.replace(result, situations=situations)
        if result.decision is not None:
            self.stages, self.blocked = result.decision.stages, result.decision.blocked
        self.desired |= {one.target.spec.name: one.replicas for one in result.steps if one.replicas is not None}

    def count_writes(self, scaled: Sequence[ReplicaUpdate]) -> None:
        """Replicas were written."""
        self.unreported = (*self.unreported, *scaled)
        for one in scaled:
            self.writes[one.name] = self.writes.get(one.name, 0) + 1


def new_binding_state(uid: str, rng: Random, *, conflict_s: tuple[float, float]) -> BindingState:
    """``conflict_s``: the first and the longest wait after a target had changed meanwhile."""
    return BindingState(
        uid=uid,
        status_retry=BackoffWriter("the status", rng),
        learned_retry=BackoffWriter("what was learned", rng),
        conflicts=Backoff(*conflict_s, rng),
        learned=AnnotationWriteSchedule(rng),
    )


def signal_wait_s(period_s: float) -> float:
    """How long a signal may take to arrive, from the first decision about a binding."""
    return max(_LEAST_PATIENCE_S, _PATIENCE_PERIODS * period_s)
