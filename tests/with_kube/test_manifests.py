# SPDX-License-Identifier: Apache-2.0
"""The manifests on a real API server: it takes them, and the role needs all that its account may do and no more."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings, parse_addresses
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    GATEWAY_CLASSES,
    GATEWAY_CONFIGS,
    GATEWAYS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    LEASES,
    MODEL_SERVERS,
    PODS,
    SECRETS,
)
from controller.kube.client import connect
from controller.kube.errors import Forbidden, NotFound
from controller.kube.leader_election import LeaderElection
from tests.gateway_objects import backend_ref, gateway, gateway_class, grpc_route, http_route, https, pool, tls_secret
from tests.kube_objects import Object, resource, route, server
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_others
from tests.with_kube.permissions import allowed_by, asked_for, missing, unused
from tests.with_kube.pods import make_pod, remove_pods
from tests.with_kube.test_gateway_api import POOL
from tests.with_kube.test_gateway_api import create as create_plainly
from tests.with_kube.test_gateway_role import IMPATIENT, addresses, conditions, create

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.client import Client

MANIFESTS = Path(__file__).parents[2] / "manifests"
SYSTEM = "attache-system"
ADDRESSES = GatewayApiSettings(bind=parse_addresses("127.0.9.0/25"))


pytestmark = REAL


@pytest_asyncio.fixture(loop_scope="session")
async def applied(client: Client, plane: ControlPlane, assets: ClusterBinaries) -> AsyncIterator[None]:
    """The gateway's manifests, as a user applies them."""
    assert await kubectl(plane, assets, "apply", "-k", str(MANIFESTS / "crds")) == 0
    wait = ["wait", "--for", "condition=established", "crd", "gatewayconfigs.attache.dev"]
    assert await kubectl(plane, assets, *wait) == 0
    assert await kubectl(plane, assets, "apply", "-k", str(MANIFESTS / "gateway")) == 0
    yield
    await remove_pods(client, SYSTEM)


async def kubectl(plane: ControlPlane, assets: ClusterBinaries, *words: str) -> int:
    command = [str(assets.binary("kubectl")), "--kubeconfig", str(plane.kubeconfig), *words]
    process = await asyncio.create_subprocess_exec(*command)
    return await process.wait()


@pytest_asyncio.fixture(loop_scope="session")
async def account(client: Client, applied: None) -> AsyncIterator[Client]:  # noqa: ARG001 - its account must be there
    """A client with the token of the gateway's ServiceAccount."""
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": {}}
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/attache-gateway/token"
    answer: dict[str, Any] = await client._json("POST", path, body=asked)
    access = msgspec.structs.replace(client.access, token=answer["status"]["token"], certificate="", key="")
    async with connect(access, manager=CONTROLLER) as one:
        yield one


@pytest.mark.usefixtures("applied")
async def test_the_server_takes_them_as_they_are(client: Client, plane: ControlPlane, assets: ClusterBinaries) -> None:
    found = await client.get(DEPLOYMENTS, "attache-gateway", SYSTEM)
    assert found["spec"]["replicas"] == 2
    assert (await client.get(GATEWAY_CONFIGS, "gateway", SYSTEM))["spec"]["messageTimeout"] == "5s"
    words = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k"]
    await define_others(client, assets.crd_directory)
    for folder in (
        "gateway",
        "gateway-api",
        "gateway-ha",
        "runtimes",
        "samples",
        "samples-gateway-api",
        "samples-models",
        "samples-autoscaling",
    ):
        assert await kubectl(plane, assets, *words, str(MANIFESTS / folder)) == 0
    # they replace fields of a Deployment that is there, which a dry run refuses; their patches check what they patch
    for folder in ("local", "local-gateway-api", "local-ha", "local-manager", "manager-with-exports"):
        assert await kubectl(plane, assets, "kustomize", str(MANIFESTS / folder)) == 0


