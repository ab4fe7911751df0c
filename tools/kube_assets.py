# SPDX-License-Identifier: Apache-2.0
"""Build a Kubernetes control plane from the published Go modules: ``make kube-assets``.

``k8s.io/kubernetes`` refers to its own libraries (staging modules) by relative paths, which only hold inside its
repository. A module that builds it needs a ``replace`` for each of them by the published release of the same number.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cluster.kubernetes_binaries import BINARIES, PinnedVersions, asset_build_directory, pinned_versions
from tools.go_modules import build as build_programs
from tools.go_modules import download_module, go_mod_text, run_go, source, toolchain_missing

if TYPE_CHECKING:
    from collections.abc import Iterable

_KUBERNETES: Final = "k8s.io/kubernetes"
_ETCD: Final = "go.etcd.io/etcd/server/v3"
_GATEWAY: Final = "sigs.k8s.io/gateway-api"
_INFERENCE: Final = "sigs.k8s.io/gateway-api-inference-extension"


def module_file(given: dict[str, Any], version: str) -> str:
    """The go.mod that builds Kubernetes ``version``; ``given``: its own go.mod, as ``go mod edit -json`` prints it."""
    staging = [one["Old"]["Path"] for one in given.get("Replace") or () if one["New"]["Path"].startswith("./staging/")]
    if not staging:
        raise ValueError(f"{_KUBERNETES} v{version} names no staging modules")
    published = "v0." + version.partition(".")[2]
    replaced = "".join(f"\t{path} => {path} {published}\n" for path in staging)
    return f"module kube\n\ngo {given['Go']}\n\nrequire {_KUBERNETES} v{version}\n\nreplace (\n{replaced})\n"


def linker_flags(version: str) -> str:
    """So that ``kubectl version`` and ``/version`` say what was built; without symbols for a debugger."""
    major, minor, _ = version.split(".", 2)
    said = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in said.items()]
    return " ".join(["-s", "-w", *stamps])


def build(wanted: PinnedVersions, out: Path) -> None:
    """Build all binaries and copy the CRDs into ``out``, which appears only once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        # first what takes no time: a version that cannot be had is then known at once
        gateway = source(_GATEWAY, wanted.gateway_api) / "config/crd/standard"
        inference = source(_INFERENCE, wanted.inference_extension) / "config/crd/bases"
        _copy_crds(gateway, made / "crds/gateway-api")
        _copy_crds(inference, made / "crds/inference-extension")
        _build_etcd(wanted.etcd, Path(work) / "etcd", made)
        _build_kubernetes(wanted.kubernetes, Path(work) / "kubernetes", made)
        made.rename(out)


def _build_kubernetes(version: str, work: Path, out: Path) -> None:
    work.mkdir()
    own = download_module(_KUBERNETES, version)["GoMod"]
    given = json.loads(run_go(["mod", "edit", "-json", own]))
    (work / "go.mod").write_text(module_file(given, version))
    programs = [f"{_KUBERNETES}/cmd/{name}" for name in BINARIES if name != "etcd"]
    build_programs(programs, work, out, linker_flags(version))


def _build_etcd(version: str, work: Path, out: Path) -> None:
    work.mkdir()
    (work / "go.mod").write_text(go_mod_text("etcd", {_ETCD: version}))
    build_programs([_ETCD], work, out / "etcd", "-s -w")


def _copy_crds(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in _crds(folder):
        shutil.copyfile(path, target / path.name)


def _crds(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*.yaml")) if "kind: CustomResourceDefinition" in path.read_text())


def main() -> int:
    """Exit status: 0 if all is there, 2 if there is no toolchain for it."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        print(f"kube-assets: nothing to build, KUBEBUILDER_ASSETS is {given}")
        return 0
    out = asset_build_directory()
    if all((out / name).is_file() for name in BINARIES):
        return 0
    if missing := toolchain_missing():
        print(
            f"kube-assets: {missing}. Or set KUBEBUILDER_ASSETS to a "
            "directory with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl.",
            file=sys.stderr,
        )
        return 2
    began_s = time.perf_counter()
    versions = pinned_versions()
    print(f"kube-assets: building Kubernetes {versions.kubernetes} and etcd {versions.etcd}, some minutes once")
    build(pinned_versions(), out)
    print(f"kube-assets: {out} after {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
