# SPDX-License-Identifier: Apache-2.0
"""A snapshot to an Envoy bundle: a bootstrap and the files that Envoy watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from controller.bundle.envoy.authentication import authentication_files, key_set_clusters
from controller.bundle.envoy.bootstrap import CLUSTERS_FILE, LISTENERS_FILE, bootstrap
from controller.bundle.envoy.clusters import (
    backend_cluster,
    backend_cluster_name,
    backend_cluster_resource,
    backend_endpoints,
    backend_endpoints_file,
    endpoints_file,
    extproc_cluster,
    server_cluster,
    server_cluster_name,
    server_endpoints,
    socket_cluster,
    usage_reports_cluster,
    with_endpoints,
)
from controller.bundle.envoy.envoy_json import BuildMemo, resources_file, to_json
from controller.bundle.envoy.fallback import FallbackRuleLimits, fallback_servers
from controller.bundle.envoy.filters import FilterNeeds
from controller.bundle.envoy.http_routes import filter_needs
from controller.bundle.envoy.inner_listeners import inner_routes
from controller.bundle.envoy.listeners import (
    client_snapshot,
    listener_groups,
    listener_resources,
    mirrored_listener,
    transformer_listener_snapshot,
)
from controller.bundle.envoy.mirror import MIRRORED, MIRRORED_ROUTES_FILE, has_mirror
from controller.bundle.envoy.model_routes import has_grpc_servers, routes_by_traffic_policy
from controller.bundle.envoy.request_translation import (
    TRANSLATED,
    TRANSLATED_ROUTES_FILE,
    needs_translation,
    translated_listener,
    translator_cluster,
)
from controller.bundle.envoy.response_filters import configured_response_headers
from controller.bundle.envoy.route_configurations import route_configuration
from controller.bundle.envoy.tracing import collector_clusters
from extproc.api.addresses import OF_CLUSTER
from extproc.api.config_snapshot import failure_mode_of
from extproc.api.http_route import Backend, BackendSpec
from extproc.api.make_before_break import with_servers
from extproc.api.model_server import RETURNED
from extproc.api.spec import Metadata
from extproc.wire_names import MIRROR_CLUSTER, MIRROR_SOCKET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_server import ModelServer

BOOTSTRAP_FILE = "bootstrap.json"

# Envoy takes an inotify instance for each file that it watches and aborts where the machine has no more of them; Linux
# gives a user 128 by default, for all its processes.
MOST_ENDPOINT_FILES: Final = 32

T = TypeVar("T", bound="ModelServer | Backend")


class BundleWriter:
    """Snapshots to bundles for ``directory``, which is where Envoy will find them.

    A route costs a millisecond with the classes of Envoy's schema, so the results for unchanged objects are kept.
    Engines change often, so a change of endpoints alone rewrites only the files of their servers; or, with many
    servers, the file of the clusters, which contain their endpoints.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._endpoints, self._memo = BuildMemo(), BuildMemo()
        # those of the last snapshot, without endpoints
        self._servers: Mapping[str, ModelServer] = {}
        self._backends: Mapping[str, Backend] = {}
        # the last snapshot without endpoints, and its bundle
        self._frame: tuple[Snapshot, Mapping[str, str]] | None = None
        # the gateway's own clusters; those of servers and Backends, in their order
        self._clusters: tuple[list[dict[str, object]], list[dict[str, object]]] = ([], [])
        # the last clusters, and their file
        self._written: tuple[list[dict[str, object]], str] = ([], "")

    def build(self, snapshot: Snapshot) -> Mapping[str, str]:
        """File names, relative to the bundle, to JSON.

        Equal snapshots give equal files. In writing order: referenced files precede those that refer to them.
        """
        self._endpoints.start_build()
        files = self._endpoint_files(snapshot) if _has_endpoint_files(snapshot) else {}
        self._servers = {one.metadata.key: _without_endpoints(one, self._servers) for one in snapshot.servers}
        self._backends = {one.metadata.key: _without_endpoints(one, self._backends) for one in snapshot.backends}
        frame = msgspec.structs.replace(
            snapshot,
            servers=tuple(self._servers.values()),
            backends=tuple(self._backends.values()),
            version="",
            digests={},
        )
        if self._frame is None or self._frame[0] != frame:
            self._frame = frame, self._files_of(frame)
        own, clusters = self._clusters
        if not files:
            endpoints = [self._endpoints.get(_endpoints_of, one) for one in (*snapshot.servers, *snapshot.backends)]
            pairs = zip(clusters, endpoints, strict=True)
            clusters = [self._endpoints.get(with_endpoints, *pair) for pair in pairs]
        if self._written[0] != (resources := [*own, *clusters]):
            self._written = resources, resources_file(resources)
        return {**files, CLUSTERS_FILE: self._written[1], **self._frame[1]}

    def _endpoint_files(self, snapshot: Snapshot) -> dict[str, str]:
        get = self._endpoints.get
        return {
            **{endpoints_file(one): get(_file_of_endpoints, one) for one in snapshot.servers},
            **{backend_endpoints_file(one.metadata.key): get(_file_of_endpoints, one) for one in snapshot.backends},
        }

    def _files_of(self, snapshot: Snapshot) -> Mapping[str, str]:
        """All files but those of clusters and endpoints; the clusters, without endpoints, are kept."""
        memo = self._memo
        memo.start_build()
        if snapshot.gateway.failure_mode is None:
            snapshot = msgspec.structs.replace(
                snapshot, gateway=memo.get(_decided, snapshot.gateway, failure_mode_of(snapshot))
            )
        gateway = snapshot.gateway
        chained = {
            key: memo.get(FallbackRuleLimits, one.budget_percent, one.min_concurrency, one.most_read)
            for key, one in fallback_servers(snapshot).items()
        }
        named = configured_response_headers(snapshot)
        clusters = [
            memo.get(server_cluster, server, self._directory, chained.get(server.metadata.key), named)
            for server in snapshot.servers
        ]
        clusters.extend(memo.get(self._backend, one, *named) for one in snapshot.backends)
        own = [
            memo.get(extproc_cluster, gateway),
            *memo.get(key_set_clusters, gateway.authentication),
            *memo.get(collector_clusters, gateway.tracing),
        ]
        views = [
            view for view in (client_snapshot(snapshot), transformer_listener_snapshot(snapshot)) if view is not None
        ]
        translates, inner_files = needs_translation(snapshot.servers), dict[str, str]()
        if translates:
            own.append(memo.get(translator_cluster, self._directory))
            routes = inner_routes(TRANSLATED, gateway, routes_by_traffic_policy(snapshot, memo))
            inner_files[TRANSLATED_ROUTES_FILE] = resources_file([routes])
        mirrors = has_mirror(snapshot.routes)
        if mirrors:
            own.append(memo.get(socket_cluster, MIRROR_CLUSTER, self._directory, MIRROR_SOCKET))
            routes = inner_routes(MIRRORED, gateway, routes_by_traffic_policy(snapshot, memo))
            inner_files[MIRRORED_ROUTES_FILE] = resources_file([routes])
        if gateway.usage_log is not None and gateway.usage_log.api is not None:
            own.append(memo.get(usage_reports_cluster, gateway.usage_log.api))
        self._clusters = own, clusters
        return {
            **{
                group.routes_file: resources_file([route_configuration(group, view, memo)])
                for view in views
                for group in listener_groups(view.gateway)
            },
            **inner_files,
            **memo.get(authentication_files, gateway.authentication),
            LISTENERS_FILE: memo.get(
                self._listener,
                tuple(view.gateway for view in views),
                longest_wait_s(snapshot),
                *filter_needs(snapshot.gateway_api_routes),
                _times_streams(snapshot),
                any(one.spec.protocol != "OpenAI" for one in snapshot.servers),
                translates,
                has_grpc_servers(snapshot) or bool(snapshot.grpc_routes),
                mirrors,
                any(one.spec.cache is not None for one in snapshot.routes),
            ),
            BOOTSTRAP_FILE: memo.get(self._bootstrap, gateway),
        }

    def _backend(self, backend: Backend, *named: str) -> dict[str, object]:
        like = self._memo.get(self._backend_like, backend.spec.protocol, *named)
        return backend_cluster_resource(backend, like, self._directory)

    def _backend_like(self, protocol: Literal["HTTP", "H2C", "WebSocket"], *named: str) -> dict[str, object]:
        some = Backend(metadata=Metadata(name="some"), spec=BackendSpec(protocol=protocol))
        return backend_cluster(some, self._directory, named)

    def _listener(self, gateways: tuple[GatewayConfigSpec, ...], longest_wait_s: float, *needs: bool) -> str:
        """``gateways``: as clients see it, and as transformers and explainers do."""
        wanted = FilterNeeds(*needs)
        found = [
            one
            for gateway in gateways
            for one in listener_resources(gateway, self._directory, longest_wait_s=longest_wait_s, needs=wanted)
        ]
        if wanted.translates:
            found.append(translated_listener(gateways[0], self._directory))
        if wanted.mirrors:
            found.append(mirrored_listener(gateways[0], self._directory))
        return resources_file(found)

    def _bootstrap(self, gateway: GatewayConfigSpec) -> str:
        return to_json(bootstrap(gateway, self._directory))


