# SPDX-License-Identifier: Apache-2.0
"""A node's own objects: the Node, its conditions, its lease."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.errors import AlreadyExists, ClusterError, NotFound
from controller.kube.resources import LEASES, NODES, PODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.kube.client import Client
    from controller.kube.resources import Object

log = logging.getLogger(__name__)

_LEASES: Final = "kube-node-lease"
_MANAGER: Final = "node"
# the scheduler does not look at conditions
_UNREACHABLE: Final = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}
_STATES: Final = ("node.kubernetes.io/not-", _UNREACHABLE["key"])

# the API wants all of them
_INFO: Final = {
    "machineID": "",
    "systemUUID": "",
    "bootID": "",
    "kernelVersion": "",
    "osImage": "processes of this machine",
    "containerRuntimeVersion": "process://1",
    "kubeletVersion": "v0.0.0-process",
    "kubeProxyVersion": "",
    "operatingSystem": "linux",
    "architecture": "amd64",
}


class NodeSpec(msgspec.Struct, frozen=True):
    """A node as the scheduler sees it. ``capacity``: quantities by resource."""

    name: str
    capacity: dict[str, str]
    labels: dict[str, str] = {}
    taints: tuple[dict[str, str], ...] = ()


def node_object(spec: NodeSpec) -> Object:
    """The Node to apply."""
    labels = {"kubernetes.io/hostname": spec.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    node: Object = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.name, "labels": {**labels, **spec.labels}},
        "spec": {"taints": list(spec.taints)} if spec.taints else {},
    }
    return node


def node_status(
    spec: NodeSpec, wall: datetime, *, ready: str = "True", host_ip: str = "127.0.0.1", port: int = 0
) -> dict[str, Any]:
    """Its status. ``ready``: True, False or Unknown; ``port``: where its logs are asked for."""
    now = wall.strftime("%Y-%m-%dT%H:%M:%SZ")
    reason = "KubeletReady" if ready == "True" else "NodeStatusUnknown"
    message = "processes are run" if ready == "True" else "Kubelet stopped posting node status."
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {
        "capacity": spec.capacity,
        "allocatable": spec.capacity,
        "addresses": [{"type": "InternalIP", "address": host_ip}, {"type": "Hostname", "address": spec.name}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": _INFO,
        "conditions": [{**condition, "lastHeartbeatTime": now, "lastTransitionTime": now}],
    }


class Heartbeat:
    """Registers a node and says every ``period_s`` that it lives, unless it is ``silent``."""

    def __init__(self, client: Client, spec: NodeSpec, period_s: float, host_ip: str) -> None:
        self.silent = False
        self.port = 0
        self.registered = asyncio.Event()
        self._client = client
        self._spec = spec
        self._period_s = period_s
        self._host_ip = host_ip

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if not self.silent:
                    await (self._renew() if self.registered.is_set() else self.beat())
            except ClusterError as error:
                log.warning("node %s: %s", self._spec.name, error)
            await asyncio.sleep(self._period_s if self.registered.is_set() else 0.5)

    async def beat(self) -> None:
        """Write the Node and its status; raises ClusterError."""
        await self._client.apply(NODES, node_object(self._spec), manager=_MANAGER, force=True)
        await self._write("True")
        await self._untaint()
        await self._renew()
        self.registered.set()

    async def declare_lost(self, pods: Sequence[Object]) -> None:
        """What the node lifecycle controller says of a silent node: it is Unknown, gets no pods, and its pods are not
        ready.
        """
        await self._write("Unknown")
        await self._client.merge_patch(
            NODES, self._spec.name, None, {"spec": {"taints": [*self._spec.taints, _UNREACHABLE]}}
        )
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in pods:
            conditions = (pod.get("status") or {}).get("conditions") or []
            changed = [
                {**one, "status": "False", "lastTransitionTime": now} if one["type"] == "Ready" else one
                for one in conditions
            ]
            metadata = pod["metadata"]
            try:
                await self._client.merge_patch(
                    PODS,
                    metadata["name"],
                    metadata["namespace"],
                    {"status": {"conditions": changed}},
                    subresource="status",
                )
            except NotFound:
                log.debug("pod %s went with its node", metadata["name"])

    async def _write(self, ready: str) -> None:
        thing: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._spec.name},
            "status": node_status(self._spec, datetime.now(UTC), ready=ready, host_ip=self._host_ip, port=self.port),
        }
        await self._client.apply(NODES, thing, subresource="status", manager=_MANAGER, force=True)

    async def _untaint(self) -> None:
        """The API server taints new nodes as not ready; without the node lifecycle controller nobody else removes
        that.
        """
        node = await self._client.get(NODES, self._spec.name)
        taints = [one for one in node["spec"].get("taints") or () if not one["key"].startswith(_STATES)]
        if taints != (node["spec"].get("taints") or []):
            await self._client.merge_patch(NODES, self._spec.name, None, {"spec": {"taints": taints or None}})

    async def _renew(self) -> None:
        """The lease by which the node lifecycle controller sees that the node lives."""
        lease: Object = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._spec.name, "namespace": _LEASES},
            "spec": {
                "holderIdentity": self._spec.name,
                "leaseDurationSeconds": 40,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        try:
            await self._client.apply(LEASES, lease, manager=_MANAGER, force=True)
        except (NotFound, AlreadyExists) as error:  # a server without that namespace has no node lifecycle either
            log.debug("node %s has no lease: %s", self._spec.name, error)
