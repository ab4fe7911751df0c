# SPDX-License-Identifier: Apache-2.0
"""A file of 2 GB, sparse where it is served: killed half way, resumed, and the memory that it takes.

Real servers of S3 (versitygw) and of a container registry (crane's) are used where ``ATTACHE_VERSITYGW`` and
``ATTACHE_REGISTRY`` name their binaries; docs/engines.md says how they are built.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from tests.controller.agents.downloader.downloads import MIB, command
from tests.controller.agents.downloader.s3_server import VERSITYGW, s3_server
from tests.controller.agents.downloader.servers import Proxy, serving
from tests.programs import not_tested
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZE = int(os.environ.get("ATTACHE_STORAGE_BYTES", str(2 * 1024**3)))
REGISTRY = os.environ.get("ATTACHE_REGISTRY", "")
# measured: 60 MiB, and 84 with boto3; what the size of the file may add is nothing
LIMIT = 128 * MIB
# of each of four parts, what was not written yet, and what was sent and stood in the sockets' buffers
LOST = 4 * (8 + 8) * MIB

pytestmark = pytest.mark.real_time


def sparse(path: Path) -> str:
    """A file of zeros with something at both ends; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(b"begin")
        file.seek(SIZE - 3)
        file.write(b"end")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def peak_bytes(pid: int) -> int:
    """Peak memory of a process that has not been waited for."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextlib.asynccontextmanager
async def http(path: Path) -> AsyncIterator[tuple[str, str, dict[str, str]]]:
    """Served by aiohttp from the file."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(path)

    async with serving(answer) as host:
        yield host, "http://{front}/m.bin", {}


@contextlib.asynccontextmanager
async def s3(path: Path) -> AsyncIterator[tuple[str, str, dict[str, str]]]:
    """A real S3 server, whose buckets are directories."""
    if not VERSITYGW:
        not_tested("S3", "ATTACHE_VERSITYGW names no program of a real S3 server, versitygw")
    with s3_server() as server:
        assert server.folder is not None
        server.make("models")
        (server.folder / "models" / "llama").mkdir()
        os.rename(path, server.folder / "models" / "llama" / "m.bin")  # noqa: PTH104
        environment = {**server.environment, "AWS_ENDPOINT_URL_S3": "http://{front}"}
        yield server.host, "s3://models/llama", environment


@contextlib.asynccontextmanager
async def registry(path: Path) -> AsyncIterator[tuple[str, str, dict[str, str]]]:
    """A real container registry, to which the file is pushed."""
    if not REGISTRY:
        not_tested("REGISTRY", "ATTACHE_REGISTRY names no program of a real container registry, distribution")
    host = f"127.0.0.1:{free_ports(1)[0]}"
    words = [REGISTRY, "registry", "serve", "--address", host, "--disk", str(path.parent / "registry")]
    (path.parent / "registry").mkdir()
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        async with aiohttp.ClientSession() as client:
            await eventually(lambda: _answers(client, host))
            await _push(client, f"http://{host}", path)
        yield host, "oci://{front}/org/model:v1", {}
    finally:
        running.terminate()
        running.wait(10)


async def _answers(client: aiohttp.ClientSession, host: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with client.get(f"http://{host}/v2/") as answer:
            return answer.status == 200
    return False


async def _push(client: aiohttp.ClientSession, base: str, path: Path) -> None:
    async def blob(digest: str, content: object) -> None:
        async with client.post(f"{base}/v2/org/model/blobs/uploads/") as answer:
            where = answer.headers["location"]
        at = where if "://" in where else base + where
        async with client.put(f"{at}?digest={digest}", data=content, timeout=aiohttp.ClientTimeout(300)) as answer:
            assert answer.status == 201, await answer.text()

    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    with path.open("rb") as file:
        await blob(digest, file)
    empty = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    await blob(empty, b"{}")
    kind = "application/vnd.oci.image.manifest.v1+json"
    layer = {
        "mediaType": "application/vnd.cncf.model.weight.v1.raw",
        "digest": digest,
        "size": SIZE,
        "annotations": {"org.opencontainers.image.title": "m.bin"},
    }
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": empty, "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer]}
    headers = {"Content-Type": kind}
    async with client.put(f"{base}/v2/org/model/manifests/v1", data=json.dumps(manifest), headers=headers) as answer:
        assert answer.status == 201, await answer.text()


@pytest.mark.parametrize("source", [http, s3, registry], ids=["http", "s3", "oci"])
async def test_two_gigabytes_are_killed_half_way_and_resumed_in_bounded_memory(tmp_path: Path, source) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    path = tmp_path / "source" / "m.bin"
    digest = await asyncio.to_thread(sparse, path)
    async with source(path) as (host, uri, given):
        proxy = Proxy(host)
        async with proxy.running() as front:
            environment = {name: value.format(front=front) for name, value in given.items()}
            words = (
                uri.format(front=front),
                "--cache",
                str(tmp_path / "c"),
                "--sha256",
                f"m.bin={digest}",
                "--keep-free",
                "1Mi",
            )
            proxy.hold_after = SIZE // 2
            killed = await command(*words, **environment)
            async with asyncio.timeout(300):
                await proxy.is_holding.wait()
            peak = peak_bytes(killed.pid)
            killed.kill()
            await killed.wait()
            first = proxy.sent
            proxy.release()
            # --hold: it is still there to be measured once it is done
            again = await command(*words, "--hold", **environment)
            assert again.stdout is not None
            async with asyncio.timeout(300):
                line = await again.stdout.readline()
            peak = max(peak, peak_bytes(again.pid))
            again.terminate()
            await again.wait()
    print(f"sent {first} before and {proxy.sent - first} after the kill of {SIZE}; peak {peak / MIB:.0f} MiB")  # noqa: T201
    with (Path(line.decode().strip()) / "m.bin").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    assert proxy.sent < SIZE + LOST + SIZE // 1000
    assert peak < LIMIT