def _times_streams(snapshot: Snapshot) -> bool:
    """Whether an objective is about tokens of streams."""
    return any(one.ttft is not None or one.tpot is not None for route in snapshot.routes for one in route.spec.slo)


def endpoint_subscriptions(snapshot: Snapshot) -> dict[str, str]:
    """The files of endpoints that Envoy watches, each with the cluster that it is for."""
    if not _has_endpoint_files(snapshot):
        return {}
    backends = [one.metadata.key for one in snapshot.backends]
    return {
        **{endpoints_file(one): server_cluster_name(one.metadata.key) for one in snapshot.servers},
        **{backend_endpoints_file(one): backend_cluster_name(one) for one in backends},
    }


def _has_endpoint_files(snapshot: Snapshot) -> bool:
    return len(snapshot.servers) + len(snapshot.backends) <= MOST_ENDPOINT_FILES


def _endpoints_of(one: ModelServer | Backend) -> dict[str, object]:
    return backend_endpoints(one) if isinstance(one, Backend) else server_endpoints(one)


def _file_of_endpoints(one: ModelServer | Backend) -> str:
    return resources_file([_endpoints_of(one)])


def _without_endpoints(one: T, last: Mapping[str, T]) -> T:
    """The object of the ``last`` snapshot if that is the same: what was made from it is kept."""
    spec = msgspec.structs.replace(one.spec, **{"endpoints" if isinstance(one, Backend) else "listed": ()})
    fresh = msgspec.structs.replace(one, spec=spec)
    before = last.get(one.metadata.key)
    return fresh if before is None or before != fresh else before


