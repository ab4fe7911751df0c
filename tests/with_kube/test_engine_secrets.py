# SPDX-License-Identifier: Apache-2.0
"""Secrets that ModelServers refer to, from API servers: the gateway role writes them into files and follows them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.kube.api_resources import CONFIG_MAPS, MODEL_SERVERS, SECRETS
from controller.kube.client import connect
from tests.certificates import Authority
from tests.kube_objects import Object, secret, server
from tests.waiting import eventually
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod
from tests.with_kube.test_gateway_role import addresses, read, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

CONNECTION: dict[str, Any] = {
    "tls": {"serverName": "engines.example.com", "caCertificateRef": {"name": "ca"}},
    "apiKeyRef": {"name": "keys"},
}


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    """A client of a server that has our kinds."""
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        yield one


def placed(thing: Object, namespace: str) -> Object:
    return {**thing, "metadata": {"name": thing["metadata"]["name"], "namespace": namespace}}


def authorities(namespace: str) -> Object:
    metadata = {"name": "ca", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"ca.crt": Authority().cert.decode()},
    }


def key_file(folder: Path) -> Path | None:
    """The file with the engines' key, if the directory is whole and names one."""
    snapshot = read(folder)
    named = [one.spec.connection.api_key_file for one in snapshot.servers] if snapshot is not None else []
    return folder / named[0] if named and named[0] is not None else None


def modes(folder: Path) -> list[int]:
    return [one.stat().st_mode & 0o777 for one in folder.iterdir() if one.name.startswith(("secret.", "configmap."))]


async def resolved(client: Client, namespace: str) -> tuple[str, str]:
    status = (await client.get(MODEL_SERVERS, "llama", namespace)).get("status") or {}
    found = [one for one in status.get("conditions") or () if one["type"] == "ResolvedRefs"]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")


async def test_keys_and_authorities_are_written_and_followed(client: Client, namespace: str, tmp_path: Path) -> None:
    await client.create(CONFIG_MAPS, authorities(namespace))
    await client.create(MODEL_SERVERS, placed(server(connection=CONNECTION), namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    async with serving(client, namespace, tmp_path):

        async def says(status: str, reason: str) -> None:
            async def is_said() -> bool:
                return await resolved(client, namespace) == (status, reason)

            await eventually(is_said)

        await says("False", "InvalidApiKeyRef")
        assert addresses(tmp_path) == []
        assert key_file(tmp_path) is None
        await client.create(SECRETS, placed(secret("keys", {"api-key": "sk-first"}), namespace))
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
        await says("True", "ResolvedRefs")
        file = key_file(tmp_path)
        assert file is not None
        assert file.read_text() == "sk-first"
        assert modes(tmp_path) == [0o600, 0o600]
        fresh = {"data": {"api-key": base64.b64encode(b"sk-second").decode()}}
        await client.merge_patch(SECRETS, "keys", namespace, fresh)
        await eventually(lambda: file.read_text() == "sk-second")
        assert addresses(tmp_path) == ["127.0.1.1:8000"]
        await client.delete(SECRETS, "keys", namespace)
        await eventually(lambda: addresses(tmp_path) == [])
        assert key_file(tmp_path) is None
        await says("False", "InvalidApiKeyRef")
        await eventually(lambda: not file.exists())


async def test_a_role_that_starts_has_keys_from_its_first_directory_on(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    """An engine that is served would otherwise be refused and come back at each restart."""
    await client.create(CONFIG_MAPS, authorities(namespace))
    await client.create(SECRETS, placed(secret("keys", {"api-key": "sk-first"}), namespace))
    await client.create(MODEL_SERVERS, placed(server(connection=CONNECTION), namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    async with serving(client, namespace, tmp_path):
        assert addresses(tmp_path) == ["127.0.1.1:8000"]
        assert key_file(tmp_path) is not None
