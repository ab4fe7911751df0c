# SPDX-License-Identifier: Apache-2.0
"""Runs one suite on a cluster of its own, in which our gateway is the only one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from bench.cluster.assets import ROOT, Assets, find_assets, versions
from bench.cluster.control_plane import ControlPlane, ControlPlaneOptions, running_control_plane
from bench.cluster.crds import apply_crds
from bench.cluster.netns import gateway_range, host_address
from bench.cluster.node.images import IMAGES
from bench.cluster.node.node import gpu_node
from bench.cluster.node.running import running_nodes
from bench.conformance.results import SuiteResult, cases, check
from bench.conformance.suites import ECHO, GATEWAY_CLASS, Suite, Wishes, arguments, built_in
from bench.processes import StartFailed
from bench.stack import envoy_binary
from controller.kube.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_MANIFESTS: Final = ROOT / "bench" / "conformance" / "manifests"
_NODES: Final = 2
_TAKEN_S: Final = 120
_SUITE: Final = "suite"


async def run_suite(suite: Suite, out: Path, range_: str, wishes: Wishes) -> SuiteResult:
    """Start a cluster, our gateway and the suite; its output, its report and all logs are in ``out`` afterwards.

    Raises StartFailed, AssetsMissing, EnvoyMissing, ClusterError, and Disagreement if output and report differ.
    """
    await asyncio.to_thread(_emptied, out)
    output = out / "logs" / f"{_SUITE}.log"
    began_s = time.perf_counter()
    async with _cluster(out, range_) as plane:
        report = out / "report.yaml"
        words = arguments(suite, report, _usable_address(range_), wishes)
        await _run([str(built_in(versions()) / suite.program), *words], plane)
    wall_s = time.perf_counter() - began_s
    written: dict[str, Any] = yaml.safe_load(report.read_text()) if report.is_file() else {}
    with output.open(errors="replace") as lines:
        found = cases(lines)
    if not found:
        raise StartFailed(f"{suite.name} ran no case, see {output}")
    if written:
        check(found, written)
    return SuiteResult(suite.name, tuple(found), written, wall_s)


@contextlib.asynccontextmanager
async def _cluster(out: Path, range_: str) -> AsyncIterator[ControlPlane]:
    """A cluster with CustomResourceDefinitions and our gateway, whose logs go to ``out``."""
    assets = find_assets()
    echo = (str(built_in(versions()) / ECHO),)
    images: dict[str, Sequence[str]] = {
        **IMAGES,
        "envoyproxy/envoy": (envoy_binary(),),
        "gateway-api/echo-basic": echo,
        "k8s-staging-gateway-api/echo-basic": echo,
        # the suite of the Inference Extension waits for its pickers; this one takes their place and their flags
        "gateway-api-inference-extension/epp": (sys.executable, "-m", "attache", "epp", "--conformance"),
        # it answers in cases of UDPRoute alone, which we do not serve, but the suite waits for its pod
        "coredns/coredns": ("sh", "-c", "exec sleep infinity"),
    }
    specs = [gpu_node(f"node-{number}") for number in range(_NODES)]
    with tempfile.TemporaryDirectory(prefix="attache-conformance-") as directory:
        where = Path(directory)
        try:
            async with (
                running_control_plane(where, assets, ControlPlaneOptions(address=host_address(range_))) as plane,
                connect(plane.admin, manager="bench") as client,
                running_nodes(client, specs, where / "pods", images=images, pod_range=range_),
            ):
                await apply_crds(client, [assets.crds, ROOT / "manifests" / "crds"])
                await _apply(plane, assets, gateway_range(range_))
                yield plane
        finally:
            await asyncio.to_thread(_keep_logs, where, out)


async def _apply(plane: ControlPlane, assets: Assets, addresses: str) -> None:
    """Apply our gateway with kubectl and wait until it has taken its GatewayClass; raises StartFailed."""
    kubectl = [str(assets.binary("kubectl")), "--kubeconfig", str(plane.kubeconfig)]
    made = await _said([*kubectl, "kustomize", str(_MANIFESTS)], b"")
    await _said([*kubectl, "apply", "-f", "-"], made.replace(b"GATEWAY_ADDRESSES", addresses.encode()))
    # the suite asks it which features there are
    taken = ["--for=condition=Accepted", f"gatewayclass/{GATEWAY_CLASS}", f"--timeout={_TAKEN_S}s"]
    await _said([*kubectl, "wait", *taken], b"")


async def _said(words: Sequence[str], given: bytes) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, errors = await process.communicate(given)
    if process.returncode:
        raise StartFailed(f"{' '.join(words)} failed: {errors.decode()}")
    return said


async def _run(words: Sequence[str], plane: ControlPlane) -> None:
    """Run a suite to its end. Its exit status says no more than its output."""
    environment = [f"KUBECONFIG={plane.kubeconfig}", f"HOME={plane.directory}"]
    await plane.processes.start(_SUITE, ["env", *environment, *words])
    await plane.processes.ended(_SUITE)


def _usable_address(range_: str) -> str:
    """An address that a Gateway may ask for: the last one that is handed out by nobody else."""
    return gateway_range(range_).rpartition(".")[0] + ".250"


def _emptied(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _keep_logs(source: Path, out: Path) -> None:
    """Copy what pods and processes have said."""
    for log in source.rglob("*.log"):
        target = out / "logs" / log.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)
