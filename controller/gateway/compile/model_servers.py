# SPDX-License-Identifier: Apache-2.0
"""ModelServers and pools with their pods, to documents of the directory; only what changed is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.deletion_grace import GraceState, selected_labels
from controller.gateway.compile.inference_pools import PREFIX, pool_key, server_from_pool, server_key
from controller.gateway.compile.pods import PRICE, PodIndex, parse_pod, pod_endpoints
from controller.gateway.compile.referenced_secrets import (
    CompiledConnection,
    ReferencedObjectKey,
    bounded_name,
    compile_connection,
)
from controller.gateway.compile.source_objects import SourceObject, decode_source, to_canonical_json
from controller.kube.conditions import (
    IN_DIRECTORY,
    NO_MISTAKE,
    WantedCondition,
    WantedStatus,
    condition_false,
    condition_true,
)
from extproc.api.addresses import NETWORKS, OF_CLUSTER, Network, is_in, is_local_or_metadata_host, parse_endpoint
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.config_loader import unexpected_error_mistake
from extproc.api.document_decoder import read_picker_file
from extproc.api.model_server import RETURNED, ModelServer, ModelServerSpec
from extproc.api.spec import API_VERSION, namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from controller.gateway.compile.pods import Pod
    from controller.gateway.compile.referenced_secrets import Read
    from extproc.api.picker_config import PickerConfigChecker
    from extproc.api.provider import Provider

# ConfigMaps with this label are read; others may be large, and are none of our business.
LABEL: Final = "attache.dev/picker-config"
_PORT_FIELDS = ("workloadSelector", "workloadPort")
# A writer of ModelServers could otherwise send the gateway's own keys to their engine, and a missing file would make
# the whole configuration invalid.
_FILES: Final = (
    "connection names files or variables of the gateway, which objects of a cluster may not; write caCertificateRef, "
    "clientCertificateRef and apiKeyRef in place of caFile, clientCertificate, apiKeyFile and apiKeyEnv"
)
# A writer of ModelServers could otherwise use models that the gateway's own account pays.
_OWN_IDENTITY: Final = (
    "provider.auth of type AWS would sign as the gateway's own pod, which objects of a cluster may not; write"
    " connection.apiKeyRef, a Secret with a credentials file"
)
_NAMES_NOTHING: Final = "it names no other object"
_UNCONNECTED: Final = (
    "its engines must not be reached without what connection refers to, and its requests are answered 503"
)
# What was deleted and what came back, which hold requests until there are engines.
_HOLD: Final = {"holdTimeout": str(RETURNED.hold_timeout)}
# Of pods in one message.
_MOST_SAID: Final = 3


def endpoint_address_mistake(spec: ModelServerSpec, networks: Sequence[Network] | None = None) -> str:
    """Why objects of a cluster may not list such an address; empty if they may. ``networks``: those that may be listed;
    None: all.

    Host names are checked again when they are resolved.
    """
    field = "endpoints" if spec.provider is None else "provider"
    for one in _addresses(spec):
        where = parse_endpoint(one)
        if is_local_or_metadata_host(where.host):
            message = "is an address of the gateway's own pod or node, or of a cloud's metadata service"
            return f"{field}: {one} {message}, which objects of a cluster may not name; write one of an engine"
        if networks is not None and not (is_in(where.host, networks) if where.is_ip else networks):
            message = "objects of this cluster may list endpoints in these networks alone"
            named = ", ".join(map(str, networks)) or "none"
            advice = "select pods by labels, or ask who runs the gateway for --endpoint-networks"
            return f"{field}: {one} is not allowed: {message}: {named}; {advice}"
    return ""


def _addresses(spec: ModelServerSpec) -> Iterator[str]:
    for endpoint in spec.endpoints:
        yield from (one for one in (endpoint.address, endpoint.kv_events, endpoint.kv_replay) if one is not None)


class CompiledPickerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One ConfigMap. ``file`` and ``content``: what the directory has of it, if it can be used. ``problem``: why it
    cannot be; empty if it can. ``notes``: what of it has no effect.
    """

    file: str
    content: bytes = b""
    problem: str = ""
    notes: Sequence[str] = ()


def picker_file_name(key: str) -> str:
    """Of the ConfigMap ``namespace/name``, in the directory."""
    return bounded_name(f"picker.{key.replace('/', '.', 1)}", ".yaml")


