# SPDX-License-Identifier: Apache-2.0
"""Objects that tests make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.kube.api_resources import CRDS, ApiResource
from controller.kube.errors import Conflict, NotFound
from tests.waiting import eventually

if TYPE_CHECKING:
    from controller.kube.client import Client

WIDGETS = ApiResource("test.attache.dev", "v1", "widgets", "Widget")


def config_map(namespace: str, name: str = "one", **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data or {"colour": "red"},
    }


def widget(namespace: str, name: str = "one", **spec: object) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "test.attache.dev/v1", "kind": "Widget", "metadata": metadata, "spec": spec}


WIDGET_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.test.attache.dev"},
    "spec": {
        "group": "test.attache.dev",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 1, "maximum": 9},
                                    "colour": {"type": "string", "default": "red", "enum": ["red", "blue"]},
                                },
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "seen": {"type": "integer"},
                                    "conditions": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                        "items": {
                                            "type": "object",
                                            "required": ["type", "status"],
                                            "properties": {
                                                "type": {"type": "string"},
                                                "status": {"type": "string"},
                                            },
                                        },
                                    },
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}


async def define_widgets(client: Client) -> None:
    """Serve widgets; a real server needs a moment for it."""
    await client.apply(CRDS, WIDGET_CRD, force=True)

    async def served() -> bool:
        try:
            await client.list(WIDGETS)
        except (NotFound, Conflict):
            return False
        return True

    await eventually(served)
