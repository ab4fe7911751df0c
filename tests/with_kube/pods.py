# SPDX-License-Identifier: Apache-2.0
"""Pods without a node: made, and given a status as a kubelet would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.cluster.resources import PODS

if TYPE_CHECKING:
    from controller.cluster.client import Client


async def make_pod(
    client: Client, namespace: str, name: str, ip: str, *, app: str = "llama", ready: bool = True
) -> None:
    """A running pod."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {"containers": [{"name": "engine", "image": "attache/engine-sim"}]},
    }
    await client.create(PODS, pod)
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
    await client.merge_patch(PODS, name, namespace, {"status": status}, subresource="status")
    if ready:
        await set_ready(client, namespace, name)


async def set_ready(client: Client, namespace: str, name: str, *, ready: bool = True) -> None:
    """The pod's readiness."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    await client.merge_patch(PODS, name, namespace, {"status": {"conditions": conditions}}, subresource="status")
