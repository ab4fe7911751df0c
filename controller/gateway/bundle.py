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
    from collections.abc import Mapping

    from extproc.config.types import Snapshot

BOOTSTRAP_FILE = "bootstrap.json"


def build(snapshot: Snapshot, directory: str) -> Mapping[str, str]:
    """File names, relative to the bundle, to JSON. ``directory``: where Envoy will find the bundle.

    Equal snapshots give equal files. In writing order: what is referred to comes before what refers to it.
    """
    version = snapshot.version
    files = {
        endpoints_file(server.metadata.name): to_resources(version, [server_endpoints(server)])
        for server in snapshot.servers
    }
    clusters = [extproc_cluster(snapshot.gateway), *(server_cluster(server, directory) for server in snapshot.servers)]
    files[CLUSTERS_FILE] = to_resources(version, clusters)
    files[ROUTES_FILE] = to_resources(version, [route_configuration(snapshot)])
    files[LISTENERS_FILE] = to_resources(version, [listener(snapshot.gateway, directory)])
    files[BOOTSTRAP_FILE] = to_json(bootstrap(snapshot.gateway, directory))
    return files


def with_leaving(snapshot: Snapshot, before: Snapshot) -> Snapshot:
    """``snapshot`` and the servers of ``before`` that it no longer has: what Envoy needs while requests still go there."""
    names = {server.metadata.name for server in snapshot.servers}
    leaving = tuple(server for server in before.servers if server.metadata.name not in names)
    return msgspec.structs.replace(snapshot, servers=(*snapshot.servers, *leaving))
