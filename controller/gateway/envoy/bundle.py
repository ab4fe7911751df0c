# SPDX-License-Identifier: Apache-2.0
"""A snapshot to an Envoy bundle: a bootstrap and the files that Envoy watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from controller.gateway.envoy.authentication import authentication_files
from controller.gateway.envoy.bootstrap import CLUSTERS_FILE, LISTENERS_FILE, bootstrap
from controller.gateway.envoy.clusters import endpoints_file, extproc_cluster, server_cluster, server_endpoints
from controller.gateway.envoy.envoy_json import resources_file, to_json, to_resource
from controller.gateway.envoy.listener import listener_resources
from controller.gateway.envoy.listener_groups import listener_groups
from controller.gateway.envoy.memo import Memo
from controller.gateway.envoy.routes import route_resource
from extproc.config.failure_mode import failure_mode_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.config.gateway_config import GatewayConfigSpec
    from extproc.config.model_server import ModelServer
    from extproc.config.snapshot import Snapshot

BOOTSTRAP_FILE = "bootstrap.json"


class BundleWriter:
    """Snapshots to bundles for ``directory``, which is where Envoy will find them.

    Envoy's schema is slow to build and to turn into JSON: what belongs to objects that have not changed is kept. Engines
    come and go all the time, so a change of endpoints alone costs no more than the files of their servers.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._endpoints, self._memo = Memo(), Memo()
        self._without_endpoints: Mapping[str, ModelServer] = {}
        # the last snapshot without endpoints, and what it came to
        self._frame: tuple[Snapshot, Mapping[str, str]] | None = None

    def build(self, snapshot: Snapshot) -> Mapping[str, str]:
        """File names, relative to the bundle, to JSON.

        Equal snapshots give equal files. In writing order: what is referred to comes before what refers to it.
        """
        self._endpoints.next_build()
        files = {
            endpoints_file(server.metadata.key): self._endpoints.get(_endpoints, server) for server in snapshot.servers
        }
        self._without_endpoints = {
            server.metadata.key: _without_endpoints(server, self._without_endpoints.get(server.metadata.key))
            for server in snapshot.servers
        }
        frame = msgspec.structs.replace(
            snapshot, servers=tuple(self._without_endpoints.values()), version="", digests={}
        )
        if self._frame is None or self._frame[0] != frame:
            self._frame = frame, self._files_of(frame)
        return {**files, **self._frame[1]}

    def _files_of(self, snapshot: Snapshot) -> Mapping[str, str]:
        """All files but those of endpoints."""
        memo = self._memo
        memo.next_build()
        if snapshot.gateway.failure_mode is None:
            snapshot = msgspec.structs.replace(
                snapshot, gateway=memo.get(_decided, snapshot.gateway, failure_mode_of(snapshot))
            )
        gateway = snapshot.gateway
        clusters = [memo.get(self._cluster, server) for server in snapshot.servers]
        routes = route_resource(snapshot, memo)
        named = {one.routes_file: {**routes, "name": one.route_config_name} for one in listener_groups(gateway)}
        return {
            CLUSTERS_FILE: resources_file([memo.get(_extproc, gateway), *clusters]),
            **{file: resources_file([resource]) for file, resource in named.items()},
            **memo.get(_authentication, gateway),
            LISTENERS_FILE: memo.get(self._listener, gateway, longest_wait_s(snapshot)),
            BOOTSTRAP_FILE: memo.get(self._bootstrap, gateway),
        }

    def _cluster(self, server: ModelServer) -> dict[str, object]:
        return to_resource(server_cluster(server, self._directory))

    def _listener(self, gateway: GatewayConfigSpec, longest_wait_s: float) -> str:
        return resources_file(listener_resources(gateway, self._directory, longest_wait_s=longest_wait_s))

    def _bootstrap(self, gateway: GatewayConfigSpec) -> str:
        return to_json(bootstrap(gateway, self._directory))


def _without_endpoints(server: ModelServer, before: ModelServer | None) -> ModelServer:
    """``before`` if that is the same: what was made from it is kept."""
    fresh = msgspec.structs.replace(server, spec=msgspec.structs.replace(server.spec, listed=()))
    return before if before == fresh and before is not None else fresh


def build(snapshot: Snapshot, directory: str) -> Mapping[str, str]:
    """One bundle by itself, for ``directory``."""
    return BundleWriter(directory).build(snapshot)


def _decided(gateway: GatewayConfigSpec, mode: Literal["Open", "Close"]) -> GatewayConfigSpec:
    return msgspec.structs.replace(gateway, failure_mode=mode)


def _authentication(gateway: GatewayConfigSpec) -> Mapping[str, str]:
    return authentication_files(gateway.authentication)


def _endpoints(server: ModelServer) -> str:
    return resources_file([server_endpoints(server)])


def _extproc(gateway: GatewayConfigSpec) -> dict[str, object]:
    return to_resource(extproc_cluster(gateway))


def longest_wait_s(snapshot: Snapshot) -> float:
    """The longest time for which extproc may hold a request of any server."""
    controls = [snapshot.flow_control_of(server.spec) for server in snapshot.servers]
    return max((control.longest_wait_s for control in controls if control is not None), default=0.0)


def with_servers(snapshot: Snapshot, more: Iterable[ModelServer]) -> Snapshot:
    """``snapshot`` plus those of ``more`` that it lacks; no rule sends new requests to them."""
    names = {server.metadata.key for server in snapshot.servers}
    added = tuple(server for server in more if server.metadata.key not in names)
    return msgspec.structs.replace(snapshot, servers=(*snapshot.servers, *added)) if added else snapshot
