# SPDX-License-Identifier: Apache-2.0
"""The controller of AutoscalingPolicyBindings and their policies, for one term of leadership."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.saved_state import decode_memory, encode_memory
from controller.autoscaler.reconciler.actuator import Actuator
from controller.autoscaler.reconciler.demand import GatewayDemandSource
from controller.autoscaler.reconciler.informers import ScalingInformers
from controller.autoscaler.reconciler.metric_sources import MetricSources, SourceSettings
from controller.autoscaler.reconciler.reconcile import (
    DeciderFunctions,
    Reconciler,
    ReconcilerDependencies,
    binding_work_key,
)
from controller.autoscaler.reconciler.scalables import SCALER
from controller.autoscaler.reconciler.target_resolver import TargetResolver
from controller.kube.api_resources import AUTOSCALING_POLICIES, AUTOSCALING_POLICY_BINDINGS, PODS
from controller.kube.controller import Controller, ControllerSettings, ReconcileResult, loop_clock_s, wall_clock_s
from controller.kube.informer import Selection
from controller.kube.pod_views import trimmed_pod
from controller.kube.work_queue import QueueTiming
from controller.models.kind_reconciler import WorkKey
from extproc.api.status_page_contents import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.reconciler.bindings import PolicyView
    from controller.autoscaler.reconciler.decision_records import DecisionRecords
    from controller.autoscaler.reconciler.demand import DemandSource
    from controller.autoscaler.reconciler.metrics import ScalingMetrics
    from controller.kube.client import Client
    from controller.kube.shared_informers import SharedInformers

DECIDER: Final = DeciderFunctions(decide, encode_memory, decode_memory)
# Changes of a policy and of its bindings within this time lead to one status of it.
_POLICY_S: Final = 2.0
Scaling = Callable[["Client", "SharedInformers"], Coroutine[Any, Any, None]]
"""Scales, until cancelled, what AutoscalingPolicyBindings name."""


class ScalingSettings(ControllerSettings, frozen=True, kw_only=True):
    """``urgent_s``: jumps of demand within this time cause one reconcile. ``gateway_namespaces``: those whose gateways
    may report demand for ModelServers of all namespaces.
    """

    workers: int = 4
    coalesce_s: float = 0.2
    urgent_s: float = 0.02
    gateway_namespaces: tuple[str, ...] = ()
    queue: QueueTiming = QueueTiming(slot_s=0.05)
    sources: SourceSettings = SourceSettings()


class ScalingController:
    """``run`` runs it. Its keys are bindings, which are decided, and policies, which have a status alone."""

    def __init__(
        self,
        client: Client,
        settings: ScalingSettings,
        metrics: ScalingMetrics,
        *,
        decider: DeciderFunctions,
        demand: DemandSource,
        records: DecisionRecords,
        clock: Callable[[], float] = wall_clock_s,
        shared: SharedInformers | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._demand = demand
        self._records = records
        self._rng = Random()
        scaler = client.as_manager(SCALER)
        self._controller = Controller[WorkKey](
            scaler,
            self._reconcile,
            settings=settings,
            measured=self._measured,
            wrote=metrics.count_write,
            rng=self._rng,
            shared=shared,
        )
        cache = self._controller.cache
        self._informers = ScalingInformers(client, cache, self._changed)
        self._servers: dict[str, frozenset[str]] = {}
        self._users: dict[str, set[str]] = defaultdict(set)
        self._sources = MetricSources(client, settings.sources, clock, self._informers.port_of_server)
        self._reconciler = Reconciler(
            ReconcilerDependencies(
                client=scaler,
                controller=self._controller,
                informers=self._informers,
                resolver=TargetResolver(self._informers),
                demand=demand,
                sources=self._sources,
                decider=decider,
                actuator=Actuator(scaler, demand, self._informers, metrics.count_write),
                clock=clock,
                rng=self._rng,
                use_servers=self._use_servers,
            )
        )
        self._controller.add_source("pods and targets of others' kinds", self._informers.run)
        self._controller.add_source("demand", lambda: demand.run(self._urgent))
        self._controller.add_source("accelerators of nodes", self._reconciler.accelerators.run, after_sync=True)
        self._controller.on_synced(self._begin)

    async def run(self) -> None:
        """Reconcile until cancelled, which ends the term; metrics and records are empty after that."""
        self._metrics.set_series_source(self._reconciler.series)
        self._records.set_logs(lambda: {key: one.log for key, one in self._reconciler.states.items()})
        try:
            await self._controller.run()
        finally:
            self._metrics.set_series_source(tuple)
            self._records.set_logs(dict)
            await self._sources.close()

    def _begin(self) -> None:
        _spare_the_collector()
        # spread over a period, as later reconciliations come a period after the one before
        for key in self._informers.binding_keys():
            self._controller.queue.add_in(binding_work_key(key), self._rng.uniform(0.0, 1.0))
        for key in self._informers.policy_keys():
            self._controller.enqueue(WorkKey(AUTOSCALING_POLICIES.kind, key))

    async def _reconcile(self, work: WorkKey) -> ReconcileResult:
        if work.kind == AUTOSCALING_POLICIES.kind:
            return await self._reconcile_policy(work)
        return await self._reconciler.reconcile(work.key)

    async def _reconcile_policy(self, work: WorkKey) -> ReconcileResult:
        policy, expectations = self._informers.policy(work.key), self._controller.expectations
        left_s = expectations.remaining_wait_s(work, loop_clock_s())
        if policy is not None and left_s:
            return ReconcileResult("early", left_s)
        expectations.forget(work)
        if policy is None:
            return ReconcileResult("gone")
        status = policy_status(policy, self._informers.count_policy_users(work.key))
        await self._controller.write_status(work, AUTOSCALING_POLICIES, policy.thing, status)
        return ReconcileResult("settled")

    def _measured(self, work: WorkKey, result: str, seconds: float) -> None:
        if work.kind == AUTOSCALING_POLICY_BINDINGS.kind:
            self._metrics.observe_reconcile(result, seconds)

    def _changed(self, work: WorkKey) -> None:
        if not self._controller.synced.is_set():
            return
        if work.kind == AUTOSCALING_POLICIES.kind:
            # many bindings of a policy may come together
            self._controller.queue.add_in(work, _POLICY_S)
        else:
            self._controller.enqueue_soon(work)

    def _urgent(self, server: str) -> None:
        for key in self._users.get(server, ()):
            self._controller.queue.add_in(binding_work_key(key), self._settings.urgent_s)

    def _use_servers(self, key: str, servers: Sequence[str]) -> None:
        """Which ModelServers a binding is about: their demand is followed, and its jumps enqueue the binding."""
        now = frozenset(servers)
        before = self._servers.get(key, frozenset())
        if now == before:
            return
        for one in before - now:
            self._users[one].discard(key)
        for one in now - before:
            self._users[one].add(key)
        if now:
            self._servers[key] = now
        else:
            self._servers.pop(key, None)
        self._users = defaultdict(set, {server: keys for server, keys in self._users.items() if keys})
        self._demand.set_servers(self._users.keys())


def _spare_the_collector() -> None:
    """Objects of informers are hundreds of thousands, live long and make no cycles, so the collector need not scan them
    again and again: with 5,000 targets that took a fifth of the time of the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def make_scaling_runner(settings: ScalingSettings, metrics: ScalingMetrics, records: DecisionRecords) -> Scaling:
    """Runs the scaling of one term of leadership."""

    async def run(client: Client, shared: SharedInformers) -> None:
        gateways = shared.acquire(PODS, Selection(labels=LOADS_LABEL), trimmed_pod)
        demand = GatewayDemandSource(gateways, settings.gateway_namespaces, wall_clock_s)
        await ScalingController(
            client, settings, metrics, decider=DECIDER, demand=demand, records=records, shared=shared
        ).run()

    return run


def policy_status(policy: PolicyView, bindings: int) -> dict[str, Any]:
    """Without times."""
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "it has no mistake"}
    if policy.problem:
        accepted |= {"status": "False", "reason": "Invalid", "message": policy.problem[:1000]}
    elif policy.bad_schedules:
        message = f"{'; '.join(policy.bad_schedules)}; all else of the policy holds"
        accepted |= {"status": "False", "reason": "ScheduleInvalid", "message": message[:1000]}
    return {"bindings": bindings, "conditions": [accepted]}
