# SPDX-License-Identifier: Apache-2.0
"""The control plane itself: kubectl works with it, others' CRDs are served, pods outlive an outage of the API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.cluster.kubernetes_binaries import ROOT, pinned_versions
from bench.cluster.local_control_plane import SCHEDULER, ControlPlaneOptions, apply_crds, running_control_plane
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from bench.stack.processes import StartFailed
from controller.kube.api_resources import PODS, ApiResource
from controller.kube.client import Client, connect
from controller.kube.errors import Invalid, NotFound, Unreachable
from tests.programs import not_tested
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.test_node import is_ready, place

if TYPE_CHECKING:
    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from tests.with_kube.test_node import Place

__all__ = ["place"]

NO_BINARY = "the directory of KUBEBUILDER_ASSETS lacks it; unset that, and make kube-assets"
INFERENCE_POOLS = ApiResource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")


async def kubectl(assets: ClusterBinaries, plane: ControlPlane, *words: str, user: str = "kubeconfig") -> str:
    command = [assets.binary("kubectl"), "--kubeconfig", plane.directory / user, *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


async def test_kubectl_finds_the_version_that_was_built(assets: ClusterBinaries, plane: ControlPlane) -> None:
    if not assets.has_binary("kubectl"):
        not_tested("KUBECTL", NO_BINARY)
    said = await kubectl(assets, plane, "version")
    assert "Server Version: v" in said
    if "KUBEBUILDER_ASSETS" not in os.environ:
        assert said.count(f"v{pinned_versions().kubernetes}") == 2


async def test_one_user_may_do_everything_and_one_nothing(assets: ClusterBinaries, plane: ControlPlane) -> None:
    if not assets.has_binary("kubectl"):
        not_tested("KUBECTL", NO_BINARY)
    assert (await kubectl(assets, plane, "auth", "can-i", "delete", "nodes")).splitlines()[-1] == "yes"
    refused = await kubectl(assets, plane, "auth", "can-i", "list", "pods", user="nobody.kubeconfig")
    assert refused.splitlines()[-1] == "no"


async def test_a_scheduler_that_ends_is_started_again(plane: ControlPlane) -> None:
    before = plane.processes.pid(SCHEDULER)
    os.kill(before, signal.SIGKILL)
    await eventually(lambda: plane.processes.is_running(SCHEDULER) and plane.processes.pid(SCHEDULER) != before)


@REAL
async def test_a_server_that_is_too_slow_for_a_definition_is_a_failed_start_and_no_traceback(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.cluster.local_control_plane._SERVED_S", 0.0)
    with pytest.raises(StartFailed, match=r"does not serve .* after 0 s; the machine may be too busy"):
        await apply_crds(client, [ROOT / "manifests" / "crds"])


@REAL
async def test_crds_of_others_are_served(assets: ClusterBinaries, namespace: str, client: Client) -> None:
    if not assets.crd_directory.is_dir():
        not_tested("CRDS", NO_BINARY)
    assert await apply_crds(client, [assets.crd_directory]) > 10
    spec: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "engines"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker"},
    }
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": namespace},
        "spec": spec,
    }
    with pytest.raises(Invalid, match="port"):  # a rule in CEL: a Service needs a port
        await client.create(INFERENCE_POOLS, pool)
    spec["endpointPickerRef"]["port"] = {"number": 9002}
    await client.create(INFERENCE_POOLS, pool)


@REAL
async def test_pods_outlive_an_outage_of_the_api(place: Place, plane: ControlPlane) -> None:
    await place.create(place.pod())
    await place.until(is_ready)
    pid = place.node.workers[f"{place.namespace}/one"].pid("main")
    await plane.stop_api()
    try:
        with pytest.raises(Unreachable):
            await place.client.get(PODS, "one", place.namespace)
        os.kill(pid, 0)
        # what happens meanwhile is told afterwards
        place.node.kill(f"{place.namespace}/one")
    finally:
        await plane.restart_api()
    status = await place.until(lambda one: one["containerStatuses"][0]["restartCount"] == 1 and is_ready(one))
    assert status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 137


@REAL
async def test_a_frozen_api_holds_no_process_up(place: Place, plane: ControlPlane) -> None:
    await place.create(place.pod())
    await place.until(is_ready)
    worker = place.node.workers[f"{place.namespace}/one"]
    first = worker.pid("main")
    plane.freeze_api()
    try:
        worker.kill()
        await eventually(lambda: worker.machine.containers["main"].state == "running" and worker.pid("main") != first)
    finally:
        plane.thaw_api()
    await place.until(lambda one: one["containerStatuses"][0]["restartCount"] == 1 and is_ready(one))


async def test_a_control_plane_without_controllers_takes_pods(assets: ClusterBinaries, tmp_path: Path) -> None:
    options = ControlPlaneOptions(controllers=False, scheduler=False)
    async with (
        running_control_plane(tmp_path, assets, options) as plane,
        connect(plane.admin, manager="test") as client,
    ):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one", "namespace": "default"},
            "spec": {"containers": [{"name": "main", "image": "none"}]},
        }

        async def accepted() -> bool:
            # the API server makes the namespace itself, soon after it is ready
            return await _created(client, pod)

        await eventually(accepted)
        plane.freeze_api()
        async with connect(plane.admin, manager="test", timeout_s=0.5) as impatient:
            with pytest.raises(Unreachable):
                await impatient.get(PODS, "one", "default")
        plane.thaw_api()
        await client.get(PODS, "one", "default")


async def _created(client: Client, pod: dict[str, Any]) -> bool:
    try:
        await client.create(PODS, pod)
    except NotFound:
        return False
    return True


async def test_a_silent_node_is_found_out_and_its_pods_are_evicted(assets: ClusterBinaries, tmp_path: Path) -> None:
    if not assets.has_binary("kube-controller-manager"):
        not_tested("CONTROLLER_MANAGER", NO_BINARY)
    options = ControlPlaneOptions(scheduler=False, node_lifecycle=True, node_grace_s=5)
    # one of three: if most nodes fall silent, the controller thinks that the network is at fault and evicts nobody
    specs, timing = [gpu_node(f"node-{number}") for number in range(3)], NodeTiming(heartbeat_s=1.0)
    leaves = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 1,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", "namespace": "default"},
        "spec": {
            "containers": [{"name": "main", "image": "attache/host", "command": ["sleep", "60"]}],
            "nodeName": "node-0",
            "tolerations": [leaves],
        },
    }
    async with (
        running_control_plane(tmp_path, assets, options) as plane,
        connect(plane.admin, manager="test") as client,
        running_nodes(client, specs, tmp_path / "pods", timing=timing) as nodes,
    ):
        await client.create(PODS, pod)

        async def status() -> dict[str, Any]:
            return dict((await client.get(PODS, "one", "default")).get("status") or {})

        async def ready() -> bool:
            return is_ready(await status())

        await eventually(ready)
        await nodes["node-0"].fail(declared=False)

        async def evicted() -> bool:
            return "deletionTimestamp" in (await client.get(PODS, "one", "default"))["metadata"]

        await eventually(evicted)
        assert not await ready()
        # the machine is back, and ends what was evicted meanwhile
        await nodes["node-0"].recover()

        async def gone() -> bool:
            return await client.get_or_none(PODS, "one", "default") is None

        await eventually(gone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_nothing_is_left_of_make_up_kube(assets: ClusterBinaries, tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "KUBEBUILDER_ASSETS": str(assets.directory), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench.cluster", "--bare", "--nodes", "1"]
    up = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert up.stdout is not None
    said = ""
    async with asyncio.timeout(120):
        # at its end there is nothing to wait for, so the time would never be over
        while "Ctrl-C" not in said and not up.stdout.at_eof():
            said += (await up.stdout.readline()).decode()
        assert "Ctrl-C" in said, said
        assert "export KUBECONFIG=" in said
        up.send_signal(number)
        status = await up.wait()
    assert status == (0 if number == signal.SIGINT else -number)
    # all of them have the directory in their arguments
    await eventually(lambda: not running_with(str(tmp_path)))


def running_with(word: str) -> list[str]:
    """The command lines of processes that have ``word`` in them."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_text(errors="replace"))
    return [line for line in found if word in line]
