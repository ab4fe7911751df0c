# SPDX-License-Identifier: Apache-2.0
"""The conformance suites: where they are built, and a run of one on a cluster with our gateway alone."""

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

import msgspec
import yaml

from bench.cluster.kubernetes_binaries import ROOT, ClusterBinaries, PinnedVersions, find_assets, pinned_versions
from bench.cluster.local_control_plane import ControlPlane, ControlPlaneOptions, apply_crds, running_control_plane
from bench.cluster.netns import gateway_range, host_address
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_spec import IMAGES
from bench.conformance.results_page import SuiteResult, check_against_report, parse_cases
from bench.stack.loopback_stack import envoy_binary
from bench.stack.processes import StartFailed
from controller.kube.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

GATEWAY_API: Final = "gateway-api"
INFERENCE: Final = "inference-extension"
ECHO: Final = "echo-basic"
GATEWAY_CLASS: Final = "attache"
_IMPLEMENTATION: Final = {
    "organization": "attache",
    "project": "attache",
    "url": "https://attache.dev",
    "contact": "https://attache.dev",
    "version": "main",
}
_QUICK: Final = ";".join(
    f"{name}:15"
    for name in (
        "GatewayMustHaveAddress",
        "GatewayMustHaveCondition",
        "GatewayStatusMustHaveListeners",
        "GatewayListenersMustHaveConditions",
        "HTTPRouteMustNotHaveParents",
        "HTTPRouteMustHaveCondition",
        "RouteMustHaveParents",
        "MaxTimeToConsistency",
        "LatestObservedGenerationSet",
        "DefaultTestTimeout",
    )
)
_MANIFESTS: Final = ROOT / "bench" / "conformance" / "manifests"
_NODES: Final = 2
_TAKEN_S: Final = 120
_SUITE: Final = "suite"


class Suite(msgspec.Struct, frozen=True):
    """One suite in one version, without a leading ``v``."""

    kind: str
    version: str

    @property
    def name(self) -> str:
        """As reports and pages have it."""
        return f"{self.kind}-{self.version}"

    @property
    def program(self) -> str:
        """The file that runs it."""
        return f"{self.name}.test"


def list_suites(wanted: PinnedVersions) -> list[Suite]:
    """All that are run, in their order."""
    inference = [Suite(INFERENCE, version) for version in wanted.inference_conformance]
    return [Suite(GATEWAY_API, wanted.gateway_api), *inference]


def choose_suites(names: Sequence[str], among: Sequence[Suite]) -> list[Suite]:
    """The suites of these names or kinds, all without any; raises KeyError for a name of none."""
    for name in names:
        if not any(name in (one.name, one.kind) for one in among):
            raise KeyError(name)
    return [one for one in among if not names or one.name in names or one.kind in names]


def suites_directory(wanted: PinnedVersions, root: Path = ROOT) -> Path:
    """Where the suites are built; it has all of them in it, each under a name with its version."""
    return root / ".tools" / f"conformance-{wanted.gateway_api}"


class SuiteOptions(msgspec.Struct, frozen=True):
    """Options for developers of the gateway; reports for the page are made without any of them.

    ``run``: the names of the cases to run. ``features``: those to test, separated by commas; else the suite of the
    Gateway API reads them from the GatewayClass's status. ``quick``: shorter waits than the suite's own.
    """

    run: tuple[str, ...] = ()
    features: str = ""
    quick: bool = False


def suite_arguments(suite: Suite, report: Path, usable_address: str, wishes: SuiteOptions) -> list[str]:
    """The words after the program's name."""
    words = [
        "-test.v",
        # beside the suite the module has tests of its own parts
        f"-test.run=^TestConformance${_only(wishes.run)}",
        "-test.count=1",
        f"-gateway-class={GATEWAY_CLASS}",
        f"-report-output={report}",
        "-cleanup-base-resources=false",
        *(f"-{name}={value}" for name, value in _IMPLEMENTATION.items()),
    ]
    if suite.kind == INFERENCE:
        # its own Gateway API is older than ours
        return [*words, "-allow-crds-mismatch=true"]
    words += [
        "-conformance-profiles=GATEWAY-HTTP,GATEWAY-GRPC",
        f"-usable-address={usable_address}",
        # of a network for documentation, which no machine has
        "-unusable-address=192.0.2.1",
    ]
    if wishes.features:
        words.append(f"-supported-features={wishes.features}")
    return [*words, f"-timeout-config-overrides={_QUICK}"] if wishes.quick else words


