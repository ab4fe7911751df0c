# SPDX-License-Identifier: Apache-2.0
"""Objects as an API server has them, for tests."""

from __future__ import annotations

import base64
from typing import Any

from tests.rule_cases import API_VERSION

Object = dict[str, Any]


def resource(kind: str, name: str, spec: dict[str, Any], *, namespace: str = "default", **metadata: object) -> Object:
    """One of our kinds. ``metadata``: ``generation``, ``creationTimestamp``, ..."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "generation": 1,
            "creationTimestamp": "2026-11-01T00:00:00Z",
            **metadata,
        },
        "spec": spec,
    }


def server(name: str = "llama", *, namespace: str = "default", app: str = "llama", **spec: object) -> Object:
    """A ModelServer that selects the pods of ``app``."""
    selecting = {"workloadSelector": {"matchLabels": {"app": app}}, "workloadPort": {"port": 8000}}
    return resource("ModelServer", name, {"model": "org/llama", **selecting, **spec}, namespace=namespace)


def route(
    name: str = "llama", *servers: str, namespace: str = "default", model: str = "", **metadata: object
) -> Object:
    """A ModelRoute of one rule with these servers, or the one of its own name."""
    targets = [{"modelServerName": one} for one in servers or (name,)]
    spec = {"modelName": model or name, "rules": [{"targetModels": targets}]}
    return resource("ModelRoute", name, spec, namespace=namespace, **metadata)


def pod(
    name: str,
    ip: str = "10.0.0.1",
    *,
    namespace: str = "default",
    app: str = "llama",
    ready: bool = True,
    **metadata: object,
) -> Object:
    """A running pod of ``app``. ``metadata``: ``deletionTimestamp``, ``annotations``, ..."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}, **metadata},
        "status": {"phase": "Running", "podIP": ip, "conditions": conditions},
    }


def picker_config(name: str, text: str, *, namespace: str = "default") -> Object:
    """A ConfigMap with an EndpointPickerConfig."""
    labels = {"attache.dev/picker-config": ""}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.yaml": text}}


def secret(
    name: str, data: dict[str, str], *, namespace: str = "default", annotations: dict[str, str] | None = None
) -> Object:
    """A Secret with these texts."""
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": namespace, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": encoded}
