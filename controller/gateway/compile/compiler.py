# SPDX-License-Identifier: Apache-2.0
"""All objects that a gateway serves, and the directory and statuses that they come to; only what changed is compiled.

The outcome depends on the objects alone, never on the order in which they came: a compiler that was fed a history ends
with what a fresh one makes of its last state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.conditions import Wanted, WantedStatus, fails, holds
from controller.gateway.compile.gateway_api.gateway_api import GatewayApi
from controller.gateway.compile.gateway_api.observed import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.gateway_api.pools import PREFIX as POOL_PREFIX
from controller.gateway.compile.gateway_api.settings import GatewayApiSettings
from controller.gateway.compile.pickers import picker_file_of
from controller.gateway.compile.pod_index import PodIndex
from controller.gateway.compile.pods import pod_of
from controller.gateway.compile.routes import RouteResult, compile_routes
from controller.gateway.compile.secrets import Pointer
from controller.gateway.compile.servers import ServerResult, compile_server, empty_server, refused_server
from controller.gateway.compile.sources import DOCUMENT_KINDS, Source, source_of, to_bytes
from extproc.config.gateway_config import GatewayConfig
from extproc.config.model_server import ModelServer
from extproc.config.spec import API_VERSION, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator

GATEWAY_FILE: Final = "gateway.json"
_DEFAULT: Final = {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "default"}}
_DEFAULT_GATEWAY: Final = to_bytes({**_DEFAULT, "spec": {}})


class Outcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory, by name. ``statuses``: of all objects, by kind and key. ``refused``: why nothing of
    this must be served, empty if it may be: what is served already stays. ``pointers``: Secrets and ConfigMaps that
    must be known for this to be complete.
    """

    files: Mapping[str, bytes]
    statuses: Mapping[tuple[str, str], WantedStatus]
    refused: str = ""
    pointers: frozenset[Pointer] = frozenset()


class Compiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``gateway``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the defaults.
    """

    def __init__(
        self,
        gateway: str | None = None,
        settings: GatewayApiSettings = GatewayApiSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._gateway = gateway
        self._sources: dict[str, dict[str, Source]] = {kind: {} for kind in DOCUMENT_KINDS}
        self._pods = PodIndex()
        self._pickers: dict[str, dict[str, bytes]] = {}
        self._servers: dict[str, ServerResult] = {}
        self._usable: frozenset[str] = frozenset()
        self._stale_servers: set[str] = set()
        self._routes: Mapping[str, RouteResult] = {}
        self._routes_stale = True
        self._api = GatewayApi(settings, gateway, self._config_problem, self._pods)

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone."""
        if kind == "Pod":
            for owner in self._pods.put(key, None if thing is None else pod_of(thing)):
                if _is_pools(owner):
                    self._api.pods_changed(owner)
                else:
                    self._stale_servers.add(owner)
        elif kind == "ConfigMap":
            self._put_picker(key, thing)
        elif kind in GATEWAY_API_KINDS:
            self._api.put(kind, key, thing)
        else:
            self._put_source(kind, key, None if thing is None else source_of(thing))

    def compile(self) -> Outcome:
        """What the objects come to."""
        for key in self._stale_servers:
            self._compile_server(key)
        self._stale_servers.clear()
        servers = frozenset(key for key, one in self._servers.items() if one.document is not None)
        self._routes_stale |= self._api.compile(servers)
        usable = servers.union(self._api.usable_pools())
        if self._routes_stale or usable != self._usable:
            self._routes = compile_routes(self._sources["ModelRoute"].values(), usable, self._api.listeners)
            self._routes_stale, self._usable = False, usable
        self._api.compile_pools(key for route in self._routes.values() for key in route.servers)
        files = dict(self._files())
        statuses = {(one.kind, one.key): one for one in self._statuses()}
        return Outcome(files, statuses, self._refusal(), self._api.pointers())

    def _put_source(self, kind: str, key: str, source: Source | None) -> None:
        known = self._sources[kind]
        if source is None:
            known.pop(key, None)
        else:
            known[key] = source
        if kind == "ModelServer":
            if not _is_pools(key):
                self._pods.select(key, _selector(source))
            self._stale_servers.add(key)
        elif kind == "ModelRoute":
            self._routes_stale = True
        elif kind == "GatewayConfig":
            self._api.gateway_configs_changed()

    def _put_picker(self, key: str, thing: Mapping[str, Any] | None) -> None:
        self._pickers.pop(key, None)
        if thing is not None:
            self._pickers[key] = picker_file_of(key, thing)
        namespace = namespace_of(key)
        self._stale_servers |= {one for one in self._sources["ModelServer"] if namespace_of(one) == namespace}

    def _compile_server(self, key: str) -> None:
        source = self._sources["ModelServer"].get(key)
        if source is None:
            self._servers.pop(key, None)
            return
        if _is_pools(key):
            self._servers[key] = refused_server(source, f"names that begin with {POOL_PREFIX} are InferencePools'")
            return
        pickers = {name: file for name, files in self._pickers.items() for file in files}
        self._servers[key] = compile_server(source, self._pods.of(key), pickers)

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """In writing order: what is referred to comes before what refers to it."""
        yield from self._api.files().items()
        for files in self._pickers.values():
            yield from files.items()
        yield GATEWAY_FILE, self._gateway_document()
        for objective in self._sources["InferenceObjective"].values():
            if not objective.mistakes:
                yield file_name(objective.kind, objective.key), objective.document()
        yield from self._backends()
        for key, route in self._routes.items():
            if route.document is not None:
                yield file_name("ModelRoute", key), route.document
        for key, document in self._api.routes():
            yield file_name("HTTPRoute", key), document

    def _backends(self) -> Iterator[tuple[str, bytes]]:
        """What routes name."""
        for key, server in self._servers.items():
            if server.document is not None:
                yield file_name("ModelServer", key), server.document
        for kind, key, document in self._api.documents():
            yield file_name(kind, key), document
        for key in {key for route in self._routes.values() for key in route.missing}:
            yield file_name("ModelServer", key), empty_server(key)

    def _gateway_document(self) -> bytes:
        """The GatewayConfig in effect, with the listeners of Gateways in place of its own."""
        found = self._sources["GatewayConfig"].get(self._api.parameters.config or "")
        if self._api.listeners is None:
            return _DEFAULT_GATEWAY if found is None else found.document()
        listeners = self._api.listener_documents()
        if found is None:
            return to_bytes({**_DEFAULT, "spec": {"listeners": listeners}})
        return found.document({**found.spec, "listeners": listeners})

    def _statuses(self) -> Iterator[WantedStatus]:
        yield from (one.status for one in self._servers.values())
        yield from (one.status for one in self._routes.values())
        yield from self._api.statuses(one.attached for one in self._routes.values())
        parameters = self._api.parameters
        for key in {parameters.config, *parameters.named}:
            config = self._sources["GatewayConfig"].get(key or "")
            if config is not None:
                yield self._config_status(config)

    def _config_status(self, config: Source) -> WantedStatus:
        conditions: tuple[Wanted, ...] = holds("Accepted"), holds("Programmed")
        if config.mistakes:
            conditions = (fails("Accepted", "Invalid", config.complaint()),)
        elif config.key != self._api.parameters.config:
            said = f"GatewayConfig {self._api.parameters.config} is in effect"
            conditions = holds("Accepted"), fails("Programmed", "Conflict", said)
        return WantedStatus(kind=config.kind, key=config.key, generation=config.generation, conditions=conditions)

    def _config_problem(self, key: str) -> str:
        """Why a GatewayConfig cannot be used; empty if it can."""
        config = self._sources["GatewayConfig"].get(key)
        if config is None:
            return "there is no such GatewayConfig"
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return config.complaint()
        return ""

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


def _selector(source: Source | None) -> Mapping[str, str] | None:
    """The labels of a ModelServer's pods; None if it has no pods."""
    if source is None or not isinstance(source.decoded, ModelServer):
        return None
    selector = source.decoded.spec.workload_selector
    return None if selector is None else selector.match_labels


def _is_pools(key: str) -> bool:
    return key.partition("/")[2].startswith(POOL_PREFIX)