def build_bundle(snapshot: Snapshot, directory: str) -> Mapping[str, str]:
    """One bundle by itself, for ``directory``."""
    return BundleWriter(directory).build(snapshot)


def _decided(gateway: GatewayConfigSpec, mode: Literal["Open", "Close"]) -> GatewayConfigSpec:
    return msgspec.structs.replace(gateway, failure_mode=mode)


def longest_wait_s(snapshot: Snapshot) -> float:
    """The longest time for which extproc may hold a request of any server.

    Any server of a cluster may come back and hold requests. That counts from the start: Envoy replaces a listener whose
    limits change, and closes its connections one by one.
    """
    specs = (
        msgspec.structs.replace(one.spec, activation=RETURNED)
        if one.spec.activation is None and OF_CLUSTER in one.metadata.annotations
        else one.spec
        for one in snapshot.servers
    )
    return max((sum(snapshot.max_wait_by_field_of(spec).values()) for spec in specs), default=0.0)


def keep_old_clusters(snapshot: Snapshot, before: Snapshot) -> Snapshot:
    """``snapshot`` plus the ModelServers and Backends of ``before`` that it lacks; no rule sends new requests to
    them.
    """
    return msgspec.structs.replace(
        with_servers(snapshot, before.servers), backends=_with(snapshot.backends, before.backends)
    )


def _with(own: tuple[T, ...], more: Iterable[T]) -> tuple[T, ...]:
    names = {one.metadata.key for one in own}
    return (*own, *(one for one in more if one.metadata.key not in names))
