# SPDX-License-Identifier: Apache-2.0
"""InferencePools of the Gateway API Inference Extension, each as the ModelServer that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from extproc.api.config_errors import ConfigInvalid
from extproc.api.spec import API_VERSION, namespace_of, object_key
from extproc.api.yaml_documents import Document, parse_document

KIND: Final = "InferencePool"
# Of a pool: fields of its ModelServer that an InferencePool does not have, as YAML.
SETTINGS: Final = "attache.dev/model-server"
# In addition to ModelServers of users.
PREFIX: Final = "inferencepool."
_LONGEST_NAME: Final = 253
_ENDPOINT_FIELDS: Final = ("endpoints", "workloadSelector", "workloadPort")


class PoolModelServer(msgspec.Struct, frozen=True):
    """``server``: a ModelServer object, as the API server would have it; None: the pool cannot be used, ``complaint``
    has the reason.
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


def server_from_pool(
    pool: Mapping[str, Any],
    *,
    prefix: str = PREFIX,
    picker_config: str | None = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> PoolModelServer:
    """The ModelServer whose endpoints are the ports of the pool's pods.

    ``pool``: an InferencePool, ``inference.networking.k8s.io/v1`` or ``inference.networking.x-k8s.io/v1alpha2``.
    ``prefix``: of the ModelServer's name; empty where pools alone are served. ``picker_config``: the name of a
    ConfigMap of its namespace; it takes precedence over the pool's annotation. ``fields``: of the spec, unless the
    annotation has them.
    """
    metadata, spec = pool["metadata"], pool.get("spec")
    settings = parse_pool_settings((metadata.get("annotations") or {}).get(SETTINGS, ""), f"annotation {SETTINGS}")
    if isinstance(settings, str):
        return PoolModelServer(None, settings)
    ports, labels = _ports(spec), _labels(spec)
    if not ports or not labels:
        return PoolModelServer(None, "spec.selector or spec.targetPorts is empty; a pool needs both")
    name = prefix + metadata["name"]
    if len(name) > _LONGEST_NAME:
        longest = _LONGEST_NAME - len(prefix)
        return PoolModelServer(None, f"its name has more than {longest} characters; choose a shorter one")
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
    return PoolModelServer({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": identity, "spec": content})


def parse_pool_settings(text: str, place: str) -> dict[str, Any] | str:
    """Fields of a pool's ModelServer, or what is wrong with them. Their values are checked where every ModelServer's
    are. ``place``: where they stand, for people.
    """
    if not text.strip():
        return {}
    advice = f"{place}: write fields of a ModelServer's spec as YAML, such as 'engine: SGLang'"
    try:
        found, repeated = parse_document(Document(SETTINGS, text))
    except ConfigInvalid as error:
        return f"{advice}: {error.mistakes[0].message}"
    if repeated or not isinstance(found, dict):
        return advice
    for field in _ENDPOINT_FIELDS:
        if field in found:
            return f"{place}: leave '{field}' out; the pool says which pods serve"
    return found if _has_text_keys(found) else f"{advice}; every key must be text, so put others in quotes"


def _has_text_keys(value: object) -> bool:
    """Whether it can be JSON. YAML's keys may be numbers, dates or nothing; its depth is bounded where it is read."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(one) for key, one in value.items())
    return all(map(_has_text_keys, value)) if isinstance(value, list) else True


def _labels(spec: object) -> Mapping[str, Any]:
    """What is no label in them is a mistake of the ModelServer."""
    selector = spec.get("selector") if isinstance(spec, dict) else None
    found = selector.get("matchLabels", selector) if isinstance(selector, dict) else {}  # v1alpha2 has them directly
    return found if isinstance(found, dict) else {}


def _ports(spec: object) -> list[Any]:
    """What is no port in them is a mistake of the ModelServer."""
    if not isinstance(spec, dict):
        return []
    if "targetPortNumber" in spec:  # v1alpha2
        return [spec["targetPortNumber"]]
    listed = spec.get("targetPorts")
    return [one.get("number") if isinstance(one, dict) else one for one in listed] if isinstance(listed, list) else []
