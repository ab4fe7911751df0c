# SPDX-License-Identifier: Apache-2.0
"""The bootstrap: Envoy's identity, its admin interface, and where the other files are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapDynamicResources,
    LayeredRuntime,
    RuntimeLayer,
    RuntimeLayerAdminLayer,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    Node,
    PathConfigSource,
    WatchedDirectory,
)
from envoy_data_plane.envoy.config.overload.v3 import (
    BufferFactoryConfig,
    OverloadAction,
    OverloadManager,
    ResourceMonitor,
    ScaledTrigger,
    ThresholdTrigger,
    Trigger,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Struct, Value

from controller.bundle.envoy.envoy_json import PackedMessage, duration, envoy_address
from extproc.api.match_patterns import MAX_PROGRAM_SIZE

if TYPE_CHECKING:
    from extproc.api.gateway_config import GatewayConfigSpec

LISTENERS_FILE = "lds.json"
CLUSTERS_FILE = "cds.json"
ENDPOINTS_FOLDER = "eds"
# Admin paths with their queries. Those that change Envoy end with a quotation mark. Browsers write it as %22, so no web
# page can send them.
_READS: Final = r"/(ready|server_info|clusters|listeners|config_dump|stats(/prometheus)?)(\?.*)?"
_CHANGES: Final = r'/(drain_listeners\?graceful&inboundonly&|(healthcheck/(fail|ok)|reopen_logs)\?)"'


def file_config_source(directory: str, file: str) -> ConfigSource:
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
        admin=Admin(
            address=envoy_address(gateway.admin),
            allow_paths=[StringMatcher(safe_regex=RegexMatcher(regex=one)) for one in (_READS, _CHANGES)],
        ),
        dynamic_resources=BootstrapDynamicResources(
            lds_config=file_config_source(directory, LISTENERS_FILE),
            cds_config=file_config_source(directory, CLUSTERS_FILE),
        ),
        overload_manager=_overload_manager(gateway),
        layered_runtime=_runtime(),
    )


def _runtime() -> LayeredRuntime:
    """Settings of Envoy that are no fields of its configuration, and below them what an operator sets by
    /runtime_modify, once that path is allowed.
    """
    largest = Struct(fields={"re2.max_program_size.error_level": Value(number_value=MAX_PROGRAM_SIZE)})
    return LayeredRuntime(
        layers=[
            RuntimeLayer(name="attache", static_layer=largest),
            RuntimeLayer(name="admin", admin_layer=RuntimeLayerAdminLayer()),
        ]
    )


def _overload_manager(gateway: GatewayConfigSpec) -> OverloadManager:
    """Envoy's overload actions, in their order, before it runs out of memory."""
    heap = "envoy.resource_monitors.fixed_heap"

    def action(name: str, threshold: float) -> OverloadAction:
        trigger = Trigger(name=heap, threshold=ThresholdTrigger(value=threshold))
        return OverloadAction(name=f"envoy.overload_actions.{name}", triggers=[trigger])

    return OverloadManager(
        refresh_interval=duration(0.25),
        resource_monitors=[
            ResourceMonitor(
                name=heap, typed_config=PackedMessage(FixedHeapConfig(max_heap_size_bytes=gateway.max_heap))
            ),
            ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections",
                typed_config=PackedMessage(
                    DownstreamConnectionsConfig(max_active_downstream_connections=gateway.max_connections)
                ),
            ),
        ],
        actions=[
            action("shrink_heap", 0.75),
            OverloadAction(
                name="envoy.overload_actions.reset_high_memory_stream",
                triggers=[Trigger(name=heap, scaled=ScaledTrigger(scaling_threshold=0.85, saturation_threshold=0.95))],
            ),
            action("stop_accepting_requests", 0.92),
            action("stop_accepting_connections", 0.97),
        ],
        # streams that hold 1 MiB and more are counted
        buffer_factory_config=BufferFactoryConfig(minimum_account_to_track_power_of_two=20),
    )
