# SPDX-License-Identifier: Apache-2.0
"""Pods without a node: made, and given a status as a kubelet would; and pods that are taken away after a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.api_resources import DEPLOYMENTS, PODS
from tests.waiting import eventually

if TYPE_CHECKING:
    from controller.kube.client import Client


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


async def remove_pods(client: Client, namespace: str) -> None:
    """All of a namespace, with the Deployments that would make them anew, whether a node confirms it or not.

    Else they run on nodes of later tests, or are gateways there that the manager has to ask.
    """

    async def are_gone() -> bool:
        deployments = (await client.list(DEPLOYMENTS, namespace)).items
        for one in deployments:
            await client.delete(DEPLOYMENTS, one["metadata"]["name"], namespace, propagation="Foreground")
        pods = (await client.list(PODS, namespace)).items
        for one in pods:
            await client.delete(PODS, one["metadata"]["name"], namespace, grace_s=0)
        return not deployments and not pods

    await eventually(are_gone, pause_s=0.2)
