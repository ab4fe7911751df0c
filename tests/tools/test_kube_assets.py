# SPDX-License-Identifier: Apache-2.0
"""The go.mod that builds Kubernetes from its published modules, and where the binaries are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cluster.kubernetes_binaries import AssetsMissing, asset_build_directory, find_assets, pinned_versions
from tools.go_modules import go_mod_text, go_version
from tools.kube_assets import linker_flags, module_file


def test_every_staging_module_is_replaced_by_the_published_release() -> None:
    given = {
        "Go": "1.26.0",
        "Replace": [
            {"Old": {"Path": "k8s.io/api"}, "New": {"Path": "./staging/src/k8s.io/api"}},
            {"Old": {"Path": "k8s.io/client-go"}, "New": {"Path": "./staging/src/k8s.io/client-go"}},
            {"Old": {"Path": "other.test/x"}, "New": {"Path": "other.test/y", "Version": "v1.0.0"}},
        ],
    }
    assert module_file(given, "1.36.3") == (
        "module kube\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v1.36.3\n\n"
        "replace (\n\tk8s.io/api => k8s.io/api v0.36.3\n\tk8s.io/client-go => k8s.io/client-go v0.36.3\n)\n"
    )
    with pytest.raises(ValueError, match="no staging modules"):
        module_file({"Go": "1.26.0"}, "1.36.3")


def test_the_binaries_know_their_version() -> None:
    flags = linker_flags("1.36.3")
    assert flags.startswith("-s -w ")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags


@pytest.mark.parametrize(
    ("said", "version"),
    [("go version go1.26.8 linux/amd64", (1, 26)), ("go version go1.9 linux/arm64", (1, 9)), ("", (0, 0))],
)
def test_the_toolchains_version_is_read(said: str, version: tuple[int, int]) -> None:
    assert go_version(said) == version


def test_a_given_directory_comes_before_the_one_that_make_fills(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    made = asset_build_directory(cache)
    assert made == tmp_path / "attache" / f"kube-{pinned_versions().kubernetes}"
    assert asset_build_directory({}) == Path.home() / ".cache" / "attache" / made.name
    with pytest.raises(AssetsMissing, match="make kube-assets"):
        find_assets(cache)
    for folder in (made, tmp_path / "given"):
        folder.mkdir(parents=True)
        for name in ("etcd", "kube-apiserver"):
            (folder / name).touch()
    assert find_assets(cache).directory == made
    given = find_assets({**cache, "KUBEBUILDER_ASSETS": str(tmp_path / "given")})
    assert given.directory == tmp_path / "given"
    assert given.has_binary("etcd")
    assert not given.has_binary("kubectl")
    with pytest.raises(AssetsMissing, match="no kubectl"):
        given.binary("kubectl")


def test_a_module_may_need_several_others() -> None:
    assert go_mod_text("made", {"a.test/b": "1.2.3", "c.test/d": "4.0.0"}) == (
        "module made\n\ngo 1.26\n\nrequire (\n\ta.test/b v1.2.3\n\tc.test/d v4.0.0\n)\n"
    )
