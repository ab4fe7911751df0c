# SPDX-License-Identifier: Apache-2.0
"""The picker's and the monitoring manifests on a real API server, with the Gateway API's and the Inference Extension's
own schemas.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio
import yaml

from controller.gateway.inference_pool_reconciler import CONTROLLER, InferencePoolRunner, InferencePoolSettings
from controller.gateway.metrics import GatewayMetrics
from controller.kube.api_resources import (
    CONFIG_MAPS,
    CRDS,
    DEPLOYMENTS,
    INFERENCE_POOLS,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    Object,
)
from controller.kube.client import connect
from controller.kube.errors import Forbidden
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_others
from tests.with_kube.permissions import allowed_by, asked_for, missing, unused
from tests.with_kube.pods import make_pod, remove_pods
from tests.with_kube.test_gateway_role import IMPATIENT, addresses
from tests.with_kube.test_manifests import MANIFESTS, SYSTEM, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.client import Client

PICKER = MANIFESTS / "picker"
OVERLAYS = (
    *(f"picker/{name}" for name in ("base", "istio", "kgateway", "gke", "envoy-gateway")),
    "monitoring/pod-monitor",
    "monitoring/service-monitor",
    "monitoring/pod-monitor-with-auth",
    "monitoring/service-monitor-with-auth",
)
# Kinds of gateways, whose definitions are not at hand: a server that knows nothing but their names.
FOREIGN = (
    ("networking.istio.io", "v1", "destinationrules", "DestinationRule"),
    ("networking.gke.io", "v1", "healthcheckpolicies", "HealthCheckPolicy"),
    ("networking.gke.io", "v1", "gcpbackendpolicies", "GCPBackendPolicy"),
    ("gateway.envoyproxy.io", "v1alpha1", "envoyextensionpolicies", "EnvoyExtensionPolicy"),
    ("gateway.envoyproxy.io", "v1alpha1", "backendtrafficpolicies", "BackendTrafficPolicy"),
    ("gateway.envoyproxy.io", "v1alpha1", "clienttrafficpolicies", "ClientTrafficPolicy"),
    ("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
    ("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    ("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
    ("llm-d.ai", "v1alpha2", "inferenceobjectives", "InferenceObjective"),
    ("llm-d.ai", "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"),
)


def definition(group: str, version: str, plural: str, kind: str) -> Object:
    """A CustomResourceDefinition that takes anything."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served: dict[str, Any] = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
    metadata = {"name": f"{plural}.{group}"}
    return {"apiVersion": CRDS.api_version, "kind": CRDS.kind, "metadata": metadata, "spec": spec}


pytestmark = REAL


@pytest_asyncio.fixture(loop_scope="session")
async def kinds(client: Client, assets: ClusterBinaries, plane: ControlPlane) -> None:
    """All kinds that the manifests have, and the namespace of some."""
    assert await kubectl(plane, assets, "apply", "-f", str(MANIFESTS / "gateway" / "namespace.yaml")) == 0
    await define_others(client, assets.crd_directory)
    for one in FOREIGN:
        await client.apply(CRDS, definition(*one), force=True)
    names = [f"{plural}.{group}" for group, _, plural, _ in FOREIGN]
    assert await kubectl(plane, assets, "wait", "--for", "condition=established", "crd", *names) == 0


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("folder", OVERLAYS)
async def test_the_server_takes_every_overlay(folder: str, plane: ControlPlane, assets: ClusterBinaries) -> None:
    words = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k"]
    assert await kubectl(plane, assets, *words, str(MANIFESTS / folder)) == 0


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("file", ["gateway/deployment.yaml", "picker/base/deployment.yaml"])
async def test_pods_fit_the_restricted_standard(file: str, client: Client) -> None:
    """The namespace enforces it, so that the server refuses a pod that does not."""
    (deployment,) = yaml.safe_load_all((MANIFESTS / file).read_text())
    spec = {**deployment["spec"]["template"]["spec"], "serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fits", "namespace": SYSTEM}, "spec": spec}

    async def has_account() -> bool:
        return await client.get_or_none(SERVICE_ACCOUNTS, "default", SYSTEM) is not None

    await eventually(has_account)
    await client.create(PODS, pod, dry_run=True)
    del spec["securityContext"]
    with pytest.raises(Forbidden, match="violates PodSecurity"):
        await client.create(PODS, pod, dry_run=True)


@pytest_asyncio.fixture(loop_scope="session")
async def account(client: Client, kinds: None, plane: ControlPlane, assets: ClusterBinaries) -> AsyncIterator[Client]:  # noqa: ARG001
    """A client with the token of the picker's ServiceAccount."""
    assert await kubectl(plane, assets, "apply", "-k", str(PICKER / "base")) == 0
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": {}}
    path = "/api/v1/namespaces/default/serviceaccounts/attache-picker/token"
    answer: dict[str, Any] = await client._json("POST", path, body=asked)
    access = msgspec.structs.replace(client.access, token=answer["status"]["token"], certificate="", key="")
    async with connect(access, manager=CONTROLLER) as one:
        yield one
    await remove_pods(client, "default")
    assert await kubectl(plane, assets, "delete", "--ignore-not-found", "-k", str(PICKER / "base")) == 0


async def test_the_picker_needs_all_that_its_account_may_do(
    client: Client, account: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await client.get(DEPLOYMENTS, "attache-picker", "default"))["spec"]["replicas"] == 2
    role = InferencePoolRunner(
        account, InferencePoolSettings(config=tmp_path, pool="default/llama"), GatewayMetrics(), timing=IMPATIENT
    )
    with asked_for(account) as asked:
        task = asyncio.create_task(role.run())
        try:
            # without pods, which is an Event
            await asyncio.wait_for(role.ready.wait(), 120)
            await make_pod(client, "default", "picked", "127.0.1.1")
            await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
            allowed = allowed_by(PICKER / "base" / "rbac.yaml")
            await eventually(lambda: not unused(allowed, asked))
            assert missing(allowed, asked) == set()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.delete(PODS, "picked", "default")
    assert "403" not in caplog.text


async def test_the_account_may_do_nothing_more(client: Client, account: Client, namespace: str) -> None:
    for resource, other in ((PODS, namespace), (CONFIG_MAPS, namespace), (INFERENCE_POOLS, namespace)):
        with pytest.raises(Forbidden):
            await account.list(resource, other)
    with pytest.raises(Forbidden):
        await account.list(INFERENCE_POOLS, "default")  # it may have its own pool alone
    with pytest.raises(Forbidden):
        await account.list(SECRETS, "default")
    status = {"status": {"parents": []}}
    with pytest.raises(Forbidden):
        await account.merge_patch(INFERENCE_POOLS, "llama", "default", status, subresource="status")
    await make_pod(client, "default", "kept", "127.0.1.1")
    try:
        with pytest.raises(Forbidden):
            await account.delete(PODS, "kept", "default")
    finally:
        await client.delete(PODS, "kept", "default")
