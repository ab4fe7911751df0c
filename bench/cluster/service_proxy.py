# SPDX-License-Identifier: Apache-2.0
"""Services' own addresses in a network of its own, in place of kube-proxy: a connection goes to one ready endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from random import Random
from typing import TYPE_CHECKING, Final

from controller.kube.api_resources import ENDPOINT_SLICES, SERVICES
from controller.kube.informer import Index, Informer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from controller.kube.api_resources import Object
    from controller.kube.client import Client

log = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 65_536
_SERVICE: Final = "kubernetes.io/service-name"
Address = tuple[str, int]


def ready_endpoints(slices: Sequence[Object], port: str) -> list[Address]:
    """The ready endpoints of a Service's port, by its name."""
    return [
        (address, int(served["port"]))
        for one in slices
        for served in one.get("ports") or ()
        if (served.get("name") or "") == port
        for endpoint in one.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready") is not False
        for address in endpoint["addresses"]
    ]


@contextlib.asynccontextmanager
async def running_service_proxy(client: Client) -> AsyncIterator[None]:
    """Listen at the address of every Service that has one, until the end of the block."""
    proxy = _ServiceProxy(client)
    task = asyncio.create_task(proxy.run(), name="service proxy")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _ServiceProxy:
    def __init__(self, client: Client) -> None:
        self._services = Informer(client, SERVICES)
        self._slices = Informer(client, ENDPOINT_SLICES)
        self._by_service = Index(self._slices, _service_key)
        self._changed: asyncio.Queue[str] = asyncio.Queue()
        # by Service: its address and ports, and what listens there
        self._wanted: dict[str, list[tuple[str, int, str]]] = {}
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._rng = Random()

    async def run(self) -> None:
        """Until cancelled; connections end then, too."""
        self._services.subscribe(self._changed.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._services.run())
            tasks.create_task(self._slices.run())
            try:
                while True:
                    await self._sync(await self._changed.get(), tasks)
            finally:
                for server in itertools.chain.from_iterable(self._servers.values()):
                    server.close()

    async def _sync(self, key: str, tasks: asyncio.TaskGroup) -> None:
        spec = (self._services.get(key) or {}).get("spec") or {}
        address = spec.get("clusterIP") or "None"
        ports = [] if address == "None" else spec.get("ports") or []
        wanted = [(address, int(one["port"]), one.get("name") or "") for one in ports]
        if wanted == self._wanted.get(key):
            return
        for server in self._servers.pop(key, []):
            server.close()
        self._wanted[key] = wanted
        self._servers[key] = [await self._listen(key, one, tasks) for one in wanted]

    async def _listen(self, key: str, wanted: tuple[str, int, str], tasks: asyncio.TaskGroup) -> asyncio.Server:
        address, number, port = wanted

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.create_task(self._forward(key, port, reader, writer))

        return await asyncio.start_server(connected, address, number)

    async def _forward(self, key: str, port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = ready_endpoints(self._by_service.objects_with(key), port)
        try:
            if not ready:
                raise ConnectionRefusedError(f"no endpoint of {key} is ready")
            there = await asyncio.open_connection(*self._rng.choice(ready))
        except OSError as error:
            log.debug("%s: %s", key, error)
            # a reset, in place of the refusal that a client of kube-proxy sees
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        finally:
            there[1].close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender has ended its half, or either end is gone."""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except (OSError, RuntimeError) as error:  # RuntimeError: uvloop's of a transport that is closed
        log.debug("a connection is reset: %s", error)
        writer.transport.abort()


def _service_key(thing: Object) -> str:
    namespace = thing["metadata"]["namespace"]
    return f"{namespace}/{(thing['metadata'].get('labels') or {}).get(_SERVICE, '')}"