def _only(names: Sequence[str]) -> str:
    return f"/^({'|'.join(names)})$" if names else ""


async def run_suite(suite: Suite, out: Path, range_: str, wishes: SuiteOptions) -> SuiteResult:
    """Start a cluster, our gateway and the suite; its output, its report and all logs are in ``out`` afterwards.

    Raises StartFailed, AssetsMissing, EnvoyMissing, ClusterError, and Disagreement if output and report differ.
    """
    await asyncio.to_thread(_emptied, out)
    output = out / "logs" / f"{_SUITE}.log"
    began_s = time.perf_counter()
    async with _cluster(out, range_) as plane:
        report = out / "report.yaml"
        words = suite_arguments(suite, report, _usable_address(range_), wishes)
        await _run([str(suites_directory(pinned_versions()) / suite.program), *words], plane)
    wall_s = time.perf_counter() - began_s
    written: dict[str, Any] = yaml.safe_load(report.read_text()) if report.is_file() else {}
    with output.open(errors="replace") as lines:
        found = parse_cases(lines)
    if not found:
        raise StartFailed(f"{suite.name} ran no case, see {output}")
    if written:
        check_against_report(found, written)
    return SuiteResult(suite.name, tuple(found), written, wall_s)


@contextlib.asynccontextmanager
async def _cluster(out: Path, range_: str) -> AsyncIterator[ControlPlane]:
    """A cluster with CustomResourceDefinitions and our gateway, whose logs go to ``out``."""
    assets = find_assets()
    echo = (str(suites_directory(pinned_versions()) / ECHO),)
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
                await apply_crds(client, [assets.crd_directory, ROOT / "manifests" / "crds"])
                await _apply(plane, assets, gateway_range(range_))
                yield plane
        finally:
            await asyncio.to_thread(_keep_logs, where, out)


async def _apply(plane: ControlPlane, assets: ClusterBinaries, addresses: str) -> None:
    """Apply our gateway with kubectl and wait until it has taken its GatewayClass; raises StartFailed."""
    kubectl = [str(assets.binary("kubectl")), "--kubeconfig", str(plane.kubeconfig)]
    made = await _run_command([*kubectl, "kustomize", str(_MANIFESTS)], b"")
    await _run_command([*kubectl, "apply", "-f", "-"], made.replace(b"GATEWAY_ADDRESSES", addresses.encode()))
    # the suite reads the features from it
    taken = ["--for=condition=Accepted", f"gatewayclass/{GATEWAY_CLASS}", f"--timeout={_TAKEN_S}s"]
    await _run_command([*kubectl, "wait", *taken], b"")


async def _run_command(words: Sequence[str], given: bytes) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, errors = await process.communicate(given)
    if process.returncode:
        raise StartFailed(f"{' '.join(words)} failed: {errors.decode()}")
    return said


async def _run(words: Sequence[str], plane: ControlPlane) -> None:
    """Run a suite to its end. Its exit status is ignored, as its output has the results."""
    environment = [f"KUBECONFIG={plane.kubeconfig}", f"HOME={plane.directory}"]
    await plane.processes.start(_SUITE, ["env", *environment, *words])
    await plane.processes.wait_for_exit(_SUITE)


def _usable_address(range_: str) -> str:
    """An address for a Gateway to request: one at the end of the range, which is never assigned otherwise."""
    return gateway_range(range_).rpartition(".")[0] + ".250"


def _emptied(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _keep_logs(source: Path, out: Path) -> None:
    """Copy the logs of pods and processes."""
    for log in source.rglob("*.log"):
        target = out / "logs" / log.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)
