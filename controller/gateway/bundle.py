"""A snapshot of the configuration to an Envoy bundle: a bootstrap and the files that Envoy watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.gateway.bootstrap import CLUSTERS_FILE, LISTENERS_FILE, ROUTES_FILE, bootstrap
from controller.gateway.clusters import endpoints_file, extproc_cluster, server_cluster, server_endpoints
from controller.gateway.envoy_json import to_json, to_resources
from controller.gateway.listener import listener
from controller.gateway.routes import route_configuration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.config.types import ModelServer, Snapshot

BOOTSTRAP_FILE = "bootstrap.json"


def build(snapshot: Snapshot, directory: str) -> Mapping[str, str]:
    """File names, relative to the bundle, to JSON. ``directory``: where Envoy will find the bundle.

    Equal snapshots give equal files. In writing order: what is referred to comes before what refers to it.
    """
    files = {
        endpoints_file(server.metadata.key): to_resources([server_endpoints(server)]) for server in snapshot.servers
    }
    clusters = [extproc_cluster(snapshot.gateway), *(server_cluster(server, directory) for server in snapshot.servers)]
    files[CLUSTERS_FILE] = to_resources(clusters)
    files[ROUTES_FILE] = to_resources([route_configuration(snapshot)])
    files[LISTENERS_FILE] = to_resources(
        [listener(snapshot.gateway, directory, longest_wait_s=longest_wait_s(snapshot))]
    )
    files[BOOTSTRAP_FILE] = to_json(bootstrap(snapshot.gateway, directory))
    return files


def longest_wait_s(snapshot: Snapshot) -> float:
    """For how long extproc may hold a request of any server."""
    controls = [snapshot.flow_control_of(server.spec) for server in snapshot.servers]
    return max((control.longest_wait_s for control in controls if control is not None), default=0.0)


def with_servers(snapshot: Snapshot, more: Iterable[ModelServer]) -> Snapshot:
    """``snapshot`` with those of ``more`` that it does not have; no rule sends new requests there."""
    names = {server.metadata.key for server in snapshot.servers}
    added = tuple(server for server in more if server.metadata.key not in names)
    return msgspec.structs.replace(snapshot, servers=(*snapshot.servers, *added)) if added else snapshot
