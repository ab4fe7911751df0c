# SPDX-License-Identifier: Apache-2.0
"""A LeaderWorkerSet is scaled through its scale, and a group of its pods is one replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest_asyncio
import yaml

from bench.cluster.local_control_plane import apply_crds
from controller.autoscaler.reconciler.scalables import LEADER_WORKER_SETS
from controller.kube.api_resources import PODS, Object
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod
from tests.with_kube.scaling import Wanted, bind, make_policy, scaling

if TYPE_CHECKING:
    from pathlib import Path

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

NAME: Final = "leaderworkerset.sigs.k8s.io/name"
PRESERVED: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
DEFINITION: Final[dict[str, Any]] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "leaderworkersets.leaderworkerset.x-k8s.io"},
    "spec": {
        "group": "leaderworkerset.x-k8s.io",
        "names": {"kind": "LeaderWorkerSet", "plural": "leaderworkersets", "singular": "leaderworkerset"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.hpaPodSelector",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {"type": "object", "properties": {"spec": PRESERVED, "status": PRESERVED}}
                },
            }
        ],
    },
}


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, tmp_path: Path) -> None:
    """Our kinds are served, and that of LeaderWorkerSets."""
    await define_kinds(client)
    (tmp_path / "definition.yaml").write_text(yaml.safe_dump(DEFINITION))
    await apply_crds(client, [tmp_path])


@FAKE
async def test_groups_are_replicas_and_their_number_is_written(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await client.create(LEADER_WORKER_SETS, _leader_worker_set(namespace))
    for number, name in enumerate(("llama-0", "llama-0-1", "llama-1", "llama-1-1")):
        await make_pod(client, namespace, name, f"10.9.1.{number}")
        place = {"group-index": name.split("-")[1], "worker-index": "1" if name.count("-") > 1 else "0"}
        labels = {NAME: "llama", **{f"leaderworkerset.sigs.k8s.io/{key}": value for key, value in place.items()}}
        await client.merge_patch(PODS, name, namespace, {"metadata": {"labels": labels}})
    ref = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "llama"}
    await bind(client, namespace, {"name": "main", "ref": ref, "minReplicas": 0, "maxReplicas": 9})
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted):

        async def is_scaled() -> bool:
            return bool((await client.get(LEADER_WORKER_SETS, "llama", namespace))["spec"]["replicas"] == 3)

        await eventually(is_scaled)

        def engines() -> list[str]:
            return [one.name for each in wanted.situations for target in each.targets for one in target.engines]

        await eventually(lambda: engines() == ["llama-0", "llama-1"])


def _leader_worker_set(namespace: str) -> Object:
    spec = {"containers": [{"name": "engine", "image": "attache/engine-sim"}]}
    template = {"metadata": {"labels": {"app": "llama"}}, "spec": spec}
    return {
        "apiVersion": LEADER_WORKER_SETS.api_version,
        "kind": LEADER_WORKER_SETS.kind,
        "metadata": {"name": "llama", "namespace": namespace},
        "spec": {"replicas": 2, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
    }
