# SPDX-License-Identifier: Apache-2.0
"""Scaling works with the manager's own account, and its part of the account's rights is no larger than it needs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from controller.autoscaler.reconciler.scalables import STATEFUL_SETS
from controller.kube.api_resources import DEPLOYMENTS, MODEL_INFERS
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import model_infer
from tests.with_kube.permissions import Permission, allowed_by, asked_for, missing, unused
from tests.with_kube.scaling import (
    Demand,
    Wanted,
    bind,
    delete_workloads,
    deployment,
    make_policy,
    make_server,
    scaling,
    target,
)
from tests.with_kube.test_manager_permissions import account
from tests.with_kube.test_manifests import MANIFESTS

if TYPE_CHECKING:
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess

__all__ = ["account"]
pytestmark = REAL
# Beside those for kinds that this cluster lacks, for roles of ModelInfers, and for conflicts.
OURS = {
    ("patch", "autoscalingpolicies/status"),
    ("patch", "autoscalingpolicybindings/status"),
    ("patch", "deployments/scale"),
    ("patch", "modelinfers/scale"),
    ("patch", "statefulsets/scale"),
    ("patch", "deployments"),
    ("patch", "statefulsets"),
    ("list", "horizontalpodautoscalers"),
    ("watch", "horizontalpodautoscalers"),
}


async def test_scaling_may_do_what_it_needs(
    client: Client,
    account: ClusterAccess,
    namespace: str,
) -> None:
    await make_policy(client, namespace, metrics=[{"name": "cpu", "value": 0.7, "source": "Resource"}])
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=1))
    await client.create(STATEFUL_SETS, _stateful_set(namespace))
    await client.create(MODEL_INFERS, model_infer(namespace, "infer"))
    first = target()
    second = {**target("StatefulSet"), "name": "second"}
    third = {**target("ModelInfer", "infer"), "name": "third"}
    await bind(client, namespace, first, second, third)
    wanted = Wanted(main=2, second=2, third=2)
    async with scaling(account, namespace, wanted, Demand()) as running:
        with asked_for(running.client) as asked:

            def left() -> set[tuple[str, str]]:
                done = {(one.verb, one.resource) for one in asked}
                usage = {("list", "pods")} - {
                    (one.verb, one.resource) for one in asked if one.group == "metrics.k8s.io"
                }
                return {one for one in OURS if one not in done} | usage

            with contextlib.suppress(TimeoutError):
                await eventually(lambda: not left())
        allowed = allowed_by(MANIFESTS / "manager" / "rbac.yaml")
        assert missing(allowed, asked) == set()
        assert left() == set()
        await delete_workloads(client, namespace)
        assert {one for one in unused(allowed, asked) if _is_ours(one)} == set()


def _is_ours(one: Permission) -> bool:
    return (one.verb, one.resource) in OURS


def _stateful_set(namespace: str) -> Object:
    made = deployment(namespace, replicas=1)
    return {**made, "kind": "StatefulSet", "spec": {**made["spec"], "serviceName": "llama"}}
