# SPDX-License-Identifier: Apache-2.0
"""Headless Services, in which the pods of a replica find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.resources import SERVICES
from controller.models.model_infer import labels, names
from controller.models.model_infer.revisions import owner_reference

if TYPE_CHECKING:
    from controller.kube.resources import Object
    from controller.models.model_infer.names import Place


def service(owner: Object, place: Place) -> Object:
    """The Service of the replica at ``place``. No ports: it gives names to pods, and nothing is sent through it."""
    metadata = owner["metadata"]
    found = {
        labels.MODEL_INFER: metadata["name"],
        labels.GROUP: str(place.group),
        labels.ROLE: place.role,
        labels.ROLE_REPLICA: str(place.replica),
    }
    return {
        "apiVersion": SERVICES.api_version,
        "kind": SERVICES.kind,
        "metadata": {
            "name": names.service_name(metadata["name"], place),
            "namespace": metadata["namespace"],
            "labels": found,
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": found},
    }
