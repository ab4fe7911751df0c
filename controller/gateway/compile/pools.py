# SPDX-License-Identifier: Apache-2.0
"""InferencePools of the Gateway API Inference Extension, each as the ModelServer that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from extproc.api.documents import Document, read
from extproc.api.errors import ConfigInvalid
from extproc.api.spec import API_VERSION, namespace_of, object_key

KIND: Final = "InferencePool"
# Of a pool: fields of its ModelServer that an InferencePool does not have, as YAML.
SETTINGS: Final = "attache.dev/model-server"
# Beside ModelServers that somebody wrote.
PREFIX: Final = "inferencepool."
_LONGEST_NAME: Final = 253
_ENDPOINT_FIELDS: Final = ("endpoints", "workloadSelector", "workloadPort")


class PoolServer(msgspec.Struct, frozen=True):
    """``server``: a ModelServer object, as the API server would have it; None: the pool cannot be used, ``complaint``
    says why.
    """

    server: Mapping[str, Any] | None
    complaint: str = ""


def server_key(pool_key: str) -> str:
    """``namespace/name`` of the ModelServer of a pool, given the pool's."""
    namespace = namespace_of(pool_key)
    return object_key(namespace, PREFIX + pool_key.removeprefix(f"{namespace}/"))


def pool_key(server: str) -> str:
    """``namespace/name`` of the pool, given that of its ModelServer."""
    namespace, _, name = server.partition("/")
    return object_key(namespace, name.removeprefix(PREFIX))


def server_of(
    pool: Mapping[str, Any],
    *,
    prefix: str = PREFIX,
    picker_config: str | None = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> PoolServer:
    """The ModelServer whose endpoints are the ports of the pool's pods.

    ``pool``: an InferencePool, ``inference.networking.k8s.io/v1`` or ``inference.networking.x-k8s.io/v1alpha2``.
    ``prefix``: of the ModelServer's name; empty where pools alone are served. ``picker_config``: the name of a
    ConfigMap of its namespace; it has precedence over the pool's annotation. ``fields``: of the spec, unless the
    annotation has them.
    """
    metadata, spec = pool["metadata"], pool.get("spec") or {}
    settings = _settings((metadata.get("annotations") or {}).get(SETTINGS, ""))
    if isinstance(settings, str):
        return PoolServer(None, settings)
    ports, labels = _ports(spec), _labels(spec)
    if not ports or not labels:
        return PoolServer(None, "spec.selector or spec.targetPorts is empty; a pool needs both")
    name = prefix + metadata["name"]
    if len(name) > _LONGEST_NAME:
        longest = _LONGEST_NAME - len(prefix)
        return PoolServer(None, f"its name has more than {longest} characters; choose a shorter one")
    content = {
        # what engines call the model; requests keep the name that the client wrote
        "model": metadata["name"],
        **fields,
        **settings,
        "workloadSelector": {"matchLabels": labels},
        "workloadPort": {"port": ports[0], "rankPorts": ports[1:]},
    }
    if picker_config is not None:
        content["pickerConfig"] = picker_config
    kept = ("namespace", "uid", "generation", "creationTimestamp")
    identity = {"name": name, **{field: metadata[field] for field in kept if field in metadata}}
    return PoolServer({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": identity, "spec": content})


def _settings(text: str) -> dict[str, Any] | str:
    """The fields, or what is wrong with them. Their values are checked where every ModelServer's are."""
    if not text.strip():
        return {}
    advice = f"annotation {SETTINGS}: write fields of a ModelServer's spec as YAML, such as 'engine: SGLang'"
    try:
        found, repeated = read(Document(SETTINGS, text))
    except ConfigInvalid as error:
        return f"{advice}: {error.mistakes[0].message}"
    if repeated or not isinstance(found, dict):
        return advice
    for field in _ENDPOINT_FIELDS:
        if field in found:
            return f"annotation {SETTINGS}: leave '{field}' out; the pool says which pods serve"
    return found if _has_text_keys(found) else f"{advice}; every key must be text, so put others in quotes"


def _has_text_keys(value: object) -> bool:
    """Whether it can be JSON. YAML's keys may be numbers, dates or nothing; its depth is bounded where it is read."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(one) for key, one in value.items())
    return all(map(_has_text_keys, value)) if isinstance(value, list) else True


def _labels(spec: Mapping[str, Any]) -> Mapping[str, str]:
    selector = spec.get("selector") or {}
    found = selector.get("matchLabels", selector)  # v1alpha2 has the labels directly
    return found if isinstance(found, dict) else {}


def _ports(spec: Mapping[str, Any]) -> list[int]:
    if "targetPortNumber" in spec:  # v1alpha2
        return [spec["targetPortNumber"]]
    return [one["number"] for one in spec.get("targetPorts") or ()]