def compile_picker(key: str, thing: Mapping[str, Any], check: PickerConfigChecker) -> CompiledPickerConfig:
    """The EndpointPickerConfig in the ConfigMap ``key``, which has one key with one document."""
    name = picker_file_name(key)
    texts = list((thing.get("data") or {}).values())
    if len(texts) != 1:
        return CompiledPickerConfig(
            file=name, problem=f"has {len(texts)} keys; give it one, whose text is an EndpointPickerConfig"
        )
    try:
        notes = tuple(check(read_picker_file(name, texts[0])))
    except ConfigInvalid as error:
        return CompiledPickerConfig(file=name, problem="; ".join(map(_mistake_text, error.mistakes)))
    except Exception as error:  # noqa: BLE001 - whatever a text does to a plugin, the others must be served
        return CompiledPickerConfig(file=name, problem=_mistake_text(unexpected_error_mistake(name, error)))
    return CompiledPickerConfig(file=name, content=texts[0].encode(), notes=notes)


def _mistake_text(mistake: Mistake) -> str:
    """The error text without the synthetic file name."""
    where = f"line {mistake.line}: " if mistake.line else ""
    return f"{where}{mistake.path}: {mistake.message}" if mistake.path else f"{where}{mistake.message}"


class ServerResult(msgspec.Struct, frozen=True):
    """``document``: None if the server cannot be used. ``files``: certificates and keys that it names. ``pointers``:
    where they come from. ``unconnected``: why its engines must not be reached; empty if they may be.
    """

    document: bytes | None
    status: WantedStatus
    files: Mapping[str, bytes] = {}
    pointers: frozenset[ReferencedObjectKey] = frozenset()
    unconnected: str = ""


def compile_server(
    grace: GraceState,
    pods: Iterable[Pod],
    pickers: Mapping[str, CompiledPickerConfig],
    read: Read,
    *,
    networks: Sequence[Network] | None = None,
) -> ServerResult:
    """``grace``: the server, and what it had before. ``pods``: those that it selects, and those that it selected
    before. ``pickers``: EndpointPickerConfigs by the key of their ConfigMap. ``read``: what Secrets and ConfigMaps
    hold. ``networks``: those whose addresses may be listed as endpoints; None: all.

    A server with an invalid EndpointPickerConfig is served by the default picker: a slower pick harms less than no
    answer. One without readable certificates or key gets no endpoints, so that no request reaches its engines without
    them. The last good configuration is not used: it would differ between replicas.
    """
    source = grace.source
    if not isinstance(source.decoded, ModelServer) or source.mistakes:
        return refused_server(source, source.mistakes_text())
    spec = source.decoded.spec
    if refusal := _refusal(spec, networks):
        return refused_server(source, refusal)
    content = dict(source.spec)
    resolved = condition_true("ResolvedRefs", _NAMES_NOTHING)
    if spec.picker_config is not None:
        picker = pickers.get(object_key(source.namespace, spec.picker_config))
        resolved = _resolved(spec.picker_config, picker)
        del content["pickerConfig"]
        if picker is not None and not picker.problem:
            content["pickerConfig"] = picker.file
    signs = spec.provider is not None and spec.provider.signs_requests
    given = content.pop("connection", {})
    connection = compile_connection(spec.connection, given, source.namespace, read, signs=signs)
    if connection.document:
        content["connection"] = connection.document
    resolved = _with_connection(resolved, connection)
    content = {name: value for name, value in content.items() if name not in _PORT_FIELDS}
    if grace.holds_requests and spec.provider is None:
        content.setdefault("activation", _HOLD)
    if connection.problem is not None:
        others = {name: value for name, value in content.items() if name != "provider"}
        return _unconnected(source, {**others, "endpoints": []}, resolved, connection)
    engines = _provider(spec.provider) if spec.provider is not None else _engines(grace, spec, pods)
    conditions = (
        condition_true("Accepted", NO_MISTAKE),
        resolved,
        condition_true("Programmed", IN_DIRECTORY),
        engines.available,
    )
    endpoints = {} if spec.provider is not None else {"endpoints": engines.endpoints}
    document = _document(source, {**content, **endpoints}, networks)
    counts = {"endpoints": engines.ready + engines.draining, "ready": engines.ready, "draining": engines.draining}
    made = _result(source, document, conditions, **counts)
    return msgspec.structs.replace(made, files=connection.files, pointers=connection.pointers)


