# SPDX-License-Identifier: Apache-2.0
"""A kind of somebody else's is scaled through its scale subresource, as far as its owner allows it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest_asyncio
import yaml

from bench.cluster.local_control_plane import apply_crds
from controller.autoscaler.reconciler.scalables import SCALED_BY
from controller.kube.api_resources import AUTOSCALING_POLICY_BINDINGS, PODS, ApiResource, Object
from controller.kube.informer import Informer, Selection
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE, REAL
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod, remove_pods
from tests.with_kube.scaling import Wanted, bind, make_policy, make_server, says, scaling
from tests.with_kube.test_manager_permissions import account
from tests.with_kube.test_manifests import MANIFESTS, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from tests.with_kube.kubes import Kube

__all__ = ["account"]
FLEETS: Final = ApiResource("example.org", "v1", "fleets", "Fleet")
CLUSTER_ROLES: Final = ApiResource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
PRESERVED: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(kind: str, plural: str, **subresources: Any) -> Object:  # noqa: ANN401 - JSON
    """Replicas do not stand where Deployments have them: only the scale says where."""
    size = {"type": "object", "properties": {"size": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"spec": size, "status": PRESERVED}}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.example.org"},
        "spec": {
            "group": "example.org",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [{**version, "subresources": {"status": {}, **subresources}}],
        },
    }


SCALE: Final = {
    "specReplicasPath": ".spec.size",
    "statusReplicasPath": ".status.size",
    "labelSelectorPath": ".status.pods",
}


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, namespace: str, tmp_path: Path) -> AsyncIterator[None]:
    """Our kinds are served, one of somebody else's with a scale, and one without."""
    await define_kinds(client)
    crds = tmp_path / "crds"
    crds.mkdir()
    (crds / "fleets.yaml").write_text(yaml.safe_dump(definition("Fleet", "fleets", scale=SCALE)))
    (crds / "lumps.yaml").write_text(yaml.safe_dump(definition("Lump", "lumps")))
    await apply_crds(client, [crds])
    yield
    await remove_pods(client, namespace)


async def make_fleet(client: Client, namespace: str, selector: str = "app=llama") -> None:
    metadata = {"name": "llama", "namespace": namespace}
    thing = {"apiVersion": FLEETS.api_version, "kind": "Fleet", "metadata": metadata, "spec": {"size": 2}}
    await client.create(FLEETS, thing)
    status = {"status": {"size": 2, "pods": selector}}
    await client.merge_patch(FLEETS, "llama", namespace, status, subresource="status")


def fleet(kind: str = "Fleet") -> Object:
    ref = {"apiVersion": "example.org/v1", "kind": kind, "name": "llama"}
    return {"name": "main", "ref": ref, "minReplicas": 0, "maxReplicas": 9}


async def size_of(client: Client, namespace: str) -> int:
    return int((await client.get(FLEETS, "llama", namespace))["spec"]["size"])


async def until_size(client: Client, namespace: str, number: int) -> None:
    async def is_so() -> bool:
        return await size_of(client, namespace) == number

    await eventually(is_so)


async def until_says(client: Client, namespace: str, type_: str, *said: str) -> None:
    async def is_said() -> bool:
        return await says(client, namespace, type_) == said

    await eventually(is_said)


async def message(client: Client, namespace: str) -> str:
    thing = await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace)
    return next(one["message"] for one in thing["status"]["conditions"] if one["type"] == "TargetsResolved")


async def test_replicas_and_pods_are_those_of_the_scale(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, drain="1s")
    await make_server(client, namespace)
    await make_fleet(client, namespace, "app=llama,role in (leader,single)")
    for number, role in enumerate(("leader", "single", "worker")):
        await make_pod(client, namespace, f"llama-{number}", f"10.9.2.{number + 1}")
        await client.merge_patch(PODS, f"llama-{number}", namespace, {"metadata": {"labels": {"role": role}}})
    binding = await bind(client, namespace, fleet())
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted):
        await until_size(client, namespace, 3)
        await until_says(client, namespace, "TargetsResolved", "True", "Resolved")

        def engines() -> list[str]:
            return [one.name for each in wanted.situations for target in each.targets for one in target.engines]

        await eventually(lambda: engines() == ["llama-0", "llama-1"])
        found = await client.get(FLEETS, "llama", namespace)
        assert found["metadata"]["annotations"][SCALED_BY] == f"{namespace}/one/{binding['metadata']['uid']}"
        # the least busy pods are marked before there are fewer; the mark of one that stays is taken off again
        marked = set[str]()

        def note(key: str) -> None:
            if "attache.dev/draining" in _annotations(pods.get(key) or {"metadata": {}}):
                marked.add(key.partition("/")[2])

        pods = Informer(client, PODS, Selection(namespace))
        pods.subscribe(note)
        watching = asyncio.create_task(pods.run())
        await asyncio.wait_for(pods.synced.wait(), 60)
        wanted.replicas["main"] = 1
        await until_size(client, namespace, 1)
        await eventually(lambda: marked == {"llama-0", "llama-1"})
        watching.cancel()


