# SPDX-License-Identifier: Apache-2.0
"""All objects that a gateway serves, and the directory and statuses that they come to; only what changed is compiled.

The outcome depends on the objects alone, never on the order in which they came: a compiler that was fed a history ends
with what a fresh one makes of its last state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.gateway_api import GatewayApi
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.gateway_api.observed import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.gateway_config import GatewayConfigs, GatewayDocument, GatewayDocuments
from controller.gateway.compile.policies import PolicyResult, PolicySet, Served
from controller.gateway.compile.routes import RouteResult, compile_routes
from controller.gateway.compile.secrets import Pointer, bounded_name
from controller.gateway.compile.servers import ServerSet, empty_server
from controller.gateway.compile.sources import DOCUMENT_KINDS, Source, source_of
from controller.kube.conditions import IN_DIRECTORY, NO_MISTAKE, Wanted, WantedStatus, fails, holds
from extproc.api.gateway_config import GatewayConfig
from extproc.api.load import MAX_DIRECTORY_BYTES, SUFFIXES, max_bytes
from extproc.api.model_route import ModelRoute
from extproc.api.picker_config import check_shape_alone
from extproc.api.snapshot import Snapshot, failure_mode_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.gateway_config import Listener
    from extproc.api.picker_config import PickerCheck

# Of namespaces in one message.
_MOST_SAID: Final = 3


def size_problem(files: Mapping[str, bytes]) -> str:
    """Why a directory of ``files`` would be refused, and by whose objects; empty if it would not be.

    A reader that starts with a directory that is too large serves nothing at all, to anybody.
    """
    sizes = {name: len(content) for name, content in files.items() if name.endswith(SUFFIXES)}
    for name, size in sizes.items():
        if size > max_bytes(name):
            return f"{name} would have {size} bytes, and {max_bytes(name)} are read; make that object smaller"
    total = sum(sizes.values())
    if total <= MAX_DIRECTORY_BYTES:
        return ""
    # names begin with kind and namespace
    shares = Counter[str]()
    for name, size in sizes.items():
        shares[name.split(".")[1]] += size
    largest = ", ".join(f"{namespace} {size}" for namespace, size in shares.most_common(_MOST_SAID))
    return (
        f"all objects come to {total} bytes, and {MAX_DIRECTORY_BYTES} are read; "
        f"the namespaces with most of them: {largest}"
    )


GATEWAY_FILE: Final = "gateway.json"


class Outcome(msgspec.Struct, frozen=True):
    """``files``: the whole directory, by name. ``statuses``: of all objects, by kind and key. ``refused``: why nothing
    of this must be served, empty if it may be: what is served already stays. ``pointers``: Secrets and ConfigMaps that
    must be known for this to be complete.
    """

    files: Mapping[str, bytes]
    statuses: Mapping[tuple[str, str], WantedStatus]
    refused: str = ""
    pointers: frozenset[Pointer] = frozenset()


class Compiler:
    """``put`` takes what changed, ``compile`` gives the outcome.

    ``gateway``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the defaults.
    ``check_picker``: that of the extproc that reads the directory, or a mistake in one ConfigMap makes it refuse the
    whole.
    """

    def __init__(
        self,
        gateway: str | None = None,
        settings: GatewayApiSettings = GatewayApiSettings(),  # noqa: B008 - frozen
        *,
        check_picker: PickerCheck = check_shape_alone,
    ) -> None:
        self._gateway = gateway
        self._sources: dict[str, dict[str, Source]] = {kind: {} for kind in DOCUMENT_KINDS}
        self._usable: frozenset[str] = frozenset()
        self._routes: Mapping[str, RouteResult] = {}
        self._routes_stale = True
        self._policy_set = PolicySet()
        self._policies: Mapping[str, PolicyResult] = {}
        self._api = GatewayApi(settings, gateway, GatewayConfigs(self._sources["GatewayConfig"]))
        self._documents = GatewayDocuments(self._api.pointed)
        self._servers = ServerSet(check_picker, self._api.pointed)

    def put(self, kind: str, key: str, thing: Mapping[str, Any] | None) -> None:
        """An object as it is now; None: it is gone."""
        if kind == "Pod":
            self._servers.put_pod(key, thing)
        elif kind == "ConfigMap":
            self._servers.put_picker(key, thing)
        elif kind in GATEWAY_API_KINDS:
            self._api.put(kind, key, thing)
            if kind == "InferencePool":
                self._servers.put_pool(key, thing)
            self._servers.pointed_changed(kind, key)
        else:
            self._put_source(kind, key, None if thing is None else source_of(thing))

    def compile(self) -> Outcome:
        """What the objects come to."""
        self._servers.compile()
        usable = self._servers.usable
        self._routes_stale |= self._api.compile(usable, self._servers.pool_problems())
        if self._routes_stale or usable != self._usable:
            self._routes = compile_routes(self._sources["ModelRoute"].values(), usable, self._api.listeners)
            self._routes_stale, self._usable = False, usable
        documents = dict(self._routing())
        self._policies = self._policy_set.compile(self._served(documents))
        has_policies = any(one.document is not None for one in self._policies.values())
        gateway = self._documents.make(
            self._config_in_effect(), self._api.listener_documents(), has_policies=has_policies
        )
        files = dict(self._files(gateway, documents))
        statuses = {(one.kind, one.key): one for one in self._statuses(gateway, has_policies=has_policies)}
        pointers = self._api.pointers() | self._servers.pointers() | gateway.pointers
        return Outcome(files, statuses, self._refusal(gateway) or size_problem(files), pointers)

    def _put_source(self, kind: str, key: str, source: Source | None) -> None:
        if kind == "ModelServer":
            self._servers.put_server(key, source)
            return
        if kind == "ModelAccessPolicy":
            self._policy_set.put(key, source)
            return
        known = self._sources[kind]
        if source is None:
            known.pop(key, None)
        else:
            known[key] = source
        if kind == "ModelRoute":
            self._routes_stale = True
        elif kind == "GatewayConfig":
            self._api.gateway_configs_changed()

    def _files(
        self, gateway: GatewayDocument, documents: Mapping[tuple[str, str], bytes]
    ) -> Iterator[tuple[str, bytes]]:
        """In writing order: what is referred to comes before what refers to it."""
        yield from self._api.files().items()
        yield from self._servers.connection_files()
        yield from self._servers.picker_files()
        yield GATEWAY_FILE, gateway.content
        for objective in self._sources["InferenceObjective"].values():
            if not objective.mistakes:
                yield file_name(objective.kind, objective.key), objective.document()
        # before what they protect, which must not be served without them: until it is there, readers use nothing of
        # this
        for key, policy in self._policies.items():
            if policy.document is not None:
                yield file_name("ModelAccessPolicy", key), policy.document
        for (kind, key), document in documents.items():
            yield file_name(kind, key), document

    def _routing(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """Routes and what they name, by kind and key."""
        yield from self._backends()
        for key, route in self._routes.items():
            if route.document is not None:
                yield ("ModelRoute", key), route.document
        for key, document in self._api.routes():
            yield ("HTTPRoute", key), document

    def _served(self, documents: Iterable[tuple[str, str]]) -> Served:
        """What policies can be attached to."""
        keys: dict[str, set[str]] = {}
        for kind, key in documents:
            keys.setdefault(kind, set()).add(key)
        config = self._config_in_effect()
        own: tuple[Listener, ...] = ()
        if config is not None and self._api.listeners is None and isinstance(config.decoded, GatewayConfig):
            own = config.decoded.spec.listeners
        return Served(
            model_routes=keys.get("ModelRoute", set()),
            model_servers=keys.get("ModelServer", set()),
            http_routes=keys.get("HTTPRoute", set()),
            listeners=self._api.listener_names(),
            config=None if config is None else config.key,
            config_listeners={one.name for one in own},
            without_models=self._api.routes_without_models(),
        )

    def _backends(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """What routes name."""
        named = {key for route in self._routes.values() for key in route.servers}
        for key, document in self._servers.documents(named.union(self._api.named_servers())):
            yield ("ModelServer", key), document
        for kind, key, document in self._api.documents():
            yield (kind, key), document
        for key in {key for route in self._routes.values() for key in route.missing}:
            yield ("ModelServer", key), empty_server(key)

    def _config_in_effect(self) -> Source | None:
        return self._sources["GatewayConfig"].get(self._api.parameters.config or "")

    def _statuses(self, gateway: GatewayDocument, *, has_policies: bool) -> Iterator[WantedStatus]:
        yield from self._servers.statuses()
        yield from (one.status for one in self._routes.values())
        yield from (one.status for one in self._policies.values())
        yield from self._api.statuses(one.attached for one in self._routes.values())
        parameters = self._api.parameters
        for key in {parameters.config, *parameters.named}:
            config = self._sources["GatewayConfig"].get(key or "")
            if config is not None:
                yield self._config_status(config, gateway, has_policies=has_policies)

    def _config_status(self, config: Source, gateway: GatewayDocument, *, has_policies: bool) -> WantedStatus:
        conditions: tuple[Wanted, ...] = (
            holds("Accepted", gateway.note or NO_MISTAKE),
            *([fails("ResolvedRefs", "SecretNotUsable", "; ".join(gateway.missing))] if gateway.missing else []),
            holds("Programmed", IN_DIRECTORY),
        )
        if config.mistakes:
            stays = "nothing is changed until it is corrected; what is served stays"
            said = stays if config.key == self._gateway else "the Gateways that refer to it are not served"
            conditions = fails("Accepted", "Invalid", config.complaint()), fails("Programmed", "Invalid", said)
        elif config.key != self._api.parameters.config:
            said = f"GatewayConfig {self._api.parameters.config} is in effect"
            conditions = holds("Accepted", NO_MISTAKE), fails("Programmed", "Conflict", said)
        return WantedStatus(
            kind=config.kind,
            key=config.key,
            generation=config.generation,
            conditions=conditions,
            fields=self._failure_mode(config, is_closed=bool(gateway.note) or has_policies),
        )

    def _failure_mode(self, config: Source, *, is_closed: bool) -> Mapping[str, str]:
        """What Envoy does without extproc, for the status."""
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return {}
        if is_closed:
            return {"failureMode": "Close"}
        served = [self._sources["ModelRoute"][key].decoded for key, one in self._routes.items() if one.document]
        snapshot = Snapshot(
            version="",
            routes=tuple(one for one in served if isinstance(one, ModelRoute)),
            servers=tuple(self._servers.decoded()),
            gateway=config.decoded.spec,
        )
        return {"failureMode": failure_mode_of(snapshot)}

    def _refusal(self, document: GatewayDocument) -> str:
        """Without its GatewayConfig a gateway would serve without the authentication that it asks for."""
        if self._gateway is not None:
            gateway = self._sources["GatewayConfig"].get(self._gateway)
            if gateway is None:
                return f"there is no GatewayConfig {self._gateway}"
            if gateway.mistakes:
                return f"GatewayConfig {self._gateway}: {gateway.complaint()}"
        if document.refused:
            return f"GatewayConfig {self._api.parameters.config} with what it refers to: {document.refused}"
        return ""


def file_name(kind: str, key: str) -> str:
    """Of an object's document in the directory. Namespaces have no dots, so no two objects share a file."""
    return bounded_name(f"{kind.lower()}.{key.replace('/', '.', 1)}", ".json")
