# SPDX-License-Identifier: Apache-2.0
"""One consistent reading of a configuration directory, with all its objects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.admission import FlowControl, InferenceObjective
from extproc.api.backend import Backend
from extproc.api.gateway_config import GatewayConfigSpec
from extproc.api.http_route import HTTPRoute
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer, ModelServerSpec
from extproc.api.picker_config import PickerFile
from extproc.api.usage_limits import with_usage_limits


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent, validated reading of a configuration directory, sorted by namespace and name.

    ``version`` is a digest of the content: equal directories have equal versions. ``digests``: of each file, as
    ``content_digest`` has it. ``picker_files``: EndpointPickerConfigs by the name of their file; which plugins there
    are, extproc knows.
    """

    version: str
    routes: tuple[ModelRoute, ...]
    servers: tuple[ModelServer, ...]
    gateway: GatewayConfigSpec
    objectives: tuple[InferenceObjective, ...] = ()
    http_routes: tuple[HTTPRoute, ...] = ()
    backends: tuple[Backend, ...] = ()
    access_policies: tuple[ModelAccessPolicy, ...] = ()
    picker_files: Mapping[str, PickerFile] = {}
    digests: Mapping[str, str] = {}

    def flow_control_of(self, spec: ModelServerSpec, namespace: str = "") -> FlowControl | None:
        """A server's own, or else that of its EndpointPickerConfig, with bands for the InferenceObjectives of
        ``namespace``.
        """
        if spec.flow_control is not None or spec.picker_config is None:
            return spec.flow_control
        file = self.picker_files[spec.picker_config]
        named = {one.spec.priority for one in self.objectives if one.metadata.namespace == namespace}
        return with_usage_limits(file.flow_control, file.config, named) if named else file.flow_control

    def longest_wait_s_of(self, spec: ModelServerSpec) -> float:
        """The longest that a request waits before an engine of the server gets it: for the first engine, for its
        adapter, then in the queue.
        """
        control, loading, activation = self.flow_control_of(spec), spec.adapter_loading, spec.activation
        for_engine_s = 0.0 if activation is None else float(activation.hold_timeout)
        for_adapter_s = 0.0 if loading is None else float(loading.timeout)
        return for_engine_s + for_adapter_s + (0.0 if control is None else control.longest_wait_s)
