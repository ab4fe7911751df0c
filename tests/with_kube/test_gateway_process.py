# SPDX-License-Identifier: Apache-2.0
"""attache gateway as a process: objects become a directory, its page says that it is ready, and a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

from bench.cluster.local_control_plane import write_kubeconfig
from bench.stack.processes import free_ports
from controller.kube.api_resources import MODEL_ROUTES
from tests.kube_objects import route, server
from tests.waiting import eventually
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod
from tests.with_kube.test_gateway_role import addresses, conditions, create
from tests.with_kube.test_picker_end_to_end import fetch

if TYPE_CHECKING:
    from pathlib import Path

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube


async def test_objects_become_a_directory_and_a_signal_ends_it(
    kube: Kube, client: Client, namespace: str, tmp_path: Path
) -> None:
    await define_kinds(client)
    await create(client, server(namespace=namespace), route(namespace=namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    access = write_kubeconfig(tmp_path / "kubeconfig", kube.admin) if kube.plane is None else kube.plane.kubeconfig
    config, metrics = tmp_path / "config", f"127.0.0.1:{free_ports(1)[0]}"
    words = ["gateway", "--config", str(config), "--namespace", namespace, "--lease-namespace", namespace]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "attache", *words, "--metrics", metrics), env={**os.environ, "KUBECONFIG": str(access)}
    )

    async def is_told() -> bool:
        found = await conditions(client, MODEL_ROUTES, "llama", namespace)
        return found.get("Programmed", ("", ""))[0] == "True"

    try:
        await eventually(lambda: config.exists() and addresses(config) == ["127.0.1.1:8000"], timeout_s=60)
        await eventually(is_told, timeout_s=60)
        assert "attache_gateway_" in await fetch(f"http://{metrics}/metrics")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
