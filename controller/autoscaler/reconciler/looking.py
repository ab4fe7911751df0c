# SPDX-License-Identifier: Apache-2.0
"""One look at a binding: what there is, what is decided, what is written, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.reconciler.accelerators import Allowed, Rooms
from controller.autoscaler.reconciler.actuator import SOON_S, Actor, Doer
from controller.autoscaler.reconciler.blockages import Blockages
from controller.autoscaler.reconciler.deciding import Deciding, Memory, steps_of
from controller.autoscaler.reconciler.demand import DemandSource
from controller.autoscaler.reconciler.holding import Holds
from controller.autoscaler.reconciler.informers import Followed
from controller.autoscaler.reconciler.learned import Keeping, unpacked
from controller.autoscaler.reconciler.metric_sources import Sources
from controller.autoscaler.reconciler.metrics import Series
from controller.autoscaler.reconciler.records import Record, Records
from controller.autoscaler.reconciler.resolver import Resolver
from controller.autoscaler.reconciler.settling import Settled, version_of
from controller.autoscaler.reconciler.situations import situations_of, with_rooms
from controller.autoscaler.reconciler.status import Awaiting, Looked, Scaled, acts_of, digest_of, events_of, status_of
from controller.autoscaler.reconciler.unwritten import Unwritten
from controller.kube.errors import Backoff
from controller.kube.recorder import Recorder, write_status
from controller.kube.resources import AUTOSCALING_POLICY_BINDINGS

if TYPE_CHECKING:
    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.resolver import Resolved

log = logging.getLogger(__name__)

_LATER_S: Final = 5.0


class Parts(msgspec.Struct, frozen=True):
    """What looks need. ``clock``: seconds since the epoch. ``concerns``: told of the ModelServers of a binding."""

    followed: Followed
    resolver: Resolver
    demand: DemandSource
    rooms: Rooms
    deciding: Deciding
    actor: Actor
    recorder: Recorder
    keeping: Keeping
    records: Records
    series: Series
    sources: Sources
    clock: Callable[[], float]
    concerns: Callable[[str, Sequence[str]], None]


class Looker:
    """Remembers of each binding what the next look needs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._memories: dict[str, tuple[str, Memory]] = {}
        self._holds = Holds()
        self._said: dict[str, tuple[str, tuple[object, ...]]] = {}
        self._blockages = Blockages()
        # what was written, until it is told, too
        self._untold: dict[str, tuple[Scaled, ...]] = {}
        self._doer = Doer(parts.actor, parts.demand)
        self._rng = Random()
        self._unsaid, self._unkept = Unwritten("the status", self._rng), Unwritten("what was learned", self._rng)
        # bindings with a target that others write all the time
        self._again: dict[str, Backoff] = {}
        # of which all is done and said
        self._settled: dict[str, Settled] = {}
        self._awaiting = Awaiting()

    async def look(self, key: str) -> tuple[str, float | None]:
        """What came of it, and in how many seconds to look again. Raises ClusterError."""
        view = self._parts.followed.binding(key)
        if view is None or view.thing["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return "gone", None
        if not self._parts.followed.knows(view):
            return "waiting", SOON_S
        looked = self._read(view)
        if looked.problem is not None or looked.policy is None or view.binding is None:
            await self._tell(view, looked)
            return "invalid", _LATER_S
        policy = looked.policy
        if self._is_still(view, looked):
            return "unchanged", float(policy.period)
        looked = self._situated(view, looked, policy)
        if policy.mode == "Paused":
            await self._tell(view, looked)
            return "paused", float(policy.period)
        measured = await self._parts.sources.measured(view.namespace, policy, looked.resolved, looked.situations)
        looked = msgspec.structs.replace(looked, situations=measured)
        try:
            # nothing may come in between, or two bindings would count the same room
            allowed = self._parts.rooms.of(view, looked.resolved)
            decided = self._decided(view, looked, allowed)
        except Exception as error:  # its owner reads the status, not our log
            await self._tell(view, msgspec.structs.replace(looked, problem=("DecisionFailed", repr(error))))
            raise
        return await self._carried_out(view, decided, allowed, float(policy.period))

    async def _carried_out(
        self, view: BindingView, decided: Looked, allowed: Allowed, period_s: float
    ) -> tuple[str, float]:
        """As ``look``, after the decision."""
        settled = self._settled.pop(view.key, None)
        if settled is not None and settled.decision is decided.decision and settled.is_told(view, decided):
            self._settled[view.key] = msgspec.structs.replace(settled, calm=decided.calm, allowed=allowed)
            return "unchanged", period_s
        done = await self._doer.do(view, decided)
        for one in done.scaled:
            self._parts.series.scaled(view.key, one.name)
        if done.scaled:
            self._untold[view.key] = (*self._untold.get(view.key, ()), *done.scaled)
        if done.is_stale and done.error is None:
            # others write it all the time: each try costs the server some calls
            return "again", self._again.setdefault(view.key, Backoff(SOON_S, _LATER_S, self._rng)).failed()
        self._again.pop(view.key, None)
        looked = done.looked
        await self._tell(view, looked)
        if done.error is not None:
            raise done.error
        await self._keep(view, looked.now_s)
        is_done = done.again_s > period_s and all(one.is_done for one in looked.steps)
        is_told = self._said.get(view.key, ("",))[0] == version_of(view) and not looked.awaits_data
        if looked.decision is not None and is_done and is_told:
            self._settled[view.key] = Settled(looked.decision, looked.resolved, version_of(view), looked.calm, allowed)
        return "decided", min(period_s, done.again_s)

    def _read(self, view: BindingView) -> Looked:
        parts, now_s = self._parts, self._parts.clock()
        policy = parts.followed.policy(view.policy_key)
        if view.binding is None:
            return Looked(now_s=now_s, problem=("Invalid", view.problem))
        resolved = tuple(self._latest(one) for one in parts.resolver.resolve(view))
        servers = sorted({one.server for one in resolved if one.server})
        parts.concerns(view.key, servers)
        if policy is None:
            said = f"there is no AutoscalingPolicy {view.policy_key}"
            return Looked(now_s=now_s, resolved=resolved, problem=("PolicyNotFound", said))
        if policy.policy is None:
            return Looked(now_s=now_s, resolved=resolved, problem=("PolicyInvalid", policy.problem))
        spec = policy.policy.spec
        calm = parts.demand.calm(servers, now_s)
        return Looked(now_s=now_s, policy=spec, resolved=resolved, calm=calm)

    def _situated(self, view: BindingView, looked: Looked, policy: AutoscalingPolicySpec) -> Looked:
        """With situations."""
        parts, now_s = self._parts, looked.now_s
        holds = self._holds.of(view, looked.resolved, policy.manual_hold, now_s)
        cut_off_s = parts.followed.cut_off_s(view.namespace)
        situations = situations_of(
            looked.resolved,
            policy,
            lambda servers: parts.demand.view(servers, now_s).cut_off(cut_off_s),
            now_s,
            holds=holds,
            blocked=lambda target: self._blockages.of(view.key, target, now_s),
        )
        return msgspec.structs.replace(looked, situations=situations, holds=holds)

    def _latest(self, target: Resolved) -> Resolved:
        if target.found is None:
            return target
        found = self._parts.actor.latest(target.place, target.found)
        return target if found is target.found else msgspec.structs.replace(target, found=found)

    def _decided(self, view: BindingView, looked: Looked, allowed: Allowed) -> Looked:
        assert looked.policy is not None  # noqa: S101 - the caller has asked
        assert view.binding is not None  # noqa: S101
        situations = with_rooms(looked.situations, allowed.rooms, allowed.pools)
        decision, memory = self._parts.deciding.decide(
            looked.policy, view.binding, situations, self._memory(view, looked.now_s), looked.now_s, free=allowed.free
        )
        self._memories[view.key] = view.claim.uid, memory
        is_early = self._awaiting.is_early(
            view.key, view.claim.uid, decision, period_s=float(looked.policy.period), now_s=looked.now_s
        )
        looked = msgspec.structs.replace(
            looked, situations=situations, decision=decision, homeless=allowed.homeless, awaits_data=is_early
        )
        settled = self._settled.get(view.key)
        if settled is not None and settled.decision is decision and settled.is_told(view, looked):
            return looked
        steps = tuple(steps_of(decision, looked.resolved, looked.holds))
        self._parts.rooms.order(view, looked.resolved, steps, decision.lacks)
        return msgspec.structs.replace(looked, steps=steps)

    def _is_still(self, view: BindingView, looked: Looked) -> bool:
        """Whether the last decision stands, because nothing but time has changed since it last did."""
        settled, known = self._settled.get(view.key), self._memories.get(view.key)
        if settled is None or known is None or looked.calm is None or looked.policy is None or view.binding is None:
            return False
        is_same = settled.is_calm(looked) and settled.is_told(view, looked)
        if not is_same or self._parts.followed.cut_off_s(view.namespace) is not None:
            return False
        found = self._parts.deciding.still(known[1], looked.policy, view.binding, looked.now_s, looked.calm.told_at_s)
        if found is None or found[0] is not settled.decision:
            return False
        if self._parts.rooms.of(view, looked.resolved) != settled.allowed:
            return False
        self._memories[view.key] = known[0], found[1]
        return True

    def _memory(self, view: BindingView, now_s: float) -> Memory:
        known = self._memories.get(view.key)
        if known is not None and known[0] == view.claim.uid:
            return known[1]
        kept = unpacked(view.learned) if view.learned else b""
        try:
            return self._parts.deciding.restored(kept, now_s) if kept else None
        except ValueError as error:
            log.warning("what was learned of %s cannot be read, and is learned anew: %s", view.key, error)
            return None

    async def _tell(self, view: BindingView, looked: Looked) -> None:
        parts = self._parts
        looked = msgspec.structs.replace(looked, scaled=self._untold.get(view.key, ()))
        parts.series.put(view, looked)
        if looked.decision is not None:
            parts.records.add(Record(decision=looked.decision, acts=acts_of(looked)))
        version, digest = version_of(view), digest_of(looked)
        if self._said.get(view.key) == (version, digest):
            return
        before = view.thing["status"]
        status = status_of(looked, before)
        if not await self._unsaid.tried(
            view.key,
            lambda: write_status(
                parts.actor.client, AUTOSCALING_POLICY_BINDINGS, view.thing, status, parts.series.wrote
            ),
        ):
            return
        self._said[view.key] = version, digest
        self._untold.pop(view.key, None)
        await parts.recorder.record(view.thing, events_of(looked, status, before))

    async def _keep(self, view: BindingView, now_s: float) -> None:
        if self._parts.keeping.is_due(view, now_s):
            memory = self._memories[view.key][1]

            async def keep() -> None:
                await self._parts.keeping.keep(view, self._parts.deciding.kept(memory), now_s)

            await self._unkept.tried(view.key, keep)

    def _forget(self, key: str) -> None:
        self._memories.pop(key, None)
        self._said.pop(key, None)
        self._untold.pop(key, None)
        self._settled.pop(key, None)
        self._again.pop(key, None)
        self._awaiting.forget(key)
        self._unsaid.forget(key)
        self._unkept.forget(key)
        self._blockages.forget(key)
        self._holds.forget(key)
        self._parts.keeping.forget(key)
        self._parts.records.forget(key)
        self._parts.resolver.forget(key)
        self._parts.rooms.forget(key)
        self._parts.series.forget(key)
        self._parts.concerns(key, ())