async def test_a_change_by_hand_is_honoured(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, manualHold="10m")
    await make_server(client, namespace)
    await make_fleet(client, namespace)
    await bind(client, namespace, fleet())
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted):
        await until_size(client, namespace, 3)
        await client.merge_patch(FLEETS, "llama", namespace, {"spec": {"replicas": 7}}, subresource="scale")
        await until_says(client, namespace, "ScalingActive", "False", "ManualHold")
        assert await size_of(client, namespace) == 7


@FAKE
async def test_what_cannot_be_scaled_is_told(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await bind(client, namespace, fleet("Lump"))
    async with scaling(kube.admin, namespace, Wanted(main=3)):
        await until_says(client, namespace, "TargetsResolved", "False", "UnknownKind")
        assert "lumps have no scale subresource" in await message(client, namespace)


@FAKE
async def test_without_a_selector_nothing_is_written(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await make_fleet(client, namespace, "")
    await bind(client, namespace, fleet())
    async with scaling(kube.admin, namespace, Wanted(main=3)):
        await until_says(client, namespace, "TargetsResolved", "False", "SelectorUnknown")
        assert await size_of(client, namespace) == 2
        status = {"status": {"pods": "app=llama"}}
        await client.merge_patch(FLEETS, "llama", namespace, status, subresource="status")
        await until_size(client, namespace, 3)


@FAKE
async def test_an_object_that_comes_later_is_scaled(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await bind(client, namespace, fleet())
    async with scaling(kube.admin, namespace, Wanted(main=3)):
        await until_says(client, namespace, "TargetsResolved", "False", "TargetNotFound")
        await make_fleet(client, namespace)
        await until_size(client, namespace, 3)


@FAKE
async def test_what_cannot_be_read_is_told_and_read_again(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await make_fleet(client, namespace)
    await bind(client, namespace, fleet())
    assert kube.fake is not None
    kube.fake.faults.refuse(1000, 503, of=lambda call: call.target.kind.resource.kind == "Fleet")
    async with scaling(kube.admin, namespace, Wanted(main=3)):
        await until_says(client, namespace, "TargetsResolved", "False", "TargetNotFound")
        assert "cannot be read: 503" in await message(client, namespace)
        kube.fake.faults.heal()
        await until_size(client, namespace, 3)


@REAL
async def test_the_owner_of_a_kind_has_to_allow_it(
    client: Client, account: ClusterAccess, plane: ControlPlane, assets: ClusterBinaries, namespace: str
) -> None:
    assert await kubectl(plane, assets, "apply", "-f", str(MANIFESTS / "manager" / "scaled-kinds.yaml")) == 0
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await make_fleet(client, namespace)
    await bind(client, namespace, fleet())
    name = f"scales-fleets-{namespace}"
    rule = {"apiGroups": ["example.org"], "resources": ["fleets", "fleets/scale"], "verbs": ["get", "patch"]}
    role: Object = {
        "apiVersion": CLUSTER_ROLES.api_version,
        "kind": "ClusterRole",
        "metadata": {"name": name, "labels": {"attache.dev/aggregate-to-scaled-kinds": "true"}},
        "rules": [rule],
    }
    try:
        async with scaling(account, namespace, Wanted(main=3)):
            await until_says(client, namespace, "TargetsResolved", "False", "TargetForbidden")
            said = await message(client, namespace)
            assert "must not get fleets, patch fleets, get fleets/scale, patch fleets/scale" in said
            assert "attache.dev/aggregate-to-scaled-kinds=true" in said
            await client.create(CLUSTER_ROLES, role)
            await until_size(client, namespace, 3)
    finally:
        await client.delete(CLUSTER_ROLES, name)


def _annotations(pod: Object) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}
