# SPDX-License-Identifier: Apache-2.0
"""A ModelServer and its pods to the document that the directory has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.connections import ConnectionResult, compile_connection
from controller.gateway.compile.listed_addresses import own_address
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.pods import PRICE, pod_endpoints
from controller.gateway.compile.secrets import Pointer
from controller.gateway.compile.sources import Source, to_bytes
from controller.kube.conditions import IN_DIRECTORY, NO_MISTAKE, Wanted, WantedStatus, fails, holds
from extproc.api.addresses import OF_CLUSTER
from extproc.api.model_server import ModelServer, ModelServerSpec
from extproc.api.spec import API_VERSION, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from controller.gateway.compile.connections import Read
    from controller.gateway.compile.pickers import Picker
    from controller.gateway.compile.pods import Pod

_PORT_FIELDS = ("workloadSelector", "workloadPort")
# Whoever may write a ModelServer could have the gateway's own keys sent to an engine of theirs, and a file that is not
# there would keep the whole configuration from use.
_FILES: Final = (
    "connection names files or variables of the gateway, which objects of a cluster may not; write caCertificateRef, "
    "clientCertificateRef and apiKeyRef in place of caFile, clientCertificate, apiKeyFile and apiKeyEnv"
)
_NAMES_NOTHING: Final = "it names no other object"
_UNCONNECTED: Final = (
    "its engines must not be reached without what connection refers to, and its requests are answered 503"
)
# Of pods in one message.
_MOST_SAID: Final = 3


class ServerResult(msgspec.Struct, frozen=True):
    """``document``: None if the server cannot be used. ``files``: certificates and keys that it names. ``pointers``:
    where they come from. ``unconnected``: why its engines must not be reached; empty if they may be.
    """

    document: bytes | None
    status: WantedStatus
    files: Mapping[str, bytes] = {}
    pointers: frozenset[Pointer] = frozenset()
    unconnected: str = ""


def compile_server(source: Source, pods: Iterable[Pod], pickers: Mapping[str, Picker], read: Read) -> ServerResult:
    """``pods``: those that the server's selector selects. ``pickers``: EndpointPickerConfigs by the key of their
    ConfigMap.
    ``read``: what Secrets and ConfigMaps hold.

    A server whose EndpointPickerConfig cannot be used is served all the same, by the default picker: a slower pick
    harms less than no answer. One whose certificates or key cannot be had has no endpoints, so that nothing reaches
    its engines without them. The last good configuration would depend on what a replica has seen.
    """
    if not isinstance(source.decoded, ModelServer) or source.mistakes:
        return refused_server(source, source.complaint())
    spec = source.decoded.spec
    if spec.connection.names_files:
        return refused_server(source, _FILES)
    if own := own_address(spec):
        said = "is an address of the gateway's own pod or node, which objects of a cluster may not name"
        return refused_server(source, f"endpoints: {own} {said}; write one that other machines reach")
    content = dict(source.spec)
    resolved = holds("ResolvedRefs", _NAMES_NOTHING)
    if spec.picker_config is not None:
        picker = pickers.get(object_key(source.namespace, spec.picker_config))
        resolved = _resolved(spec.picker_config, picker)
        del content["pickerConfig"]
        if picker is not None and not picker.problem:
            content["pickerConfig"] = picker.file
    connection = compile_connection(spec.connection, content.pop("connection", {}), source.namespace, read)
    if connection.document:
        content["connection"] = connection.document
    resolved = _with_connection(resolved, connection)
    counted, pods = len(spec.endpoints), list(pods)
    endpoints: Collection[Mapping[str, Any]] = content.get("endpoints", ())
    if spec.workload_selector is not None:
        counted = len(pods)
        endpoints = [] if spec.workload_port is None else pod_endpoints(spec.workload_port.ports, pods)
        content = {name: value for name, value in content.items() if name not in _PORT_FIELDS}
        content["endpoints"] = endpoints
    if connection.problem is not None:
        return _unconnected(source, {**content, "endpoints": []}, resolved, connection)
    draining = sum(bool(one.get("draining")) for one in endpoints)
    ready = len(endpoints) - draining
    available = _available(spec, ready, draining, counted)
    if wrong := _wrong_prices(pods):
        available = msgspec.structs.replace(available, message=f"{available.message}; {wrong}")
    conditions = (holds("Accepted", NO_MISTAKE), resolved, holds("Programmed", IN_DIRECTORY), available)
    made = _result(
        source, _document(source, content), conditions, endpoints=len(endpoints), ready=ready, draining=draining
    )
    return msgspec.structs.replace(made, files=connection.files, pointers=connection.pointers)


def _unconnected(
    source: Source, content: Mapping[str, Any], resolved: Wanted, connection: ConnectionResult
) -> ServerResult:
    """A server without endpoints: its requests are answered 503, as nothing of it may be sent to its engines."""
    conditions = (
        holds("Accepted", NO_MISTAKE),
        resolved,
        fails("Programmed", "Invalid", "it is served without endpoints until ResolvedRefs is True"),
        fails("Available", "ConnectionNotUsable", _UNCONNECTED),
    )
    made = _result(source, _document(source, content), conditions, endpoints=0, ready=0, draining=0)
    return msgspec.structs.replace(
        made, pointers=connection.pointers, unconnected=f"{resolved.message}; {_UNCONNECTED}"
    )


def _with_connection(resolved: Wanted, connection: ConnectionResult) -> Wanted:
    """``resolved``, which speaks of the EndpointPickerConfig, with what the connection refers to."""
    if connection.problem is None:
        if not connection.used:
            return resolved
        own = "" if resolved.message == _NAMES_NOTHING else f"{resolved.message}; "
        return msgspec.structs.replace(resolved, message=f"{own}connection uses {connection.used}")
    if resolved.status == "True":
        return connection.problem
    return msgspec.structs.replace(connection.problem, message=f"{connection.problem.message}; {resolved.message}")


def _resolved(name: str, picker: Picker | None) -> Wanted:
    """Whether the ConfigMap ``name`` is there and can be used."""
    meanwhile = "the default picker is used until then"
    if picker is None:
        said = f"this namespace has no ConfigMap '{name}' with the label {LABEL}"
        return fails("ResolvedRefs", "PickerConfigNotFound", f"{said}; {meanwhile}")
    if picker.problem:
        said = f"correct the ConfigMap '{name}', {meanwhile}: {picker.problem}"
        return fails("ResolvedRefs", "PickerConfigInvalid", said)
    return holds("ResolvedRefs", "; ".join(picker.notes) or f"the ConfigMap '{name}' is used")


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


def _available(spec: ModelServerSpec, ready: int, draining: int, counted: int) -> Wanted:
    if ready:
        also = f", and {draining} drain" if draining else ""
        return holds("Available", f"new requests go to {ready} of {ready + draining} endpoints{also}")
    if draining:
        said = f"all {draining} endpoints drain; they get new requests until there are others"
        return Wanted("Available", "True", "AllDraining", said)
    if spec.workload_selector is None:
        return fails("Available", "NoEndpoints", "endpoints is empty; its requests are answered 503")
    labels = ",".join(f"{name}={value}" for name, value in sorted(spec.workload_selector.match_labels.items()))
    if not counted:
        return fails("Available", "NoPods", f"no pod of this namespace has the labels {labels}")
    return fails("Available", "NoReadyPods", f"none of {counted} pods with the labels {labels} is ready")


def _wrong_prices(pods: Collection[Pod]) -> str:
    """What is wrong with annotations of pods, for people; empty if nothing is."""
    wrong = sorted(f"{pod.name} '{pod.wrong_price}'" for pod in pods if pod.wrong_price)
    if not wrong:
        return ""
    more = f" and {len(wrong) - _MOST_SAID} more" if len(wrong) > _MOST_SAID else ""
    return f"{PRICE} is no positive number, and not used, on {', '.join(wrong[:_MOST_SAID])}{more}"


def _result(source: Source, document: bytes | None, conditions: tuple[Wanted, ...], **counts: int) -> ServerResult:
    status = WantedStatus(
        kind=source.kind, key=source.key, generation=source.generation, conditions=conditions, fields=counts
    )
    return ServerResult(document, status)


def _document(source: Source, content: Mapping[str, Any]) -> bytes:
    """Whoever resolves host names in it must know that it is a cluster's."""
    return source.document(content, {OF_CLUSTER: "true"})
