# SPDX-License-Identifier: Apache-2.0
"""Virtual keys in a Secret: written by one or by several, and passed on by a gateway's compiler."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

import pytest

from bench.stack.processes import free_ports
from controller.keys.api_key_changes import KeyRefused, parse_key_request
from controller.keys.api_key_store import KeyAdmin
from controller.keys.kubernetes_secret_store import KeyStoreSecret
from controller.kube.api_resources import SECRETS
from controller.kube.cluster_access import ClusterAccess
from extproc.api.key_store import KEYS_FILE

if TYPE_CHECKING:
    from controller.keys.api_key_changes import KeyRequest
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube


def admin_of(kube: Kube, namespace: str) -> KeyAdmin:
    return KeyAdmin(KeyStoreSecret(kube.admin, f"{namespace}/keys"), lambda: 1_795_435_200.0)


def asked(name: str) -> KeyRequest:
    return parse_key_request({"name": name, "tenant": "acme"})


async def test_a_secret_is_made_changed_and_holds_no_key(client: Client, kube: Kube, namespace: str) -> None:
    admin = admin_of(kube, namespace)
    assert (await asyncio.to_thread(admin.place.read)).keys == ()
    made = await asyncio.to_thread(admin.create, asked("web"), "test")
    found = await client.get(SECRETS, "keys", namespace)
    content = base64.b64decode(found["data"][KEYS_FILE])
    assert made.record.key_sha256.encode() in content
    assert made.key.encode() not in content
    # whatever else is in it stays
    await client.merge_patch(
        SECRETS, "keys", namespace, {"data": {"other": "eA=="}, "metadata": {"labels": {"a": "b"}}}
    )
    await asyncio.to_thread(admin.revoke, "web", "test")
    found = await client.get(SECRETS, "keys", namespace)
    assert (found["data"]["other"], found["metadata"]["labels"]) == ("eA==", {"a": "b"})
    assert (await asyncio.to_thread(admin.place.read)).keys[0].revoked_at is not None


async def test_writers_at_once_lose_no_key(kube: Kube, namespace: str) -> None:
    names = [f"key-{number}" for number in range(6)]
    await asyncio.gather(*(asyncio.to_thread(admin_of(kube, namespace).create, asked(name), "test") for name in names))
    store = await asyncio.to_thread(admin_of(kube, namespace).place.read)
    assert sorted(one.name for one in store.keys) == names


async def test_a_broken_secret_is_never_written_over(client: Client, kube: Kube, namespace: str) -> None:
    data = {KEYS_FILE: base64.b64encode(b"{").decode()}
    metadata = {"name": "keys", "namespace": namespace}
    await client.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    with pytest.raises(KeyRefused, match=r"keys\.json of the Secret .* cannot be used"):
        await asyncio.to_thread(admin_of(kube, namespace).create, asked("web"), "test")
    assert (await client.get(SECRETS, "keys", namespace))["data"] == data


async def test_a_cluster_that_is_away_is_told_of() -> None:
    (port,) = free_ports(1)
    admin = KeyAdmin(KeyStoreSecret(ClusterAccess(f"http://127.0.0.1:{port}"), "default/keys"), lambda: 0.0)
    with pytest.raises(KeyRefused, match="cannot be read or written"):
        await asyncio.to_thread(admin.revoke, "web", "test")
