# SPDX-License-Identifier: Apache-2.0
"""Two managers as processes: one leads; when it is killed the other goes on, and no pod is made twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import aiohttp

from bench.cluster.local_control_plane import write_kubeconfig
from bench.stack.processes import Processes, free_ports
from controller.kube.api_resources import LEASES, MODEL_INFERS, PODS
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_kinds, model_infer, pod_names, role

if TYPE_CHECKING:
    from pathlib import Path

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

pytestmark = REAL
# long enough for a machine with other work on it
LEASE_S = 12
NAMES = ("first", "second")
ROLES = (role("prefill", replicas=2), role("decode", replicas=2, workers=1))


async def page(port: int, path: str) -> str:
    """Empty while it does not answer."""
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}{path}") as answer:
            return await answer.text()
    return ""


async def leads(port: int) -> bool:
    return "\nattache_manager_leader 1.0" in await page(port, "/metrics")


async def test_the_leader_is_killed_and_the_other_goes_on(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    await define_kinds(client)
    made: dict[str, set[str]] = {}

    async def watch() -> None:
        since = (await client.list(PODS, namespace)).resource_version
        async for event in client.watch(PODS, namespace, since=since):
            if event.type == "ADDED":
                metadata = event.object["metadata"]
                made.setdefault(metadata["name"], set()).add(metadata["uid"])

    watching = asyncio.create_task(watch())
    ports = dict(zip(NAMES, free_ports(2), strict=True))
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", kube.admin)
    async with Processes(tmp_path) as processes:
        for name, port in ports.items():
            words = ["--no-webhooks", "--watch-namespace", namespace, "--lease-namespace", namespace]
            words += ["--lease-duration", str(LEASE_S), "--metrics", f"127.0.0.1:{port}"]
            command = ["env", f"KUBECONFIG={kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
            await processes.start(name, command)
            await processes.wait_ready(name, lambda port=port: is_up(port))

        leaders: list[str] = []

        async def one_leads() -> bool:
            leaders[:] = [name for name, port in ports.items() if await leads(port)]
            return len(leaders) == 1

        await eventually(one_leads)
        await client.create(MODEL_INFERS, model_infer(namespace, "llama", *ROLES, replicas=4))

        async def is_half_way() -> bool:
            return len(await pod_names(client, namespace)) >= 6

        await eventually(is_half_way, pause_s=0.005)
        (leader,) = leaders
        (other,) = set(NAMES) - {leader}
        await processes.end(leader, signal.SIGKILL)

        async def took_over() -> bool:
            return await leads(ports[other])

        await eventually(took_over)

        async def is_whole() -> bool:
            # the watch may be later than the list
            return len(made) == len(await pod_names(client, namespace)) == 24

        await eventually(is_whole)
        lease = await client.get(LEASES, "attache-manager", namespace)
        assert lease["spec"]["leaseTransitions"] == 1
    watching.cancel()
    assert {name for name, uids in made.items() if len(uids) > 1} == set(), "made twice"


async def is_up(port: int) -> bool:
    return bool(await page(port, "/readyz"))
