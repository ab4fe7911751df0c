# SPDX-License-Identifier: Apache-2.0
"""The gateway role in picker mode against API servers: an InferencePool's pods are in the directory, and what is wrong
is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.gateway.inference_pool_reconciler import CONTROLLER, InferencePoolRunner, InferencePoolSettings
from controller.gateway.metrics import GatewayMetrics
from controller.kube.api_resources import CRDS, EVENTS, INFERENCE_POOLS
from controller.kube.client import connect
from extproc.api.config_loader import load_directory
from tests.controller.gateway.compile.test_inference_pool_compiler import PICKER
from tests.waiting import eventually
from tests.with_kube.pods import make_pod
from tests.with_kube.test_gateway_role import IMPATIENT, addresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.kube.client import Client
    from tests.kube_objects import Object
    from tests.with_kube.kubes import Kube

ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
NAMES = {
    "plural": "inferencepools",
    "singular": "inferencepool",
    "kind": "InferencePool",
    "listKind": "InferencePoolList",
}
POOL_CRD: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension"
        },
    },
    "spec": {
        "group": INFERENCE_POOLS.group,
        "scope": "Namespaced",
        "names": NAMES,
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": ANYTHING, "status": ANYTHING}}},
                "subresources": {"status": {}},
            }
        ],
    },
}


def pool(namespace: str, *ports: int, app: str = "llama") -> Object:
    spec = {
        "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": port} for port in ports or (8000,)],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    metadata = {"name": "llama", "namespace": namespace}
    return {"apiVersion": INFERENCE_POOLS.api_version, "kind": "InferencePool", "metadata": metadata, "spec": spec}


@contextlib.asynccontextmanager
async def client_with_pools(kube: Kube) -> AsyncIterator[Client]:
    """A client of a server that has InferencePools: those of the Inference Extension where they are installed
    already.
    """
    async with connect(kube.admin, manager="test") as one:
        if not await one.serves(INFERENCE_POOLS):
            await one.apply(CRDS, POOL_CRD, force=True)
        await eventually(lambda: one.serves(INFERENCE_POOLS))
        yield one


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    async with client_with_pools(kube) as one:
        yield one


@contextlib.asynccontextmanager
async def picking(
    client: Client, namespace: str, folder: Path, picker_file: Path | None = None
) -> AsyncIterator[InferencePoolRunner]:
    """A role at work."""
    async with connect(client.access, manager=CONTROLLER) as own:
        settings = InferencePoolSettings(config=folder, pool=f"{namespace}/llama", picker_file=picker_file)
        role = InferencePoolRunner(own, settings, GatewayMetrics(), timing=IMPATIENT)
        task = asyncio.create_task(role.run())
        try:
            yield role
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def reasons(client: Client, namespace: str) -> set[str]:
    events = await client.list(EVENTS, namespace)
    return {one["reason"] for one in events.items if one["involvedObject"]["kind"] == "InferencePool"}


async def test_a_pools_pods_become_a_directory_once_the_pool_is_there(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    async with picking(client, namespace, tmp_path) as role:
        await make_pod(client, namespace, "a", "127.0.1.1")
        await make_pod(client, namespace, "other", "127.0.1.3", app="other")
        await asyncio.sleep(0.3)
        assert not role.ready.is_set()
        await client.create(INFERENCE_POOLS, pool(namespace, 8000, 8001))
        await asyncio.wait_for(role.ready.wait(), 120)
        assert addresses(tmp_path) == ["127.0.1.1:8000", "127.0.1.1:8001"]
        await make_pod(client, namespace, "b", "127.0.1.2")
        await eventually(lambda: len(addresses(tmp_path) or ()) == 4)
        assert not (await client.get(INFERENCE_POOLS, "llama", namespace)).get("status"), "that is the gateways'"


async def test_what_is_wrong_is_an_event_of_the_pool(client: Client, namespace: str, tmp_path: Path) -> None:
    await client.create(INFERENCE_POOLS, pool(namespace))
    async with picking(client, namespace, tmp_path) as role:
        await asyncio.wait_for(role.ready.wait(), 120)
        await eventually(lambda: told(client, namespace, "NoPods"))
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: told(client, namespace, "PoolServed"))
        patch: dict[str, Any] = {"metadata": {"annotations": {"attache.dev/model-server": "engine: nvLLM"}}}
        await client.merge_patch(INFERENCE_POOLS, "llama", namespace, patch)
        await eventually(lambda: told(client, namespace, "PoolInvalid"))
        assert addresses(tmp_path) == ["127.0.1.1:8000"]


async def told(client: Client, namespace: str, reason: str) -> bool:
    return reason in await reasons(client, namespace)


async def test_an_endpoint_picker_config_in_a_file_is_followed(client: Client, namespace: str, tmp_path: Path) -> None:
    await client.create(INFERENCE_POOLS, pool(namespace))
    file, folder = tmp_path / "picker.yaml", tmp_path / "config"
    async with picking(client, namespace, folder, file) as role:
        await asyncio.sleep(0.3)
        assert not role.ready.is_set()
        file.write_text(PICKER)
        await asyncio.wait_for(role.ready.wait(), 120)
        (server,) = load_directory(folder).servers
        assert server.spec.picker_config is not None
        assert (folder / server.spec.picker_config).read_text() == PICKER
        changed = PICKER.replace("queue-scorer", "kv-cache-utilization-scorer")
        file.write_text(changed)
        await eventually(lambda: (folder / str(server.spec.picker_config)).read_text() == changed)
