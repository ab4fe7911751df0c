# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and who we are, from files and variables as kubectl and pods have them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from bench.cluster.certificates import Authority
from bench.cluster.local_control_plane import write_kubeconfig
from controller.kube.cluster_access import ClusterAccess, access_from_kubeconfig, find_access, in_cluster_access
from controller.kube.errors import ClusterAccessInvalid

if TYPE_CHECKING:
    from pathlib import Path


def kubeconfig(path: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None) -> Path:
    content = {
        "clusters": [{"name": "c", "cluster": {"server": "https://kube.test:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "here"}},
            {"name": "two", "context": {"cluster": "c"}},
        ],
        "current-context": "one",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_current_context_counts_unless_another_is_named(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {"token": "t"})
    assert access_from_kubeconfig(path) == ClusterAccess("https://kube.test:6443", namespace="here", token="t")  # noqa: S106 - not one
    assert access_from_kubeconfig(path, "two") == ClusterAccess("https://kube.test:6443")
    with pytest.raises(ClusterAccessInvalid, match="no context 'three'"):
        access_from_kubeconfig(path, "three")


def test_certificates_are_read_from_the_file_or_from_beside_it(tmp_path: Path) -> None:
    authority = Authority(datetime.now(UTC))
    certificate, key = authority.issue("me")
    (tmp_path / "client.pem").write_text(certificate)
    (tmp_path / "key.pem").write_text(key)
    user = {"client-certificate": "client.pem", "client-key": "key.pem"}
    data = base64.b64encode(authority.certificate.encode()).decode()
    access = access_from_kubeconfig(kubeconfig(tmp_path / "config", user, {"certificate-authority-data": data}))
    assert (access.ca, access.certificate, access.key) == (authority.certificate, certificate, key)
    assert access.tls() is not None
    assert ClusterAccess("http://kube.test").tls() is None


def test_a_token_file_is_read_anew_for_each_call(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {"tokenFile": "token"})
    access = access_from_kubeconfig(path)
    with pytest.raises(ClusterAccessInvalid, match="cannot read the token"):
        access.headers()
    for token in ("first", "second"):
        (tmp_path / "token").write_text(token + "\n")
        assert access.headers() == {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"exec": {"command": "x"}}, {}, "credential plugin"),
        ({"client-certificate-data": "%"}, {}, "cannot read client-certificate"),
        ({}, {"certificate-authority": "none.pem"}, "cannot read certificate-authority"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterAccessInvalid, match=why):
        access_from_kubeconfig(kubeconfig(tmp_path / "config", user, cluster))


@pytest.mark.parametrize("content", ["- a", "{", ""])
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(ClusterAccessInvalid, match="config"):
        access_from_kubeconfig(tmp_path / "config")
    with pytest.raises(ClusterAccessInvalid, match="cannot read"):
        access_from_kubeconfig(tmp_path / "none")


def test_bad_certificates_are_said_before_the_first_call() -> None:
    with pytest.raises(ClusterAccessInvalid, match=r"kube\.test"):
        ClusterAccess("https://kube.test", ca="no certificate").tls()


def test_a_pod_has_its_service_account(tmp_path: Path) -> None:
    for name, text in (("ca.crt", "CA"), ("namespace", "mine\n"), ("token", "t")):
        (tmp_path / name).write_text(text)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = find_access(environment, tmp_path)
    assert (access.server, access.ca, access.namespace) == ("https://[fd00::1]:6443", "CA", "mine")
    assert access.headers() == {"authorization": "Bearer t"}
    with pytest.raises(ClusterAccessInvalid, match="no service account"):
        in_cluster_access(environment, tmp_path / "none")
    with pytest.raises(ClusterAccessInvalid, match="not in a pod"):
        in_cluster_access({})


def test_kubeconfig_comes_before_the_pod_and_the_pod_before_the_home(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", {"token": "home"})
    named = kubeconfig(tmp_path / "named", {"token": "named"})
    home = {"HOME": str(tmp_path)}
    assert find_access(home).token == "home"  # noqa: S105 - not one
    assert find_access({**home, "KUBECONFIG": str(named)}).token == "named"  # noqa: S105 - not one
    with pytest.raises(ClusterAccessInvalid, match="service account"):
        find_access({**home, "KUBERNETES_SERVICE_HOST": "kube.test"}, tmp_path / "none")
    with pytest.raises(ClusterAccessInvalid, match="set KUBECONFIG"):
        find_access({"HOME": str(tmp_path / "none")})


def test_what_is_written_is_read_and_only_by_its_owner(tmp_path: Path) -> None:
    access = ClusterAccess("https://kube.test", ca="CA", namespace="here", token="t")  # noqa: S106 - not one
    path = write_kubeconfig(tmp_path / "config", access)
    assert access_from_kubeconfig(path) == access
    assert path.stat().st_mode & 0o077 == 0


def test_a_credential_is_never_shown() -> None:
    assert "hush" not in repr(ClusterAccess("https://kube.test", token="hush", key="hush"))  # noqa: S106 - that is the point
