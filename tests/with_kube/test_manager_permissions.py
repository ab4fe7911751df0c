# SPDX-License-Identifier: Apache-2.0
"""The manager works with its own account: its manifests allow what it asks for, and little that it never needs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest_asyncio
import yaml

from bench.cluster.node.in_process_node import gpu_node, running_nodes
from controller.kube.api_resources import MODEL_INFERS, MODELS, NODES, PODS, SECRETS, SERVICES
from controller.kube.errors import Forbidden
from controller.models.model_infer import names
from controller.models.model_infer.reconcile import reconcile
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import condition, define_kinds, managing, model_infer, pod_names, role, settings
from tests.with_kube.permissions import Permission, allowed_by, asked_for, missing, unused
from tests.with_kube.pods import remove_pods
from tests.with_kube.test_manifests import MANIFESTS, SYSTEM, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess

pytestmark = REAL
CRASHES = [{"name": "engine", "image": "attache/host", "command": ["sh", "-c", "echo no GPU found; exit 3"]}]
# Of the webhooks, of clusters with other schedulers or checks, and of Models with volumes for weights.
ELSEWHERE = {"secrets", "validatingwebhookconfigurations", "gatewayconfigs", "podgroups", "workloads"}
ELSEWHERE |= {"modelinfers/finalizers", "models/finalizers", "modelinferroles", "modelinferroles/status"}
# Of scaling: see test_scaling_permissions.py.
ELSEWHERE |= {"autoscalingpolicies/status", "autoscalingpolicybindings/status", "deployments", "deployments/scale"}
ELSEWHERE |= {"horizontalpodautoscalers", "leaderworkersets", "leaderworkersets/scale", "modelinferroles/scale"}
ELSEWHERE_GROUPS = {"metrics.k8s.io"}
ELSEWHERE |= {"modelinfers/scale", "scaledobjects", "statefulsets", "statefulsets/scale"}
# Of changes that need more time: a Model that loses a backend, a rollout that fails, old revisions.
SELDOM = {("delete", "modelinfers"), ("patch", "controllerrevisions"), ("delete", "controllerrevisions")}
# An apply is a patch that needs this right, too, where it makes an object.
SELDOM.add(("create", "modelinfers"))
ELSEWHERE |= {"modelroutes", "modelservers"}
ELSEWHERE |= {"autoscalingpolicies", "autoscalingpolicybindings", "configmaps", "daemonsets", "jobs"}


@pytest_asyncio.fixture(loop_scope="session")
async def account(client: Client, plane: ControlPlane, assets: ClusterBinaries, tmp_path: Path) -> ClusterAccess:
    """With the token of the manager's ServiceAccount."""
    await define_kinds(client)
    for name in ("namespace.yaml", "rbac.yaml"):
        (tmp_path / name).write_text((MANIFESTS / "manager" / name).read_text())
    kept = {"namespace": SYSTEM, "resources": ["namespace.yaml", "rbac.yaml"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kept))
    assert await kubectl(plane, assets, "apply", "-k", str(tmp_path)) == 0
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": {}}
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/attache-manager/token"
    answer: dict[str, Any] = await client._json("POST", path, body=asked)
    access = msgspec.structs.replace(client.access, token=answer["status"]["token"], certificate="", key="")
    return msgspec.structs.replace(access, namespace=SYSTEM)


@pytest_asyncio.fixture(loop_scope="session")
async def node(client: Client, namespace: str, tmp_path: Path) -> AsyncIterator[None]:
    spec = gpu_node(f"node-{namespace}", labels={"test": namespace})
    async with running_nodes(client, [spec], tmp_path / "node", schedules=False):
        yield
        for kind in (MODELS, MODEL_INFERS):
            for one in (await client.list(kind, namespace)).items:
                await client.delete(kind, one["metadata"]["name"], namespace)
        await remove_pods(client, namespace)
        await client.delete(NODES, spec.name)


async def test_the_account_may_do_what_the_work_needs_and_little_more(
    client: Client,
    account: ClusterAccess,
    namespace: str,
    node: None,  # noqa: ARG001 - runs the pods
) -> None:
    everything = settings(None)
    async with managing(account, SYSTEM, decide=reconcile, with_kopf=True, work=everything) as manager:
        with asked_for(manager.client) as asked:
            crashing = role(containers=CRASHES, nodeSelector={"test": namespace})
            await client.create(MODEL_INFERS, model_infer(namespace, "crash", crashing))
            await client.create(MODEL_INFERS, model_infer(namespace, "llama", role(workers=1), replicas=2))
            model = {"apiVersion": MODELS.api_version, "kind": "Model", "spec": {"uri": "hf://org/llama"}}
            await client.create(MODELS, {**model, "metadata": {"name": "five", "namespace": namespace}})

            async def are_made() -> bool:
                names = await pod_names(client, namespace)
                return {"crash-0-main-0-0", "llama-1-main-0-1"} <= names and any(
                    one.startswith("five") for one in names
                )

            await eventually(are_made)
            changed = {"metadata": {"labels": {names.MODEL_INFER: None}}}
            await client.merge_patch(PODS, "llama-0-main-0-0", namespace, changed)
            await client.merge_patch(SERVICES, "llama-0-main-0", namespace, changed)

            async def are_mended() -> bool:
                things = [
                    await client.get_or_none(PODS, "llama-0-main-0-0", namespace),
                    await client.get_or_none(SERVICES, "llama-0-main-0", namespace),
                ]
                found = [(one or {"metadata": {}})["metadata"].get("labels") or {} for one in things]
                return all(names.MODEL_INFER in one for one in found)

            # whom the scaling takes away nobody mends
            await eventually(are_mended)
            await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 1}})
            await client.merge_patch(MODELS, "five", namespace, {"spec": {"stop": True}})

            def left() -> set[Permission]:
                found = unused(allowed_by(MANIFESTS / "manager" / "rbac.yaml"), asked)
                # reading is one right to whoever asks: kopf gets what we list
                return {
                    one
                    for one in found
                    if one.resource not in ELSEWHERE and one.verb != "get" and (one.verb, one.resource) not in SELDOM
                    if one.group not in ELSEWHERE_GROUPS
                }

            with contextlib.suppress(TimeoutError):
                await eventually(lambda: not left())
            assert missing(allowed_by(MANIFESTS / "manager" / "rbac.yaml"), asked) == set()
            assert left() == set(), "what the account may do, and the work never does"
        assert (await condition(client, namespace, "Available", "llama"))[0]
        with contextlib.suppress(Forbidden):
            await manager.client.list(SECRETS, namespace)
            raise AssertionError("the account reads Secrets")
