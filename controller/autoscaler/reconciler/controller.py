# SPDX-License-Identifier: Apache-2.0
"""Scaling in one term of leadership: informers, demand, the queue of bindings, and the statuses of policies."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.autoscaling import schedule_mistakes
from controller.audit import caused_by
from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.memory import decode_memory, encode_memory
from controller.autoscaler.reconciler.actuator import Actuator
from controller.autoscaler.reconciler.demand import GatewayDemand
from controller.autoscaler.reconciler.informers import Informers
from controller.autoscaler.reconciler.metric_sources import Sources, SourceSettings
from controller.autoscaler.reconciler.reconcile import Decider, Parts, Reconciler
from controller.autoscaler.reconciler.resolver import Resolver
from controller.autoscaler.reconciler.scalables import SCALER
from controller.kube.errors import ClusterError
from controller.kube.informer import InformerTiming
from controller.kube.queue import QueueTiming, WorkQueue
from controller.kube.recorder import Recorder, write_status
from controller.kube.resources import AUTOSCALING_POLICIES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from controller.autoscaler.reconciler.bindings import PolicyView
    from controller.autoscaler.reconciler.demand import DemandSource
    from controller.autoscaler.reconciler.metrics import ScalingMetrics
    from controller.autoscaler.reconciler.records import Records
    from controller.kube.client import Client
    from controller.kube.recorder import Counted

log = logging.getLogger(__name__)

_CLOCK: Final = time.perf_counter
DECIDER: Final = Decider(decide, encode_memory, decode_memory)
_EACH_S: Final = 2.0


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace``: the one whose bindings are reconciled; None: all. ``workers``: bindings reconciled concurrently.
    ``together_s``: changes of objects within this time cause one reconcile. ``urgent_s``: the same for a jump of
    demand. ``gateway_namespaces``: those whose gateways may report demand for ModelServers of all namespaces.
    """

    namespace: str | None = None
    workers: int = 4
    together_s: float = 0.2
    urgent_s: float = 0.02
    gateway_namespaces: tuple[str, ...] = ()
    informers: InformerTiming = InformerTiming()
    queue: QueueTiming = QueueTiming(slot_s=0.05)
    sources: SourceSettings = SourceSettings()


def wall_s() -> float:
    """Seconds since the epoch, as the times in objects."""
    return time.time_ns() / 1e9


class ScalingController:
    """``run`` does all of it."""

    def __init__(
        self,
        client: Client,
        settings: ScalingSettings,
        metrics: ScalingMetrics,
        *,
        decider: Decider,
        demand: DemandSource,
        records: Records,
        clock: Callable[[], float] = wall_s,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._demand = demand
        self._records = records
        self._rng = Random()
        self._queue = WorkQueue[str](self._rng, settings.queue)
        scaler = client.as_manager(SCALER)
        self._informers = Informers(client, settings.namespace, settings.informers, self._soon)
        self._policies = PolicyStatuses(scaler, self._informers, metrics.wrote)
        self._servers: dict[str, frozenset[str]] = {}
        self._users: dict[str, set[str]] = defaultdict(set)
        self._is_begun = False
        self._sources = Sources(client, settings.sources, clock, self._informers.port_of)
        self._reconciler = Reconciler(
            Parts(
                client=scaler,
                informers=self._informers,
                resolver=Resolver(self._informers),
                demand=demand,
                sources=self._sources,
                decider=decider,
                actuator=Actuator(scaler, demand, metrics.wrote, self._informers.other_kinds.anew),
                recorder=Recorder(client, SCALER, _loop_s, metrics.wrote),
                counted=metrics.wrote,
                clock=clock,
                rng=self._rng,
                use_servers=self._use_servers,
            ),
            settings.informers,
        )

    async def run(self) -> None:
        """Reconcile until cancelled, which ends the term; metrics and records are empty after that."""
        self._metrics.follow(self._reconciler.series)
        self._records.follow(lambda: {key: one.log for key, one in self._reconciler.states.items()})
        try:
            await self._run()
        finally:
            self._metrics.follow(tuple)
            self._records.follow(dict)
            await self._sources.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._informers.run(), name="informers of scaling")
            tasks.create_task(_awaited(self._demand.run(self._urgent)), name="demand")
            await self._informers.wait_until_synced()
            _spare_the_collector()
            self._is_begun = True
            # spread over a period, as later reconciliations come a period after the one before
            for key in self._informers.bindings():
                self._queue.add_in(key, self._rng.uniform(0.0, 1.0))
            tasks.create_task(self._policies.run(), name="statuses of policies")
            tasks.create_task(self._reconciler.accelerators.run(), name="accelerators of nodes")
            await self._queue.run(self._reconcile, self._settings.workers)

    async def _reconcile(self, key: str) -> float | None:
        began_s = _CLOCK()
        outcome = "error"
        try:
            with caused_by(of=f"AutoscalingPolicyBinding {key}"):
                outcome, again_s = await self._reconciler.reconcile(key)
        finally:
            self._metrics.observe_reconcile(outcome, _CLOCK() - began_s)
        return again_s

    def _soon(self, key: str) -> None:
        if self._is_begun:
            self._queue.add_in(key, self._settings.together_s)

    def _urgent(self, server: str) -> None:
        for key in self._users.get(server, ()):
            self._queue.add_in(key, self._settings.urgent_s)

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
        self._demand.follow(self._users.keys())