async def test_the_role_works_with_its_own_account(
    client: Client,
    account: Client,
    assets: ClusterBinaries,
    namespace: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await define_others(client, assets.crd_directory)
    # without a status, which an earlier role may have written
    with contextlib.suppress(NotFound):
        await client.delete(GATEWAY_CLASSES, gateway_class()["metadata"]["name"])
    await create_plainly(client, "", gateway_class())
    await create_plainly(client, SYSTEM, gateway(namespace, https("https", 443, namespace)), tls_secret(namespace))
    # names of their own: this role serves all namespaces, those of other tests too
    policy = resource("ModelAccessPolicy", namespace, {"rules": []}, namespace=namespace)
    await create(client, server(namespace, namespace=namespace), route(namespace, namespace=namespace), policy)
    parent, pooled = {"name": namespace}, backend_ref("llama", None, **POOL)
    routes = (http_route(namespace, pooled, parents=(parent,)), grpc_route(namespace, pooled, parents=(parent,)))
    await create_plainly(client, SYSTEM, pool(), *routes)
    election = LeaderElection(account, namespace=SYSTEM, name="attache-gateway", identity="test")
    settings = GatewaySettings(config=tmp_path, gateway_config=f"{SYSTEM}/gateway", gateway_api=ADDRESSES)
    role = GatewayRunner(account, settings, GatewayMetrics(), election=election, timing=IMPATIENT)
    watching = contextlib.ExitStack()
    asked = watching.enter_context(asked_for(account))
    task = asyncio.create_task(role.run())
    try:
        await asyncio.wait_for(role.ready.wait(), 120)
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: addresses(tmp_path, namespace) == ["127.0.1.1:8000"])

        async def is_written() -> bool:
            found = await conditions(client, GATEWAY_CONFIGS, "gateway", SYSTEM)
            return found.get("Programmed") == ("True", "Programmed")

        await eventually(is_written)

        async def is_programmed() -> bool:
            found = (await client.get(GATEWAYS, namespace, SYSTEM)).get("status") or {}
            return any(one["type"] == "Programmed" and one["status"] == "True" for one in found["conditions"])

        await eventually(is_programmed)
        allowed = allowed_by(MANIFESTS / "gateway" / "rbac.yaml")
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: not unused(allowed, asked))
        assert unused(allowed, asked) == set(), "what the account may do, and the role never does"
        assert missing(allowed, asked) == set()
    finally:
        watching.close()
        await client.delete(GATEWAYS, namespace, SYSTEM)
        await client.delete(HTTP_ROUTES, namespace, SYSTEM)
        await client.delete(GRPC_ROUTES, namespace, SYSTEM)
        await client.delete(INFERENCE_POOLS, "llama", SYSTEM)
        await client.delete(SECRETS, namespace, SYSTEM)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    # other tests' Gateways point to Secrets in namespaces in which this account may read none
    assert [one for one in caplog.messages if "403" in one and not one.startswith("secrets:")] == []


async def test_the_account_may_do_nothing_more(client: Client, account: Client, namespace: str) -> None:
    await create(client, server(namespace=namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    labelled = {"metadata": {"labels": {"a": "b"}}}
    with pytest.raises(Forbidden):
        await account.list(SECRETS)
    with pytest.raises(Forbidden):
        await account.get(SECRETS, "cert", namespace)
    with pytest.raises(Forbidden):
        await account.create(SECRETS, {**tls_secret(), "metadata": {"name": "cert", "namespace": SYSTEM}})
    with pytest.raises(Forbidden):
        await account.delete(PODS, "a", namespace)
    with pytest.raises(Forbidden):
        await account.merge_patch(MODEL_SERVERS, "llama", namespace, labelled)
    with pytest.raises(Forbidden):
        await account.merge_patch(PODS, "a", namespace, {"status": {"phase": "Failed"}}, subresource="status")
    with pytest.raises(Forbidden):
        await account.get(LEASES, "kube-scheduler", SYSTEM)
    with pytest.raises(Forbidden):
        await account.get(LEASES, "attache-gateway", namespace)
    with pytest.raises(Forbidden):
        await account.create(
            CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": namespace}}
        )
    with contextlib.suppress(NotFound):  # may be asked for
        await account.get(LEASES, "attache-gateway", SYSTEM)
