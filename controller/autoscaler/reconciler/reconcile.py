# SPDX-License-Identifier: Apache-2.0
"""Reconciles one binding: read, resolve, situate, decide, actuate, report; with one state object for each binding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from controller.autoscaler.reconciler.accelerators import AcceleratorTracker
from controller.autoscaler.reconciler.actuator import SOON_S, Actuator
from controller.autoscaler.reconciler.binding_state import BindingState, decode_annotation, new_binding_state
from controller.autoscaler.reconciler.decision_records import DecisionRecord
from controller.autoscaler.reconciler.demand import DemandSource
from controller.autoscaler.reconciler.informers import ScalingInformers
from controller.autoscaler.reconciler.metric_sources import MetricSources
from controller.autoscaler.reconciler.metrics import BindingSeries, binding_series
from controller.autoscaler.reconciler.result import ReconciliationResult, target_actions
from controller.autoscaler.reconciler.scalables import LEARNED
from controller.autoscaler.reconciler.situations import build_situations, with_headroom
from controller.autoscaler.reconciler.status import action_texts, binding_events, binding_status
from controller.autoscaler.reconciler.target_resolver import TargetResolver, server_keys
from controller.kube.api_resources import AUTOSCALING_POLICY_BINDINGS, split_key
from controller.kube.client import Client
from controller.kube.controller import Controller, ReconcileResult, loop_clock_s
from controller.models.kind_reconciler import WorkKey

if TYPE_CHECKING:
    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.situation import Situation
    from controller.autoscaler.reconciler.actuator import ActuationResult
    from controller.autoscaler.reconciler.bindings import BindingView

log = logging.getLogger(__name__)

_LATER_S: Final = 5.0

Memory = Any
"""State that a decision returns for the next one; None at first."""


class ScalingDecisionFunction(Protocol):
    """``free``: accelerators that a binding may still use, by pool."""

    def __call__(
        self,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        situations: Sequence[Situation],
        memory: Memory,
        now_s: float,
        /,
        *,
        free: Mapping[str, int] | None = None,
    ) -> tuple[Decision, Memory]:
        """The decision, and the memory for the next one."""
        ...


class DeciderFunctions(NamedTuple):
    """``decide``: the decision. ``kept``: what of a memory survives a restart, as JSON of bounded length; empty if
    nothing. ``restored``: a memory from that and the time; raises ValueError for anything else.
    """

    decide: ScalingDecisionFunction
    kept: Callable[[Memory], bytes] = lambda _: b""
    restored: Callable[[bytes, float], Memory] = lambda _, __: None


class ReconcilerDependencies(msgspec.Struct, frozen=True):
    """What a reconciliation needs. ``client``: under our own manager's name. ``clock``: seconds since the epoch.
    ``use_servers``: called with the ModelServers of a binding.
    """

    client: Client
    controller: Controller[WorkKey]
    informers: ScalingInformers
    resolver: TargetResolver
    demand: DemandSource
    sources: MetricSources
    decider: DeciderFunctions
    actuator: Actuator
    clock: Callable[[], float]
    rng: Random
    use_servers: Callable[[str, Sequence[str]], None]


class Reconciler:
    """``states``: by binding. Several bindings may be reconciled side by side, each by one worker at a time."""

    def __init__(self, parts: ReconcilerDependencies) -> None:
        self._parts = parts
        self.states: dict[str, BindingState] = {}
        self.accelerators = AcceleratorTracker(
            parts.controller.cache.shared,
            lambda: [one.ordered for one in self.states.values() if one.ordered is not None],
        )

    async def reconcile(self, key: str) -> ReconcileResult:
        """One binding. Raises ClusterError."""
        view = self._read(key)
        if view is None:
            self._forget(key)
            return ReconcileResult("gone")
        lacks_s = self._lacks_s(view)
        if lacks_s:
            return ReconcileResult("waiting", lacks_s)
        state = self._state(view)
        result = self._resolve(view, state)
        if result.policy is None:
            await self._report(view, state, result)
            return ReconcileResult("invalid", _LATER_S)
        policy, period_s = result.policy, float(result.policy.period)
        result = self._situate(view, state, result, policy)
        if policy.mode == "Paused":
            await self._report(view, state, result)
            return ReconcileResult("paused", period_s)
        measured = await self._parts.sources.with_metrics(view.namespace, policy, result.resolved, result.situations)
        result = msgspec.structs.replace(result, situations=measured)
        try:
            result = self._decide(view, state, result, policy)
        except Exception as error:  # the binding's owner reads the status, not our log
            await self._report(view, state, msgspec.structs.replace(result, problem=("DecisionFailed", repr(error))))
            raise
        done = await self._actuate(view, state, result)
        if done.is_stale and done.error is None:
            # others write a target all the time: each attempt costs the server some calls
            return ReconcileResult("again", state.conflicts.record_failure())
        state.conflicts.reset()
        await self._report(view, state, done.result)
        if done.error is not None:
            raise done.error
        await self._keep_learned(view, state, result.now_s)
        return ReconcileResult("decided", min(period_s, done.again_s))

    def series(self) -> list[BindingSeries]:
        """Called in the thread of a scrape."""
        model_of = self._parts.informers.model_of_server
        return [one for state in list(self.states.values()) if (one := binding_series(state, model_of)) is not None]

    def _read(self, key: str) -> BindingView | None:
        """None if the binding is gone, or going."""
        view = self._parts.informers.binding(key)
        return None if view is None or view.thing["metadata"].get("deletionTimestamp") else view

    def _lacks_s(self, view: BindingView) -> float | None:
        """How long to wait for what informers do not show yet; None or 0: no longer."""
        if not self._parts.informers.has_synced(view):
            return SOON_S
        work, expectations = binding_work_key(view.key), self._parts.controller.expectations
        left_s = expectations.remaining_wait_s(work, loop_clock_s())
        if not left_s:
            expectations.forget(work)
        return left_s

    def _state(self, view: BindingView) -> BindingState:
        """The state of a binding; a recreated binding gets a new one."""
        state = self.states.get(view.key)
        if state is None or state.uid != view.claim.uid:
            self._parts.controller.expectations.forget(binding_work_key(view.key))
            state = self.states[view.key] = new_binding_state(
                view.claim.uid, self._parts.rng, conflict_s=(SOON_S, _LATER_S)
            )
        return state

    def _resolve(self, view: BindingView, state: BindingState) -> ReconciliationResult:
        """The policy and the targets, or why nothing can be decided."""
        parts, now_s = self._parts, self._parts.clock()
        if view.binding is None:
            return ReconciliationResult(now_s=now_s, problem=("Invalid", view.problem))
        state.resolution = parts.resolver.resolve_targets(view, state.resolution)
        resolved = state.resolution.targets
        parts.use_servers(view.key, server_keys(resolved))
        policy = parts.informers.policy(view.policy_key)
        if policy is None:
            problem = ("PolicyNotFound", f"there is no AutoscalingPolicy {view.policy_key}")
            return ReconciliationResult(now_s=now_s, resolved=resolved, problem=problem)
        if policy.policy is None:
            return ReconciliationResult(now_s=now_s, resolved=resolved, problem=("PolicyInvalid", policy.problem))
        return ReconciliationResult(
            now_s=now_s, policy=policy.policy.spec, bad_schedules=policy.bad_schedules, resolved=resolved
        )

    def _situate(
        self, view: BindingView, state: BindingState, result: ReconciliationResult, policy: AutoscalingPolicySpec
    ) -> ReconciliationResult:
        """With manual overrides and a situation for each stage."""
        parts, now_s = self._parts, result.now_s
        holds = state.manual_overrides(view, result.resolved, policy.manual_hold, now_s)
        cut_off_s = parts.informers.disconnected_s(view.namespace)
        situations = build_situations(
            result.resolved,
            policy,
            lambda servers: parts.demand.view(servers, now_s).with_api_unreachable(cut_off_s),
            now_s,
            holds=holds,
        )
        return msgspec.structs.replace(result, situations=situations, holds=holds)

    def _decide(
        self, view: BindingView, state: BindingState, result: ReconciliationResult, policy: AutoscalingPolicySpec
    ) -> ReconciliationResult:
        """With the decision. Nothing may be awaited in here, or two bindings would count the same accelerators."""
        assert view.binding is not None  # noqa: S101 - or there would be no policy
        capacity = self.accelerators.compute_headroom(view, result.resolved, state.ordered)
        situations = with_headroom(result.situations, capacity.replicas, capacity.pools)
        if state.first_decided_s is None:
            state.memory = self._restored(view, result.now_s)
        decision, state.memory = self._parts.decider.decide(
            policy, view.binding, situations, state.memory, result.now_s, free=capacity.free
        )
        steps = tuple(target_actions(decision, result.resolved, result.holds))
        state.ordered = self.accelerators.reserve(view, result.resolved, steps, decision.lacks, state.ordered)
        return msgspec.structs.replace(
            result,
            situations=situations,
            decision=decision,
            steps=steps,
            without_nodes=capacity.without_nodes,
            awaits_data=state.is_waiting_for_data(decision, float(policy.period), result.now_s),
        )

    def _restored(self, view: BindingView, now_s: float) -> Memory:
        """What an earlier leader has learned."""
        kept = decode_annotation(view.learned) if view.learned else b""
        try:
            return self._parts.decider.restored(kept, now_s) if kept else None
        except ValueError as error:
            log.warning("what was learned of %s cannot be read, and is learned anew: %s", view.key, error)
            return None

    async def _actuate(self, view: BindingView, state: BindingState, result: ReconciliationResult) -> ActuationResult:
        """Claims, drains and scales."""
        done = await self._parts.actuator.actuate(view, result)
        state.count_writes(done.scaled)
        return done

    async def _report(self, view: BindingView, state: BindingState, result: ReconciliationResult) -> None:
        """Metrics, the record of the decision, the status and Events."""
        parts, work = self._parts, binding_work_key(view.key)
        result = msgspec.structs.replace(result, scaled=state.unreported)
        state.store_result(view, result)
        if result.decision is not None:
            state.log.add(DecisionRecord(decision=result.decision, acts=action_texts(result)))
        before = view.thing["status"]
        status = binding_status(result, before)
        if not await state.status_retry.attempt(
            view.key,
            lambda: parts.controller.write_status(work, AUTOSCALING_POLICY_BINDINGS, view.thing, status),
        ):
            return
        state.unreported = ()
        await parts.controller.record_events(view.thing, binding_events(result, status, before))

    async def _keep_learned(self, view: BindingView, state: BindingState, now_s: float) -> None:
        """Write the learned state into an annotation, for the next leader."""
        if not state.learned.is_due(view.learned, now_s):
            return
        text = state.learned.next_annotation(self._parts.decider.kept(state.memory), view.learned, now_s)
        if not text:
            return
        namespace, name = split_key(view.key)
        metadata = {"uid": view.claim.uid, "annotations": {LEARNED: text}}
        client = self._parts.client
        await state.learned_retry.attempt(
            view.key,
            lambda: client.merge_patch(AUTOSCALING_POLICY_BINDINGS, name, namespace, {"metadata": metadata}),
        )

    def _forget(self, key: str) -> None:
        self._parts.controller.expectations.forget(binding_work_key(key))
        self.states.pop(key, None)
        self.accelerators.release(key)
        self._parts.use_servers(key, ())


def binding_work_key(binding: str) -> WorkKey:
    """A binding as a key of the controller."""
    return WorkKey(AUTOSCALING_POLICY_BINDINGS.kind, binding)
