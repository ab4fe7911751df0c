# SPDX-License-Identifier: Apache-2.0
"""Who may what by objects of a cluster: Secrets and policies are in the directory at once, and say what became of
them.
"""

from __future__ import annotations

import base64
import stat
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.kube.api_resources import GATEWAY_CONFIGS, MODEL_ACCESS_POLICIES, SECRETS
from controller.kube.client import connect
from tests.kube_objects import resource, route, secret, server
from tests.waiting import eventually
from tests.with_kube.managing import define_kinds
from tests.with_kube.test_gateway_role import conditions, create, read, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.kube.client import Client
    from extproc.api.gateway_config import GatewayConfigSpec
    from tests.with_kube.kubes import Kube

KEY, NEXT = "sk-0123456789", "sk-of-the-next-month"


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    """A client of a server that has our kinds."""
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        yield one


def digests(folder: Path) -> set[str]:
    """Those of the keys that Envoy would know."""
    gateway = gateway_of(folder)
    if gateway is None or gateway.authentication is None:
        return set()
    return {one.digest or "" for one in gateway.authentication.api_keys}


def gateway_of(folder: Path) -> GatewayConfigSpec | None:
    snapshot = read(folder)
    return None if snapshot is None else snapshot.gateway


def written(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


async def test_keys_of_a_secret_are_followed_and_only_their_digests_arrive(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    keys = {"authentication": {"apiKeySecrets": [{"name": "keys", "tenant": "acme"}]}, "cacheIsolation": "Shared"}
    await create(client, resource("GatewayConfig", "config", keys, namespace=namespace))
    async with serving(client, namespace, tmp_path, config=f"{namespace}/config"):
        # nobody is let in while the Secret is not there
        assert digests(tmp_path) == {"0" * 64}

        async def says(status: str, why: str) -> bool:
            found = await conditions(client, GATEWAY_CONFIGS, "config", namespace)
            return found.get("ResolvedRefs") == (status, why)

        await eventually(lambda: says("False", "SecretNotUsable"))
        await client.create(SECRETS, secret("keys", {"web": KEY}, namespace=namespace))
        await eventually(lambda: digests(tmp_path) == {digest(KEY)})
        data: dict[str, Any] = {"data": {"web": base64.b64encode(NEXT.encode()).decode()}}
        await client.merge_patch(SECRETS, "keys", namespace, data)
        await eventually(lambda: digests(tmp_path) == {digest(NEXT)})
        files = written(tmp_path)
        assert files
        assert not [file for file in files if any(key.encode() in file.read_bytes() for key in (KEY, NEXT))]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        await client.delete(SECRETS, "keys", namespace)
        await eventually(lambda: digests(tmp_path) == {"0" * 64})


async def test_a_policy_is_in_the_directory_before_what_it_protects(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    spec = {"targetRefs": [{"kind": "ModelRoute", "name": "llama"}], "rules": [{"from": [{"tenants": ["acme"]}]}]}
    await create(client, resource("ModelAccessPolicy", "p", spec, namespace=namespace))
    async with serving(client, namespace, tmp_path):

        async def says(type_: str, status: str, why: str) -> bool:
            found = await conditions(client, MODEL_ACCESS_POLICIES, "p", namespace)
            return found.get(type_) == (status, why)

        await eventually(lambda: says("ResolvedRefs", "False", "TargetNotFound"))
        await create(client, server(namespace=namespace), route(namespace=namespace))
        seen = []

        async def is_protected() -> bool:
            snapshot = read(tmp_path)
            if snapshot is not None and snapshot.routes:
                seen.append(len(snapshot.access_policies))
            return bool(seen)

        await eventually(is_protected)
        assert seen == [1]
        await eventually(lambda: says("Programmed", "True", "Programmed"))
        await client.delete(MODEL_ACCESS_POLICIES, "p", namespace)
        await eventually(lambda: (found := read(tmp_path)) is not None and not found.access_policies)
