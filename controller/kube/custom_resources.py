# SPDX-License-Identifier: Apache-2.0
"""The custom resources, a row each: struct, status, printer columns, subresources; and their definitions."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec
from msgspec import inspect

from controller.api import statuses
from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.api.crds.schema import crd_schema
from controller.api.model import Model, ModelTemplate, ModelTemplateStatus
from controller.api.model_infer import ModelInfer, ModelInferRole
from controller.api.serving_runtime import ClusterServingRuntime, ServingRuntime, ServingRuntimeStatus
from controller.kube import api_resources
from controller.kube.api_resources import ApiResource
from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.gateway_config import GatewayConfig
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer

_DOCUMENTS: Final = {one.document for one in DOCUMENT_KINDS}
_NAMES: Final = {"apiVersion": "The version of this schema.", "kind": "What this object is."}


class PrinterColumn(msgspec.Struct, frozen=True):
    """A column of ``kubectl get``. ``path``: where it stands in the object. ``wide``: only with ``-o wide``."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class CustomResourceKind(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind is defined. If it is a kind of the directory too, the gateway role watches its objects and writes
    their statuses.

    ``resource``: a constant of ``resources`` where other modules name it. ``document``: the struct of its objects.
    ``conditions``: what they mean, if its status has nothing else and thus needs no struct of its own. ``scaled_by``:
    the paths of its replicas in spec and status, and of the status' label selector, if it has a scale subresource.
    ``is_reviewed``: users write its objects, so a webhook checks them. ``restricts_access``: its objects decide who may
    use what.
    """

    resource: ApiResource
    short_names: tuple[str, ...]
    document: type
    columns: tuple[PrinterColumn, ...]
    status: type = statuses.CommonStatus
    conditions: str = ""
    scaled_by: tuple[str, str, str] | None = None
    needs_spec: bool = True
    is_reviewed: bool = True
    restricts_access: bool = False

    @property
    def name(self) -> str:
        """As objects have it in ``kind``."""
        return self.resource.kind


def _condition(name: str) -> PrinterColumn:
    return PrinterColumn(name, f'.status.conditions[?(@.type=="{name}")].status')


# Of the first condition that is not as it should be: for kinds whose conditions are all True where nothing is wrong.
_REASON: Final = PrinterColumn("Reason", '.status.conditions[?(@.status!="True")].reason')
_AGE: Final = PrinterColumn("Age", ".metadata.creationTimestamp", "date")
_RUNTIME_COLUMNS: Final = (
    PrinterColumn("Engine", ".spec.engine"),
    PrinterColumn("Formats", ".spec.supports[*].name"),
    PrinterColumn("Disabled", ".spec.disabled", "boolean"),
    _AGE,
)
KINDS: Final[tuple[CustomResourceKind, ...]] = (
    CustomResourceKind(
        resource=api_resources.MODEL_ROUTES,
        short_names=("mr",),
        document=ModelRoute,
        status=statuses.ModelRouteStatus,
        columns=(
            PrinterColumn("Model", ".spec.modelName"),
            _condition("Accepted"),
            _condition("ResolvedRefs"),
            _condition("Programmed"),
            _REASON,
            PrinterColumn("Adapters", ".spec.loraAdapters", wide=True),
            _AGE,
        ),
    ),
    CustomResourceKind(
        resource=api_resources.MODEL_SERVERS,
        short_names=("ms",),
        document=ModelServer,
        status=statuses.ModelServerStatus,
        columns=(
            PrinterColumn("Model", ".spec.model"),
            PrinterColumn("Engine", ".spec.engine"),
            PrinterColumn("Ready", ".status.ready", "integer"),
            PrinterColumn("Endpoints", ".status.endpoints", "integer"),
            PrinterColumn("Draining", ".status.draining", "integer", wide=True),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
    ),
    CustomResourceKind(
        resource=api_resources.GATEWAY_CONFIGS,
        short_names=("gwc",),
        document=GatewayConfig,
        status=statuses.GatewayConfigStatus,
        columns=(
            PrinterColumn("Listen", ".spec.listen"),
            PrinterColumn("FailureMode", ".status.failureMode"),
            _condition("Accepted"),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
        restricts_access=True,
    ),
    CustomResourceKind(
        resource=api_resources.MODEL_ACCESS_POLICIES,
        short_names=("map",),
        document=ModelAccessPolicy,
        conditions="Accepted (False: all requests to its targets are denied), ResolvedRefs (its targets exist),"
        " Programmed (it is in the served configuration)",
        columns=(
            PrinterColumn("Targets", ".spec.targetRefs[*].name"),
            _condition("Accepted"),
            _condition("ResolvedRefs"),
            _condition("Programmed"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
        restricts_access=True,
    ),
    CustomResourceKind(
        resource=api_resources.MODEL_INFERS,
        short_names=("mi",),
        document=ModelInfer,
        status=statuses.ModelInferStatus,
        columns=(
            PrinterColumn("Replicas", ".spec.replicas", "integer"),
            PrinterColumn("Ready", ".status.readyReplicas", "integer"),
            PrinterColumn("Updated", ".status.updatedReplicas", "integer"),
            _condition("Available"),
            PrinterColumn("Status", ".status.summary"),
            PrinterColumn("Revision", ".status.updateRevision", wide=True),
            _AGE,
        ),
        scaled_by=(".spec.replicas", ".status.replicas", ".status.labelSelector"),
    ),
    CustomResourceKind(
        resource=api_resources.MODEL_INFER_ROLES,
        short_names=("mir",),
        document=ModelInferRole,
        status=statuses.ModelInferRoleStatus,
        columns=(
            PrinterColumn("ModelInfer", ".spec.modelInfer"),
            PrinterColumn("Role", ".spec.role"),
            PrinterColumn("Replicas", ".spec.replicas", "integer"),
            PrinterColumn("Ready", ".status.readyReplicas", "integer"),
            _AGE,
        ),
        scaled_by=(".spec.replicas", ".status.replicas", ".status.labelSelector"),
        is_reviewed=False,
    ),
    CustomResourceKind(
        resource=api_resources.MODELS,
        short_names=(),
        document=Model,
        status=statuses.ModelStatus,
        columns=(
            PrinterColumn("Ready", '.status.conditions[?(@.type=="Ready")].status'),
            PrinterColumn("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
            PrinterColumn("Phase", ".status.phase"),
            PrinterColumn("Replicas", ".status.readyReplicas", "integer"),
            PrinterColumn("URL", ".status.url"),
            PrinterColumn("URI", ".spec.uri", wide=True),
            PrinterColumn("Failure", ".status.failure.message", wide=True),
            _AGE,
        ),
    ),
    CustomResourceKind(
        resource=api_resources.MODEL_TEMPLATES,
        short_names=("mt",),
        document=ModelTemplate,
        status=ModelTemplateStatus,
        columns=(PrinterColumn("URI", ".spec.uri"), _AGE),
        needs_spec=False,
    ),
    CustomResourceKind(
        resource=api_resources.SERVING_RUNTIMES,
        short_names=("srt",),
        document=ServingRuntime,
        status=ServingRuntimeStatus,
        columns=_RUNTIME_COLUMNS,
    ),
    CustomResourceKind(
        resource=api_resources.CLUSTER_SERVING_RUNTIMES,
        short_names=("csrt",),
        document=ClusterServingRuntime,
        status=ServingRuntimeStatus,
        columns=_RUNTIME_COLUMNS,
    ),
    CustomResourceKind(
        resource=api_resources.AUTOSCALING_POLICIES,
        short_names=("asp",),
        document=AutoscalingPolicy,
        status=statuses.AutoscalingPolicyStatus,
        columns=(
            PrinterColumn("Mode", ".spec.mode"),
            PrinterColumn("Bindings", ".status.bindings", "integer"),
            _condition("Accepted"),
            _REASON,
            _AGE,
        ),
        needs_spec=False,
    ),
    CustomResourceKind(
        resource=api_resources.AUTOSCALING_POLICY_BINDINGS,
        short_names=("aspb",),
        document=AutoscalingPolicyBinding,
        status=statuses.AutoscalingPolicyBindingStatus,
        columns=(
            PrinterColumn("Policy", ".spec.policyRef"),
            PrinterColumn("Current", ".status.targets[*].current"),
            PrinterColumn("Desired", ".status.targets[*].desired"),
            _condition("ScalingActive"),
            PrinterColumn("Reason", '.status.conditions[?(@.type=="ScalingActive")].reason'),
            _AGE,
        ),
    ),
)
# Those that are kinds of the directory too.
GATEWAY_KINDS: Final = tuple(kind for kind in KINDS if kind.document in _DOCUMENTS)


def crd_object(kind: CustomResourceKind) -> dict[str, Any]:
    """The whole object, as plain data."""
    of = kind.resource
    scope = "Namespaced" if of.namespaced else "Cluster"
    names: dict[str, Any] = {"kind": of.kind, "plural": of.plural, "singular": of.kind.lower()}
    names |= {"listKind": f"{of.kind}List", "categories": ["attache"]}
    if kind.short_names:
        names["shortNames"] = list(kind.short_names)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{of.plural}.{of.group}"},
        "spec": {"group": of.group, "names": names, "scope": scope, "versions": [_version(kind)]},
    }


def _version(kind: CustomResourceKind) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.scaled_by is not None:
        fields = ("specReplicasPath", "statusReplicasPath", "labelSelectorPath")
        subresources["scale"] = dict(zip(fields, kind.scaled_by, strict=True))
    return {
        "name": kind.resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema(kind)},
        "subresources": subresources,
        "additionalPrinterColumns": [_column(one) for one in kind.columns],
    }


def _schema(kind: CustomResourceKind) -> dict[str, Any]:
    document = cast("inspect.StructType", inspect.type_info(kind.document))
    (spec,) = (field for field in document.fields if field.name == "spec")
    properties: dict[str, Any] = {
        name: {"type": "string", "description": description} for name, description in _NAMES.items()
    }
    properties["metadata"] = {"type": "object"}
    properties["spec"] = crd_schema(cast("inspect.StructType", spec.type).cls)
    if not kind.needs_spec:
        properties["spec"]["default"] = {}
    properties["status"] = crd_schema(kind.status)
    if kind.conditions:
        del properties["status"]["description"]
        properties["status"]["properties"]["conditions"]["description"] = kind.conditions
    required = ["spec"] if kind.needs_spec else []
    schema = {"type": "object", "description": properties["spec"].pop("description", ""), "properties": properties}
    return {**schema, "required": required} if required else schema


def _column(column: PrinterColumn) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**found, "priority": 1} if column.wide else found