def _refusal(spec: ModelServerSpec, networks: Sequence[Network] | None) -> str:
    """Why objects of a cluster may not say this; empty if they may."""
    if spec.connection.references_files_or_variables:
        return _FILES
    if spec.provider is not None and spec.provider.signs_requests and spec.connection.api_key_ref is None:
        return _OWN_IDENTITY
    return endpoint_address_mistake(spec, networks)


class ServerEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """``endpoints``: what requests are sent to, as documents have it. ``ready`` and ``draining``: how many of these are
    the server's own.
    """

    endpoints: Sequence[Mapping[str, Any]]
    ready: int
    draining: int
    available: WantedCondition


def _provider(provider: Provider) -> ServerEndpoints:
    available = condition_true("Available", f"new requests go to the provider at {provider.address}")
    return ServerEndpoints(endpoints=(), ready=1, draining=0, available=available)


def _engines(grace: GraceState, spec: ModelServerSpec, pods: Iterable[Pod]) -> ServerEndpoints:
    """``pods``: those that the server selects, and those that it selected before."""
    listed: Sequence[Mapping[str, Any]] = grace.source.spec.get("endpoints", ())
    selected: list[Pod] = []
    former: list[Pod] = []
    if spec.workload_selector is not None:
        for pod in pods:
            (selected if pod.has_labels(spec.workload_selector.match_labels) else former).append(pod)
    ports = () if spec.workload_port is None else spec.workload_port.ports
    own = listed or pod_endpoints(ports, selected)
    served = own or (pod_endpoints(ports, former) if grace.is_served_by_former_pods else [])
    draining = sum(bool(one.get("draining")) for one in own)
    available = _available(spec, len(own) - draining, draining, len(selected))
    if not own and former:
        available = _with_former(available, grace, former, served=len(served))
    if wrong := _wrong_prices(selected):
        available = msgspec.structs.replace(available, message=f"{available.message}; {wrong}")
    return ServerEndpoints(endpoints=served, ready=len(own) - draining, draining=draining, available=available)


def _with_former(
    available: WantedCondition, grace: GraceState, former: Collection[Pod], served: int
) -> WantedCondition:
    """``available`` of a server without endpoints, extended by what its selector selected before."""
    labels = _labels_text(grace.former or {})
    said = f"before its last change it selected {len(former)} pods with the labels {labels}"
    if served:
        said += f", and {served} endpoints of these get its requests for some seconds more"
    return msgspec.structs.replace(available, message=f"{available.message}; {said}")


def _unconnected(
    source: SourceObject, content: Mapping[str, Any], resolved: WantedCondition, connection: CompiledConnection
) -> ServerResult:
    """A server without endpoints: its requests are answered 503, as nothing of it may be sent to its engines."""
    conditions = (
        condition_true("Accepted", NO_MISTAKE),
        resolved,
        condition_false("Programmed", "Invalid", "it is served without endpoints until ResolvedRefs is True"),
        condition_false("Available", "ConnectionNotUsable", _UNCONNECTED),
    )
    made = _result(source, _document(source, content), conditions, endpoints=0, ready=0, draining=0)
    return msgspec.structs.replace(
        made, pointers=connection.pointers, unconnected=f"{resolved.message}; {_UNCONNECTED}"
    )


def _with_connection(resolved: WantedCondition, connection: CompiledConnection) -> WantedCondition:
    """``resolved``, a condition about the EndpointPickerConfig, extended by the connection's references."""
    if connection.problem is None:
        if not connection.used:
            return resolved
        own = "" if resolved.message == _NAMES_NOTHING else f"{resolved.message}; "
        return msgspec.structs.replace(resolved, message=f"{own}connection uses {connection.used}")
    if resolved.status == "True":
        return connection.problem
    return msgspec.structs.replace(connection.problem, message=f"{connection.problem.message}; {resolved.message}")


