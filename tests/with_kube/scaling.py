# SPDX-License-Identifier: Apache-2.0
"""Scaling inside a test: a decision that is told what to say, demand by hand, and objects for both."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry

from controller.autoscaler.decision.decision import Decision, StageDecision, TargetDecision
from controller.autoscaler.decision.situation import Backlog, EngineReport, Freshness
from controller.autoscaler.reconciler.controller import DECIDER, ScalingController, ScalingSettings
from controller.autoscaler.reconciler.decision_records import DecisionRecords
from controller.autoscaler.reconciler.demand import DemandView
from controller.autoscaler.reconciler.metric_sources import SourceSettings
from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.autoscaler.reconciler.reconcile import DeciderFunctions
from controller.autoscaler.reconciler.scalables import STATEFUL_SETS
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_SERVERS,
    Object,
)
from controller.kube.client import Client, connect
from tests.with_kube.managing import IMPATIENT, QUICK_QUEUE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.audit import AuditLog
    from controller.autoscaler.decision.situation import Situation
    from controller.autoscaler.reconciler.demand import Urgent
    from controller.kube.cluster_access import ClusterAccess


class Wanted:
    """Decides what ``replicas`` says, by target; None: nothing is known. ``situations`` and ``free``: of the last
    decision. ``rooms``: by target of any binding, when it was last decided about.
    """

    def __init__(self, **replicas: int | None) -> None:
        self.replicas: dict[str, int | None] = replicas
        self.situations: Sequence[Situation] = ()
        self.decisions = 0
        self.free: Mapping[str, int] | None = None
        self.rooms: dict[str, int | None] = {}

    def decide(
        self,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        situations: Sequence[Situation],
        memory: int | None,
        now_s: float,
        *,
        free: Mapping[str, int] | None = None,
    ) -> tuple[Decision, int]:
        self.situations, self.decisions, self.free = situations, self.decisions + 1, free
        self.rooms |= {one.name: one.headroom for each in situations for one in each.targets}
        targets = [
            TargetDecision(one.name, one.current, self.replicas.get(one.name), reason=f"look {memory}")
            for each in situations
            for one in each.targets
        ]
        known = [one.desired for one in targets if one.desired is not None]
        stages = (StageDecision("Both", (), float(sum(known)) if known else None),)
        decision = Decision(
            binding=binding.metadata.key, at_s=now_s, mode=policy.mode, targets=tuple(targets), stages=stages
        )
        return decision, (memory or 0) + 1

    @property
    def decider(self) -> DeciderFunctions:
        def restored(kept: bytes, _: float) -> int:
            return int(kept)

        return DeciderFunctions(self.decide, lambda memory: b"7" if memory else b"", restored)


class Demand:
    """``reports``: by IP address. ``urgent``: set once it runs."""

    def __init__(self) -> None:
        self.reports: dict[str, EngineReport] = {}
        self.waiting = Backlog()
        self.urgent: Urgent | None = None

    async def run(self, urgent: Urgent) -> None:
        self.urgent = urgent

    def set_servers(self, servers: Collection[str]) -> None:
        """Of all."""

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        reports = {ip: msgspec.structs.replace(one, at_s=now_s) for ip, one in self.reports.items()}
        return DemandView(waiting=self.waiting, freshness=Freshness(gateways=len(servers)), reports=reports)


class Scales(msgspec.Struct, frozen=True):
    """Scaling that runs. ``client``: its own."""

    client: Client
    metrics: CollectorRegistry
    records: DecisionRecords
    task: asyncio.Task[None]

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 for what never was."""
        return self.metrics.get_sample_value(name, labels) or 0.0

    def writes(self) -> float:
        """All writes so far."""
        found = [one for family in self.metrics.collect() for one in family.samples]
        return sum(one.value for one in found if one.name == "attache_scaling_writes_total")


