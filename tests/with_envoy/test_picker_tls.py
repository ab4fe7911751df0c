# SPDX-License-Identifier: Apache-2.0
"""TLS between a gateway of somebody else and extproc, through a real Envoy."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cluster.certificates import Authority
from bench.stack.processes import Processes, free_ports
from extproc.streams.tls import TlsFiles
from tests.extproc.streams.test_tls import issue
from tests.waiting import eventually
from tests.with_envoy.gateways import engines, gateway, pool_config

if TYPE_CHECKING:
    from pathlib import Path

BODY = json.dumps({"model": "base", "messages": [{"role": "user", "content": "Who are you?"}]})
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status_of(http: httpx.AsyncClient, url: str) -> int:
    return (await http.post(f"{url}/v1/chat/completions", content=BODY)).status_code


async def test_a_certificate_of_our_own_serves_gateways_that_do_not_check_it(tmp_path: Path) -> None:
    async with engines(2) as addresses:
        made = gateway(tmp_path, addresses, flags=["--tls-self-signed"], tls={})
        async with made as at, httpx.AsyncClient(timeout=60) as http:
            assert await status_of(http, at.url) == 200


async def test_a_certificate_is_replaced_without_a_failed_request(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    first, second = Authority(now), Authority(now)
    issue(files, first, name="picker")
    # Envoy checks the certificate, and trusts both authorities
    trusted = {"trusted_ca": {"inline_string": first.certificate + second.certificate}}
    flags = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    async with engines(2) as addresses:
        made = gateway(tmp_path / "stack", addresses, flags=flags, tls={"validation_context": trusted})
        async with made as at, httpx.AsyncClient(timeout=30) as http:
            statuses: list[int] = []

            async def ask() -> None:
                while True:
                    statuses.append(await status_of(http, at.url))

            async def is_new() -> bool:
                page = (await http.get(f"{at.metrics}/metrics")).text
                return 'attache_tls_certificate_loads_total{result="used"} 2.0' in page

            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(ask()) for _ in range(3)]
                await eventually(lambda: len(statuses) > 20)
                issue(files, second, name="picker")
                await eventually(is_new)
                before = len(statuses)
                # some handshakes with the new one
                await eventually(lambda: len(statuses) > before + 50)
                for client in clients:
                    client.cancel()
    assert set(statuses) == {200}


async def health(port: int, service: str) -> int | None:
    """What the health service says; None if nobody listens."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status
        except grpc.aio.AioRpcError:
            return None


@pytest.mark.parametrize(
    "service", ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"]
)
async def test_a_picker_that_waits_for_its_pool_is_alive_and_not_ready(tmp_path: Path, service: str) -> None:
    listen, probes, metrics = free_ports(3)
    config = tmp_path / "config"
    words = [
        sys.executable,
        "-m",
        "extproc",
        "--config",
        str(config),
        "--pool",
        "pool",
        "--wait-for-pool",
        "--settle",
        "0s",
    ]
    addresses = [
        "--listen",
        f"127.0.0.1:{listen}",
        "--health",
        f"127.0.0.1:{probes}",
        "--metrics",
        f"127.0.0.1:{metrics}",
    ]
    async with Processes(tmp_path) as processes:
        await processes.start("extproc", [*words, *addresses, "--tls-self-signed"])

        async def says(wanted: int) -> bool:
            return await health(probes, service) == wanted

        await eventually(lambda: says(NOT_SERVING))
        assert await health(probes, "liveness") == SERVING
        config.mkdir()
        (config / "pool.yaml").write_text(pool_config(["127.0.0.1:1"]))
        await eventually(lambda: says(SERVING))
