# SPDX-License-Identifier: Apache-2.0
"""A Service's own address leads to its ready endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from bench.cluster.service_proxy import running_service_proxy
from controller.kube.api_resources import ENDPOINT_SLICES, SERVICES
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.client import Client

pytestmark = FAKE
ADDRESS = "127.0.63.79"


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """The port of a server that sends back the first line of each connection."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(ADDRESS, port)
    with contextlib.closing(writer):
        writer.write(b"hello\n")
        return await reader.read()


def service(namespace: str, port: int) -> dict[str, Any]:
    spec = {"clusterIP": ADDRESS, "ports": [{"name": "http", "port": port, "targetPort": "http"}]}
    metadata = {"name": "web", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def endpoint_slice(namespace: str, port: int, *, ready: bool) -> dict[str, Any]:
    metadata = {"name": "web-1", "namespace": namespace, "labels": {"kubernetes.io/service-name": "web"}}
    return {
        "apiVersion": ENDPOINT_SLICES.api_version,
        "kind": ENDPOINT_SLICES.kind,
        "metadata": metadata,
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port}],
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": ready}}],
    }


async def test_connections_go_to_endpoints_that_are_ready(client: Client, namespace: str) -> None:
    async with echoing() as port, running_service_proxy(client):
        # the port is free at the Service's address
        await client.create(SERVICES, service(namespace, port))
        await client.create(ENDPOINT_SLICES, endpoint_slice(namespace, port, ready=True))

        async def answers() -> bool:
            with contextlib.suppress(OSError):
                return await ask(port) == b"hello\n"
            return False

        await eventually(answers)
        away = {"endpoints": endpoint_slice(namespace, port, ready=False)["endpoints"]}
        await client.merge_patch(ENDPOINT_SLICES, "web-1", namespace, away)

        async def is_reset() -> bool:
            return not await answers()

        await eventually(is_reset)
        with pytest.raises(ConnectionResetError):
            await ask(port)
