# SPDX-License-Identifier: Apache-2.0
"""The gateway role reads Gateways, HTTPRoutes and their backends from API servers, and writes statuses into them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    CONFIG_MAPS,
    CRDS,
    ENDPOINT_SLICES,
    EVENTS,
    GATEWAY_CLASSES,
    GATEWAYS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    MODEL_SERVERS,
    REFERENCE_GRANTS,
    SECRETS,
    SERVICES,
    ApiResource,
)
from controller.kube.client import connect
from controller.kube.errors import AlreadyExists
from controller.kube.leader_election import LeaderElection
from tests.gateway_objects import (
    Object,
    backend_ref,
    endpoint_slice,
    gateway,
    gateway_class,
    grpc_route,
    http_route,
    https,
    listener,
    pool,
    service,
    tls_secret,
)
from tests.kube_objects import server
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds, define_others
from tests.with_kube.pods import make_pod
from tests.with_kube.test_gateway_role import IMPATIENT, addresses, read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from controller.kube.client import Client
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube

OPTIONAL = (GATEWAY_CLASSES, GATEWAYS, HTTP_ROUTES, GRPC_ROUTES, REFERENCE_GRANTS, INFERENCE_POOLS)
MADE = {one.kind: one for one in (*OPTIONAL, CONFIG_MAPS, SECRETS, SERVICES, ENDPOINT_SLICES, MODEL_SERVERS)}
POOL = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}


def loose(resource: ApiResource) -> Object:
    """A definition that takes everything, for the fake server, which needs no Go module."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    spec = {
        "group": resource.group,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "names": {"plural": resource.plural, "kind": resource.kind},
        "versions": [version],
    }
    metadata = {"name": f"{resource.plural}.{resource.group}"}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": CRDS.kind, "metadata": metadata, "spec": spec}


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of a server that has our kinds, and those of the Gateway API with a GatewayClass of ours."""
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        if kube.fake is None:
            await define_others(one, request.getfixturevalue("assets").crds)
        else:
            for resource in OPTIONAL:
                await one.create(CRDS, loose(resource))
        with contextlib.suppress(AlreadyExists):
            await create(one, "", gateway_class())
        yield one


async def create(client: Client, namespace: str, *things: Object) -> None:
    for thing in things:
        metadata = (
            {"name": thing["metadata"]["name"], "labels": thing["metadata"]["labels"]}
            if ("labels" in thing["metadata"])
            else {"name": thing["metadata"]["name"]}
        )
        if namespace:
            metadata["namespace"] = namespace
        sent = {name: value for name, value in thing.items() if name != "status"} | {"metadata": metadata}
        await client.create(MADE[thing["kind"]], sent)


@contextlib.asynccontextmanager
async def serving(client: Client, namespace: str, folder: Path, probe_s: float = 30.0) -> AsyncIterator[GatewayRunner]:
    """A role that has written its directory once."""
    async with connect(client.access, manager=CONTROLLER) as own:
        election = LeaderElection(own, namespace=namespace, name="gateway", identity="a")
        settings = GatewaySettings(
            config=folder,
            namespace=namespace,
            gateway_api=GatewayApiSettings(bind=("127.0.9.1", "127.0.9.2")),
            probe_s=probe_s,
        )
        role = GatewayRunner(own, settings, GatewayMetrics(), election=election, timing=IMPATIENT)
        task = asyncio.create_task(role.run())
        try:
            async with asyncio.timeout(120):
                await role.ready.wait()
            yield role
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def status(client: Client, resource: ApiResource, name: str, namespace: str | None) -> dict[str, Any]:
    return (await client.get(resource, name, namespace)).get("status") or {}


def said(conditions: list[dict[str, Any]] | None) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in conditions or ()}


def listeners(folder: Path) -> dict[str, str]:
    snapshot = read(folder)
    return {} if snapshot is None else {one.name: one.address for one in snapshot.gateway.listeners}


def modes_of_secrets(folder: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in folder.iterdir() if path.name.startswith("secret.")]


async def test_a_gateway_and_a_route_become_a_directory_and_say_so(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    web = gateway("web", listener("http"), https("https", 443, "cert"))
    await create(client, namespace, web, service(), http_route("app", backend_ref(), backend_ref("gone")))
    async with serving(client, namespace, tmp_path) as role:
        assert listeners(tmp_path) == {f"{namespace}/web/http": "127.0.9.1:80"}
        await create(client, namespace, tls_secret(), endpoint_slice("app", "10.1.0.1"))
        await eventually(lambda: f"{namespace}/web/https" in listeners(tmp_path))

        def has_endpoint() -> bool:
            snapshot = read(tmp_path)
            return snapshot is not None and any("10.1.0.1:3000" in one.spec.endpoints for one in snapshot.backends)

        await eventually(has_endpoint)

        async def gateway_is_programmed() -> bool:
            found = await status(client, GATEWAYS, "web", namespace)
            return [one["attachedRoutes"] for one in found.get("listeners") or ()] == [1, 1] and said(
                found["listeners"][1]["conditions"]
            )["Programmed"] == ("True", "Programmed")

        await eventually(gateway_is_programmed)
        found = await status(client, GATEWAYS, "web", namespace)
        assert found["addresses"] == [{"type": "IPAddress", "value": "127.0.9.1"}]
        assert said(found["conditions"])["Programmed"] == ("True", "Programmed")
        (parent,) = (await status(client, HTTP_ROUTES, "app", namespace))["parents"]
        assert parent["controllerName"] == "attache.dev/gateway"
        assert said(parent["conditions"]) == {
            "Accepted": ("True", "Accepted"),
            "ResolvedRefs": ("False", "BackendNotFound"),
            "Programmed": ("True", "Programmed"),
        }
        accepted = await status(client, GATEWAY_CLASSES, "attache", None)
        assert said(accepted["conditions"])["Accepted"] == ("True", "Accepted")
        assert "SupportedVersion" in said(accepted["conditions"])
        events = await client.list(EVENTS, namespace)
        assert {one["involvedObject"]["kind"] for one in events.items} >= {"Gateway", "HTTPRoute"}
        # a settled object is not written again
        await asyncio.sleep(0.3)
        writes = role.status_write_count
        await asyncio.sleep(0.5)
        assert role.status_write_count == writes


async def test_of_routes_of_two_kinds_the_older_is_served_and_both_say_so(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    await create(client, namespace, gateway(), service(), http_route("web"))
    # times of API servers are whole seconds; of two in one, the first by name is older
    await create(client, namespace, grpc_route("zcalls"))

    async def accepted(resource: ApiResource, name: str) -> list[tuple[str, str]]:
        parents = (await status(client, resource, name, namespace)).get("parents") or ()
        return [said(one["conditions"])["Accepted"] for one in parents]

    async def one_is_served() -> bool:
        of_http, of_calls = await accepted(HTTP_ROUTES, "web"), await accepted(GRPC_ROUTES, "zcalls")
        return (of_http, of_calls) == ([("True", "Accepted")], [("False", "HostnameConflict")])

    async def the_other_is_served() -> bool:
        return await accepted(GRPC_ROUTES, "zcalls") == [("True", "Accepted")]

    async with serving(client, namespace, tmp_path):
        await eventually(one_is_served)
        await client.delete(HTTP_ROUTES, "web", namespace)
        await eventually(the_other_is_served)
        snapshot = read(tmp_path)
        assert snapshot is not None
        assert [one.metadata.name for one in snapshot.gateway_api_routes] == ["zcalls"]


async def test_a_pool_is_served_and_says_by_which_gateway(client: Client, namespace: str, tmp_path: Path) -> None:
    await create(client, namespace, gateway(), pool(), service("picker", 9002))
    await create(client, namespace, http_route("app", backend_ref("llama", None, **POOL)))
    await make_pod(client, namespace, "a", "127.0.1.1")
    async with serving(client, namespace, tmp_path):
        await eventually(lambda: addresses(tmp_path, "inferencepool.llama") == ["127.0.1.1:8000"])

        async def has_parent() -> bool:
            found = (await status(client, INFERENCE_POOLS, "llama", namespace)).get("parents") or ()
            return [(one["parentRef"]["name"], said(one["conditions"])["Accepted"][0]) for one in found] == [
                ("web", "True")
            ]

        await eventually(has_parent)
        await client.delete(HTTP_ROUTES, "app", namespace)

        async def has_none() -> bool:
            return not (await status(client, INFERENCE_POOLS, "llama", namespace)).get("parents")

        await eventually(has_none)
        await eventually(lambda: addresses(tmp_path, "inferencepool.llama") is None)


async def test_what_other_controllers_say_of_a_route_stays(client: Client, namespace: str, tmp_path: Path) -> None:
    await create(client, namespace, gateway(), gateway("gone"), service())
    await create(client, namespace, http_route(parents=({"name": "web"}, {"name": "other"})))
    time = "2026-01-01T00:00:00Z"
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": time}
    theirs = {
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "other"},
        "controllerName": "example.com/other",
        "conditions": [accepted],
    }
    stale = {**theirs, "controllerName": "attache.dev/gateway"}
    await client.merge_patch(
        HTTP_ROUTES, "app", namespace, {"status": {"parents": [theirs, stale]}}, subresource="status"
    )
    async with serving(client, namespace, tmp_path):

        async def is_merged() -> bool:
            found = (await status(client, HTTP_ROUTES, "app", namespace))["parents"]
            return [(one["parentRef"]["name"], one["controllerName"]) for one in found] == [
                ("other", "example.com/other"),
                ("web", "attache.dev/gateway"),
            ]

        await eventually(is_merged)
        assert theirs in (await status(client, HTTP_ROUTES, "app", namespace))["parents"]


async def test_a_listener_does_not_go_away_while_a_role_starts(client: Client, namespace: str, tmp_path: Path) -> None:
    """The first directory that a role writes has what Secrets are for."""
    await create(client, namespace, gateway("web", https("https", 443, "cert")), tls_secret())
    async with serving(client, namespace, tmp_path):
        assert listeners(tmp_path) == {f"{namespace}/web/https": "127.0.9.1:443"}
        assert modes_of_secrets(tmp_path) == [0o600, 0o600]
        await client.delete(SECRETS, "cert", namespace)
        await eventually(lambda: listeners(tmp_path) == {})
        await eventually(lambda: modes_of_secrets(tmp_path) == [])


@FAKE
async def test_kinds_that_come_later_are_served_then(
    kube: Kube, fake: FakeServer, namespace: str, tmp_path: Path
) -> None:
    del fake
    async with connect(kube.admin, manager="test") as bare:
        for resource in OPTIONAL:
            await bare.delete(CRDS, f"{resource.plural}.{resource.group}", None)
        await create(bare, namespace, server())
        async with serving(bare, namespace, tmp_path, probe_s=0.1):
            assert addresses(tmp_path) == []
            for resource in OPTIONAL:
                await bare.create(CRDS, loose(resource))
            with contextlib.suppress(AlreadyExists):  # the fake server keeps objects of a definition that goes
                await create(bare, "", gateway_class())
            await create(bare, namespace, gateway())
            await eventually(lambda: list(listeners(tmp_path)) == [f"{namespace}/web/http"])
