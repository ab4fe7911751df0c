# SPDX-License-Identifier: Apache-2.0
"""The manager's work inside a test, and ModelInfers for it."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.cluster.local_control_plane import apply_crds
from controller.kube.api_resources import CRDS, EVENTS, MODEL_INFERS, PODS
from controller.kube.client import Client, connect
from controller.kube.custom_resources import KINDS, crd_object
from controller.kube.errors import NotFound
from controller.kube.informer import InformerTiming
from controller.kube.leader_election import LeaderElection, LeaseTiming
from controller.kube.manager_metrics import ManagerMetrics
from controller.kube.work_queue import QueueTiming
from controller.manager.runner import CONTROLLER, LeaderControllers, ManagerRunner, kopf_source
from controller.models.controller import DecisionFunctions, ModelControllerSettings
from controller.models.model.reconcile import reconcile
from tests.waiting import eventually
from tests.with_kube.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from controller.autoscaler.reconciler.controller import Scaling
    from controller.kube.api_resources import ApiResource, Object
    from controller.kube.cluster_access import ClusterAccess
    from controller.models.controller import Source
    from controller.models.kind_reconciler import LoadSource
    from controller.models.model_infer_reconciler import Decide

IMPATIENT = InformerTiming(backoff_s=0.05, backoff_max_s=0.5, resync_s=2.0)
QUICK_QUEUE = QueueTiming(backoff_s=0.05, backoff_max_s=1.0)
# long enough for a machine with other work on it; who is stopped gives the Lease back
QUICK_LEASE = LeaseTiming(duration_s=12.0, renew_deadline_s=10.0, retry_s=0.4)


class Managing(msgspec.Struct, frozen=True):
    """A manager that runs. ``client``: its own."""

    client: Client
    leader: LeaderControllers
    metrics: ManagerMetrics
    task: asyncio.Task[None]

    def metric(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """A metric's value; 0 for what never was."""
        return self.metrics.registry.get_sample_value(name, dict(labels or {})) or 0.0

    def writes(self) -> float:
        """All writes so far."""
        found = [one for family in self.metrics.registry.collect() for one in family.samples]
        return sum(one.value for one in found if one.name == "attache_manager_writes_total")

    async def stop(self) -> None:
        """As a signal does. What it ended with by itself is left to the test."""
        self.task.cancel()
        await asyncio.wait([self.task])


def settings(namespace: str | None, **more: Any) -> ModelControllerSettings:  # noqa: ANN401 - fields of the struct
    """Work that retries quickly."""
    return ModelControllerSettings(namespace=namespace, informers=IMPATIENT, queue=QUICK_QUEUE, **more)


@contextlib.asynccontextmanager
async def managing(
    access: ClusterAccess,
    namespace: str,
    *,
    decide: Decide = stand_in,
    with_kopf: bool = False,
    source: Source | None = None,
    loads: LoadSource | None = None,
    scaling: Scaling | None = None,
    work: ModelControllerSettings | None = None,
) -> AsyncIterator[Managing]:
    """The manager's work for the objects of ``namespace``, with a Lease in it."""
    async with connect(access, manager=CONTROLLER) as client:
        election = LeaderElection(
            client,
            namespace=namespace,
            name="attache-manager",
            identity=f"test-{id(client)}",
            timing=QUICK_LEASE,
            rng=Random(1),
        )
        metrics = ManagerMetrics()
        if with_kopf:
            source = kopf_source(client, (work or settings(namespace)).namespace)
        leader = LeaderControllers(
            client,
            work or settings(namespace),
            metrics,
            election,
            decisions=DecisionFunctions(decide, reconcile),
            source=source,
            loads=loads,
            scaling=scaling,
        )
        managed = Managing(client, leader, metrics, asyncio.create_task(ManagerRunner(None, leader).run()))
        try:
            yield managed
        finally:
            await managed.stop()


OUR_KINDS: Final[Mapping[str, ApiResource]] = {kind.name: kind.resource for kind in KINDS}
_DEFINED: Final[set[tuple[str, Path | None]]] = set()


async def define_kinds(client: Client) -> None:
    """Serve our kinds. A server takes them once: applied again, they would cost as much as the first time."""
    if (client.access.server, None) in _DEFINED and await _serves_ours(client):
        return
    await asyncio.gather(*(client.apply(CRDS, crd_object(kind), force=True) for kind in KINDS))
    await eventually(lambda: _serves_ours(client))
    _DEFINED.add((client.access.server, None))


async def _serves_ours(client: Client) -> bool:
    # a fake server may have the port of one that has ended
    try:
        served = await client.served_resources(MODEL_INFERS.api_version)
    except NotFound:
        return False
    return {one.plural for one in OUR_KINDS.values()} <= {one["name"] for one in served}


async def define_others(client: Client, folder: Path) -> None:
    """Serve the kinds of the folder's definitions, on a server that nobody takes them from."""
    if (client.access.server, folder) not in _DEFINED:
        await apply_crds(client, [folder])
        _DEFINED.add((client.access.server, folder))


def role(name: str = "main", *, replicas: int = 1, workers: int = 0, **template: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A role of a ModelInfer. ``template``: more of the spec of its pods."""
    spec = {"containers": [{"name": "engine", "image": "attache/engine-sim"}], **template}
    made: dict[str, Any] = {"name": name, "replicas": replicas, "entryTemplate": {"spec": spec}}
    return made | ({"workerReplicas": workers, "workerTemplate": {"spec": spec}} if workers else {})


def model_infer(namespace: str, name: str = "llama", *roles: dict[str, Any], replicas: int = 1) -> Object:
    """A ModelInfer of these roles, or of one with one pod."""
    return {
        "apiVersion": MODEL_INFERS.api_version,
        "kind": MODEL_INFERS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicas": replicas, "template": {"roles": list(roles) or [role()]}},
    }


async def pods(client: Client, namespace: str) -> list[Object]:
    """All that are not on their way out."""
    found = (await client.list(PODS, namespace)).items
    return [one for one in found if "deletionTimestamp" not in one["metadata"]]


async def pod_names(client: Client, namespace: str) -> set[str]:
    return {one["metadata"]["name"] for one in await pods(client, namespace)}


async def status(client: Client, namespace: str, name: str = "llama") -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(MODEL_INFERS, name, namespace)).get("status") or {}
    return found


async def condition(client: Client, namespace: str, type_: str, name: str = "llama") -> tuple[str, str]:
    """Status and reason of a condition."""
    for one in (await status(client, namespace, name)).get("conditions") or ():
        if one["type"] == type_:
            return one["status"], one["reason"]
    return "", ""


async def reasons(client: Client, namespace: str) -> list[str]:
    """Of all Events."""
    return sorted(one["reason"] for one in (await client.list(EVENTS, namespace)).items)
