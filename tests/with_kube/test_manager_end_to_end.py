# SPDX-License-Identifier: Apache-2.0
"""A ModelInfer becomes pods that a node runs, and stays as it says whatever happens to the pods and to the manager."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from bench.cluster.node.in_process_node import Node, gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from controller.kube.api_resources import (
    CONTROLLER_REVISIONS,
    EVENTS,
    MODEL_INFERS,
    NODES,
    PODS,
    SERVICES,
)
from controller.kube.client import Client
from controller.models.model_infer.names import MODEL_INFER
from controller.models.model_infer.reconcile import reconcile
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import Managing, condition, define_kinds, managing, model_infer, pods, role, status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.kube.api_resources import ApiResource, Object
    from tests.with_kube.kubes import Kube

QUICK = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.2, pull_max_s=0.4, heartbeat_s=1.0)
SLEEPS = [{"name": "engine", "image": "attache/host", "command": ["sh", "-c", "exec sleep 3600"]}]
CRASHES = [{"name": "engine", "image": "attache/host", "command": ["sh", "-c", "echo no GPU found; exit 3"]}]


class Place(msgspec.Struct, frozen=True):
    """A namespace with a node of its own."""

    client: Client
    namespace: str
    node: Node

    def role(self, name: str, *, replicas: int = 1, workers: int = 0, containers: Any = SLEEPS) -> dict[str, Any]:  # noqa: ANN401 - JSON
        chosen = {"nodeSelector": {"test": self.namespace}, "terminationGracePeriodSeconds": 1}
        return role(name, replicas=replicas, workers=workers, containers=containers, **chosen)

    async def create(self, *roles: dict[str, Any], replicas: int = 1, **spec: Any) -> None:  # noqa: ANN401 - JSON
        made = model_infer(self.namespace, "llama", *roles, replicas=replicas)
        made["spec"]["template"]["drainTimeout"] = "1s"
        made["spec"].update(spec)
        await self.client.create(MODEL_INFERS, made)

    async def names(self, resource: ApiResource = PODS) -> set[str]:
        """Of those objects that a ModelInfer owns."""
        found = (await self.client.list(resource, self.namespace)).items
        return {
            one["metadata"]["name"]
            for one in found
            if one["metadata"].get("ownerReferences") and "deletionTimestamp" not in one["metadata"]
        }

    async def until_settled(self, count: int) -> set[str]:
        """So many pods, all ready, none going, and the status says so; their names."""

        async def are_ready() -> bool:
            everything = (await self.client.list(PODS, self.namespace)).items
            said = await status(self.client, self.namespace)
            return (
                len(everything) == count
                and all(_is_ready(one) for one in everything)
                and said.get("readyReplicas") == said.get("replicas") == said.get("updatedReplicas")
                and (await condition(self.client, self.namespace, "Available"))[0] == "True"
            )

        try:
            await eventually(are_ready, pause_s=0.1)
        except TimeoutError:
            found = (await self.client.list(PODS, self.namespace)).items
            said = {one["metadata"]["name"]: _is_ready(one) for one in found}
            pytest.fail(f"{said}; {await status(self.client, self.namespace)}")
        return await self.names()


@pytest_asyncio.fixture(loop_scope="session")
async def place(client: Client, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Place]:
    await define_kinds(client)
    spec = gpu_node(f"node-{namespace}", labels={"test": namespace})
    async with running_nodes(client, [spec], tmp_path, timing=QUICK, schedules=kube.fake is not None) as nodes:
        yield Place(client, namespace, nodes[spec.name])
        for thing in (await client.list(MODEL_INFERS, namespace)).items:
            await client.delete(MODEL_INFERS, thing["metadata"]["name"], namespace)
        for pod in (await client.list(PODS, namespace)).items:
            await client.delete(PODS, pod["metadata"]["name"], namespace, grace_s=0)
        await client.delete(NODES, spec.name)


@pytest_asyncio.fixture(loop_scope="session")
async def manager(place: Place, kube: Kube) -> AsyncIterator[Managing]:
    """The manager with everything: kopf, the real reconciler."""
    async with managing(kube.admin, place.namespace, decide=reconcile, with_kopf=True) as running:
        yield running


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


@pytest.mark.usefixtures("manager")
async def test_two_groups_of_prefill_and_decode_run_are_scaled_mended_and_collected(
    place: Place, client: Client, namespace: str
) -> None:
    await place.create(place.role("prefill"), place.role("decode", replicas=2, workers=1), replicas=2)
    names = await place.until_settled(10)
    assert names == {
        f"llama-{group}-{rest}"
        for group in range(2)
        for rest in ("prefill-0-0", "decode-0-0", "decode-0-1", "decode-1-0", "decode-1-1")
    }
    # one for each replica that has workers
    services = {f"llama-{group}-decode-{replica}" for group in range(2) for replica in range(2)}
    assert await place.names(SERVICES) == services
    assert len(await place.names(CONTROLLER_REVISIONS)) == 1
    # somebody deletes a pod and a Service, and changes a label
    await client.delete(PODS, "llama-0-decode-0-1", namespace, grace_s=0)
    await client.delete(SERVICES, "llama-1-decode-0", namespace)
    patch = {"metadata": {"labels": {MODEL_INFER: None}}}
    await client.merge_patch(PODS, "llama-1-prefill-0-0", namespace, patch)

    async def is_mended() -> bool:
        known = await client.list(PODS, namespace, labels=f"{MODEL_INFER}=llama")
        return len(known.items) == 10 and await place.names(SERVICES) == services

    await eventually(is_mended)
    await place.until_settled(10)
    # as an autoscaler does
    await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 1}}, subresource="scale")
    assert await place.until_settled(5) == {name for name in names if name.startswith("llama-0-")}
    await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 0}}, subresource="scale")
    assert await place.until_settled(0) == set()
    await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 1}}, subresource="scale")
    await place.until_settled(5)
    await client.delete(MODEL_INFERS, "llama", namespace)

    async def is_gone() -> bool:
        kinds = (PODS, SERVICES, CONTROLLER_REVISIONS)
        return not any([await place.names(one) for one in kinds])

    await eventually(is_gone)


async def test_a_settled_model_infer_causes_no_write(place: Place, manager: Managing) -> None:
    await place.create(place.role("main", workers=1), replicas=2)
    await place.until_settled(4)

    def looks() -> float:
        return manager.metric("attache_manager_reconciles_total", {"kind": "ModelInfer", "outcome": "settled"})

    await asyncio.sleep(1)
    writes, seen = manager.writes(), looks()
    # resyncs come every two seconds
    await eventually(lambda: looks() >= seen + 3)
    assert manager.writes() == writes


async def test_a_container_that_crashes_is_told_with_the_last_lines_of_its_log(
    place: Place, client: Client, namespace: str, manager: Managing
) -> None:
    await place.create(place.role("main", containers=CRASHES))

    async def is_told() -> bool:
        said = [one.get("message", "") for one in (await status(client, namespace)).get("conditions") or ()]
        said += [one["message"] for one in (await client.list(EVENTS, namespace)).items]
        return any("no GPU found" in one for one in said)

    await eventually(is_told)
    assert not manager.task.done()


@pytest.mark.parametrize("seed", [1])
async def test_a_manager_that_is_ended_at_random_moments_comes_to_the_same_end(
    place: Place, kube: Kube, namespace: str, seed: int
) -> None:
    rng = Random(seed)
    await place.create(place.role("prefill"), place.role("decode", workers=1), replicas=2)
    for _ in range(12):
        async with managing(kube.admin, namespace, decide=reconcile):
            await asyncio.sleep(rng.uniform(0.0, 0.4))
    async with managing(kube.admin, namespace, decide=reconcile):
        assert len(await place.until_settled(6)) == 6
        found = await pods(place.client, namespace)
        assert len({one["metadata"]["uid"] for one in found}) == 6


@REAL
async def test_an_api_server_that_is_away_for_ten_seconds_is_outlived(
    place: Place, client: Client, kube: Kube, namespace: str, manager: Managing
) -> None:
    assert kube.plane is not None
    await place.create(place.role("main"), replicas=2)
    await place.until_settled(2)
    await kube.plane.stop_api()
    await asyncio.sleep(10)
    await kube.plane.restart_api()
    await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 3}}, subresource="scale")
    await place.until_settled(3)
    assert not manager.task.done()
