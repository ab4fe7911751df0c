# SPDX-License-Identifier: Apache-2.0
"""The runtime agent as a native sidecar of an engine's pod: the kubelet's probes and preStop ask it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest_asyncio

from bench.cluster.node.container_machine import NodeTiming
from bench.cluster.node.node import gpu_node
from bench.cluster.node.running import running_nodes
from controller.cluster.resources import NODES, PODS
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.cluster.client import Client
    from controller.cluster.resources import Object
    from tests.with_kube.kubes import Kube

MODEL = "llama"
PATIENCE_S = 60.0


def asks(path: str, **more: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": 9000}, "periodSeconds": 1, **more}


def engine_pod(namespace: str) -> Object:
    """As docs/agent.md has it."""
    agent = {
        "name": "agent",
        "image": "attache",
        "args": ["agent", "--engine", "http://$(POD_IP):8000", "--listen", "0.0.0.0:9000", "--settle", "0"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "restartPolicy": "Always",
    }
    engine = {
        "name": "engine",
        "image": "attache/engine-sim",
        "args": ["--port", "8000", "--model", MODEL, "--speed", "2"],
        "startupProbe": asks("/started", failureThreshold=120),
        "readinessProbe": asks("/ready"),
        "livenessProbe": asks("/live"),
        "lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": 9000}}},
    }
    spec = {
        "initContainers": [agent],
        "containers": [engine],
        "nodeSelector": {"test": namespace},
        "terminationGracePeriodSeconds": 60,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine-0", "namespace": namespace}, "spec": spec}


@pytest_asyncio.fixture(loop_scope="session")
async def node(client: Client, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[None]:
    spec = gpu_node(f"node-{namespace}", gpus=1, labels={"test": namespace})
    timing = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.2, pull_max_s=0.4, heartbeat_s=1.0)
    async with running_nodes(client, [spec], tmp_path, timing=timing, schedules=kube.fake is not None):
        yield
        for pod in (await client.list(PODS, namespace)).items:
            await client.delete(PODS, pod["metadata"]["name"], namespace, grace_s=0)
        await client.delete(NODES, spec.name)


async def tokens_of(http: aiohttp.ClientSession, url: str, tokens: int) -> int:
    """The tokens that came of a stream of so many."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "stream": True}
    count = 0
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            count += line.startswith(b'data: {"')
    return count


async def test_a_pod_that_is_deleted_ends_after_its_streams(client: Client, namespace: str, node: None) -> None:  # noqa: ARG001
    await client.create(PODS, engine_pod(namespace))

    async def status() -> dict[str, Any]:
        found = await client.find(PODS, "engine-0", namespace)
        return {} if found is None else dict(found.get("status") or {})

    async def is_ready() -> bool:
        conditions = (await status()).get("conditions") or ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    await eventually(is_ready, timeout_s=PATIENCE_S)
    ip = (await status())["podIP"]
    async with aiohttp.ClientSession() as http:
        stream = asyncio.create_task(tokens_of(http, f"http://{ip}:8000", 800))

        async def runs() -> bool:
            async with http.get(f"http://{ip}:9000/metrics") as page:
                return 'attache_engine_running_requests{model_name="llama"} 1' in await page.text()

        await eventually(runs)
        await client.delete(PODS, "engine-0", namespace)

        async def is_unready() -> bool:
            async with http.get(f"http://{ip}:9000/ready") as page:
                return page.status == 503

        await eventually(is_unready)
        assert not stream.done()
        assert await stream >= 800

        async def is_gone() -> bool:
            return await client.find(PODS, "engine-0", namespace) is None

        # the agent ends by itself, long before the grace does
        await eventually(is_gone, timeout_s=30)
