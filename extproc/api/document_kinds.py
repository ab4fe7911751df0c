# SPDX-License-Identifier: Apache-2.0
"""The kinds of a configuration directory: a row each, from which they are decoded, checked, loaded and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from extproc.api import reference_checks
from extproc.api.access_policy import ModelAccessPolicy, check_access_policy, check_targets
from extproc.api.admission import InferenceObjective
from extproc.api.config_errors import Finding, Mistake
from extproc.api.gateway_config import GatewayConfig, check_gateway, check_has_listeners, check_listeners, check_origins
from extproc.api.grpc_route import GRPCRoute, check_grpc_route
from extproc.api.http_route import Backend, HTTPRoute, check_backend, check_http_route
from extproc.api.key_store import KeyStore, check_against_gateway_keys, check_key_store
from extproc.api.model_route import ModelRoute, check_route
from extproc.api.model_server import ModelServer, check_connection, check_server
from extproc.api.picker_config import EndpointPickerConfig
from extproc.api.picker_flow_control import check_flow_control_section, check_usage_limits
from extproc.api.spec import API_VERSION
from extproc.api.yaml_documents import DirectoryObjects


class DocumentKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of the directory. To add one, write a module with its struct and checks, its row, and its field of
    Snapshot; in a cluster, its row in ``controller.kube.custom_resources`` too, and what compiles it
    (``gateway.compile``).

    ``document``: the struct, which has the kind's name. ``api_versions``: empty if they are part of the struct.
    ``checks``: of one spec, or of the whole document if it has none. ``references``: of an object, against all others.
    ``together``: of all objects of a directory, such as names that only one of them may have. ``field``: of Snapshot,
    for the objects; empty if they go in otherwise. ``second``: why a directory takes one alone; empty if it takes any
    number, with different names.
    """

    document: type
    api_versions: tuple[str, ...] = (API_VERSION,)
    checks: tuple[Callable[[Any], Iterator[Finding]], ...] = ()
    references: tuple[Callable[[Any, DirectoryObjects], Iterator[Finding]], ...] = ()
    together: tuple[Callable[[DirectoryObjects], Iterator[Mistake]], ...] = ()
    field: str = ""
    second: str = ""

    @property
    def name(self) -> str:
        """As documents have it in ``kind``."""
        return self.document.__name__


# In the order in which `check` counts them.
DOCUMENT_KINDS: Final = (
    DocumentKind(
        document=ModelRoute,
        checks=(check_route,),
        references=(reference_checks.check_target_servers, reference_checks.check_parents),
        together=(reference_checks.check_model_names,),
        field="routes",
    ),
    DocumentKind(
        document=ModelServer,
        checks=(check_server, check_connection),
        references=(reference_checks.check_server_references,),
        field="servers",
    ),
    DocumentKind(
        document=HTTPRoute,
        api_versions=("gateway.networking.k8s.io/v1",),
        checks=(check_http_route,),
        references=(reference_checks.check_backends, reference_checks.check_parents),
        field="http_routes",
    ),
    DocumentKind(
        document=GRPCRoute,
        api_versions=("gateway.networking.k8s.io/v1",),
        checks=(check_grpc_route,),
        references=(reference_checks.check_backends, reference_checks.check_parents),
        field="grpc_routes",
    ),
    DocumentKind(document=Backend, checks=(check_backend,), field="backends"),
    DocumentKind(
        document=InferenceObjective,
        api_versions=("inference.networking.x-k8s.io/v1alpha2", "llm-d.ai/v1alpha2"),
        field="objectives",
    ),
    DocumentKind(
        document=ModelAccessPolicy, checks=(check_access_policy,), references=(check_targets,), field="access_policies"
    ),
    DocumentKind(
        document=EndpointPickerConfig,
        api_versions=(),
        checks=(check_flow_control_section, check_usage_limits),
        field="picker_files",
    ),
    DocumentKind(
        document=GatewayConfig,
        checks=(check_gateway, check_listeners, check_has_listeners, check_origins),
        references=(reference_checks.check_no_secret_references, reference_checks.check_failure_mode),
        second="a second GatewayConfig; a directory takes one, merge the two",
    ),
    DocumentKind(
        document=KeyStore,
        checks=(check_key_store,),
        references=(check_against_gateway_keys,),
        second="a second KeyStore; a directory takes one",
    ),
)
