# SPDX-License-Identifier: Apache-2.0
"""Build a Kubernetes control plane from the published Go modules: ``make kube-assets``.

``k8s.io/kubernetes`` refers to its own libraries (staging modules) by relative paths, which only hold inside its
repository. A module that builds it needs a ``replace`` for each of them by the published release of the same number.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cluster.assets import BINARIES, Versions, built_in, versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KUBERNETES: Final = "k8s.io/kubernetes"
_ETCD: Final = "go.etcd.io/etcd/server/v3"
_GATEWAY: Final = "sigs.k8s.io/gateway-api"
_INFERENCE: Final = "sigs.k8s.io/gateway-api-inference-extension"
_GO_NEEDED: Final = (1, 26)


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


def go_version(said: str) -> tuple[int, int]:
    """The version in what ``go version`` prints; (0, 0) if there is none."""
    found = re.search(r"go(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def build(wanted: Versions, out: Path) -> None:
    """Build all binaries and copy the CRDs into ``out``, which appears only once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        # first what takes no time: a version that cannot be had is then known at once
        gateway = _directory(_GATEWAY, wanted.gateway_api) / "config/crd/standard"
        inference = _directory(_INFERENCE, wanted.inference_extension) / "config/crd/bases"
        _copy_crds(gateway, made / "crds/gateway-api")
        _copy_crds(inference, made / "crds/inference-extension")
        _build_etcd(wanted.etcd, Path(work) / "etcd", made)
        _build_kubernetes(wanted.kubernetes, Path(work) / "kubernetes", made)
        made.rename(out)


def _build_kubernetes(version: str, work: Path, out: Path) -> None:
    work.mkdir()
    own = _downloaded(_KUBERNETES, version)["GoMod"]
    given = json.loads(_go(["mod", "edit", "-json", own]))
    (work / "go.mod").write_text(module_file(given, version))
    programs = [f"{_KUBERNETES}/cmd/{name}" for name in BINARIES if name != "etcd"]
    _compile(programs, work, out, linker_flags(version))


def _build_etcd(version: str, work: Path, out: Path) -> None:
    work.mkdir()
    (work / "go.mod").write_text(f"module etcd\n\ngo 1.26\n\nrequire {_ETCD} v{version}\n")
    _compile([_ETCD], work, out / "etcd", "-s -w")


def _compile(packages: Sequence[str], work: Path, out: Path, flags: str) -> None:
    """``-mod=mod``: go completes go.mod and go.sum by itself, from what the modules ask for."""
    target = f"{out}/" if out.is_dir() else str(out)
    _go(["build", "-mod=mod", "-trimpath", "-ldflags", flags, "-o", target, *packages], work)


def _directory(module: str, version: str) -> Path:
    return Path(_downloaded(module, version)["Dir"])


def _downloaded(module: str, version: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_go(["mod", "download", "-json", f"{module}@v{version}"]))
    return answer


def _copy_crds(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in _crds(source):
        shutil.copyfile(path, target / path.name)


def _crds(source: Path) -> Iterable[Path]:
    return (path for path in sorted(source.glob("*.yaml")) if "kind: CustomResourceDefinition" in path.read_text())


def _go(words: Sequence[str], directory: Path | None = None) -> str:
    """Run go with nothing of this machine's C compiler; its output. What it says on stderr is shown."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    with tempfile.TemporaryDirectory() as empty:  # not in our repository, nor under somebody's go.mod
        done = subprocess.run(  # noqa: S603 - the toolchain, with words of this file
            [_program(), *words], cwd=directory or empty, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout


def _program() -> str:
    found = shutil.which("go")
    if found is None:
        raise FileNotFoundError("there is no go in PATH")
    return found


def main() -> int:
    """Exit status: 0 if all is there, 2 if there is no toolchain for it."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        print(f"kube-assets: nothing to build, KUBEBUILDER_ASSETS is {given}")
        return 0
    out = built_in()
    if all((out / name).is_file() for name in BINARIES):
        return 0
    program = shutil.which("go")
    said = subprocess.run([program, "version"], capture_output=True, text=True, check=True).stdout if program else ""  # noqa: S603
    if go_version(said) < _GO_NEEDED:
        needed = ".".join(map(str, _GO_NEEDED))
        print(
            f"kube-assets: Go {needed} or newer is needed, found {said.strip() or 'none'}. Or set KUBEBUILDER_ASSETS to a "
            "directory with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl.",
            file=sys.stderr,
        )
        return 2
    began_s = time.perf_counter()
    print(f"kube-assets: building Kubernetes {versions().kubernetes} and etcd {versions().etcd}, some minutes once")
    build(versions(), out)
    print(f"kube-assets: {out} after {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
