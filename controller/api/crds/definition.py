# SPDX-License-Identifier: Apache-2.0
"""A kind as the CustomResourceDefinition that a cluster installs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import inspect

from controller.api.crds.schema import schema_of
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from controller.api.crds.kinds import Column, Kind

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
    properties: dict[str, Any] = {name: {"type": "string", "description": said} for name, said in _NAMES.items()}
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
