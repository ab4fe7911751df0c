# SPDX-License-Identifier: Apache-2.0
"""The kinds: struct, status, plural, printer columns, subresources; and each as the CustomResourceDefinition."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

import msgspec
from msgspec import inspect

from controller.api import statuses
from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.api.crds.schema import schema_of
from controller.api.model import Model, ModelTemplate, ModelTemplateStatus
from controller.api.model_infer import ModelInfer, ModelInferRole
from controller.api.serving_runtime import ClusterServingRuntime, ServingRuntime, ServingRuntimeStatus
from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.gateway_config import GatewayConfig
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer
from extproc.api.spec import API_VERSION


class Column(msgspec.Struct, frozen=True):
    """A column of ``kubectl get``. ``path``: where it stands in the object. ``wide``: only with ``-o wide``."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind is defined. ``spec_of``: the struct of its documents. ``scaled_by``: the paths of its replicas in spec
    and status, and of the status' label selector, if it has a scale subresource. ``scope``: whether objects are in
    namespaces.
    """

    name: str
    plural: str
    short_names: tuple[str, ...]
    document: type
    status: type
    columns: tuple[Column, ...]
    scaled_by: tuple[str, str, str] | None = None
    needs_spec: bool = True
    scope: Literal["Namespaced", "Cluster"] = "Namespaced"


def _condition(name: str) -> Column:
    return Column(name, f'.status.conditions[?(@.type=="{name}")].status')


# Of the first condition that is not as it should be: for kinds whose conditions are all True where nothing is wrong.
_REASON: Final = Column("Reason", '.status.conditions[?(@.status!="True")].reason')
_AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")
_RUNTIME_COLUMNS: Final = (
    Column("Engine", ".spec.engine"),
    Column("Formats", ".spec.supports[*].name"),
    Column("Disabled", ".spec.disabled", "boolean"),
    _AGE,
)
KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        name="ModelRoute",
        plural="modelroutes",
        short_names=("mr",),
        document=ModelRoute,
        status=statuses.ModelRouteStatus,
        columns=(
            Column("Model", ".spec.modelName"),
            _condition("Accepted"),
            _condition("ResolvedRefs"),
            _condition("Programmed"),
            _REASON,
            Column("Adapters", ".spec.loraAdapters", wide=True),
            _AGE,
        ),
    ),
    Kind(
        name="ModelServer",
        plural="modelservers",
        short_names=("ms",),
        document=ModelServer,
        status=statuses.ModelServerStatus,
        columns=(
            Column("Model", ".spec.model"),
            Column("Engine", ".spec.engine"),
            Column("Ready", ".status.ready", "integer"),
            Column("Endpoints", ".status.endpoints", "integer"),
            Column("Draining", ".status.draining", "integer", wide=True),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
    ),
    Kind(
        name="GatewayConfig",
        plural="gatewayconfigs",
        short_names=("gwc",),
        document=GatewayConfig,
        status=statuses.GatewayConfigStatus,
        columns=(
            Column("Listen", ".spec.listen"),
            Column("FailureMode", ".status.failureMode"),
            _condition("Accepted"),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
    ),
    Kind(
        name="ModelAccessPolicy",
        plural="modelaccesspolicies",
        short_names=("map",),
        document=ModelAccessPolicy,
        status=statuses.ModelAccessPolicyStatus,
        columns=(
            Column("Targets", ".spec.targetRefs[*].name"),
            _condition("Accepted"),
            _condition("ResolvedRefs"),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
    ),
    Kind(
        name="ModelInfer",
        plural="modelinfers",
        short_names=("mi",),
        document=ModelInfer,
        status=statuses.ModelInferStatus,
        columns=(
            Column("Replicas", ".spec.replicas", "integer"),
            Column("Ready", ".status.readyReplicas", "integer"),
            Column("Updated", ".status.updatedReplicas", "integer"),
            _condition("Available"),
            Column("Status", ".status.summary"),
            Column("Revision", ".status.updateRevision", wide=True),
            _AGE,
        ),
        scaled_by=(".spec.replicas", ".status.replicas", ".status.labelSelector"),
    ),
    Kind(
        name="ModelInferRole",
        plural="modelinferroles",
        short_names=("mir",),
        document=ModelInferRole,
        status=statuses.ModelInferRoleStatus,
        columns=(
            Column("ModelInfer", ".spec.modelInfer"),
            Column("Role", ".spec.role"),
            Column("Replicas", ".spec.replicas", "integer"),
            Column("Ready", ".status.readyReplicas", "integer"),
            _AGE,
        ),
        scaled_by=(".spec.replicas", ".status.replicas", ".status.labelSelector"),
    ),
    Kind(
        name="Model",
        plural="models",
        short_names=(),
        document=Model,
        status=statuses.ModelStatus,
        columns=(
            Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
            Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
            Column("Phase", ".status.phase"),
            Column("Replicas", ".status.readyReplicas", "integer"),
            Column("URL", ".status.url"),
            Column("URI", ".spec.uri", wide=True),
            Column("Failure", ".status.failure.message", wide=True),
            _AGE,
        ),
    ),
    Kind(
        name="ModelTemplate",
        plural="modeltemplates",
        short_names=("mt",),
        document=ModelTemplate,
        status=ModelTemplateStatus,
        columns=(Column("URI", ".spec.uri"), _AGE),
        needs_spec=False,
    ),
    Kind(
        name="ServingRuntime",
        plural="servingruntimes",
        short_names=("srt",),
        document=ServingRuntime,
        status=ServingRuntimeStatus,
        columns=_RUNTIME_COLUMNS,
    ),
    Kind(
        name="ClusterServingRuntime",
        plural="clusterservingruntimes",
        short_names=("csrt",),
        document=ClusterServingRuntime,
        status=ServingRuntimeStatus,
        columns=_RUNTIME_COLUMNS,
        scope="Cluster",
    ),
    Kind(
        name="AutoscalingPolicy",
        plural="autoscalingpolicies",
        short_names=("asp",),
        document=AutoscalingPolicy,
        status=statuses.AutoscalingPolicyStatus,
        columns=(
            Column("Mode", ".spec.mode"),
            Column("Bindings", ".status.bindings", "integer"),
            _condition("Accepted"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
    ),
    Kind(
        name="AutoscalingPolicyBinding",
        plural="autoscalingpolicybindings",
        short_names=("aspb",),
        document=AutoscalingPolicyBinding,
        status=statuses.AutoscalingPolicyBindingStatus,
        columns=(
            Column("Policy", ".spec.policyRef"),
            Column("Current", ".status.targets[*].current"),
            Column("Desired", ".status.targets[*].desired"),
            _condition("ScalingActive"),
            Column("Reason", '.status.conditions[?(@.type=="ScalingActive")].reason'),
            _AGE,
        ),
    ),
)

GROUP, _, VERSION = API_VERSION.partition("/")
_NAMES: Final = {"apiVersion": "The version of this schema.", "kind": "What this object is."}


def definition_of(kind: Kind) -> dict[str, Any]:
    """The whole object, as plain data."""
    names: dict[str, Any] = {"kind": kind.name, "plural": kind.plural, "singular": kind.name.lower()}
    names |= {"listKind": f"{kind.name}List", "categories": ["attache"]}
    if kind.short_names:
        names["shortNames"] = list(kind.short_names)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": kind.scope, "versions": [_version(kind)]},
    }


def _version(kind: Kind) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.scaled_by is not None:
        fields = ("specReplicasPath", "statusReplicasPath", "labelSelectorPath")
        subresources["scale"] = dict(zip(fields, kind.scaled_by, strict=True))
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema(kind)},
        "subresources": subresources,
        "additionalPrinterColumns": [_column(one) for one in kind.columns],
    }


def _schema(kind: Kind) -> dict[str, Any]:
    document = cast("inspect.StructType", inspect.type_info(kind.document))
    (spec,) = (field for field in document.fields if field.name == "spec")
    properties: dict[str, Any] = {
        name: {"type": "string", "description": description} for name, description in _NAMES.items()
    }
    properties["metadata"] = {"type": "object"}
    properties["spec"] = schema_of(cast("inspect.StructType", spec.type).cls)
    if not kind.needs_spec:
        properties["spec"]["default"] = {}
    properties["status"] = schema_of(kind.status)
    required = ["spec"] if kind.needs_spec else []
    schema = {"type": "object", "description": properties["spec"].pop("description", ""), "properties": properties}
    return {**schema, "required": required} if required else schema


def _column(column: Column) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**found, "priority": 1} if column.wide else found
