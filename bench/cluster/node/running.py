# SPDX-License-Identifier: Apache-2.0
"""Nodes that run in this process for a while, with a scheduler where the cluster has none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bench.cluster.node.container_machine import NodeTiming
from bench.cluster.node.images import IMAGES
from bench.cluster.node.node import Node
from bench.cluster.node.pod_network import BridgedNetwork, LoopbackNetwork
from bench.cluster.node.scheduler import Scheduler
from bench.guard import Guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from bench.cluster.node.node_status import NodeSpec
    from controller.kube.client import Client


@contextlib.asynccontextmanager
async def running_nodes(
    client: Client,
    specs: Sequence[NodeSpec],
    directory: Path,
    *,
    images: Mapping[str, Sequence[str]] = IMAGES,
    timing: NodeTiming = NodeTiming(),  # noqa: B008 - frozen
    schedules: bool = False,
    pod_range: str | None = None,
) -> AsyncIterator[dict[str, Node]]:
    """Nodes by name, ready for pods. On the way out their pods' processes end; the objects stay.

    ``schedules``: bind pods too, because no kube-scheduler runs.
    ``pod_range``: the range of ``bench.cluster.netns``, if this process is in its network; else pods have addresses of
    127/8.
    """
    with Guard() as guard:
        network = BridgedNetwork(pod_range, guard) if pod_range else LoopbackNetwork()
        nodes = {
            spec.name: Node(client, spec, directory / spec.name, guard, network, images=images, timing=timing)
            for spec in specs
        }
        running = [asyncio.create_task(node.run(), name=f"node {name}") for name, node in nodes.items()]
        if schedules:
            running.append(asyncio.create_task(Scheduler(client).run(), name="scheduler"))
        try:
            await _all_registered(nodes, running)
            yield nodes
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            network.close()
            for task in running:
                if not task.cancelled() and (error := task.exception()):
                    raise error


async def _all_registered(nodes: Mapping[str, Node], running: Sequence[asyncio.Task[None]]) -> None:
    """Until all nodes are in the cluster, or one of the tasks has ended, whose error is then raised on the way out."""
    for node in nodes.values():
        registered = asyncio.create_task(node.registered())
        await asyncio.wait([registered, *running], return_when=asyncio.FIRST_COMPLETED)
        if not registered.done():
            registered.cancel()
            raise RuntimeError("a node has ended before it was in the cluster")
