# SPDX-License-Identifier: Apache-2.0
"""A ModelServer and its pods to the document that the directory has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.gateway.compile.conditions import Wanted, WantedStatus, fails, holds
from controller.gateway.compile.pods import pod_endpoints
from controller.gateway.compile.sources import Source, to_bytes
from extproc.config.model_server import ModelServer, ModelServerSpec
from extproc.config.spec import API_VERSION, namespace_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from controller.gateway.compile.pods import Pod

_PORT_FIELDS = ("workloadSelector", "workloadPort")


class ServerResult(msgspec.Struct, frozen=True):
    """``document``: None if the server cannot be used."""

    document: bytes | None
    status: WantedStatus


def compile_server(source: Source, pods: Iterable[Pod], pickers: Mapping[str, str]) -> ServerResult:
    """``pods``: those that the server's selector selects. ``pickers``: the files of the EndpointPickerConfigs that can be
    used, by ``namespace/name`` of their ConfigMap.
    """
    if not isinstance(source.decoded, ModelServer) or source.mistakes:
        return refused_server(source, source.complaint())
    spec = source.decoded.spec
    content = dict(source.spec)
    resolved = holds("ResolvedRefs")
    if spec.picker_config is not None:
        file = pickers.get(f"{source.namespace}/{spec.picker_config}")
        if file is None:
            said = f"no ConfigMap '{spec.picker_config}' labelled attache.dev/picker-config holds a usable EndpointPickerConfig"
            resolved = fails("ResolvedRefs", "PickerConfigNotFound", f"{said}; the server is not used")
            return _result(source, None, (holds("Accepted"), resolved, fails("Programmed", "Invalid", said)))
        content["pickerConfig"] = file
    counted = len(spec.endpoints)
    endpoints: Collection[Mapping[str, Any]] = content.get("endpoints", ())
    if spec.workload_selector is not None:
        pods = list(pods)
        counted = len(pods)
        endpoints = [] if spec.workload_port is None else pod_endpoints(spec.workload_port.ports, pods)
        content = {name: value for name, value in content.items() if name not in _PORT_FIELDS}
        content["endpoints"] = endpoints
    ready = sum(not one.get("draining", False) for one in endpoints)
    conditions = (holds("Accepted"), resolved, holds("Programmed"), _available(spec, ready, counted))
    return _result(source, source.document(content), conditions, endpoints=len(endpoints), ready=ready)


def refused_server(source: Source, problem: str) -> ServerResult:
    """A ModelServer that is not used, because of ``problem``."""
    conditions = fails("Accepted", "Invalid", problem), fails("Programmed", "Invalid", "the server is not used")
    return _result(source, None, conditions)


def empty_server(key: str) -> bytes:
    """The document of a server that a rule names and that is not there: its requests are answered 503."""
    namespace = namespace_of(key)
    name = key.removeprefix(f"{namespace}/")
    metadata = {"name": name, "namespace": namespace}
    spec = {"model": name, "endpoints": []}
    return to_bytes({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": metadata, "spec": spec})


def _available(spec: ModelServerSpec, ready: int, counted: int) -> Wanted:
    if ready:
        return holds("Available")
    if spec.workload_selector is None:
        return fails("Available", "NoEndpoints", "endpoints is empty; its requests are answered 503")
    labels = ",".join(f"{name}={value}" for name, value in sorted(spec.workload_selector.match_labels.items()))
    if not counted:
        return fails("Available", "NoPods", f"no pod of this namespace has the labels {labels}")
    return fails("Available", "NoReadyPods", f"none of {counted} pods with the labels {labels} is ready")


def _result(source: Source, document: bytes | None, conditions: tuple[Wanted, ...], **counts: int) -> ServerResult:
    status = WantedStatus(
        kind=source.kind, key=source.key, generation=source.generation, conditions=conditions, fields=counts
    )
    return ServerResult(document, status)
