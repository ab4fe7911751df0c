# SPDX-License-Identifier: Apache-2.0
"""attache epp as a process: alive while it waits for the pool, ready once it is there, and it ends when it should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.cluster.local_control_plane import write_kubeconfig
from bench.stack.processes import free_ports, ports_in_a_row
from controller.kube.api_resources import INFERENCE_POOLS
from tests.waiting import eventually
from tests.with_envoy.test_picker_tls import NOT_SERVING, SERVING, health
from tests.with_kube.kubes import REAL
from tests.with_kube.pods import make_pod
from tests.with_kube.test_external_metrics import let_scrape, token_of
from tests.with_kube.test_picker_role import client_with_pools, pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube


class Epp(msgspec.Struct, frozen=True):
    """A running one, and its ports."""

    process: asyncio.subprocess.Process
    health: int
    metrics: int

    async def says(self, wanted: int, service: str = "readiness") -> bool:
        return await health(self.health, service) == wanted

    def extproc(self) -> int:
        """The process of the other half."""
        (found,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found)

    async def page(self, *, of_role: bool = False) -> str:
        return (await self.get("/metrics", of_role=of_role)).text

    async def get(self, path: str, token: str = "", *, of_role: bool = False) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            return await http.get(f"http://127.0.0.1:{self.metrics + of_role}{path}")


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    async with client_with_pools(kube) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="session")
async def epp(
    request: pytest.FixtureRequest,
    kube: Kube,
    client: Client,  # noqa: ARG001 - has pools
    namespace: str,
    tmp_path: Path,
) -> AsyncIterator[Epp]:
    """For the pool llama, which is not there yet. The parameter is further flags."""
    access = write_kubeconfig(tmp_path / "kubeconfig", kube.admin) if kube.plane is None else kube.plane.kubeconfig
    (grpc, probes), metrics = free_ports(2), ports_in_a_row(2)
    ports = [f"--grpc-port={grpc}", f"--grpc-health-port={probes}", f"--metrics-port={metrics}"]
    words = ["epp", "--bind-address=127.0.0.1", "--pool-name=llama", f"--pool-namespace={namespace}", "-v=4", *ports]
    words += getattr(request, "param", ["--metrics-endpoint-auth=false"])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "attache", *words), env={**os.environ, "KUBECONFIG": str(access)}
    )
    running = Epp(process, probes, metrics)
    try:
        await eventually(lambda: running.says(SERVING, "liveness"))
        yield running
    finally:
        if process.returncode is None:
            # twice: nothing is waited for
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
        await process.wait()


async def test_it_is_ready_once_there_is_a_pool_and_ends_with_a_signal(
    epp: Epp, client: Client, namespace: str
) -> None:
    assert await epp.says(NOT_SERVING)
    await client.create(INFERENCE_POOLS, pool(namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    await eventually(lambda: epp.says(SERVING))

    async def has_endpoint() -> bool:
        return f'attache_in_flight{{endpoint="127.0.1.1:8000",server="{namespace}/llama"}}' in await epp.page()

    await eventually(has_endpoint)
    assert f'attache_pool_endpoints{{pool="{namespace}/llama",state="ready"}} 1.0' in await epp.page(of_role=True)
    epp.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(epp.process.wait(), 120) == 0


@REAL
@pytest.mark.parametrize("epp", [[], ["--metrics-endpoint-auth"]], indirect=True, ids=["by default", "by the flag"])
async def test_metrics_need_a_token_with_the_right(epp: Epp, client: Client, namespace: str) -> None:
    await client.create(INFERENCE_POOLS, pool(namespace))
    accounts = {name: await token_of(client, namespace, name) for name in ("scraper", "stranger")}
    await let_scrape(client, namespace, "scraper")

    async def is_allowed_and_ready() -> bool:
        answers = [await epp.get("/metrics", accounts["scraper"])]
        answers += [await epp.get("/readyz", "", of_role=of_role) for of_role in (False, True)]
        return {one.status_code for one in answers} == {200}

    await eventually(is_allowed_and_ready)
    tokens = {**accounts, "nobody": "", "liar": "no.such.token"}
    found = {
        (path, of_role, who): (await epp.get(path, token, of_role=of_role)).status_code
        for path in ("/metrics", "/readyz", "/loads")
        for of_role in (False, True)
        for who, token in tokens.items()
    }
    for of_role in (False, True):
        served = {who: found["/metrics", of_role, who] for who in tokens}
        assert served == {"scraper": 200, "stranger": 403, "nobody": 401, "liar": 401}
        assert {found["/readyz", of_role, who] for who in tokens} == {200}
    # the right is one to a path
    assert found["/loads", False, "scraper"] == 403
    assert "attache_picks_total" in (await epp.get("/metrics", accounts["scraper"])).text
    assert "attache_pool_endpoints" in (await epp.get("/metrics", accounts["scraper"], of_role=True)).text


async def test_it_ends_if_extproc_does(epp: Epp) -> None:
    os.kill(epp.extproc(), signal.SIGKILL)
    assert await asyncio.wait_for(epp.process.wait(), 120) == 1
    with contextlib.suppress(ProcessLookupError):
        epp.process.kill()
