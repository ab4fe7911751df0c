# SPDX-License-Identifier: Apache-2.0
"""Kubeconfig files for kubectl and others, from what our own client needs."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import yaml

from bench.cluster.certificates import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from controller.kube.access import Access


def write_kubeconfig(path: Path, access: Access) -> Path:
    """A kubeconfig with one cluster, one user and one context; it may hold a token, so only its owner may read it."""
    cluster: dict[str, object] = {"server": access.server}
    if access.ca:
        cluster["certificate-authority-data"] = base64.b64encode(access.ca.encode()).decode()
    user = {"tokenFile": access.token_file} if access.token_file else {"token": access.token} if access.token else {}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "bench", "user": user}],
        "contexts": [
            {"name": "bench", "context": {"cluster": "bench", "user": "bench", "namespace": access.namespace}}
        ],
        "current-context": "bench",
    }
    return write_private(path, yaml.safe_dump(content, sort_keys=False))