@contextlib.asynccontextmanager
async def scaling(
    access: ClusterAccess,
    namespace: str,
    wanted: Wanted,
    demand: Demand | None = None,
    *,
    sources: SourceSettings = SourceSettings(),  # noqa: B008 - frozen
    is_real: bool = False,
    audit: AuditLog | None = None,
) -> AsyncIterator[Scales]:
    """The scaling of a namespace. ``is_real``: with the real decision."""
    registry, records = CollectorRegistry(), DecisionRecords()
    async with connect(access, manager="attache-manager", audit=audit) as client:
        settings = ScalingSettings(
            namespace=namespace, informers=IMPATIENT, queue=QUICK_QUEUE, coalesce_s=0.02, sources=sources
        )
        one = ScalingController(
            client,
            settings,
            ScalingMetrics(registry),
            decider=DECIDER if is_real else wanted.decider,
            demand=demand or Demand(),
            records=records,
        )
        task = asyncio.create_task(one.run())
        try:
            yield Scales(client, registry, records, task)
        finally:
            task.cancel()
            await asyncio.wait([task])


async def make_policy(client: Client, namespace: str, name: str = "plain", **spec: Any) -> None:  # noqa: ANN401 - JSON
    """A policy that decides often."""
    metadata = {"name": name, "namespace": namespace}
    thing = {"apiVersion": AUTOSCALING_POLICIES.api_version, "kind": "AutoscalingPolicy", "metadata": metadata}
    await client.create(AUTOSCALING_POLICIES, {**thing, "spec": {"period": "100ms", **spec}})


def target(kind: str = "Deployment", name: str = "llama", **more: Any) -> Object:  # noqa: ANN401 - JSON
    """A target of a binding, called ``main``."""
    api_version = "attache.dev/v1alpha1" if kind.startswith("Model") else "apps/v1"
    return {
        "name": "main",
        "ref": {"apiVersion": api_version, "kind": kind, "name": name},
        "minReplicas": 0,
        "maxReplicas": 9,
        **more,
    }


async def bind(
    client: Client,
    namespace: str,
    *targets: Object,
    name: str = "one",
    policy: str = "plain",
    **more: Any,  # noqa: ANN401 - JSON
) -> Object:
    """A binding of these targets. ``more``: of its specification."""
    return await client.create(
        AUTOSCALING_POLICY_BINDINGS,
        {
            "apiVersion": AUTOSCALING_POLICY_BINDINGS.api_version,
            "kind": "AutoscalingPolicyBinding",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"policyRef": policy, "targets": list(targets), **more},
        },
    )


async def make_server(client: Client, namespace: str, name: str = "llama", app: str = "llama") -> None:
    """A ModelServer of the pods with the label ``app``."""
    await client.create(
        MODEL_SERVERS,
        {
            "apiVersion": MODEL_SERVERS.api_version,
            "kind": "ModelServer",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "model": "org/llama",
                "engine": "vLLM",
                "workloadSelector": {"matchLabels": {"app": app}},
                "workloadPort": {"port": 8000},
            },
        },
    )


def deployment(namespace: str, name: str = "llama", replicas: int = 2) -> Object:
    """A Deployment whose pods have the label ``app``."""
    containers = [{"name": "engine", "image": "attache/engine-sim"}]
    return {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": containers}},
        },
    }


async def delete_workloads(client: Client, namespace: str) -> None:
    """Whatever makes pods."""
    for resource in (DEPLOYMENTS, STATEFUL_SETS):
        for one in (await client.list(resource, namespace)).items:
            await client.delete(resource, one["metadata"]["name"], namespace, propagation="Background")


async def replicas_of(client: Client, namespace: str, name: str = "llama") -> int:
    """That a Deployment asks for."""
    return int((await client.get(DEPLOYMENTS, name, namespace))["spec"]["replicas"])


async def says(client: Client, namespace: str, type_: str, name: str = "one") -> tuple[str, str]:
    """Status and reason of a binding's condition."""
    thing = await client.get(AUTOSCALING_POLICY_BINDINGS, name, namespace)
    for one in (thing.get("status") or {}).get("conditions") or ():
        if one["type"] == type_:
            return one["status"], one["reason"]
    return "", ""


def report(in_flight: int) -> EngineReport:
    """An engine's, of now."""
    return EngineReport(at_s=0.0, in_flight=in_flight)


def labels_of(scales: Scales, name: str) -> list[Mapping[str, str]]:
    """The labels of all series of a metric."""
    return [one.labels for family in scales.metrics.collect() for one in family.samples if one.name == name]
