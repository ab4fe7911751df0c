# SPDX-License-Identifier: Apache-2.0
"""The bootstrap: Envoy's identity, its admin address, and where the other files are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapDynamicResources
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    Node,
    PathConfigSource,
    WatchedDirectory,
)

from controller.gateway.envoy_json import address

if TYPE_CHECKING:
    from extproc.config.types import GatewayConfigSpec

LISTENERS_FILE = "lds.json"
ROUTES_FILE = "rds.json"
CLUSTERS_FILE = "cds.json"
ENDPOINTS_FOLDER = "eds"


def file_source(directory: str, file: str) -> ConfigSource:
    """xDS from ``file``, read again whenever a file is moved into its folder (which is how it is replaced)."""
    path = f"{directory}/{file}"
    return ConfigSource(
        path_config_source=PathConfigSource(
            path=path, watched_directory=WatchedDirectory(path=path.rpartition("/")[0] or "/")
        ),
        resource_api_version=ApiVersion.V3,
    )


def bootstrap(gateway: GatewayConfigSpec, directory: str) -> Bootstrap:
    """The only part that cannot be replaced while Envoy runs. ``directory``: where Envoy finds the bundle."""
    return Bootstrap(
        node=Node(id="attache", cluster="attache"),
        admin=Admin(address=address(gateway.admin)),
        dynamic_resources=BootstrapDynamicResources(
            lds_config=file_source(directory, LISTENERS_FILE),
            cds_config=file_source(directory, CLUSTERS_FILE),
        ),
    )
