# SPDX-License-Identifier: Apache-2.0
"""Where the binaries of a Kubernetes control plane and others' CRDs lie on this machine."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).resolve().parents[2]
BINARIES: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
_NEEDED: Final = ("etcd", "kube-apiserver")
_ADVICE: Final = (
    "install Go 1.26 or newer and run `make kube-assets` (once, some minutes), "
    "or set KUBEBUILDER_ASSETS to a directory with etcd and kube-apiserver"
)


class PinnedVersions(msgspec.Struct, frozen=True, rename="kebab"):
    """What ``pinned_versions.toml`` pins, without a leading ``v``."""

    kubernetes: str
    etcd: str
    gateway_api: str
    inference_extension: str
    inference_conformance: tuple[str, ...]


class AssetsMissing(Exception):
    """There is no control plane on this machine; the message says how to get one."""


class ClusterBinaries(msgspec.Struct, frozen=True):
    """A directory with binaries, and beside them others' CRDs if ``make kube-assets`` made it."""

    directory: Path

    def binary(self, name: str) -> Path:
        """The path of a binary; raises AssetsMissing."""
        path = self.directory / name
        if not path.is_file():
            raise AssetsMissing(f"no {name} in {self.directory}: {_ADVICE}")
        return path

    def has_binary(self, name: str) -> bool:
        """Whether this binary is there: a control plane does without some of them."""
        return (self.directory / name).is_file()

    @property
    def crd_directory(self) -> Path:
        """The directory of CRDs, ``gateway-api/`` and ``inference-extension/`` in it; it need not exist."""
        return self.directory / "crds"

    @property
    def has_gateway_api(self) -> bool:
        """Whether there are the CRDs of the Gateway API and of its Inference Extension."""
        return all(any((self.crd_directory / one).glob("*.yaml")) for one in ("gateway-api", "inference-extension"))


def pinned_versions() -> PinnedVersions:
    """The pinned versions."""
    return msgspec.convert(tomllib.loads(Path(__file__).with_name("versions.toml").read_text()), PinnedVersions)


def asset_build_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where ``make kube-assets`` puts what it builds: in the user's cache, so that it builds once for all clones."""
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attache" / f"kube-{pinned_versions().kubernetes}"


def find_assets(environment: Mapping[str, str] = os.environ) -> ClusterBinaries:
    """``KUBEBUILDER_ASSETS`` if it is set, else what ``make kube-assets`` has built; raises AssetsMissing."""
    given = environment.get("KUBEBUILDER_ASSETS", "")
    assets = ClusterBinaries(Path(given) if given else asset_build_directory(environment))
    for name in _NEEDED:
        assets.binary(name)
    return assets