def _resolved(name: str, picker: CompiledPickerConfig | None) -> WantedCondition:
    """Whether the ConfigMap ``name`` is there and can be used."""
    meanwhile = "the default picker is used until then"
    if picker is None:
        message = f"this namespace has no ConfigMap '{name}' with the label {LABEL}"
        return condition_false("ResolvedRefs", "PickerConfigNotFound", f"{message}; {meanwhile}")
    if picker.problem:
        message = f"correct the ConfigMap '{name}', {meanwhile}: {picker.problem}"
        return condition_false("ResolvedRefs", "PickerConfigInvalid", message)
    return condition_true("ResolvedRefs", "; ".join(picker.notes) or f"the ConfigMap '{name}' is used")


def refused_server(source: SourceObject, problem: str) -> ServerResult:
    """A ModelServer that is not used, because of ``problem``."""
    conditions = (
        condition_false("Accepted", "Invalid", problem),
        condition_false("Programmed", "Invalid", "the server is not used"),
    )
    return _result(source, None, conditions)


def empty_server(key: str) -> bytes:
    """The document of a server that a rule names and that is not there: its requests are answered 503."""
    namespace = namespace_of(key)
    name = key.removeprefix(f"{namespace}/")
    metadata = {"name": name, "namespace": namespace}
    spec = {"model": name, "endpoints": []}
    return to_canonical_json({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": metadata, "spec": spec})


def _available(spec: ModelServerSpec, ready: int, draining: int, counted: int) -> WantedCondition:
    if ready:
        also = f", and {draining} drain" if draining else ""
        return condition_true("Available", f"new requests go to {ready} of {ready + draining} endpoints{also}")
    if draining:
        message = f"all {draining} endpoints drain; they get new requests until there are others"
        return WantedCondition("Available", "True", "AllDraining", message)
    if spec.workload_selector is None:
        return condition_false("Available", "NoEndpoints", "endpoints is empty; its requests are answered 503")
    labels = _labels_text(spec.workload_selector.match_labels)
    if not counted:
        return condition_false("Available", "NoPods", f"no pod of this namespace has the labels {labels}")
    return condition_false("Available", "NoReadyPods", f"none of {counted} pods with the labels {labels} is ready")


def _labels_text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _wrong_prices(pods: Collection[Pod]) -> str:
    """What is wrong with annotations of pods, for people; empty if nothing is."""
    wrong = sorted(f"{pod.name} '{pod.wrong_price}'" for pod in pods if pod.wrong_price)
    if not wrong:
        return ""
    more = f" and {len(wrong) - _MOST_SAID} more" if len(wrong) > _MOST_SAID else ""
    return f"{PRICE} is no positive number, and not used, on {', '.join(wrong[:_MOST_SAID])}{more}"


def _result(
    source: SourceObject, document: bytes | None, conditions: tuple[WantedCondition, ...], **counts: int
) -> ServerResult:
    status = WantedStatus(
        kind=source.kind, key=source.key, generation=source.generation, conditions=conditions, fields=counts
    )
    return ServerResult(document, status)


def _document(source: SourceObject, content: Mapping[str, Any], networks: Sequence[Network] | None = None) -> bytes:
    """Marked as a cluster's, which limits what host names may stand for."""
    names = source.spec.get("endpoints") or source.spec.get("provider")
    limited = {} if networks is None or not names else {NETWORKS: ",".join(map(str, networks))}
    return source.document(content, {OF_CLUSTER: "true", **limited})


class ModelServerCompiler:
    """``put_...`` takes what changed, None for what is gone; ``compile`` brings ``results``, ``usable`` and ``calls``
    up to date.

    ``check_picker``: that of the extproc that reads the directory. ``read``: what Secrets and ConfigMaps hold.
    ``networks``: those whose addresses may be listed as endpoints; None: all.
    """

    def __init__(
        self, check_picker: PickerConfigChecker, read: Read, networks: Sequence[Network] | None = None
    ) -> None:
        self._check_picker = check_picker
        self._read = read
        self._networks = networks
        self._states: dict[str, GraceState] = {}
        # keys of ModelServer objects that have the name of a pool's
        self._refused: dict[str, SourceObject] = {}
        self._pods = PodIndex()
        self._pickers: dict[str, CompiledPickerConfig] = {}
        self._stale: set[str] = set()
        self.results: dict[str, ServerResult] = {}
        # keys of those that have a document
        self.usable: frozenset[str] = frozenset()
        # of those, the ones that are called by gRPC
        self.calls: frozenset[str] = frozenset()
        # why pools cannot be used, by the pool's key
        self._pool_problems: dict[str, str] = {}

    def put_server(self, key: str, state: GraceState | None) -> None:
        """A ModelServer object."""
        if not is_pool_server(key):
            self._put(key, state)
        elif state is None or state.is_deleted:
            self._refused.pop(key, None)
        else:
            self._refused[key] = state.source

    def put_pool(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """An InferencePool, as the API server has it."""
        self._pool_problems.pop(key, None)
        made = None if thing is None else server_from_pool(thing)
        source = None if made is None or made.server is None else decode_source(made.server)
        if made is not None and made.server is None:
            self._pool_problems[key] = made.complaint
        elif source is not None and source.mistakes:
            self._pool_problems[key] = source.mistakes_text()
        self._put(server_key(key), None if source is None else GraceState(source=source))

    def put_pod(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """A pod, as the API server has it."""
        self._stale.update(self._pods.set_pod(key, None if thing is None else parse_pod(thing)))

    def put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        """A ConfigMap that may hold an EndpointPickerConfig."""
        self._pickers.pop(key, None)
        if thing is not None:
            self._pickers[key] = compile_picker(key, thing, self._check_picker)
        namespace = namespace_of(key)
        self._stale |= {one for one in self._states if namespace_of(one) == namespace}

    def on_referenced_changed(self, kind: str, key: str) -> None:
        """An object that ``read`` gives has changed. ``kind``: as a pointer's ``compiler_kind``."""
        self._stale |= {
            name
            for name, one in self.results.items()
            if any((pointer.compiler_kind, pointer.key) == (kind, key) for pointer in one.pointers)
        }

    def compile(self) -> None:
        """What changed."""
        for key in self._stale:
            state = self._states.get(key)
            if state is None:
                self.results.pop(key, None)
            else:
                pods = self._pods.find_pods(key)
                self.results[key] = compile_server(state, pods, self._pickers, self._read, networks=self._networks)
        if self._stale:
            self.usable = frozenset(key for key, one in self.results.items() if one.document is not None)
            self.calls = frozenset(filter(self._takes_grpc, self.usable))
        self._stale.clear()

    def _takes_grpc(self, key: str) -> bool:
        found = self._states[key].source.decoded
        return isinstance(found, ModelServer) and found.spec.takes_grpc

    def picker_files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the EndpointPickerConfigs that can be used."""
        return ((one.file, one.content) for one in self._pickers.values() if not one.problem)

    def referenced_keys(self) -> frozenset[ReferencedObjectKey]:
        """What connections refer to."""
        return frozenset(pointer for one in self.results.values() for pointer in one.pointers)

    def connection_files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the certificates and keys that connections need."""
        for one in self.results.values():
            yield from one.files.items()

    def pool_problems(self) -> Mapping[str, str]:
        """Why pools cannot be used, by the pool's key."""
        unconnected = {
            pool_key(key): one.unconnected
            for key, one in self.results.items()
            if one.unconnected and is_pool_server(key)
        }
        return {**unconnected, **self._pool_problems}

    def documents(self, pools: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Of all ModelServers, and of ``pools``, which are named by the keys of their ModelServers."""
        for key, one in self.results.items():
            if one.document is not None and (key in pools or not is_pool_server(key)):
                yield key, one.document

    def statuses(self) -> Iterator[WantedStatus]:
        """Of the ModelServer objects. Pools have statuses of their own."""
        yield from (one.status for key, one in self.results.items() if not is_pool_server(key))
        for source in self._refused.values():
            yield refused_server(source, f"names that begin with {PREFIX} are those of InferencePools").status

    def served_objects(self) -> Iterator[ModelServer]:
        """The ModelServer objects that are served."""
        for key in self.usable:
            found = self._states[key].source.decoded
            if isinstance(found, ModelServer) and not is_pool_server(key):
                yield found

    def _put(self, key: str, state: GraceState | None) -> None:
        if state is None:
            self._states.pop(key, None)
            self._pods.set_selectors(key)
        else:
            self._states[key] = state
            self._pods.set_selectors(
                key, *(one for one in (selected_labels(state.source), state.former) if one is not None)
            )
        self._stale.add(key)


def is_pool_server(key: str) -> bool:
    """Whether a ModelServer of this key stands for a pool."""
    return key.partition("/")[2].startswith(PREFIX)
