# SPDX-License-Identifier: Apache-2.0
"""All objects that a gateway serves, and the directory and statuses that they come to; only what changed is compiled.

The outcome depends on the objects alone, never on the order in which they came: a compiler that was fed a history ends
with what a fresh one makes of its last state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.conditions import IN_DIRECTORY, NO_MISTAKE, WantedStatus, fails, holds
from controller.gateway.compile.pickers import Picker, picker_of
from controller.gateway.compile.pods import Pod, pod_of
from controller.gateway.compile.routes import RouteResult, compile_routes
from controller.gateway.compile.servers import ServerResult, compile_server, empty_server
from controller.gateway.compile.sources import DOCUMENT_KINDS, Source, source_of, to_bytes
from extproc.config.failure_mode import failure_mode_of
from extproc.config.gateway_config import GatewayConfig
from extproc.config.model_route import ModelRoute
from extproc.config.model_server import ModelServer
from extproc.config.picker_config import check_shape_alone
from extproc.config.snapshot import Snapshot
from extproc.config.spec import API_VERSION, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.picker_config import PickerCheck

GATEWAY_FILE: Final = "gateway.json"
_DEFAULT_GATEWAY: Final = to_bytes(
    {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "default"}, "spec": {}}
)


class Outcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory, by name. ``statuses``: of all objects, by kind and key. ``refused``: why nothing of
    this must be served, empty if it may be: what is served already stays.
    """

    files: Mapping[str, bytes]
    statuses: Mapping[tuple[str, str], WantedStatus]
    refused: str = ""


class Compiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``gateway``: the GatewayConfig to serve, as ``namespace/name``; None: the defaults. ``check_picker``: that of the
    extproc that reads the directory, or a mistake in one ConfigMap makes it refuse the whole.
    """

    def __init__(self, gateway: str | None = None, *, check_picker: PickerCheck = check_shape_alone) -> None:
        self._gateway = gateway
        self._check_picker = check_picker
        self._sources: dict[str, dict[str, Source]] = {kind: {} for kind in DOCUMENT_KINDS}
        self._pods: dict[str, Pod] = {}
        # keys of pods by namespace, and by the server that selects them
        self._pods_of: dict[str, dict[str, Pod]] = {}
        self._pickers: dict[str, Picker] = {}
        self._servers: dict[str, ServerResult] = {}
        self._stale_servers: set[str] = set()
        self._routes: Mapping[str, RouteResult] = {}
        self._routes_stale = True

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone."""
        if kind == "Pod":
            self._put_pod(key, None if thing is None else pod_of(thing))
        elif kind == "ConfigMap":
            self._put_picker(key, thing)
        else:
            self._put_source(kind, key, None if thing is None else source_of(thing))

    def compile(self) -> Outcome:
        """What the objects come to."""
        usable = {key for key, one in self._servers.items() if one.document is not None}
        for key in self._stale_servers:
            self._compile_server(key)
        self._stale_servers.clear()
        now_usable = {key for key, one in self._servers.items() if one.document is not None}
        if self._routes_stale or now_usable != usable:
            self._routes = compile_routes(self._sources["ModelRoute"].values(), now_usable)
            self._routes_stale = False
        files = dict(self._files())
        statuses = {(one.kind, one.key): one for one in self._statuses()}
        return Outcome(files, statuses, self._refusal())

    def _put_source(self, kind: str, key: str, source: Source | None) -> None:
        known = self._sources[kind]
        if source is None:
            known.pop(key, None)
        else:
            known[key] = source
        if kind == "ModelServer":
            self._select_pods(key, source)
            self._stale_servers.add(key)
        elif kind == "ModelRoute":
            self._routes_stale = True

    def _select_pods(self, key: str, source: Source | None) -> None:
        if source is None or not isinstance(source.decoded, ModelServer):
            self._pods_of.pop(key, None)
            return
        selected = self._pods_of[key] = {}
        for pod in self._pods.values():
            if _selects(source, pod):
                selected[pod.key] = pod

    def _put_pod(self, key: str, pod: Pod | None) -> None:
        if self._pods.get(key) == pod:
            return
        if pod is None:
            del self._pods[key]
        else:
            self._pods[key] = pod
        for server, selected in self._pods_of.items():
            if namespace_of(server) != namespace_of(key):
                continue
            if pod is not None and _selects(self._sources["ModelServer"][server], pod):
                selected[key] = pod
            elif selected.pop(key, None) is None:
                continue
            self._stale_servers.add(server)

    def _put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        self._pickers.pop(key, None)
        if thing is not None:
            self._pickers[key] = picker_of(key, thing, self._check_picker)
        namespace = namespace_of(key)
        self._stale_servers |= {server for server in self._pods_of if namespace_of(server) == namespace}

    def _compile_server(self, key: str) -> None:
        source = self._sources["ModelServer"].get(key)
        if source is None:
            self._servers.pop(key, None)
            return
        self._servers[key] = compile_server(source, self._pods_of.get(key, {}).values(), self._pickers)

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """In writing order: what is referred to comes before what refers to it."""
        yield from ((one.file, one.content) for one in self._pickers.values() if not one.problem)
        gateway = self._sources["GatewayConfig"].get(self._gateway or "")
        yield GATEWAY_FILE, _DEFAULT_GATEWAY if gateway is None else gateway.document()
        for objective in self._sources["InferenceObjective"].values():
            if not objective.mistakes:
                yield file_name(objective.kind, objective.key), objective.document()
        missing: set[str] = set()
        for route in self._routes.values():
            missing |= route.missing
        for key, server in self._servers.items():
            if server.document is not None:
                yield file_name("ModelServer", key), server.document
        for key in missing:
            yield file_name("ModelServer", key), empty_server(key)
        for key, route in self._routes.items():
            if route.document is not None:
                yield file_name("ModelRoute", key), route.document

    def _statuses(self) -> Iterator[WantedStatus]:
        yield from (one.status for one in self._servers.values())
        yield from (one.status for one in self._routes.values())
        gateway = self._sources["GatewayConfig"].get(self._gateway or "")
        if gateway is not None:
            problem = fails("Accepted", "Invalid", gateway.complaint())
            stays = fails("Programmed", "Invalid", "nothing is changed until it is corrected; what is served stays")
            good = (holds("Accepted", NO_MISTAKE), holds("Programmed", IN_DIRECTORY))
            yield WantedStatus(
                kind=gateway.kind,
                key=gateway.key,
                generation=gateway.generation,
                conditions=(problem, stays) if gateway.mistakes else good,
                fields=self._failure_mode(gateway),
            )

    def _failure_mode(self, gateway: Source) -> Mapping[str, str]:
        """What Envoy does without extproc, for the status."""
        if gateway.mistakes or not isinstance(gateway.decoded, GatewayConfig):
            return {}
        served = [self._sources["ModelRoute"][key].decoded for key, one in self._routes.items() if one.document]
        servers = [self._sources["ModelServer"][key].decoded for key, one in self._servers.items() if one.document]
        snapshot = Snapshot(
            version="",
            routes=tuple(one for one in served if isinstance(one, ModelRoute)),
            servers=tuple(one for one in servers if isinstance(one, ModelServer)),
            gateway=gateway.decoded.spec,
        )
        return {"failureMode": failure_mode_of(snapshot)}

    def _refusal(self) -> str:
        """Without its GatewayConfig a gateway would serve without the authentication that it asks for."""
        if self._gateway is None:
            return ""
        gateway = self._sources["GatewayConfig"].get(self._gateway)
        if gateway is None:
            return f"there is no GatewayConfig {self._gateway}"
        return f"GatewayConfig {self._gateway}: {gateway.complaint()}" if gateway.mistakes else ""


def file_name(kind: str, key: str) -> str:
    """Of an object's document in the directory. Namespaces have no dots, so no two objects share a file."""
    return f"{kind.lower()}.{key.replace('/', '.', 1)}.json"


def _selects(source: Source, pod: Pod) -> bool:
    if not isinstance(source.decoded, ModelServer) or source.decoded.spec.workload_selector is None:
        return False
    return source.namespace == pod.namespace and pod.has(source.decoded.spec.workload_selector.match_labels)
