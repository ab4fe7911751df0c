# SPDX-License-Identifier: Apache-2.0
"""The API server's address and our credentials: from a pod's service account or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from controller.kube.errors import ClusterAccessInvalid
from extproc.api.addresses import join_host_port

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterAccess(msgspec.Struct, frozen=True):
    """An API server and our credentials for it.

    ``ca``: the PEM text that vouches for the server; empty: the machine's authorities do. ``token_file`` is read for
    each call, because the kubelet renews it. ``certificate`` and ``key``: PEM texts of a client certificate.
    """

    server: str
    ca: str = ""
    namespace: str = "default"
    token: str = ""
    token_file: str = ""
    certificate: str = ""
    key: str = ""
    tls_server_name: str = ""
    insecure: bool = False

    def __repr__(self) -> str:
        return f"Access({self.server!r})"  # never a credential in a log

    def headers(self) -> dict[str, str]:
        """The Authorization header; raises ClusterAccessInvalid if the token's file cannot be read."""
        token = self.token
        if self.token_file:
            try:
                token = Path(self.token_file).read_text().strip()
            except OSError as error:
                raise ClusterAccessInvalid(f"cannot read the token: {error}") from error
        return {"authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | None:
        """How to check the server and show our certificate; None for plain HTTP. Raises ClusterAccessInvalid."""
        if not self.server.startswith("https:"):
            return None
        try:
            context = ssl.create_default_context(cadata=self.ca or None)
            if self.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate:
                _load_pair(context, self.certificate, self.key)
        except (ssl.SSLError, ValueError) as error:
            raise ClusterAccessInvalid(f"the certificates for {self.server} cannot be used: {error}") from error
        return context


def find_access(environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ClusterAccess:
    """As kubectl and client-go do: ``KUBECONFIG``, else the pod's service account, else ``~/.kube/config``.

    Of several files in ``KUBECONFIG`` the first counts; they are not merged.

    Raises ClusterAccessInvalid if there is none of them, or the one found cannot be used.
    """
    given = environment.get("KUBECONFIG", "")
    if given:
        return access_from_kubeconfig(Path(given.split(os.pathsep)[0]))
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster_access(environment, account)
    default = Path(environment.get("HOME", "/root")) / ".kube" / "config"
    if default.is_file():
        return access_from_kubeconfig(default)
    raise ClusterAccessInvalid("no cluster: set KUBECONFIG, or run in a pod with a service account")


def in_cluster_access(environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ClusterAccess:
    """The API server as a pod sees it, with its service account; raises ClusterAccessInvalid."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ClusterAccessInvalid("not in a pod: KUBERNETES_SERVICE_HOST is not set")
    try:
        ca = (account / "ca.crt").read_text()
        namespace = (account / "namespace").read_text().strip()
    except OSError as error:
        raise ClusterAccessInvalid(
            f"the pod has no service account mounted (automountServiceAccountToken): {error}"
        ) from error
    address = join_host_port(host, port)
    return ClusterAccess(f"https://{address}", ca=ca, namespace=namespace, token_file=str(account / "token"))


def access_from_kubeconfig(path: Path, context: str | None = None) -> ClusterAccess:
    """The current, or the named, context of a kubeconfig; raises ClusterAccessInvalid.

    Credential plugins (``exec``, ``auth-provider``) are not run: the controller runs under a service account.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ClusterAccessInvalid(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ClusterAccessInvalid(f"{path} is no kubeconfig")
    chosen = _named(content, "context", context or content.get("current-context") or "", path)
    cluster = _named(content, "cluster", chosen.get("cluster", ""), path)
    user = _named(content, "user", chosen["user"], path) if chosen.get("user") else {}
    for plugin in ("exec", "auth-provider"):
        if plugin in user:
            raise ClusterAccessInvalid(
                f"{path}: user {chosen['user']} needs a credential plugin ({plugin}); use a token instead"
            )
    return ClusterAccess(
        server=str(cluster.get("server", "")).rstrip("/"),
        ca=_text(cluster, "certificate-authority", path),
        namespace=chosen.get("namespace") or "default",
        token=user.get("token", ""),
        token_file=str(path.parent / user["tokenFile"]) if user.get("tokenFile") and not user.get("token") else "",
        certificate=_text(user, "client-certificate", path),
        key=_text(user, "client-key", path),
        tls_server_name=cluster.get("tls-server-name", ""),
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
    )


def _named(content: Mapping[str, Any], what: str, name: str, path: Path) -> dict[str, Any]:
    """The entry ``name`` of one of a kubeconfig's three lists."""
    for entry in content.get(f"{what}s") or ():
        if entry.get("name") == name:
            return dict(entry.get(what) or {})
    raise ClusterAccessInvalid(f"{path} has no {what} {name!r}")


def _text(holder: Mapping[str, Any], name: str, path: Path) -> str:
    """A PEM text: in the kubeconfig itself (``NAME-data``, base64) or in a file that it names."""
    try:
        if holder.get(f"{name}-data"):
            return base64.b64decode("".join(holder[f"{name}-data"].split()), validate=True).decode()
        return (path.parent / holder[name]).read_text() if holder.get(name) else ""
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ClusterAccessInvalid(f"{path}: cannot read {name}: {error}") from error


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """ssl takes a client certificate from files only."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # only its owner may read it
        file.write(f"{certificate.strip()}\n{key.strip()}\n")
        file.flush()
        context.load_cert_chain(file.name)