def _spare_the_collector() -> None:
    """Objects of informers are hundreds of thousands, live long and make no cycles, so the collector need not scan them
    again and again: with 5,000 targets that took a fifth of the time of the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _awaited(demand: object) -> None:
    await demand  # type: ignore[misc]


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


def scaling_of(
    settings: ScalingSettings, metrics: ScalingMetrics, records: Records
) -> Callable[[Client], Awaitable[None]]:
    """Runs the scaling of one term of leadership."""

    async def run(client: Client) -> None:
        demand = GatewayDemand(client, settings.gateway_namespaces, settings.informers, wall_s)
        await ScalingController(client, settings, metrics, decider=DECIDER, demand=demand, records=records).run()

    return run


class PolicyStatuses:
    """Writes the statuses of policies that changed, or whose number of bindings did, every two seconds."""

    def __init__(self, client: Client, informers: Informers, counted: Counted) -> None:
        self._client = client
        self._informers = informers
        self._counted = counted
        self._said: dict[str, tuple[str, int]] = {}

    async def run(self) -> None:
        """Write statuses until cancelled. A write that fails is tried again."""
        while True:
            keys = self._informers.policies()
            for key in keys:
                policy = self._informers.policy(key)
                if policy is not None:
                    await self._write_status(key, policy)
            self._said = {key: said for key, said in self._said.items() if key in keys}
            await asyncio.sleep(_EACH_S)

    async def _write_status(self, key: str, policy: PolicyView) -> None:
        now = policy.thing["metadata"].get("resourceVersion", ""), self._informers.users_of(key)
        if self._said.get(key) == now:
            return
        try:
            await write_status(
                self._client, AUTOSCALING_POLICIES, policy.thing, policy_status(policy, now[1]), self._counted
            )
        except ClusterError as error:
            log.warning("the status of the AutoscalingPolicy %s cannot be written, tried again: %s", key, error)
            return
        self._said[key] = now


def policy_status(policy: PolicyView, bindings: int) -> dict[str, Any]:
    """Without times."""
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "it has no mistake"}
    if policy.problem:
        accepted |= {"status": "False", "reason": "Invalid", "message": policy.problem[:1000]}
    elif policy.policy is not None and (found := list(schedule_mistakes(policy.policy.spec.schedules))):
        message = f"{'; '.join(found)}; all else of the policy holds"
        accepted |= {"status": "False", "reason": "ScheduleInvalid", "message": message[:1000]}
    return {"bindings": bindings, "conditions": [accepted]}
