# SPDX-License-Identifier: Apache-2.0
"""The runtime agent as a native sidecar of an engine's pod: the kubelet's probes and preStop ask it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest_asyncio

from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from controller.kube.api_resources import NODES, PODS
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

MODEL = "llama"


def asks(path: str, **more: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": 9000}, "periodSeconds": 1, **more}


def engine_pod(namespace: str, name: str) -> Object:
    """As docs/engines.md has it."""
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
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


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


async def status_of(client: Client, namespace: str, name: str) -> dict[str, Any]:
    found = await client.get_or_none(PODS, name, namespace)
    return {} if found is None else dict(found.get("status") or {})


def is_ready(status: dict[str, Any]) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())


async def test_a_pod_that_is_deleted_ends_after_its_streams(client: Client, namespace: str, node: None) -> None:  # noqa: ARG001
    for name in ("engine-0", "engine-1"):
        await client.create(PODS, engine_pod(namespace, name))

    async def are_ready() -> bool:
        return all([is_ready(await status_of(client, namespace, name)) for name in ("engine-0", "engine-1")])

    await eventually(are_ready)
    status = await status_of(client, namespace, "engine-0")
    # both listen on port 8000, each on its own address
    assert [one["restartCount"] for one in status["containerStatuses"]] == [0]
    ip = status["podIP"]
    async with aiohttp.ClientSession() as http:
        stream = asyncio.create_task(tokens_of(http, f"http://{ip}:8000", 2000))

        async def runs() -> bool:
            async with http.get(f"http://{ip}:9000/metrics") as page:
                return 'attache_engine_running_requests{model_name="llama"} 1' in await page.text()

        await eventually(runs)
        await client.delete(PODS, "engine-0", namespace)

        async def is_draining() -> bool:
            async with http.get(f"http://{ip}:9000/ready") as page:
                return (page.status, await page.text()) == (503, "draining\n")

        await eventually(is_draining)
        assert not stream.done()
        assert await stream >= 2000

        async def is_gone() -> bool:
            return await client.get_or_none(PODS, "engine-0", namespace) is None

        # the agent ends by itself, long before the grace does
        await eventually(is_gone)
    assert is_ready(await status_of(client, namespace, "engine-1"))
